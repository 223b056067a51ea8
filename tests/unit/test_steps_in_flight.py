"""Steps in flight: whose freed blocks they may still use, and how long the device is busy with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.step_loads.steps_in_flight import REMEMBERED_STEPS, StepsInFlight

acts = st.one_of(
    st.just(("scheduled", 0)), st.just(("processed", 0)), st.just(("unknown", 0)),
    st.tuples(st.just("freed"), st.integers(0, 3)),
)  # fmt: skip


@given(st.lists(acts, max_size=60))
def test_whatever_happens_no_block_in_use_passes_for_free(script: list[tuple[str, int]]) -> None:
    steps = StepsInFlight()
    scheduled = processed = 0
    last_users: list[tuple[int, int | None]] = []
    for number, (what, block) in enumerate(script):
        match what:
            case "scheduled":
                steps.scheduled()
                scheduled += 1
            case "processed":
                steps.processed(float(number))
                processed = min(processed + 1, scheduled)
            case _:
                steps.freed(None if what == "unknown" else [block])
                last_users.append((scheduled, None if what == "unknown" else block))
        for asked in range(4):
            used = any(freed in (None, asked) and step > processed for step, freed in last_users)
            assert steps.may_use([asked]) == used


# --- time -------------------------------------------------------------------------------------------------------


def busy(*ends: float) -> StepsInFlight:
    """Steps that ended then, each scheduled before the one ahead had ended; one is in flight."""
    steps = StepsInFlight()
    steps.scheduled()
    for end in ends:
        steps.scheduled()
        steps.processed(end)
    return steps


def test_nothing_is_left_of_what_is_not_known() -> None:
    steps = StepsInFlight()
    assert steps.seconds_left(1.0) == 0.0, "no step in flight"
    steps.scheduled()
    assert steps.seconds_left(1.0) == 0.0, "no step has ended yet"
    assert busy(1.0).seconds_left(1.0) == 0.0, "of the first one it is not known when it began"


def test_a_step_takes_what_the_one_before_took() -> None:
    steps = busy(1.0, 1.010)
    assert steps.seconds_left(1.010) == pytest.approx(0.010)
    assert steps.seconds_left(1.016) == pytest.approx(0.004)
    assert steps.seconds_left(1.030) == 0.0, "never less than nothing"


def test_all_steps_in_flight_count() -> None:
    steps = busy(1.0, 1.010)
    steps.scheduled()
    assert steps.seconds_left(1.012) == pytest.approx(0.018)


def test_the_shortest_of_the_last_steps_counts() -> None:
    """A load that fits is to fit after any of them."""
    steps = busy(1.0, 1.010, 1.013, 1.033)
    assert steps.seconds_left(1.033) == pytest.approx(0.003)
    now = 1.033
    for _ in range(REMEMBERED_STEPS):
        steps.scheduled()
        now += 0.008
        steps.processed(now)
    assert steps.seconds_left(now) == pytest.approx(0.008), "what was long ago is forgotten"


def test_a_step_after_a_pause_says_nothing_of_the_time_of_a_step() -> None:
    """The device began it when it was launched, which is not known here."""
    steps = StepsInFlight()
    now = 1.0
    for _ in range(3):
        steps.scheduled()
        steps.processed(now)
        now += 5.0
    steps.scheduled()
    assert steps.seconds_left(now) == 0.0


def test_a_step_that_computes_nothing_says_nothing_of_the_time_of_a_step() -> None:
    steps = busy(1.0, 1.010)
    steps.scheduled()
    steps.processed(1.0101, computed=False)
    assert steps.seconds_left(1.0101) == pytest.approx(0.010)


def test_nothing_in_flight_keeps_no_device_busy() -> None:
    steps = busy(1.0, 1.010)
    steps.processed(1.020)
    assert steps.seconds_left(1.020) == 0.0
    steps.scheduled()
    assert steps.seconds_left(1.021) == 0.0, "when it was launched is not known"
