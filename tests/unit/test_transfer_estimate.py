"""What is expected of a hand-over, from the last ones."""

from __future__ import annotations

import math

import pytest

from kvferry.connector.wire.transfer_estimate import FRESH_SECONDS, UNKNOWN, TransferEstimate, TransferEstimates

P, LONG = ("P", 0), TransferEstimate(0.004, 8000)
SHORT = TransferEstimate(0.001, 10)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ([], {10: math.inf}),
        # It has a cost that does not depend on tokens.
        ([TransferEstimate(0.004, 1000)], {1000: 0.004, 10: 0.004, 5000: 0.02}),
        ([TransferEstimate(0.004, 1000), TransferEstimate(0.002, 1000)], {1000: 0.002}),
        # Most of what a short one took it would take for no token at all.
        ([SHORT], {8000: 0.8}),
        ([SHORT, LONG, SHORT], {8000: 0.004, 10: 0.001}),
        ([SHORT, LONG, TransferEstimate(0.003, 12)], {10: 0.003}),
        # What was hardly faster before is raised.
        ([TransferEstimate(0.012, 32000), TransferEstimate(0.049, 128000)], {32000: 0.01225, 128000: 0.049}),
        ([TransferEstimate(0.04, 128000), TransferEstimate(0.044, 32000)], {32000: 0.044, 128000: 0.044}),
        # What was faster before is forgotten; after a failure nothing is expected.
        ([LONG, TransferEstimate(0.1, 1000)], {1000: 0.1, 8000: 0.8}),
        ([LONG, UNKNOWN], {8000: math.inf}),
        ([LONG, UNKNOWN, TransferEstimate(0.004, 1000)], {1000: 0.004}),
    ],
)
def test_the_last_hand_overs_count(observed: list[TransferEstimate], expected: dict[int, float]) -> None:
    estimates = TransferEstimates(1)
    for now, estimate in enumerate(observed):
        estimates.observe({P: estimate}, float(now))
    assert {tokens: estimates.seconds("P", tokens, 3.0) for tokens in expected} == pytest.approx(expected)
    assert math.isinf(estimates.seconds("Q", 10, 3.0))


def test_the_slowest_rank_counts_and_all_must_have_observed() -> None:
    estimates = TransferEstimates(2)
    estimates.observe({P: TransferEstimate(0.004, 1000)}, 0.0)
    assert math.isinf(estimates.seconds("P", 1000, 0.0))
    estimates.observe({("P", 1): TransferEstimate(0.009, 1000)}, 0.0)
    assert estimates.seconds("P", 1000, 0.0) == 0.009
    estimates.observe({("P", 1): UNKNOWN}, 0.0)
    assert math.isinf(estimates.seconds("P", 1, 0.0))


def test_it_is_forgotten_in_time() -> None:
    estimates = TransferEstimates(1)
    estimates.observe({P: LONG}, 0.0)
    assert math.isfinite(estimates.seconds("P", 1, FRESH_SECONDS))
    assert math.isinf(estimates.seconds("P", 1, FRESH_SECONDS + 1))
    estimates.observe({("Q", 0): LONG}, FRESH_SECONDS + 1)
    assert set(estimates.observed) == {("Q", 0)}
