"""A load inside a step: the forward is launched over each load once, and one that was given up never stands."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.step_loads import step_load as s

PHASE = s.StepLoadPhase
BEGUN, GAVE_UP, THREAD = s.CopiesBegun(), s.EngineGaveUp(), s.ThreadEnded()
OK, FAILED = s.LoadEnded(True), s.LoadEnded(False)
EVENTS: list[s.StepLoadEvent] = [BEGUN, OK, FAILED, GAVE_UP, THREAD]


def run(*events: s.StepLoadEvent, phase: s.StepLoadPhase = PHASE.POSTED) -> s.StepLoadPhase:
    state = s.StepLoad(phase)
    for event in events:
        state, effects = s.STEP_LOAD.step(state, event, 0.0)
        assert effects == ()
    return state.phase


def test_every_event_in_every_phase() -> None:
    """All pairs, so that a row that changes is seen here."""
    changes = {
        (PHASE.POSTED, BEGUN): PHASE.UNDER_WAY,
        (PHASE.POSTED, GAVE_UP): PHASE.GIVEN_UP,
        (PHASE.POSTED, OK): PHASE.STANDS,
        (PHASE.UNDER_WAY, OK): PHASE.STANDS,
        (PHASE.POSTED, FAILED): PHASE.FAILED,
        (PHASE.UNDER_WAY, FAILED): PHASE.FAILED,
        (PHASE.GIVEN_UP, OK): PHASE.FAILED,
        (PHASE.GIVEN_UP, FAILED): PHASE.FAILED,
        (PHASE.POSTED, THREAD): PHASE.FAILED,
        (PHASE.UNDER_WAY, THREAD): PHASE.FAILED,
        (PHASE.GIVEN_UP, THREAD): PHASE.FAILED,
    }
    assert {type(event) for event in EVENTS} == set(get_args(s.StepLoadEvent))
    for phase in PHASE:
        for event in EVENTS:
            assert run(event, phase=phase) is changes.get((phase, event), phase), (phase, event)


@pytest.mark.parametrize("begun", [[], [BEGUN]])
@pytest.mark.parametrize("end", [OK, FAILED])
def test_what_was_given_up_fails_whatever_its_copies_did(begun: list[s.StepLoadEvent], end: s.StepLoadEvent) -> None:
    """The forward was launched without them: that all bytes are there in the end helps nobody."""
    assert run(GAVE_UP, *begun) is PHASE.GIVEN_UP, "copies may still write its blocks"
    assert run(GAVE_UP, *begun, end) is PHASE.FAILED


def test_what_is_under_way_is_not_given_up() -> None:
    """The device waits for it."""
    assert run(BEGUN, GAVE_UP) is PHASE.UNDER_WAY
    assert run(BEGUN, GAVE_UP, OK) is PHASE.STANDS


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_whatever_happens(events: list[s.StepLoadEvent]) -> None:
    state = s.StepLoad()
    ready: bool | None = None  # whether the forward was launched over copies that were under way
    for event in events:
        before = state.phase
        state, effects = s.STEP_LOAD.step(state, event, 0.0)
        assert effects == ()
        if event == GAVE_UP and ready is None:
            ready = before is not PHASE.POSTED
        if before in s.FINAL:
            assert state.phase is before, "nothing follows the end"
        if state.phase in s.FINAL and before not in s.FINAL:
            assert isinstance(event, s.LoadEnded | s.ThreadEnded), "nothing else says that no copy writes"
        if state.phase is PHASE.STANDS and before is not PHASE.STANDS:
            assert event == OK and ready is not False
        if event == GAVE_UP:
            assert state.phase is not PHASE.POSTED, "the engine waits no more"
    if any(isinstance(event, s.LoadEnded | s.ThreadEnded) for event in events):
        assert state.phase in s.FINAL, "the step's output leaves"
