"""The time of a hand-over from the costs of its plane."""

from __future__ import annotations

from math import isclose

import pytest

from benchmarks.plan import plan_fit
from kvferry.cli.plan.handover import PlannedRead
from kvferry.cli.plan.time_model import (
    PlaneCosts,
    default_calibration,
    seconds_of,
)
from kvferry.router.prefill_choice import FIRST_HANDOVER
from kvferry.transport.errors import ConfigError

COSTS = PlaneCosts(0.001, 0.00001, {1024: 1e9, 4096: 4e9}, 1.5)


def read(p: int, d: int, nbytes: int, messages: int = 10, piece: int = 1024) -> PlannedRead:
    return PlannedRead((0, d), (0, p), "full", 0, 0, 1, 0, 1, 1, messages, nbytes, piece)


def test_the_busiest_rank_decides() -> None:
    assert isclose(seconds_of([], COSTS), 0.001)
    assert isclose(seconds_of([read(0, 0, 10**6)], COSTS), 0.0021)
    assert isclose(seconds_of([read(0, 0, 10**6), read(1, 0, 2 * 10**6)], COSTS), 0.0042)
    assert isclose(seconds_of([read(0, 0, 10**6), read(1, 1, 2 * 10**6)], COSTS), 0.0031)
    assert isclose(seconds_of([read(0, 0, 10**6), read(0, 1, 10**6)], COSTS), 0.0032), "P's rank sends both"
    assert isclose(seconds_of([read(0, 0, 10**6, 0)], COSTS, link=1e8), 0.011), "the link bounds the rate"


def test_rates_between_known_pieces() -> None:
    for piece, rate in ((1, 1e9), (1024, 1e9), (2048, 2e9), (4096, 4e9), (1 << 20, 4e9)):
        assert isclose(COSTS.rate(piece), rate)


def test_a_plane_that_is_misspelt() -> None:
    with pytest.raises(ConfigError, match=r"plane 'tpc/host' is not in the calibration.*did you mean 'tcp/host'"):
        default_calibration().costs("tpc/host")


def test_the_default_calibration_is_what_the_committed_results_give() -> None:
    """And the costs give these back, within 13 %, as docs/planning.md says."""
    assert plan_fit.encoded(plan_fit.calibration()) == plan_fit.PACKAGED.read_bytes()
    of = [(f"{plane}/host", plan_fit.on_host(plane)) for plane in plan_fit.HOST_PLANES]
    of += [(f"{plane}/gpu", plan_fit.on_gpus(plane)) for plane in plan_fit.GPU_PLANES]
    for plane, rows in of:
        costs = default_calibration().costs(plane)
        assert all(abs(seconds_of(row.reads, costs) / row.p50 - 1) < 0.13 for row in rows), plane


def test_the_router_takes_a_hand_over_of_which_it_has_seen_none_for_one_over_tcp() -> None:
    for tokens in (1000, 8000):
        nbytes = tokens * 128 << 10
        messages = -(-nbytes >> 20)
        costs = default_calibration().costs("tcp/host")
        planned = seconds_of([read(0, 0, nbytes, messages, 16384)], costs)
        assert isclose(FIRST_HANDOVER[0] + tokens * FIRST_HANDOVER[1], planned, rel_tol=0.3)
