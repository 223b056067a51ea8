"""Ranks that sleep: nobody uses pages that are gone, everything is reported, and after the wake hand-overs go on.

A P in a process of its own makes its pages inaccessible while it sleeps: any touch by one of its threads ends it.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from kvferry.connector.decode_side.link import LinkPhase
from kvferry.connector.geometry.model_identity import WEIGHTS, weights_fact
from kvferry.connector.prefill_side.serve import Producer
from kvferry.connector.worker import worker
from kvferry.transport.errors import TransportError
from tests.handover.scenario import (
    OURS,
    PATIENT,
    SMALL,
    THEIRS,
    TOKENS,
    Gate,
    Pair,
    RankGroup,
    another_works,
    begin,
    ended,
    has_all,
    is_wiped,
    lease_plan,
    leased,
    load_from,
    wipe,
)
from tests.support.engines import free_port
from tests.support.pair import remote_peer
from tests.support.ranks import Rank, load_plan, peer, standing, wait

PLANES = ["cma", "shm", "tcp"]
FORM: dict[str, Any] = {"content": 512, "layers": 8, **SMALL, **PATIENT}


@pytest.fixture(params=PLANES)
def pair(group: RankGroup, request: pytest.FixtureRequest) -> Pair:
    return group.pair(plane=request.param, **FORM)


on_cma = pytest.mark.parametrize("pair", ["cma"], indirect=True)


def held_in_flight(p: Rank, d: Rank) -> Gate:
    """D stops where it takes what has arrived, or what it has copied."""
    another_works(p, d)
    gate = Gate(d.consumer, "collect", lambda now: False)
    begin(p, d)
    assert wait(lambda: gate.calls > 3 and bool(d.consumer.loads.running), [p])
    return gate


def loads(p: Rank, d: Rank, name: str, token: bytes, engine: Any = None) -> bool:
    d.worker.post(load_plan(f"{name}-d", token, engine or peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: f"{name}-d" in d.received, [d])
    return f"{name}-d" not in d.failed


def test_a_p_with_leases_sleeps_and_wakes(p: Rank, d: Rank) -> None:
    another_works(p, d)
    token, before = leased(p, "held"), peer([p])
    (link,) = d.consumer.links
    p.worker.unregister()
    assert p.worker.address is None
    p.poll()
    assert p.sent == {"again-p", "held-p"}, "its blocks are the engine's again"
    wipe(p, -9)  # the pages of a sleeping engine
    assert wait(lambda: link.handled_phase is LinkPhase.FAILED, [d]), "and its mappings are dropped"
    assert not loads(p, d, "late", token, before)
    p.worker.restore()
    assert p.address.incarnation != before.ranks[0].incarnation
    assert not loads(p, d, "later", token, before)
    p.fill(THEIRS, TOKENS)
    another_works(p, d, "awake")


def test_p_sleeps_in_the_middle_of_a_read(p: Rank, d: Rank) -> None:
    gate = held_in_flight(p, d)
    p.worker.unregister()
    wipe(p, -9)
    gate.open()
    assert not ended(p, d)
    p.worker.restore()
    p.fill(THEIRS, TOKENS)
    another_works(p, d, "awake")


def test_d_sleeps_in_the_middle_of_a_load(p: Rank, d: Rank) -> None:
    held_in_flight(p, d)
    d.worker.unregister()
    wipe(d)
    d.poll()
    assert "req-d" in d.failed
    assert wait(lambda: "req-p" in p.sent, [p, d]), "D has released it"
    assert is_wiped(d), "written after the pages were gone"
    d.worker.restore()
    another_works(p, d, "awake")


OTHER = {"architectures": "Labelled", WEIGHTS: weights_fact("5", "tuned")}


@pytest.mark.parametrize("changed", ["p", "d", "both"])
def test_weights_that_change_end_leases_and_links(p: Rank, d: Rank, changed: str) -> None:
    """Also the link of a D that reads P's pages and grants without a message to P."""
    another_works(p, d)
    token, (link,) = leased(p, "held"), d.consumer.links
    for rank in {"p": [p], "d": [d], "both": [p, d]}[changed]:
        rank.worker.change_model(OTHER)
        assert wait(lambda rank=rank: rank.context.model is OTHER)
    assert wait(lambda: link.handled_phase is LinkPhase.FAILED, [p, d])
    assert "weights of this engine have changed" in link.failure.text
    if changed != "d":
        assert wait(lambda: "held-p" in p.sent, [p]), "its blocks are the engine's again"
    assert loads(p, d, "new", leased(p, "new")) == (changed == "both")
    counts = d.figures()["counts"]
    assert changed == "both" or "incompatible" in counts["num_failed_handovers"]
    assert "num_retries" not in counts, "a load that a step computes with has one attempt"
    assert not loads(p, d, "late", token)


@on_cma
def test_weights_that_change_while_the_engine_sleeps(p: Rank, d: Rank) -> None:
    another_works(p, d)
    p.worker.unregister()
    p.worker.change_model(OTHER)
    p.worker.restore()
    assert not loads(p, d, "new", leased(p, "new")) and "incompatible" in d.counts("num_failed_handovers")
    d.worker.change_model(OTHER)
    another_works(p, d, "anew")


@on_cma
def test_a_copy_that_began_before_the_sleep_is_not_loaded(p: Rank, d: Rank) -> None:
    """The fence alone: D hears nothing of P's end, has read the pages of P's sleep, and sees that its grant is gone."""
    another_works(p, d)
    (link,), plane = d.consumer.links, d.context.plane("cma")
    assert plane is not None
    gate = Gate(plane, "progress", lambda: False)
    token = leased(p)
    assert wait(lambda: link.board.find(token) is not None), "else D would ask P"
    load_from(p, d, token)
    assert wait(lambda: bool(plane.copies))  # type: ignore[attr-defined]
    deaf, mute = Gate(link, "serve", lambda now: []), Gate(link, "send", lambda message: None)
    p.worker.unregister()
    wipe(p, -9)
    gate.open()
    assert wait(lambda: "req-d" in d.failed, [d])
    assert (d.read(OURS, TOKENS) == -9).any(), "it has read them"
    deaf.open(), mute.open()


@on_cma
def test_a_load_that_ended_but_was_not_reported_has_failed(p: Rank, d: Rank) -> None:
    """Its blocks are unmapped before the engine knows that they were filled."""
    begin(p, d)
    assert wait(lambda: bool(d.thread.results.loads), [p])
    d.worker.unregister()
    d.poll()
    assert d.received == d.failed == {"req-d"}


@on_cma
def test_what_a_sleeping_rank_is_asked_for_fails_and_is_reported(p: Rank, d: Rank) -> None:
    another_works(p, d)
    token = leased(p)
    d.worker.unregister()
    d.worker.post(load_plan("beside", token, peer([p]), OURS, 0, TOKENS))
    d.worker.begin_step()
    d.worker.post(load_plan("inside", token, peer([p]), OURS, 0, TOKENS, now=True))
    d.worker.begin_step()
    assert standing(d) == frozenset()
    d.worker.post(lease_plan(bytes(16), "lease"))
    d.poll()
    assert (d.received, d.failed, d.sent) == ({"again-d", "beside"}, {"beside"}, {"lease-p"})
    d.worker.restore()
    assert loads(p, d, "awake", token) and wait(lambda: "req-p" in p.sent, [p, d])


def test_twice_is_once_and_a_sleeping_rank_may_end(group: RankGroup) -> None:
    p, d = group.pair()
    p.worker.restore()
    address = p.address
    p.worker.unregister(), p.worker.unregister()
    p.worker.restore()
    again = p.address
    p.worker.restore()
    assert p.address == again != address
    another_works(p, d)
    p.worker.unregister()
    p.close(), p.close()


def test_other_addresses_and_the_same_port(group: RankGroup) -> None:
    """A port that was named is the same after the wake; tensors may be others."""
    port = free_port()
    p, d = group.pair(of_p={"side_channel_port": port})
    old = p.caches
    p.worker.unregister()
    p.caches = {name: cache.clone() for name, cache in old.items()}
    p.worker.restore(p.caches)
    for cache in old.values():
        cache.fill_(-9)
    assert p.address.port == port
    another_works(p, d)


def test_pages_that_may_be_in_use_stay_mapped(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then vLLM's sleep fails, and nothing is unmapped."""
    p, hold, held = group.rank(), threading.Event(), threading.Event()

    def stuck(now: float) -> bool:
        held.set()
        return not hold.wait(60)

    p.producer.pump = stuck
    assert held.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "UNREGISTER_SECONDS", 0.05)
        with pytest.raises(TransportError, match="they must stay mapped"):
            p.worker.unregister()
    hold.set()
    p.worker.unregister()
    assert p.worker.address is None


@pytest.mark.parametrize("plane", PLANES)
def test_a_process_sleeps_again_and_again_under_load(group: RankGroup, plane: str) -> None:
    """Never stale KV, no hang; each time the same prompt lies in other blocks of P, and all other pages hold -9."""
    draw = random.Random(f"{plane}")
    quick = {**FORM, "plane": plane, "handshake_timeout_seconds": 30.0, "transfer_timeout_seconds": 30.0}
    p, d = group.process(**quick), group.rank(engine_id="engine-d", **quick)
    loaded, free = 0, list(range(1, 32))
    for life, awaited in enumerate((4, 0, 2)):
        theirs = draw.sample(free, len(THEIRS))
        p.fill(theirs, TOKENS)
        tokens = {f"{life}-{n}": p.grant(f"{life}-{n}-p", theirs, TOKENS) for n in range(4)}
        ours = dict(zip(tokens, (free[n : n + 7] for n in range(0, 28, 7)), strict=True))
        wipe(d)
        for name, token in tokens.items():
            d.worker.post(load_plan(name, token, remote_peer([p]), ours[name], 0, TOKENS))
        assert wait(
            lambda life=life, awaited=awaited: sum(n.startswith(f"{life}-") for n in d.received) >= awaited, [d]
        )
        p.sleep()
        assert wait(lambda tokens=tokens: d.received >= tokens.keys(), [d])
        stand = tokens.keys() - d.failed
        assert all(has_all(d, ours[name]) for name in stand)
        loaded += len(stand)
        p.wake()
        assert {f"{name}-p" for name in tokens} <= p.sent()
    assert loaded >= 4
    p.fill(THEIRS, TOKENS)
    token = p.grant("last-p", THEIRS, TOKENS)
    d.worker.post(load_plan("last", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "last" in d.received, [d]) and "last" not in d.failed and has_all(d)


@pytest.mark.parametrize(("ends", "why"), [("close", "the engine ends"), ("unregister", "the engine goes to sleep")])
def test_the_end_of_its_leases_is_told(group: RankGroup, monkeypatch: pytest.MonkeyPatch, ends: str, why: str) -> None:
    p, d = group.pair(of_d=PATIENT)
    another_works(p, d)
    (link,) = d.consumer.links
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
    assert link.failure.kind == "peer_lost" and f"the prefill engine has ended its leases: {why}" in link.failure.text
