"""A D that reads P's memory by itself, while either process is killed, stopped or restarted at a drawn moment.

Host memory over ``cma``; where there is a GPU, one GPU that both share over ``cuda_ipc`` (``make test-gpu``).
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.pair import OURS, THEIRS, TIMES, TOKENS, RankPair, remote_peer

PLANES = {"cpu": "cma", "cuda": "cuda_ipc"}
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=no_gpu)])
def pair(request: pytest.FixtureRequest) -> Iterator[RankPair]:
    pair = RankPair(TIMES | {"plane": PLANES[request.param]}, device=request.param, content=128, layers=16)
    pair.works()
    yield pair
    pair.close()


@pytest.fixture(params=range(3))
def name(request: pytest.FixtureRequest, pair: RankPair) -> str:
    """A load that D has begun: before its read, in it, or behind it."""
    name, rng = pair.begin(), random.Random(request.param)
    time.sleep(rng.choice((0.0, 0.001, 0.003, 0.01)) * rng.random())
    return name


def test_p_is_killed(pair: RankPair, name: str) -> None:
    pair.p.kill()
    pair.ended(name)
    pair.restart("p")
    pair.works()


def test_p_restarts_on_its_port(pair: RankPair) -> None:
    """What D has of the former life, its mapping or its grant, is of no use."""
    token = pair.p.grant("old", THEIRS, TOKENS)
    former = remote_peer([pair.p])
    pair.restart("p")
    pair.d.load("old", token, former, OURS, TOKENS)
    assert not pair.ended("old")
    pair.works()


def test_d_is_killed(pair: RankPair, name: str) -> None:
    pair.d.kill()
    pair.freed(name)
    pair.restart("d")
    pair.works()


def test_d_stands_still_past_the_lease(pair: RankPair, name: str) -> None:
    """P uses the pages again at once. What D makes of its read when it goes on is P's prompt, or a failed load."""
    pair.d.signal(signal.SIGSTOP)
    pair.freed(name)
    pair.reuse()
    pair.d.signal(signal.SIGCONT)
    pair.ended(name)
    pair.works()


def test_p_stands_still(pair: RankPair, name: str) -> None:
    """D needs no answer of P for a posted grant; for anything else it waits no longer than its deadline."""
    pair.p.signal(signal.SIGSTOP)
    pair.ended(name)
    pair.p.signal(signal.SIGCONT)
    pair.freed(name)
    pair.works()
