"""The consumer's machine: total table, exactly one report, no report while something may write."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector import handover as h

TIMEOUTS = h.Timeouts(handshake=10, transfer=30)
EVENTS = get_args(h.Event)
GONE, AGAIN = h.Reason("peer_lost", "gone"), h.Reason("peer_lost", "again")


def test_table_is_total_over_live_phases() -> None:
    assert set(h.TRANSITIONS) == set(product(h.LIVE, EVENTS))


def test_nothing_to_fetch_reports_at_once() -> None:
    state, effects = h.begin(0, TIMEOUTS, 0)
    assert state.phase is h.Phase.DONE
    assert effects == (h.Report(), h.Release())


def run(state: h.Handover, *events: h.Event, now: float = 1) -> tuple[h.Handover, list[h.Effect]]:
    effects: list[h.Effect] = []
    for event in events:
        state, new = h.step(state, event, now)
        effects += new
    return state, effects


def begun(sources: int = 2) -> h.Handover:
    return h.begin(sources, TIMEOUTS, 0)[0]


READY = (h.PeerReady(0), h.PeerReady(1))
MOVING = (*READY, h.Granted(0), h.Granted(1))
COMMITTING = (*MOVING, h.Moved(0), h.Moved(1))


def test_the_good_way() -> None:
    state, effects = run(begun(), *COMMITTING, h.Committed(1), h.Committed(0))
    assert state.phase is h.Phase.DONE
    assert effects == [h.Ask(), h.Commit(), h.Report(), h.Release()]


@pytest.mark.parametrize("before", [(), READY, COMMITTING], ids=["handshaking", "ready", "committing"])
@pytest.mark.parametrize("event", [h.Failed(1, GONE), h.Cancel(GONE)], ids=["failed", "cancel"])
def test_before_and_after_io_it_fails_at_once(before: tuple[h.Event, ...], event: h.Event) -> None:
    state, _ = run(begun(), *before)
    state, effects = run(state, event)
    assert state.phase is h.Phase.FAILED
    assert effects == [h.Stop(), h.Release(), h.Report(GONE)]


@pytest.mark.parametrize("event", [h.Failed(1, GONE), h.Cancel(GONE)], ids=["failed", "cancel"])
def test_during_io_it_drains_first(event: h.Event) -> None:
    state, _ = run(begun(), *MOVING, h.Moved(0))
    state, effects = run(state, event)
    assert (state.phase, effects) == (h.Phase.DRAINING, [h.Stop()])
    state, effects = run(state, h.Cancel(), h.Failed(1, AGAIN), h.Drained(0))
    assert (state.phase, effects) == (h.Phase.DRAINING, [])
    state, effects = run(state, h.Drained(1))
    assert effects == [h.Release(), h.Report(GONE)]


@pytest.mark.parametrize(
    ("before", "name", "limit"),
    [((), "handshaking", 10), (READY, "ready", 30), (COMMITTING, "committing", 30)],
)
def test_every_phase_has_a_deadline(before: tuple[h.Event, ...], name: str, limit: float) -> None:
    state, _ = run(begun(), *before, now=0)
    assert h.step(state, h.Tick(), limit - 0.1) == (state, ())
    state, effects = h.step(state, h.Tick(), limit)
    assert effects[-1] == h.Report(h.Reason("timeout", f"nothing moved on in time while {name}"))


def test_data_may_overtake_the_grant() -> None:
    state, effects = run(begun(), *READY, h.Progress(), h.Moved(0), h.Granted(0), h.Moved(1), h.Granted(1))
    assert (state.phase, effects) == (h.Phase.COMMITTING, [h.Ask(), h.Commit()])
    state, effects = run(begun(1), h.PeerReady(0), h.Moved(0), h.Granted(0), h.Committed(0))
    assert effects == [h.Ask(), h.Commit(), h.Report(), h.Release()]


def test_progress_moves_the_deadline_and_time_is_no_proof_of_drained() -> None:
    state, _ = run(begun(), *MOVING, now=0)
    state, _ = h.step(state, h.Progress(), 20)
    assert h.step(state, h.Tick(), 49)[0].phase is h.Phase.MOVING
    state, effects = h.step(state, h.Tick(), 50)
    assert (state.phase, effects) == (h.Phase.DRAINING, (h.Stop(),))
    state, effects = h.step(state, h.Tick(), 1e9)
    assert (state.phase, effects) == (h.Phase.DRAINING, (h.Stop(),))


sources = st.integers(0, 2)
any_event = st.one_of(
    *(st.builds(kind, sources) for kind in (h.PeerReady, h.Granted, h.Moved, h.Committed, h.Drained)),
    st.builds(h.Failed, sources, st.just(GONE)),
    st.just(h.Cancel()),
    st.just(h.Progress()),
    st.just(h.Tick()),
)


@given(st.integers(0, 3), st.lists(st.tuples(any_event, st.floats(0, 20)), max_size=60))
def test_one_report_at_most_and_never_while_moving(count: int, script: list[tuple[h.Event, float]]) -> None:
    now = 0.0
    state, effects = h.begin(count, TIMEOUTS, now)
    seen = list(effects)
    drained: set[int] = set()
    for event, seconds in script:
        now += seconds
        before = state.phase
        writing = (h.Phase.READY, h.Phase.MOVING, h.Phase.DRAINING)
        if isinstance(event, h.Moved | h.Drained) and before in writing:
            drained.add(event.source)
        state, effects = h.step(state, event, now)
        for effect in effects:
            if isinstance(effect, h.Report) and before in (h.Phase.MOVING, h.Phase.DRAINING):
                assert set(range(count)) <= drained
        seen += effects
    reports = [effect for effect in seen if isinstance(effect, h.Report)]
    assert len(reports) == (state.phase not in h.LIVE)
    assert sum(isinstance(effect, h.Release) for effect in seen) == len(reports)
    if reports:
        assert reports[0].ok == (state.phase is h.Phase.DONE)
