"""What is expected of a hand-over, from the last ones."""

from __future__ import annotations

import math

from kvferry.connector.pace import FRESH_SECONDS, NEVER, Pace, Paces


def test_as_long_as_the_last_one_and_longer_for_more_tokens() -> None:
    paces = Paces(1)
    assert math.isinf(paces.seconds("P", 10, 0.0))
    paces.told({("P", 0): Pace(0.004, 1000)}, 0.0)
    assert paces.seconds("P", 1000, 1.0) == 0.004
    assert paces.seconds("P", 10, 1.0) == 0.004, "it has a cost that does not depend on tokens"
    assert math.isclose(paces.seconds("P", 5000, 1.0), 0.02)
    assert math.isinf(paces.seconds("Q", 10, 1.0))
    paces.told({("P", 0): Pace(0.002, 1000)}, 2.0)
    assert paces.seconds("P", 1000, 2.0) == 0.002, "the last one counts"


def test_a_short_one_says_little_of_a_long_one() -> None:
    """Most of what it took it would take for no token at all."""
    paces = Paces(1)
    paces.told({("P", 0): Pace(0.001, 10)}, 0.0)
    assert math.isclose(paces.seconds("P", 8000, 0.0), 0.8)
    paces.told({("P", 0): Pace(0.004, 8000)}, 1.0)
    paces.told({("P", 0): Pace(0.001, 10)}, 2.0)
    assert paces.seconds("P", 8000, 2.0) == 0.004
    assert paces.seconds("P", 10, 2.0) == 0.001
    paces.told({("P", 0): Pace(0.003, 12)}, 3.0)
    assert paces.seconds("P", 10, 3.0) == 0.003, "the last one of its length"


def test_what_was_faster_before_is_forgotten() -> None:
    paces = Paces(1)
    paces.told({("P", 0): Pace(0.004, 8000)}, 0.0)
    paces.told({("P", 0): Pace(0.1, 1000)}, 1.0)
    assert paces.seconds("P", 1000, 1.0) == 0.1
    assert math.isclose(paces.seconds("P", 8000, 1.0), 0.8)


def test_after_a_failure_nothing_is_expected() -> None:
    paces = Paces(1)
    paces.told({("P", 0): Pace(0.004, 8000)}, 0.0)
    paces.told({("P", 0): NEVER}, 1.0)
    assert math.isinf(paces.seconds("P", 8000, 1.0))
    paces.told({("P", 0): Pace(0.004, 1000)}, 2.0)
    assert paces.seconds("P", 1000, 2.0) == 0.004


def test_the_slowest_rank_counts_and_all_must_have_told() -> None:
    paces = Paces(2)
    paces.told({("P", 0): Pace(0.004, 1000)}, 0.0)
    assert math.isinf(paces.seconds("P", 1000, 0.0))
    paces.told({("P", 1): Pace(0.009, 1000)}, 0.0)
    assert paces.seconds("P", 1000, 0.0) == 0.009
    paces.told({("P", 1): NEVER}, 0.0)
    assert math.isinf(paces.seconds("P", 1, 0.0))


def test_it_is_forgotten_in_time() -> None:
    paces = Paces(1)
    paces.told({("P", 0): Pace(0.004, 1000)}, 0.0)
    assert math.isfinite(paces.seconds("P", 1, FRESH_SECONDS))
    assert math.isinf(paces.seconds("P", 1, FRESH_SECONDS + 1))
    paces.told({("Q", 0): Pace(0.004, 1000)}, FRESH_SECONDS + 1)
    assert set(paces._told) == {("Q", 0)}
