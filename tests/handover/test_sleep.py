"""Ranks that sleep: nobody uses pages that are gone, everything is reported, and after the wake hand-overs go on.

A P in a process of its own makes its pages inaccessible while it sleeps: any touch by one of its threads ends it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.link import LinkPhase
from kvferry.connector.engine import worker
from kvferry.connector.prefill_side.serve import Producer
from kvferry.connector.wire.step_plan import LeaseGrant, StepPlan, pack_ids
from kvferry.transport.errors import TransportError
from tests.handover.gates import PATIENT, Gate, halves
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works, begin
from tests.handover.rank_group import RankGroup
from tests.support.inside import thread_of
from tests.support.rank_process import RemoteRank, remote_peer
from tests.support.ranks import SOON, Rank, grant, load_plan, peer, standing, wait

PLANES = ["cma", "shm", "tcp"]
WIDE = {"content": 512, "layers": 8}


def settings(plane: str, **more: Any) -> dict[str, Any]:
    return {"plane": plane, "slot_bytes": 64 << 10, "staging_bytes": 1 << 20, **PATIENT, **more}


@pytest.fixture(params=PLANES)
def plane(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(group: RankGroup, plane: str) -> Iterator[tuple[Rank, Rank]]:
    p, d = (group.rank(settings=Settings(**settings(plane)), engine_id=name, **WIDE) for name in ("engine", "engine-d"))
    p.fill(THEIRS, TOKENS)
    yield p, d


def wipe(rank: Rank, value: int) -> None:
    for cache in rank.caches.values():
        cache.fill_(value)


def held_in_flight(d: Rank) -> Gate:
    """Stops D where it takes what has arrived, or what it has copied."""
    return Gate(halves(d)[1], "collect", lambda now: False)


def test_a_p_with_leases_sleeps_and_wakes(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    another_works(p, d)
    token, before = grant([p], "held-p", THEIRS, TOKENS), peer([p])
    (link,) = halves(d)[1].links
    p.worker.unregister()
    assert p.worker.address is None
    p.poll()
    assert p.sent == {"again-p", "held-p"}, "its blocks are the engine's again"
    wipe(p, -9)  # the pages of a sleeping engine
    assert wait(lambda: link.handled_phase is LinkPhase.FAILED, [d]), "and its mappings are dropped"
    d.worker.post(load_plan("late-d", token, before, OURS, 0, TOKENS))
    assert wait(lambda: "late-d" in d.received, [d], SOON) and d.failed == {"late-d"}
    p.worker.restore()
    assert p.address.incarnation != before.ranks[0].incarnation
    d.worker.post(load_plan("later-d", token, before, OURS, 0, TOKENS))
    assert wait(lambda: "later-d" in d.received, [d], SOON) and d.failed == {"late-d", "later-d"}
    p.fill(THEIRS, TOKENS)
    begin(p, d, "awake")
    assert wait(lambda: "awake-d" in d.received and "awake-p" in p.sent, [p, d])
    assert "awake-d" not in d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_p_sleeps_in_the_middle_of_a_read(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    another_works(p, d)
    gate = held_in_flight(d)
    begin(p, d)
    assert wait(lambda: gate.calls > 3 and bool(halves(d)[1].loads.running), [p])
    p.worker.unregister()
    wipe(p, -9)
    gate.open()
    assert wait(lambda: "req-d" in d.received, [p, d], SOON) and "req-d" in d.failed and "req-p" in p.sent
    p.worker.restore()
    p.fill(THEIRS, TOKENS)
    begin(p, d, "awake")
    assert wait(lambda: "awake-d" in d.received and "awake-p" in p.sent, [p, d]) and "awake-d" not in d.failed
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_a_copy_that_began_before_the_sleep_is_not_loaded(group: RankGroup) -> None:
    """The fence alone: D hears nothing of P's end, has read the pages of P's sleep, and sees that its grant is gone."""
    p, d = (group.rank(settings=Settings(**settings("cma")), engine_id=name, **WIDE) for name in ("engine", "engine-d"))
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    (link,) = halves(d)[1].links
    plane = d.worker.rank_context.plane("cma")  # type: ignore[union-attr]
    gate = Gate(plane, "progress", lambda: False)
    token = grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: link.board.find(token) is not None), "else D would ask P"
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: bool(plane.copies))  # type: ignore[union-attr]
    deaf, mute = Gate(link, "serve", lambda now: []), Gate(link, "send", lambda message: None)
    p.worker.unregister()
    wipe(p, -9)
    gate.open()
    assert wait(lambda: "req-d" in d.received, [d], SOON) and "req-d" in d.failed
    assert (d.read(OURS, TOKENS) == -9).any(), "it has read them"
    deaf.open()
    mute.open()


def test_d_sleeps_in_the_middle_of_a_load(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    another_works(p, d)
    gate = held_in_flight(d)
    begin(p, d)
    assert wait(lambda: gate.calls > 3 and bool(halves(d)[1].loads.running), [p])
    d.worker.unregister()
    wipe(d, -7)
    d.poll()
    assert "req-d" in d.received and "req-d" in d.failed
    assert wait(lambda: "req-p" in p.sent, [p, d]), "D has released it"
    assert all((cache == -7).all() for cache in d.caches.values()), "written after the pages were gone"
    d.worker.restore()
    begin(p, d, "awake")
    assert wait(lambda: "awake-d" in d.received and "awake-p" in p.sent, [p, d]) and "awake-d" not in d.failed
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


@pytest.mark.parametrize("plane", PLANES[:1], indirect=True)
@pytest.mark.parametrize("counted", [False, True])
def test_a_load_that_ended_but_was_not_reported_has_failed(pair: tuple[Rank, Rank], counted: bool) -> None:
    """Its blocks are unmapped before the engine knows that they were filled. ``counted``: the engine has taken how long
    the load took, as vLLM does between two looks at the reports."""
    p, d = pair
    begin(p, d)
    assert wait(lambda: bool(thread_of(d).results.loads), [p])
    if counted:
        assert d.worker.take_estimates()
    d.worker.unregister()
    d.poll()
    assert d.received == d.failed == {"req-d"}


@pytest.mark.parametrize("plane", PLANES[:1], indirect=True)
def test_what_a_sleeping_rank_is_asked_for_fails_and_is_reported(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    another_works(p, d)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.unregister()
    d.worker.post(load_plan("beside", token, peer([p]), OURS, 0, TOKENS))
    d.worker.begin_step()
    d.worker.post(load_plan("inside", token, peer([p]), OURS, 0, TOKENS, now=True))
    d.worker.begin_step()
    assert standing(d) == frozenset()
    d.worker.post(StepPlan(leases=(LeaseGrant("lease", bytes(16), TOKENS, (pack_ids(OURS),)),)))
    d.poll()
    assert (d.received, d.failed, d.sent) == ({"again-d", "beside"}, {"beside"}, {"lease"})
    d.worker.restore()
    d.worker.post(load_plan("awake", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "awake" in d.received and "req-p" in p.sent, [p, d]) and "awake" not in d.failed


def test_twice_is_once_and_a_sleeping_rank_may_end(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.worker.restore()
    address = p.address
    p.worker.unregister()
    p.worker.unregister()
    p.worker.restore()
    again = p.address
    p.worker.restore()
    assert p.address == again != address
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    p.worker.unregister()
    p.close()
    p.close()


def test_other_addresses_and_the_same_port(group: RankGroup) -> None:
    """A port that was named is the same after the wake; tensors may be others."""
    first = group.rank()
    port = first.address.port
    first.close()
    p, d = group.rank(settings=Settings(side_channel_port=port)), group.rank(engine_id="engine-d")
    old = p.caches
    p.worker.unregister()
    p.caches = {name: cache.clone() for name, cache in old.items()}
    p.worker.restore(p.caches)
    for cache in old.values():
        cache.fill_(-9)
    p.fill(THEIRS, TOKENS)
    assert p.address.port == port
    another_works(p, d)


def test_pages_that_may_be_in_use_stay_mapped(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then vLLM's sleep fails, and nothing is unmapped."""
    p, hold, held = group.rank(), threading.Event(), threading.Event()

    def stuck(now: float) -> bool:
        held.set()
        return not hold.wait(60)

    halves(p)[0].pump = stuck
    assert held.wait(60)
    monkeypatch.setattr(worker, "UNREGISTER_SECONDS", 0.05)
    with pytest.raises(TransportError, match="they must stay mapped"):
        p.worker.unregister()
    hold.set()
    monkeypatch.setattr(worker, "UNREGISTER_SECONDS", 60.0)
    p.worker.unregister()
    assert p.worker.address is None


@pytest.mark.parametrize("plane", PLANES)
def test_a_process_sleeps_again_and_again_under_load(group: RankGroup, plane: str) -> None:
    """Never stale KV, no hang; each time the same prompt lies in other blocks of P, and all other pages hold -9."""
    draw = random.Random(f"{plane}")
    quick = settings(plane, handshake_timeout_seconds=30.0, transfer_timeout_seconds=30.0)
    p: RemoteRank = group.process(settings=quick, **WIDE)
    d = group.rank(settings=Settings(**quick), engine_id="engine-d", **WIDE)
    blocks, free = d.read, list(range(1, 32))
    loaded = 0
    for life, awaited in enumerate((4, 0, 1, 3, 2)):
        theirs = draw.sample(free, len(THEIRS))
        p.fill(theirs, TOKENS)
        tokens = {f"{life}-{n}": p.grant(f"{life}-{n}-p", theirs, TOKENS) for n in range(4)}
        ours = dict(zip(tokens, (free[n : n + 7] for n in range(0, 28, 7)), strict=True))
        wipe(d, -7)
        for name, token in tokens.items():
            d.worker.post(load_plan(name, token, remote_peer([p]), ours[name], 0, TOKENS))
        assert wait(
            lambda life=life, awaited=awaited: sum(n.startswith(f"{life}-") for n in d.received) >= awaited, [d]
        )
        p.sleep()
        assert wait(lambda tokens=tokens: d.received >= tokens.keys(), [d], 2 * SOON)
        for name in tokens.keys() - d.failed:
            assert torch.equal(blocks(ours[name], TOKENS), d.wanted(TOKENS)), name
            loaded += 1
        p.wake()
        assert {f"{name}-p" for name in tokens} <= p.sent()
    assert loaded >= 4
    p.fill(THEIRS, TOKENS)
    token = p.grant("last-p", THEIRS, TOKENS)
    d.worker.post(load_plan("last", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "last" in d.received, [d]) and "last" not in d.failed
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


@pytest.mark.parametrize(("ends", "why"), [("close", "the engine ends"), ("unregister", "the engine goes to sleep")])
def test_the_end_of_its_leases_is_told(group: RankGroup, monkeypatch: pytest.MonkeyPatch, ends: str, why: str) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d", settings=Settings(**PATIENT))
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    (link,) = halves(d)[1].links
    told, say = threading.Event(), Producer.say_closing

    def say_and_wait(producer: Any, reason: str) -> None:  # as long as a slow host may take
        say(producer, reason)
        told.wait(60)

    monkeypatch.setattr(Producer, "say_closing", say_and_wait)
    ending = threading.Thread(target=getattr(p.worker, ends))
    ending.start()
    assert wait(lambda: link.phase is LinkPhase.FAILED, [d])
    told.set()
    ending.join(60)
    assert link.failure.kind == "peer_lost" and f"P has ended its leases: {why}" in link.failure.text
