"""Hand-overs between ranks without a model, over every data plane: all bytes arrive, all leases end, nothing twice."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.wire.step_plan import KeepLease, StepPlan
from kvferry.transport import wake
from tests.handover.opening import OURS, PLANES, THEIRS, begin
from tests.handover.rank_group import RankGroup
from tests.support.inside import clock_of, plans_of, relaxed
from tests.support.ranks import grant, load_plan, peer, wait
from tests.support.turns import TurnLines


def small(plane: str) -> Settings:
    """Slots so small that a hand-over takes several."""
    return Settings(plane=plane, slot_bytes=64 << 10, staging_bytes=1 << 20)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("tokens", [1, 16, 77, 200])
def test_all_bytes_arrive_and_the_lease_ends(group: RankGroup, plane: str, tokens: int) -> None:
    p, d = group.rank(settings=small(plane)), group.rank(settings=small(plane), engine_id="engine-d")
    blocks = random.Random(tokens).sample(range(32), -(-tokens // 16))
    ours = random.Random(tokens + 1).sample(range(32), -(-tokens // 16))
    p.fill(blocks, tokens)
    begin(p, d, tokens=tokens, theirs=blocks, ours=ours)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed
    assert torch.equal(d.read(ours, tokens), d.wanted(tokens))
    untouched = sorted(set(range(32)) - set(ours))
    assert all((d.caches[name][untouched] == -1).all() for name in d.layers)
    assert d.plane == plane


def test_the_comparison_fails_on_planted_corruption(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill([3, 4], 20)
    p.caches[p.layers[2]][4, 1, 3, 5] ^= 1 << 7
    begin(p, d, tokens=20, theirs=[3, 4], ours=[8, 9])
    assert wait(lambda: d.received == {"req-d"}, [p, d])
    differs = d.read([8, 9], 20) != d.wanted(20)
    assert differs.nonzero().tolist() == [[2, 1, 19, 5]]


def test_only_the_tokens_that_d_lacks_are_fetched(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill([1, 2, 3], 40)
    token = grant([p], "req-p", [1, 2, 3], 40)
    d.worker.post(load_plan("req-d", token, peer([p]), [5, 6, 7], 16, 40))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert torch.equal(d.read([6, 7], 24), d.wanted(40)[:, :, 16:])
    assert all((d.caches[name][5] == -1).all() for name in d.layers)


@pytest.mark.parametrize(
    ("p_form", "d_form"),
    [
        ({"block_size": 16, "layout": "HND"}, {"block_size": 32, "layout": "NHD"}),
        ({"block_size": 32, "layout": "NHD"}, {"block_size": 16, "layout": "HND"}),
        ({"block_size": 48, "layout": "HND"}, {"block_size": 32, "layout": "HND"}),
    ],
)
def test_block_size_and_layout_may_differ(
    group: RankGroup, p_form: dict[str, object], d_form: dict[str, object]
) -> None:
    p, d = group.rank(**p_form), group.rank(engine_id="engine-d", **d_form)
    blocks, ours = THEIRS[: -(-100 // p.block_size)], OURS[: -(-100 // d.block_size)]
    p.fill(blocks, 100)
    begin(p, d, tokens=100, theirs=blocks, ours=ours)
    assert wait(lambda: d.received == {"req-d"}, [p, d])
    assert torch.equal(d.read(ours, 100), d.wanted(100))


@pytest.mark.parametrize(
    ("p_size", "d_size", "heads"), [(1, 2, 4), (2, 1, 4), (2, 4, 2), (4, 2, 2), (3, 2, 6), (2, 3, 6)]
)
def test_any_tensor_parallel_size_to_any_other(group: RankGroup, p_size: int, d_size: int, heads: int) -> None:
    """Every rank of P is released, also those that nobody reads."""
    ps = [group.rank(tp_rank=r, tp_size=p_size, total_heads=heads) for r in range(p_size)]
    ds = [group.rank(tp_rank=r, tp_size=d_size, total_heads=heads, engine_id="engine-d") for r in range(d_size)]
    blocks, ours = [7, 3, 12], [1, 30, 2]
    for p in ps:
        p.fill(blocks, 45)
    token = grant(ps, "req-p", blocks, 45)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer(ps), ours, 0, 45))
    assert wait(lambda: all(d.received for d in ds) and all(p.sent for p in ps), [*ps, *ds])
    for d in ds:
        assert not d.failed
        assert torch.equal(d.read(ours, 45), d.wanted(45))


def test_many_at_once(group: RankGroup) -> None:
    p, d = group.rank(blocks=64), group.rank(blocks=64, engine_id="engine-d")
    p.fill(range(60), 60 * 16)
    wanted = d.wanted(60 * 16)
    for n in range(20):
        token = grant([p], f"p{n}", list(range(3 * n, 3 * n + 3)), 48)
        d.worker.post(load_plan(f"d{n}", token, peer([p]), list(range(3 * n, 3 * n + 3)), 0, 48))
    assert wait(lambda: len(d.received) == 20 and len(p.sent) == 20, [p, d])
    assert not d.failed
    assert torch.equal(d.read(range(60), 60 * 16), wanted)


def test_siblings_share_one_lease(group: RankGroup) -> None:
    """``n = 3``: three requests of D name one lease; P is released after the last of them."""
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill([3], 10)
    token = grant([p], "req-p", [3], 10)
    engine = peer([p])
    for n in range(3):
        plan = load_plan(f"{n}_req", token, engine, [10 + n], 0, 10, watch=False)
        d.worker.post(
            StepPlan(consumer=plan.consumer, keeps=(KeepLease(f"{n}_req", token, engine, True),), loads=plan.loads)
        )
        assert wait(lambda n=n: f"{n}_req" in d.received, [p, d])
    assert not d.failed
    assert not p.sent
    assert wait(lambda: p.sent == {"req-p"}, [p, d])


def test_an_idle_transfer_thread_sleeps(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes a few times in a second, for little work, and does not take its sleep for being held up."""
    monkeypatch.setattr(wake, "HELD_UP_SECONDS", 0.0)
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill([3], 10)
    begin(p, d, tokens=10, theirs=[3], ours=[1])
    assert wait(lambda: bool(p.sent), [p, d])
    for rank in (p, d):
        turns, begun, clock = TurnLines(rank), time.monotonic(), clock_of(rank)
        now = clock.now
        assert wait(lambda clock=clock, now=now: clock.now > now + 0.5), "its clock goes on while it sleeps"
        assert turns.count < 20 + 4 * (time.monotonic() - begun) and turns.most < 1000


def test_the_interval_is_short_for_what_is_posted_while_the_thread_relaxes(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has looked for work, and leaves the interpreter's switch interval to the engine, just before."""
    p = group.rank()
    thread = p.thread

    class Posted(deque[Any]):
        def append(self, plan: Any) -> None:
            thread.wake()
            assert wait(lambda: relaxed(thread))
            super().append(plan)

    monkeypatch.setattr(plans_of(thread), "posted", Posted())
    grant([p], "req-p", [3], 10)
    assert not relaxed(thread) and sys.getswitchinterval() < 1e-4
