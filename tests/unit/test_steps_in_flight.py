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


def busy(*ends: float) -> StepsInFlight:
    """Steps that ended then, each scheduled before the one ahead had ended; one is in flight."""
    steps = StepsInFlight()
    steps.scheduled()
    for end in ends:
        steps.scheduled()
        steps.processed(end)
    return steps


@pytest.mark.parametrize(("ends", "now", "left"), [
    ((), 1.0, 0.0),  # no step has ended yet
    ((1.0,), 1.0, 0.0),  # of the first one it is not known when it began
    ((1.0, 1.010), 1.010, 0.010), ((1.0, 1.010), 1.016, 0.004), ((1.0, 1.010), 1.030, 0.0),
    ((1.0, 1.010, 1.013, 1.033), 1.033, 0.003),  # the shortest counts: a load that fits is to fit after any of them
    ((1.0, 1.003, *(1.003 + 0.008 * n for n in range(1, REMEMBERED_STEPS + 1))), 1.003 + 0.008 * REMEMBERED_STEPS,
        0.008),  # what was long ago is forgotten
])  # fmt: skip
def test_how_long_the_device_is_busy(ends: tuple[float, ...], now: float, left: float) -> None:
    assert busy(*ends).seconds_left(now) == pytest.approx(left)


def test_when_a_step_can_begin_that_is_scheduled_later() -> None:
    """After the steps in flight, the one that is scheduled now, and those that are by the time its output is seen."""
    assert busy(1.0, 1.010).seconds_until_seen(1.014) == pytest.approx(0.006 + 2 * 0.010)
    waits = StepsInFlight()  # not scheduled ahead
    for end in (1.0, 1.010):
        waits.scheduled()
        waits.scheduled()
        waits.processed(end)
        waits.processed(end + 0.010)
    assert waits.count == 0 and waits.seconds_until_seen(1.5) == pytest.approx(waits.step_seconds)
    assert StepsInFlight().seconds_until_seen(1.0) == 0.0


def test_where_a_report_is_seen_at_once_the_others_in_flight_come_before() -> None:
    early = busy(1.0, 1.010)
    early.seen_at_once = True
    assert early.seconds_until_seen(1.014) == pytest.approx(early.count * 0.010)
    assert StepsInFlight().seconds_until_seen(1.0) == 0.0


def test_steps_that_say_nothing_of_the_time_of_a_step() -> None:
    """One after a pause, which began when it was launched, and that is not known; and one that computes nothing."""
    steps = StepsInFlight()
    assert steps.seconds_left(1.0) == 0.0
    for now in (1.0, 6.0, 11.0):
        steps.scheduled()
        steps.processed(now)
    steps.scheduled()
    assert steps.seconds_left(16.0) == 0.0
    steps = busy(1.0, 1.010)
    steps.scheduled()
    steps.processed(1.0101, computed=False)
    assert steps.seconds_left(1.0101) == pytest.approx(0.010)
    steps.scheduled()
    assert steps.seconds_left(1.0121) == pytest.approx(0.018), "all steps in flight count"


def test_nothing_in_flight_keeps_no_device_busy() -> None:
    steps = busy(1.0, 1.010)
    steps.processed(1.020)
    assert steps.seconds_left(1.020) == 0.0
    steps.scheduled()
    assert steps.seconds_left(1.021) == 0.0, "when it was launched is not known"


def test_an_admission_takes_what_the_shortest_of_the_last_ones_of_its_length_took() -> None:
    steps = StepsInFlight()
    steps.admitted(100_000, 0.2)  # the engine was held up
    assert not steps.admission_seconds(100_000)
    steps.admitted(100_000, 0.01)
    expected = {100_000: 0.01, 120_000: 0.01, 80_000: 0.008, 40_000: 0.0, 200_000: 0.0}
    assert {tokens: steps.admission_seconds(tokens) for tokens in expected} == pytest.approx(expected)
    steps.admitted(100_000, 0.3)
    assert steps.admission_seconds(100_000) == 0.01
    for _ in range(2):
        steps.admitted(100_000, 0.012)
    assert steps.admission_seconds(100_000) == 0.012
