"""P's machine of a prompt that its engine computes: nothing of a life of blocks that is over counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.prefill_side import computing_prompt as c
from kvferry.connector.wire.states import Tick

PHASE = c.ComputingPhase


def run(*events: c.ComputingEvent) -> tuple[c.ComputingState, list[c.ComputingEffect]]:
    state, effects = c.ComputingState(), list[c.ComputingEffect]()
    for event in events:
        state, new = c.COMPUTING_PROMPT.step(state, event, 1)
        effects += new
    return state, effects


FIRST, AGAIN = c.ChunkPlanned(restarts=False), c.ChunkPlanned(restarts=True)
LOST, GIVEN_UP = c.BlocksLost(ended=False), c.BlocksLost(ended=True)


def test_the_good_way() -> None:
    state, effects = run(FIRST, c.TokensComputed(0, 0), c.LayersComputed(0), c.TokensComputed(0, 40))
    assert (state, effects) == (c.ComputingState(PHASE.COMPUTING, 0, 40), [c.ResumeReads()] * 3)
    state, effects = run(FIRST, c.TokensComputed(0, 40), FIRST, c.LeaseBegins(), c.TokensComputed(0, 80), GIVEN_UP)
    assert state.phase is PHASE.GRANTED and c.FailReads() not in effects


def test_a_step_of_lost_blocks_counts_no_more() -> None:
    late = c.TokensComputed(0, 80), c.LayersComputed(0)
    state, _ = run(FIRST, c.TokensComputed(0, 40), LOST, *late)
    assert state == c.ComputingState(PHASE.PREEMPTED, 0, 0, 1 + c.PREEMPTED_SECONDS)
    state, effects = run(FIRST, LOST, AGAIN, *late)
    assert (state, effects) == (c.ComputingState(PHASE.COMPUTING, 1, 0), [c.ResumeReads()] * 2)
    assert run(FIRST, AGAIN, *late)[0].computed == 0, "also where no stop came before"


def test_a_chunk_that_does_not_restart_says_too_little_after_a_preemption() -> None:
    assert run(FIRST, LOST, FIRST, c.TokensComputed(0, 40))[0].phase is PHASE.PREEMPTED
    assert run(FIRST, LOST, FIRST, c.LeaseBegins())[0].phase is PHASE.GRANTED


def test_reads_fail_once() -> None:
    for before in ((), (FIRST,), (FIRST, LOST)):
        state, effects = run(*before, GIVEN_UP, GIVEN_UP, c.LeaseBegins(), AGAIN)
        assert state.phase is PHASE.ENDED and effects.count(c.FailReads()) == 1


def test_reads_do_not_wait_long_for_a_prompt_that_stays_preempted() -> None:
    state, _ = run(FIRST, LOST)
    assert c.COMPUTING_PROMPT.step(state, Tick(), c.PREEMPTED_SECONDS)[1] == ()
    for turn in (1, 2):  # reads that begin later are refused as well
        state, effects = c.COMPUTING_PROMPT.step(state, Tick(), 1 + turn * c.PREEMPTED_SECONDS)
        assert state.phase is PHASE.PREEMPTED and effects == (c.FailReads(c.NOT_RESUMED),)
    state, _ = c.COMPUTING_PROMPT.step(state, AGAIN, 90)
    assert c.COMPUTING_PROMPT.step(state, Tick(), 900) == (state, ())


events = st.one_of(
    st.sampled_from([FIRST, AGAIN, LOST, GIVEN_UP, c.LeaseBegins()]),
    st.builds(c.TokensComputed, st.integers(0, 3), st.integers(0, 100)),
    st.builds(c.LayersComputed, st.integers(0, 3)),
)


@given(st.lists(events, max_size=40))
def test_tokens_count_of_the_present_life_only(script: list[c.ComputingEvent]) -> None:
    state, failed = c.ComputingState(), 0
    for event in script:
        before = state
        state, effects = c.COMPUTING_PROMPT.step(state, event, 1)
        failed += c.FailReads() in effects
        if state.computed > before.computed:
            assert isinstance(event, c.TokensComputed) and event.life == state.life == before.life
            assert before.phase is PHASE.COMPUTING
        if event == LOST or state.life > before.life:
            assert state.computed == 0 or state.phase in (PHASE.GRANTED, PHASE.ENDED)
        if before.phase in (PHASE.GRANTED, PHASE.ENDED):
            assert (state, effects) == (before, ())
    assert failed <= 1
