"""A D that reads P's memory by itself, while either process is killed, stopped or restarted at a drawn moment.

Host memory over ``cma``; where there is a GPU, one GPU that both share over ``cuda_ipc`` (``make test-gpu``).
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.faults.pair import OURS, PATIENCE, THEIRS, TOKENS, RankPair, left
from tests.support.engines import free_port
from tests.support.rank_process import remote_peer

LEASE, TIMEOUT = 20.0, 10.0
MOMENTS = 4
PLANES = {"cpu": "cma", "cuda": "cuda_ipc"}
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Pair(RankPair):
    """On one device."""

    def __init__(self, device: str) -> None:
        self._device = device
        super().__init__(free_port())

    def options(self, role: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "plane": PLANES[self._device], "lease_seconds": LEASE, "handshake_timeout_seconds": TIMEOUT,
            "transfer_timeout_seconds": TIMEOUT, "side_channel_port": self._port if role == "p" else 0,
        }  # fmt: skip
        return {"settings": settings, "device": self._device}

    def end(self, name: str) -> bool:
        """Whether D reports the load as done; then it has P's bytes. D's clock goes on where it waits."""
        end = time.monotonic() + PATIENCE
        while name not in (received := self.d.received()):
            assert time.monotonic() < end, "D reports its load"
            time.sleep(0.05)
            self.d.let_time_pass(0.5)
        assert not received[name] or self.holds(), "what is done has P's bytes"
        return bool(received[name])

    def freed(self, name: str) -> None:
        """P has its pages back one second after the lease, by P's clock."""
        time.sleep(0.2)
        if name not in self.p.sent():
            self.p.let_time_pass(LEASE + 1)
        end = time.monotonic() + PATIENCE
        while name not in self.p.sent():
            assert time.monotonic() < end, "P has its pages back"
            time.sleep(0.01)

    def works(self) -> None:
        """A hand-over succeeds, after a moment in which a link that has failed answers."""
        end = time.monotonic() + PATIENCE
        while not self.end(self.begin()):
            assert time.monotonic() < end, "a hand-over succeeds afterwards"
            time.sleep(0.3)
        for rank in (self.p, self.d):
            while kept := left(rank):
                assert time.monotonic() < end, kept
                time.sleep(0.01)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=no_gpu)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param)
    pair.works()
    yield pair
    pair.close()


@pytest.fixture(params=range(MOMENTS))
def moment(request: pytest.FixtureRequest) -> float:
    """Seconds after D was given the load: before its read, in it, or behind it."""
    return random.Random(request.param).choice((0.0, 0.001, 0.003, 0.01)) * random.Random(-request.param).random()


def test_p_is_killed(pair: Pair, moment: float) -> None:
    name = pair.begin()
    time.sleep(moment)
    pair.p.kill()
    pair.end(name)
    pair.restart("p")
    pair.works()


def test_p_restarts_on_its_port(pair: Pair) -> None:
    """What D has of the former life, its mapping or its grant, is of no use."""
    token = pair.p.grant("old", THEIRS, TOKENS)
    former = remote_peer([pair.p])
    pair.restart("p")
    pair.d.load("old", token, former, OURS, TOKENS)
    assert not pair.end("old")
    pair.works()


def test_d_is_killed(pair: Pair, moment: float) -> None:
    name = pair.begin()
    time.sleep(moment)
    pair.d.kill()
    pair.freed(name)
    pair.restart("d")
    pair.works()


def test_d_stands_still_past_the_lease(pair: Pair, moment: float) -> None:
    """P uses the pages again at once. What D makes of its read when it goes on is P's prompt, or a failed load."""
    name = pair.begin()
    time.sleep(moment)
    pair.d.signal(signal.SIGSTOP)
    pair.freed(name)
    pair.reuse()
    pair.d.signal(signal.SIGCONT)
    pair.end(name)
    pair.works()


def test_p_stands_still(pair: Pair, moment: float) -> None:
    """D needs no answer of P for a posted grant; for anything else it waits no longer than its deadline."""
    name = pair.begin()
    time.sleep(moment)
    pair.p.signal(signal.SIGSTOP)
    pair.end(name)
    pair.p.signal(signal.SIGCONT)
    pair.freed(name)
    pair.works()
