"""The time of a hand-over from the costs of its plane."""

from __future__ import annotations

from math import isclose

import pytest

from benchmarks.plan import plan_fit
from kvferry.cli.plan.handover import PlannedRead
from kvferry.cli.plan.time_model import (
    PlaneCosts,
    decoded_calibration,
    default_calibration,
    finish_seconds,
    work_of,
)
from kvferry.router.prefill_choice import FIRST_HANDOVER
from kvferry.transport.errors import ConfigError

COSTS = PlaneCosts(0.001, 0.0001, 0.00001, {1024: 1e9, 4096: 4e9}, 1.5)


def read(p: int, d: int, nbytes: int, messages: int = 10, piece: int = 1024) -> PlannedRead:
    return PlannedRead((0, d), (0, p), "full", 0, 0, 1, 0, 1, 1, messages, nbytes, piece)


def test_the_busiest_rank_decides() -> None:
    assert isclose(work_of([read(0, 0, 10**6)], COSTS).seconds, 0.0011)
    both = work_of([read(0, 0, 10**6), read(1, 0, 2 * 10**6)], COSTS)
    assert isclose(both.seconds, 0.0032) and both.turns == 20
    apart = work_of([read(0, 0, 10**6), read(1, 1, 2 * 10**6)], COSTS)
    assert isclose(apart.seconds, 0.0021)
    one_source = work_of([read(0, 0, 10**6), read(0, 1, 10**6)], COSTS)
    assert isclose(one_source.seconds, 0.0022), "P's rank sends both"
    assert isclose(work_of([read(0, 0, 10**6, 0)], COSTS, link=1e8).seconds, 0.01001), "the link bounds the rate"
    assert isclose(work_of([read(0, 0, 10**6, 0)], COSTS).seconds, 0.00101)


def test_rates_between_known_pieces() -> None:
    for piece, rate in ((1, 1e9), (1024, 1e9), (2048, 2e9), (4096, 4e9), (1 << 20, 4e9)):
        assert isclose(COSTS.rate(piece), rate)


def test_hand_overs_at_once_take_turns() -> None:
    work = work_of([read(0, 0, 10**6)], COSTS)
    alone = finish_seconds(work, COSTS)
    assert isclose(alone, 0.001 + 0.0001 + work.seconds)
    ends = [finish_seconds(work, COSTS, n, 4) for n in range(1, 5)]
    assert ends == sorted(ends) and isclose(ends[-1], 0.001 + 0.0004 + 4 * work.seconds)
    assert ends[0] > 0.001 + 3.6 * work.seconds, "the first waits for the turns of the others"
    pulled = work_of([read(0, 0, 10**6, messages=0)], COSTS)
    assert isclose(finish_seconds(pulled, COSTS, 1, 4), alone - 9 * 0.00001), "D reads one after the other"
    long = PlaneCosts(0.001, 0.0001, 0.00001, {1024: 1e9}, 1.5, turn_bytes=300_000)
    assert work_of([read(0, 0, 10**6, messages=0)], long).turns == 4, "D goes on with another read after 300,000 bytes"


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"\xff", b'{"form": "other", "measured": {}, "planes": {}}',
     b'{"form": "kvferry-calibration-1", "measured": {}, "planes": {"tcp/host": {"fixed_seconds": -1}}}'],
)  # fmt: skip
def test_what_is_no_calibration(text: bytes) -> None:
    with pytest.raises(ConfigError, match=r"costs\.json: no calibration"):
        decoded_calibration(text, "costs.json")
    with pytest.raises(ConfigError, match=r"plane 'tpc/host' is not in the calibration.*did you mean 'tcp/host'"):
        default_calibration().costs("tpc/host")


def test_the_default_calibration_is_what_the_committed_results_give() -> None:
    assert plan_fit.encoded(plan_fit.calibration()) == plan_fit.PACKAGED.read_bytes()


def test_the_router_takes_a_hand_over_of_which_it_has_seen_none_for_one_over_tcp() -> None:
    for tokens in (1000, 8000):
        nbytes = tokens * 128 << 10
        messages = -(-nbytes >> 20)
        costs = default_calibration().costs("tcp/host")
        planned = finish_seconds(work_of([read(0, 0, nbytes, messages, 16384)], costs), costs)
        assert isclose(FIRST_HANDOVER[0] + tokens * FIRST_HANDOVER[1], planned, rel_tol=0.3)
