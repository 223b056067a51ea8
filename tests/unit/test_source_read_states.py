"""D's read from one P rank: every way to the commit, every way to stop, and no report while a copy may write."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side import handover as h
from kvferry.connector.decode_side import source_read as r
from kvferry.connector.wire.states import Tick

GONE = h.Reason("peer_lost", "gone")
ASKED = r.ReadAsked(2, "pushed")


def run(*events: r.ReadEvent, state: r.ReadState | None = None) -> tuple[r.ReadState, list[r.ReadEffect]]:
    state = state or r.ReadState(7)
    effects: list[r.ReadEffect] = []
    for event in events:
        state, new = r.SOURCE_READ.step(state, event, 0.0)
        effects += new
    return state, effects


def test_a_pushed_read() -> None:
    state, effects = run(
        ASKED, r.ReadGranted(), r.WriteBegan(1), r.WriteEnded(), r.WriteBegan(0), r.WriteEnded(), r.CommitWanted()
    )
    assert state.phase is r.ReadPhase.COMMITTED
    assert effects[0] == h.SourceGranted(7) and effects[-2:] == [h.SourceMoved(7), h.SourceCommitted(7)]


def test_chunks_that_arrive_before_the_grant() -> None:
    state, effects = run(ASKED, r.WriteBegan(1), r.WriteEnded())
    assert state.phase is r.ReadPhase.OVERTAKEN and effects == [h.SourceProgress(), h.SourceProgress()]
    assert run(r.ReadGranted(), state=state)[0].phase is r.ReadPhase.MOVING


def test_all_chunks_arrive_before_the_grant() -> None:
    landed, effects = run(ASKED, r.WriteBegan(0), r.WriteEnded())
    assert landed.phase is r.ReadPhase.LANDED_UNGRANTED and effects[-1] == h.SourceMoved(7)
    granted, effects = run(r.ReadGranted(), state=landed)
    assert granted.phase is r.ReadPhase.LANDED and effects == [h.SourceGranted(7)]
    assert run(r.CommitWanted(), state=granted)[1] == [h.SourceCommitted(7)]
    waiting, effects = run(r.CommitWanted(), state=landed)
    assert effects == [], "without the grant the read must not be committed"
    assert run(r.ReadGranted(), state=waiting) == (
        r.ReadState(7, r.ReadPhase.COMMITTED, awaitable=True), [h.SourceCommitted(7)]
    )  # fmt: skip


@pytest.mark.parametrize(("fence", "effect"), [("asked", r.SendCommit()), ("posted", r.CheckPostedGrant())])
def test_a_pulled_read_is_committed_by_its_fence(fence: r.Fence, effect: r.ReadEffect) -> None:
    landed, _ = run(r.ReadAsked(0, fence), r.ReadGranted(), r.WriteBegan(0), r.WriteEnded())
    state, effects = run(r.CommitWanted(), state=landed)
    assert effects == [effect]
    assert run(r.CommitAnswered(True), state=state)[1] == [h.SourceCommitted(7)]
    (failed,) = run(r.CommitAnswered(False), state=state)[1]
    assert isinstance(failed, h.SourceFailed) and failed.reason.kind == "expired"


def test_nothing_to_read() -> None:
    state, effects = run(r.NothingToRead(), r.CommitWanted())
    assert effects == [h.SourceMoved(7), h.SourceCommitted(7)] and state.phase is r.ReadPhase.COMMITTED


def test_stopped_while_copies_write() -> None:
    state, effects = run(ASKED, r.ReadGranted(), r.WriteBegan(1), r.WriteBegan(0), r.StopRead())
    assert state.phase is r.ReadPhase.DRAINING and effects[-1] == r.CancelRead()
    state, effects = run(r.WriteEnded(), state=state)
    assert not effects, "one copy still writes"
    state, effects = run(r.WriteEnded(GONE), state=state)
    assert effects == [h.SourceDrained(7)] and state.phase is r.ReadPhase.STOPPED


def test_a_stopped_read_stays_until_its_messages_are_accounted_for() -> None:
    state, _ = run(ASKED, r.StopRead(), r.HandoverEnded())
    assert run(r.MessagesLeft(1), state=state)[1] == []
    assert run(r.MessagesLeft(0), state=state)[1] == [r.ForgetRead()]
    landed, _ = run(ASKED, r.ReadGranted(), r.WriteBegan(0), r.WriteEnded())
    assert run(r.HandoverEnded(), state=landed)[1] == [r.ForgetRead()]


events = st.one_of(
    st.builds(r.ReadAsked, st.integers(0, 3), st.sampled_from(get_args(r.Fence))),
    st.builds(r.WriteBegan, st.integers(0, 3), awaitable=st.booleans()),
    st.builds(r.CommitAnswered, st.booleans()),
    st.builds(r.MessagesLeft, st.integers(0, 3)),
    st.sampled_from([
        r.NothingToRead(), r.ReadGranted(), r.WriteMoved(), r.ReadFailed(GONE), r.CommitWanted(), r.StopRead(),
        r.HandoverEnded(),
    ]),
)  # fmt: skip


@given(st.lists(st.one_of(events, st.just(r.WriteEnded())), max_size=30))
def test_nothing_is_drained_or_landed_while_a_copy_writes(happenings: list[r.ReadEvent]) -> None:
    state, writing, committed = r.ReadState(7), 0, 0
    for happening in happenings:
        if isinstance(happening, r.WriteEnded) and not writing:
            continue  # no copy is under way that could end
        before = state
        state, effects = r.SOURCE_READ.step(state, happening, 0.0)
        writing += state.writing - before.writing
        assert writing == state.writing >= 0
        for effect in effects:
            if isinstance(effect, h.SourceMoved | h.SourceDrained | h.SourceCommitted):
                assert writing == 0
            committed += isinstance(effect, h.SourceCommitted)
        assert committed <= 1 and (committed == 1) == (state.phase is r.ReadPhase.COMMITTED)
        assert not (before.stopped and not state.stopped)


def test_a_stopped_read_whose_last_messages_do_not_come_costs_the_link() -> None:
    stopped, _ = run(ASKED, r.ReadGranted(), r.StopRead(), state=r.ReadState(7, timeout=3.0))
    assert stopped.deadline == 3.0
    assert r.SOURCE_READ.step(stopped, Tick(), 2.9) == (stopped, ())
    late, effects = r.SOURCE_READ.step(stopped, Tick(), 3.0)
    assert effects == (r.FailLink(),)
    assert r.SOURCE_READ.step(late, Tick(), 99.0)[1] == (), "once"
    ended, _ = r.SOURCE_READ.step(stopped, r.MessagesLeft(0), 1.0)
    assert r.SOURCE_READ.step(ended, Tick(), 99.0)[1] == (), "no message can come any more"
