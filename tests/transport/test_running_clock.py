"""The clock of a thread that may be held up: what it counts of a turn."""

from __future__ import annotations

import random

import pytest

from kvferry.transport.wake import HELD_UP_SECONDS, RunningClock


class Given:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("slept", "took", "counted", "late"),
    [
        (0.0, 0.004, 0.004, 0.0),
        (0.02, 0.021, 0.021, 0.0),
        (30.0, 2.0, 2.0, 0.0),
        (1.0, 2.0, 2.0, 0.0),
        (1.0, 11.0, 1.0 + HELD_UP_SECONDS, 10.0),
        (0.0, 10.0, HELD_UP_SECONDS, 10.0),
    ],
)
def test_a_turn(slept: float, took: float, counted: float, late: float) -> None:
    given = Given()
    clock = RunningClock(given)
    assert clock.turn() == 0.0
    clock.sleeps(slept)
    given.seconds += took
    assert clock.turn() == pytest.approx(counted)
    assert clock.late == pytest.approx(late)
    given.seconds += 0.5
    assert clock.turn() == pytest.approx(counted + 0.5)
    assert clock.late == 0.0


def test_it_never_goes_back_and_always_goes_on() -> None:
    rng, given = random.Random(1), Given()
    clock = RunningClock(given)
    before = clock.turn()
    for _ in range(1000):
        clock.sleeps(rng.choice([0.0, 0.001, 0.02, 1.0]))
        step = rng.choice([0.0001, 0.02, 1.5, 600.0])
        given.seconds += step
        now = clock.turn()
        assert min(step, HELD_UP_SECONDS) <= now - before + 1e-9 <= step + 2e-9
        before = now
