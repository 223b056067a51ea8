"""Hand-overs between ranks without a model, over every data plane: all bytes arrive, all leases end, nothing twice."""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connector.engine.aggregator import ConnectorOutput, KVOutputAggregator
from kvferry.transport import wake
from kvferry.transport.planes.tcp_flows import Cipher
from tests.handover.scenario import (
    OURS,
    PATIENT,
    PLANES,
    SMALL,
    THEIRS,
    TOKENS,
    RankGroup,
    another_works,
    begin,
    ended,
    has_all,
)
from tests.support.inside import clock_of, plans_of, relaxed
from tests.support.ranks import Rank, grant, load_plan, peer, wait
from tests.support.turns import TurnLines


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("tokens", [1, 16, 77, 200])
def test_all_bytes_arrive_and_the_lease_ends(group: RankGroup, plane: str, tokens: int) -> None:
    p, d = (group.rank(plane=plane, engine_id=f"engine-{name}", **SMALL) for name in "pd")
    blocks, ours = (random.Random(tokens + n).sample(range(32), -(-tokens // 16)) for n in range(2))
    p.fill(blocks, tokens)
    begin(p, d, tokens=tokens, theirs=blocks, ours=ours)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and torch.equal(d.read(ours, tokens), d.wanted(tokens))
    untouched = sorted(set(range(32)) - set(ours))
    assert all((d.caches[name][untouched] == -1).all() for name in d.layers)
    assert d.plane == plane


def test_the_comparison_fails_on_planted_corruption(p: Rank, d: Rank) -> None:
    p.caches[p.layers[2]][THEIRS[1], 1, 3, 5] ^= 1 << 7
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"}, [p, d])
    assert (d.read(OURS, 100) != d.wanted(100)).nonzero().tolist() == [[2, 1, 19, 5]]


@pytest.mark.parametrize("content", [16, 64], ids=["slots", "pieces"])
def test_encrypted(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: int
) -> None:
    caplog.set_level("INFO", "vllm.kvferry")
    opened, real = [], Cipher.open

    def seen(self: Cipher, *args: object) -> bool:
        opened.append(self)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Cipher, "open", seen)
    p, d = group.pair(plane="tcp", content=content, **SMALL, **PATIENT, of_d={"encrypt": True})
    another_works(p, d)
    assert opened
    assert f"KV bytes from engine-p pp0 tp0 at 127.0.0.1:{p.address.port} are encrypted" in caplog.text


def test_encrypted_kv_bytes_in_full_slots(group: RankGroup) -> None:
    """CURVE makes each frame longer, and libzmq compares the longer frame with the largest one that D takes."""
    p, d = group.pair(plane="zmq", slot_bytes=128 << 10, layers=2, content=8192, blocks=18)
    begin(p, d)
    assert ended(p, d) and d.plane == "zmq"


def test_an_idle_transfer_thread_sleeps(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes a few times in a second, for little work, and does not take its sleep for being held up."""
    monkeypatch.setattr(wake, "HELD_UP_SECONDS", 0.0)
    p, d = group.pair()
    another_works(p, d)
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


BLOCKS, EACH = 7, 2
"""Blocks of a prompt, and prompts that are under way at once in each direction."""


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp"])
def test_two_engines_change_places_under_load(group: RankGroup, plane: str) -> None:
    """A to B, B to A, and both at once, with every byte compared; whoever was P is D two hand-overs later."""
    draw = random.Random(plane)
    a, b = (group.rank(engine_id=f"engine-{name}", plane=plane, content=64, blocks=64, **PATIENT) for name in "ab")
    of_a, of_b = (draw.sample(range(1, 64), 4 * EACH * BLOCKS) for _ in range(2))
    half = 2 * EACH * BLOCKS
    ways = {"a": (a, b, of_a[:half], of_b[:half]), "b": (b, a, of_b[half:], of_a[half:])}
    for life in range(8):
        begun = []
        for way in ("a", "b", "ab")[life // 2 % 3]:
            p, d, *blocks = ways[way]
            for n in range(EACH):
                theirs, ours = (own[n * BLOCKS : (n + 1) * BLOCKS] for own in blocks)
                for cache in d.caches.values():
                    cache[ours] = -7
                p.fill(theirs, TOKENS)
                begin(p, d, f"{way}{life}-{n}", TOKENS, theirs, ours)
                begun.append((p, d, f"{way}{life}-{n}", ours))
        for p, d, name, _ in begun:
            assert wait(lambda p=p, d=d, name=name: f"{name}-d" in d.received and f"{name}-p" in p.sent, [a, b])
        assert not a.failed and not b.failed and all(has_all(d, ours) for _, d, _, ours in begun)


SHORT = [3, 1, 4]


@pytest.mark.parametrize("granted", [True, False])
def test_a_load_ends_when_its_last_rank_reports_and_fails_if_any_rank_failed(group: RankGroup, granted: bool) -> None:
    """Without a lease on P's second rank, D's second rank fails late: once P no longer waits for the lease."""
    ps = [group.rank(tp_rank=r, tp_size=2, ask_hold_seconds=0.5) for r in range(2)]
    ds = [group.rank(tp_rank=r, tp_size=2, engine_id="engine-d") for r in range(2)]
    for p in ps:
        p.fill(SHORT, 40)
    token = grant(ps if granted else ps[:1], "req-p", SHORT, 40)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer(ps), SHORT, 0, 40))
    aggregator, reported, ends = KVOutputAggregator(2), set[int](), time.monotonic() + 60
    while True:
        results = [d.worker.take_results() for d in ds]
        reported |= {rank for rank, each in enumerate(results) if each.received}
        output = aggregator.aggregate([SimpleNamespace(kv_connector_output=each) for each in results])
        assert output is not None
        report: ConnectorOutput = output.kv_connector_output
        assert (report.finished_recving == {"req-d"}) == (reported == {0, 1})
        if report.finished_recving:
            break
        assert aggregator.pending() == ({"req-d": tuple(reported)} if reported else {})
        assert time.monotonic() < ends, f"ranks that reported: {reported}"
        time.sleep(0.001)
    assert report.failed_recving == (set() if granted else {"req-d"})
