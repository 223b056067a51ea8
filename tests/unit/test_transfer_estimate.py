"""What is expected of a hand-over, from the last ones."""

from __future__ import annotations

import math

from kvferry.connector.wire.transfer_estimate import FRESH_SECONDS, UNKNOWN, TransferEstimate, TransferEstimates


def test_as_long_as_the_last_one_and_longer_for_more_tokens() -> None:
    estimates = TransferEstimates(1)
    assert math.isinf(estimates.seconds("P", 10, 0.0))
    estimates.observe({("P", 0): TransferEstimate(0.004, 1000)}, 0.0)
    assert estimates.seconds("P", 1000, 1.0) == 0.004
    assert estimates.seconds("P", 10, 1.0) == 0.004, "it has a cost that does not depend on tokens"
    assert math.isclose(estimates.seconds("P", 5000, 1.0), 0.02)
    assert math.isinf(estimates.seconds("Q", 10, 1.0))
    estimates.observe({("P", 0): TransferEstimate(0.002, 1000)}, 2.0)
    assert estimates.seconds("P", 1000, 2.0) == 0.002, "the last one counts"


def test_a_short_one_says_little_of_a_long_one() -> None:
    """Most of what it took it would take for no token at all."""
    estimates = TransferEstimates(1)
    estimates.observe({("P", 0): TransferEstimate(0.001, 10)}, 0.0)
    assert math.isclose(estimates.seconds("P", 8000, 0.0), 0.8)
    estimates.observe({("P", 0): TransferEstimate(0.004, 8000)}, 1.0)
    estimates.observe({("P", 0): TransferEstimate(0.001, 10)}, 2.0)
    assert estimates.seconds("P", 8000, 2.0) == 0.004
    assert estimates.seconds("P", 10, 2.0) == 0.001
    estimates.observe({("P", 0): TransferEstimate(0.003, 12)}, 3.0)
    assert estimates.seconds("P", 10, 3.0) == 0.003, "the last one of its length"


def test_what_was_faster_before_is_forgotten() -> None:
    estimates = TransferEstimates(1)
    estimates.observe({("P", 0): TransferEstimate(0.004, 8000)}, 0.0)
    estimates.observe({("P", 0): TransferEstimate(0.1, 1000)}, 1.0)
    assert estimates.seconds("P", 1000, 1.0) == 0.1
    assert math.isclose(estimates.seconds("P", 8000, 1.0), 0.8)


def test_after_a_failure_nothing_is_expected() -> None:
    estimates = TransferEstimates(1)
    estimates.observe({("P", 0): TransferEstimate(0.004, 8000)}, 0.0)
    estimates.observe({("P", 0): UNKNOWN}, 1.0)
    assert math.isinf(estimates.seconds("P", 8000, 1.0))
    estimates.observe({("P", 0): TransferEstimate(0.004, 1000)}, 2.0)
    assert estimates.seconds("P", 1000, 2.0) == 0.004


def test_the_slowest_rank_counts_and_all_must_have_observed() -> None:
    estimates = TransferEstimates(2)
    estimates.observe({("P", 0): TransferEstimate(0.004, 1000)}, 0.0)
    assert math.isinf(estimates.seconds("P", 1000, 0.0))
    estimates.observe({("P", 1): TransferEstimate(0.009, 1000)}, 0.0)
    assert estimates.seconds("P", 1000, 0.0) == 0.009
    estimates.observe({("P", 1): UNKNOWN}, 0.0)
    assert math.isinf(estimates.seconds("P", 1, 0.0))


def test_it_is_forgotten_in_time() -> None:
    estimates = TransferEstimates(1)
    estimates.observe({("P", 0): TransferEstimate(0.004, 1000)}, 0.0)
    assert math.isfinite(estimates.seconds("P", 1, FRESH_SECONDS))
    assert math.isinf(estimates.seconds("P", 1, FRESH_SECONDS + 1))
    estimates.observe({("Q", 0): TransferEstimate(0.004, 1000)}, FRESH_SECONDS + 1)
    assert set(estimates.observed) == {("Q", 0)}
