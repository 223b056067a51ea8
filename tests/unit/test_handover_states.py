"""The consumer's machine: total table, exactly one report, no report while something may write."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.protocol import handover as h
from kvferry.connector.protocol.state_machine import Tick

TIMEOUTS = h.Timeouts(handshake=10, transfer=30)
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
    assert effects == [h.StopSources(), h.ReportLoad(GONE), h.ReleaseLease()]


@pytest.mark.parametrize("event", [h.SourceFailed(1, GONE), h.CancelLoad(GONE)], ids=["failed", "cancel"])
def test_during_io_it_drains_first(event: h.HandoverEvent) -> None:
    state, _ = run(begun(), *MOVING, h.SourceMoved(0))
    state, effects = run(state, event)
    assert (state.phase, effects) == (h.HandoverPhase.DRAINING, [h.StopSources()])
    state, effects = run(state, h.CancelLoad(), h.SourceFailed(1, AGAIN), h.SourceDrained(0))
    assert (state.phase, effects) == (h.HandoverPhase.DRAINING, [])
    state, effects = run(state, h.SourceDrained(1))
    assert effects == [h.ReportLoad(GONE), h.ReleaseLease()]


@pytest.mark.parametrize(
    ("before", "name", "limit"),
    [((), "handshaking", 10), (READY, "ready", 30), (COMMITTING, "committing", 30)],
)
def test_every_phase_has_a_deadline(before: tuple[h.HandoverEvent, ...], name: str, limit: float) -> None:
    state, _ = run(begun(), *before, now=0)
    assert h.HANDOVER.step(state, Tick(), limit - 0.1) == (state, ())
    state, effects = h.HANDOVER.step(state, Tick(), limit)
    assert effects[-2] == h.ReportLoad(h.Reason("timeout", f"nothing moved on in time while {name}"))


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
    drained: set[int] = set()
    for event, seconds in script:
        now += seconds
        before = state.phase
        writing = (h.HandoverPhase.READY, h.HandoverPhase.MOVING, h.HandoverPhase.DRAINING)
        if isinstance(event, h.SourceMoved | h.SourceDrained) and before in writing:
            drained.add(event.source)
        state, effects = h.HANDOVER.step(state, event, now)
        for effect in effects:
            if isinstance(effect, h.ReportLoad) and before in (h.HandoverPhase.MOVING, h.HandoverPhase.DRAINING):
                assert set(range(count)) <= drained
        seen += effects
    reports = [effect for effect in seen if isinstance(effect, h.ReportLoad)]
    assert len(reports) == (state.phase in (h.HandoverPhase.DONE, h.HandoverPhase.FAILED))
    assert sum(isinstance(effect, h.ReleaseLease) for effect in seen) == len(reports)
    if reports:
        assert reports[0].ok == (state.phase is h.HandoverPhase.DONE)
