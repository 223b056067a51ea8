"""How long a request of D waits for a prompt that P will hold: the time in P's queue does not count, up to a bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connector.config import Settings
from kvferry.connector.engine.load_planner import MAX_PATIENCE
from kvferry.connector.engine.scheduler import SchedulerHalf
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.wire.step_plan import LookupResult

TIMEOUT = 100.0
PARAMS = {
    "do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5600, "remote_engine_id": "p",
    "transfer_id": "tx",
}  # fmt: skip
VIEW = RequestView("r", PARAMS, list(range(100)), 100, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waits(clock: Clock) -> Callable[[float, bool], bool]:
    """Whether a request that came at 0 still waits at a time; ``known``: P says then that its engine has the prompt."""
    settings, tables = Settings(handover_timeout_seconds=TIMEOUT), (BlockTable("full", 16),)
    half = SchedulerHalf(settings, "d", tables, tp_size=1, pp_size=1, produces=False, consumes=True, clock=clock)
    half.on_new_request(VIEW)

    def waits(at: float, known: bool = False) -> bool:
        clock.now = at
        if known:
            half.lookups_answered({"r": LookupResult(known=True)})
        return half.num_new_matched_tokens(VIEW, 0) == (None, False)

    return waits


Waits = Callable[..., bool]


def test_a_p_that_never_gets_the_request(waits: Waits, caplog: pytest.LogCaptureFixture) -> None:
    assert waits(0.0) and waits(TIMEOUT - 1)
    assert not waits(TIMEOUT)
    assert "has told nothing of 'tx' in 100 s; does the router send both legs" in caplog.text


def test_a_p_that_says_so_once_and_dies(waits: Waits, caplog: pytest.LogCaptureFixture) -> None:
    assert waits(60.0, known=True) and waits(60.0 + TIMEOUT - 1)
    assert not waits(60.0 + TIMEOUT)
    assert "has told nothing of 'tx' in 100 s; it had the prompt: has its engine stopped?" in caplog.text


def test_a_p_that_never_computes_it(waits: Waits, caplog: pytest.LogCaptureFixture) -> None:
    end = MAX_PATIENCE * TIMEOUT
    at = 0.0
    while at + TIMEOUT / 2 < end:
        at += TIMEOUT / 2
        assert waits(at, known=True)
    assert waits(end - 1, known=True) and not waits(end, known=True)
    assert f"has had 'tx' for {end:g} s, and has not computed it" in caplog.text
