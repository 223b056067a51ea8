"""P's machine of a read that it sends: it ends exactly once, after all chunks or a stop, never under a running copy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.prefill_side import outgoing_read as o

PHASE = o.SendPhase
CHUNK = (o.ChunkBegun(), o.ChunkSent())


def run(state: o.SendProgress, *events: o.OutgoingReadEvent) -> tuple[o.SendProgress, list[o.OutgoingReadEffect]]:
    effects: list[o.OutgoingReadEffect] = []
    for event in events:
        state, new = o.OUTGOING_READ.step(state, event, 1)
        effects += new
    return state, effects


def test_the_good_way() -> None:
    state, effects = run(o.begin_sending(2), *CHUNK, o.ChannelIdle(), o.CopiesEnded())
    assert (state.phase, state.begun, state.sent, effects) == (PHASE.SENDING, 1, 1, [])
    state, effects = run(state, *CHUNK)
    assert (state.phase, effects) == (PHASE.SENT, [])
    state, effects = run(state, o.ChannelIdle())
    assert (state.phase, effects) == (PHASE.DRAINING, [o.StopSending()])
    state, effects = run(state, o.CopiesEnded(), o.CopiesEnded(), o.SendStopped(), o.SendFailed("late"))
    assert (state.phase, effects) == (PHASE.ENDED, [o.EndRead()])


def test_a_chunk_that_is_being_packed_is_not_sent() -> None:
    state, _ = run(o.begin_sending(2), o.ChunkBegun(), o.ChunkBegun(), o.ChunkSent())
    assert (state.phase, state.begun, state.sent) == (PHASE.SENDING, 2, 1)
    state, effects = run(state, o.ChannelIdle(), o.CopiesEnded())
    assert (state.phase, effects) == (PHASE.SENDING, [])


BEFORE = {"sending": (), "packing": (o.ChunkBegun(),), "sent": (*CHUNK, *CHUNK)}


@pytest.mark.parametrize("before", BEFORE)
def test_a_failure_is_answered_and_drains(before: str) -> None:
    state, _ = run(o.begin_sending(2), *BEFORE[before])
    state, effects = run(state, o.SendFailed("broken"))
    assert (state.phase, effects) == (PHASE.DRAINING, [o.DenyRead("broken"), o.StopSending()])
    assert run(state, o.SendFailed("again"), o.SendStopped(), o.ChannelIdle()) == (state, [])
    assert run(state, o.CopiesEnded())[1] == [o.EndRead()]


@pytest.mark.parametrize("before", BEFORE)
def test_a_stop_is_not_answered(before: str) -> None:
    state, effects = run(o.begin_sending(2), *BEFORE[before], o.SendStopped(), o.SendFailed("late"))
    assert (state.phase, effects) == (PHASE.DRAINING, [o.StopSending()])


@pytest.mark.parametrize("before", [(*CHUNK,), (o.SendStopped(),), (o.SendStopped(), o.CopiesEnded())])
@pytest.mark.parametrize("chunk", CHUNK)
def test_no_chunk_goes_out_after_the_end(before: tuple[o.OutgoingReadEvent, ...], chunk: o.OutgoingReadEvent) -> None:
    state, _ = run(o.begin_sending(1), *before)
    with pytest.raises(AssertionError, match=f"a read that is {state.phase.value}"):
        run(state, chunk)


any_event = st.one_of(
    *(st.just(kind()) for kind in (o.ChunkBegun, o.ChunkSent, o.ChannelIdle, o.SendStopped, o.CopiesEnded)),
    st.builds(o.SendFailed, st.sampled_from("ab")),
)


@given(st.integers(1, 4), st.lists(any_event, max_size=60))
def test_it_ends_once_and_never_under_a_running_copy(chunks: int, script: list[o.OutgoingReadEvent]) -> None:
    state, seen = o.begin_sending(chunks), list[o.OutgoingReadEffect]()
    for event in script:
        live = state.phase is PHASE.SENDING
        if isinstance(event, o.ChunkBegun) and not (live and state.begun < chunks):
            continue  # the sender begins no chunk then
        if isinstance(event, o.ChunkSent) and not (live and state.sent < state.begun):
            continue
        before = state
        state, effects = o.OUTGOING_READ.step(state, event, 0)
        if o.EndRead() in effects:
            assert o.StopSending() in seen and event == o.CopiesEnded()
        if o.StopSending() in effects and isinstance(event, o.ChannelIdle):
            assert before.sent == chunks, "it would end with chunks left"
        seen += effects
    assert seen.count(o.StopSending()) == (state.phase in (PHASE.DRAINING, PHASE.ENDED))
    assert seen.count(o.EndRead()) == (state.phase is PHASE.ENDED)
    assert sum(isinstance(effect, o.DenyRead) for effect in seen) <= 1
