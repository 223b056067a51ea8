"""The consumer's machine: total table, exactly one end, no end while something may write, none after the deadline."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.connector.decode_side import handover as h
from kvferry.connector.wire.states import Tick

TIMEOUTS = h.Timeouts(handshake=10, transfer=30, handover=100)
EVENTS = get_args(h.HandoverEvent)
GONE, AGAIN = h.Reason("peer_lost", "gone"), h.Reason("peer_lost", "again")


def test_nothing_to_fetch_reports_at_once() -> None:
    state, effects = h.begin(0, TIMEOUTS, 0)
    assert state.phase is h.HandoverPhase.DONE
    assert effects == (h.ReportLoad(), h.ReleaseLease())


def run(state: h.Handover, *events: h.HandoverEvent, now: float = 1) -> tuple[h.Handover, list[h.HandoverEffect]]:
    effects: list[h.HandoverEffect] = []
    for event in events:
        state, new = h.HANDOVER.step(state, event, now)
        effects += new
    return state, effects


def timed_out(effect: h.HandoverEffect) -> bool:
    return isinstance(effect, h.AttemptFailed) and effect.reason.kind == "timeout"


def begun(sources: int = 2) -> h.Handover:
    return h.begin(sources, TIMEOUTS, 0)[0]


READY = (h.SourceReady(0), h.SourceReady(1))
MOVING = (*READY, h.SourceGranted(0), h.SourceGranted(1))
COMMITTING = (*MOVING, h.SourceMoved(0), h.SourceMoved(1))


def test_the_good_way() -> None:
    state, effects = run(begun(), *COMMITTING, h.SourceCommitted(1), h.SourceCommitted(0))
    assert state.phase is h.HandoverPhase.DONE
    assert effects == [h.AskSources(), h.CommitSources(), h.ReportLoad(), h.ReleaseLease()]


@pytest.mark.parametrize("before", [(), READY, COMMITTING], ids=["handshaking", "ready", "committing"])
@pytest.mark.parametrize("event", [h.SourceFailed(1, GONE), h.CancelLoad(GONE)], ids=["failed", "cancel"])
def test_before_and_after_io_it_fails_at_once(before: tuple[h.HandoverEvent, ...], event: h.HandoverEvent) -> None:
    state, _ = run(begun(), *before)
    state, effects = run(state, event)
    assert state.phase is h.HandoverPhase.FAILED
    assert effects == [h.StopSources(), h.AttemptFailed(GONE)]


@pytest.mark.parametrize("event", [h.SourceFailed(1, GONE), h.CancelLoad(GONE)], ids=["failed", "cancel"])
def test_during_io_it_drains_first(event: h.HandoverEvent) -> None:
    state, _ = run(begun(), *MOVING, h.SourceMoved(0))
    state, effects = run(state, event)
    assert (state.phase, effects) == (h.HandoverPhase.DRAINING, [h.StopSources()])
    state, effects = run(state, h.SourceFailed(1, AGAIN), h.SourceDrained(0))
    assert (state.phase, effects) == (h.HandoverPhase.DRAINING, [])
    assert run(state, h.SourceDrained(1))[1] == [h.AttemptFailed(GONE)]
    cancelled = h.CancelLoad()
    assert run(state, cancelled, h.SourceDrained(1))[1] == [h.AttemptFailed(cancelled.reason)], "no attempt follows"


@pytest.mark.parametrize(
    ("before", "name", "limit"),
    [((), "handshaking", 10), (READY, "ready", 30), (COMMITTING, "committing", 30)],
)
def test_every_phase_has_a_deadline(before: tuple[h.HandoverEvent, ...], name: str, limit: float) -> None:
    state, _ = run(begun(), *before, now=0)
    assert h.HANDOVER.step(state, Tick(), limit - 0.1) == (state, ())
    state, effects = h.HANDOVER.step(state, Tick(), limit)
    blames: Literal["peer", ""] = "peer" if name == "handshaking" else ""
    assert effects[-1] == h.AttemptFailed(h.Reason("timeout", f"nothing moved on in time while {name}", blames))


def test_data_may_overtake_the_grant() -> None:
    state, effects = run(
        begun(), *READY, h.SourceProgress(), h.SourceMoved(0), h.SourceGranted(0), h.SourceMoved(1), h.SourceGranted(1)
    )
    assert (state.phase, effects) == (h.HandoverPhase.COMMITTING, [h.AskSources(), h.CommitSources()])
    state, effects = run(begun(1), h.SourceReady(0), h.SourceMoved(0), h.SourceGranted(0), h.SourceCommitted(0))
    assert effects == [h.AskSources(), h.CommitSources(), h.ReportLoad(), h.ReleaseLease()]


def test_progress_moves_the_deadline_and_time_is_no_proof_of_drained() -> None:
    state, _ = run(begun(), *MOVING, now=0)
    state, _ = h.HANDOVER.step(state, h.SourceProgress(), 20)
    assert h.HANDOVER.step(state, Tick(), 49)[0].phase is h.HandoverPhase.MOVING
    state, effects = h.HANDOVER.step(state, Tick(), 50)
    assert (state.phase, effects) == (h.HandoverPhase.DRAINING, (h.StopSources(),))
    state, effects = h.HANDOVER.step(state, Tick(), 1e9)
    assert (state.phase, effects) == (h.HandoverPhase.DRAINING, (h.StopSources(),))


@pytest.mark.parametrize("before", [(), READY, COMMITTING], ids=["handshaking", "ready", "committing"])
def test_all_phases_together_have_a_deadline(before: tuple[h.HandoverEvent, ...]) -> None:
    state, _ = run(begun(), *before, now=0)
    state = replace(state, deadline=1e9)  # whatever extends the phase
    assert timed_out(h.HANDOVER.step(state, Tick(), 1e9)[1][-1])
    state, _ = run(begun(), *before, now=95)
    assert state.deadline in (10, 100), "no phase lasts longer"


def test_progress_does_not_extend_the_last_deadline() -> None:
    state, _ = run(begun(), *MOVING, now=0)
    for now in range(0, 100, 20):
        state, effects = run(state, h.SourceProgress(), Tick(), now=now)
        assert (state.phase, effects) == (h.HandoverPhase.MOVING, [])
    state, effects = run(state, Tick(), now=100)
    assert (state.phase, effects) == (h.HandoverPhase.DRAINING, [h.StopSources()])
    (failed,) = run(state, h.SourceDrained(0), h.SourceDrained(1), now=101)[1]
    text = "no end in 100 s (handover_timeout_seconds), now moving"
    assert failed == h.AttemptFailed(h.Reason("timeout", text))


def test_a_later_attempt_has_no_more_time() -> None:
    state, _ = h.begin(1, TIMEOUTS, 95, end=100)
    assert (state.deadline, state.end) == (100, 100)
    assert timed_out(run(state, Tick(), now=100)[1][-1])


sources = st.integers(0, 2)
any_event = st.one_of(
    *(
        st.builds(kind, sources)
        for kind in (h.SourceReady, h.SourceGranted, h.SourceMoved, h.SourceCommitted, h.SourceDrained)
    ),
    st.builds(h.SourceFailed, sources, st.just(GONE)),
    st.just(h.CancelLoad()),
    st.just(h.SourceProgress()),
    st.just(Tick()),
)


@given(st.integers(0, 3), st.lists(st.tuples(any_event, st.floats(0, 20)), max_size=60))
def test_one_report_at_most_and_never_while_moving(count: int, script: list[tuple[h.HandoverEvent, float]]) -> None:
    now = 0.0
    state, effects = h.begin(count, TIMEOUTS, now)
    seen = list(effects)
    ends = h.ReportLoad | h.AttemptFailed
    drained: set[int] = set()
    for event, seconds in script:
        now += seconds
        before = state.phase
        writing = (h.HandoverPhase.READY, h.HandoverPhase.MOVING, h.HandoverPhase.DRAINING)
        if isinstance(event, h.SourceMoved | h.SourceDrained) and before in writing:
            drained.add(event.source)
        state, effects = h.HANDOVER.step(state, event, now)
        for effect in effects:
            if isinstance(effect, ends) and before in (h.HandoverPhase.MOVING, h.HandoverPhase.DRAINING):
                assert set(range(count)) <= drained
        seen += effects
        if effects and state.phase in (h.HandoverPhase.HANDSHAKING, h.HandoverPhase.READY, h.HandoverPhase.MOVING):
            assert state.deadline <= state.end
    found = [effect for effect in seen if isinstance(effect, ends)]
    assert len(found) == (state.phase in (h.HandoverPhase.DONE, h.HandoverPhase.FAILED))
    done = state.phase is h.HandoverPhase.DONE
    assert sum(isinstance(effect, h.ReleaseLease) for effect in seen) == done
    assert not found or isinstance(found[0], h.ReportLoad) == done
