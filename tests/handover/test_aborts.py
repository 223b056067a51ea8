"""A request given up at every stage of its hand-over: one report, no page touched afterwards, P's blocks freed.

Stages are held by gates: a method of the real transfer_thread that does nothing until the gate opens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.wire.step_plan import KeepLease, LeaseGrant, StepPlan, UnneededLease, pack_ids
from kvferry.transport.planes import tcp
from tests.handover.gates import PATIENT, Gate, halves
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works, begin
from tests.handover.rank_group import RankGroup
from tests.support.inside import early_asks, early_votes, receives, sends_of
from tests.support.ranks import Rank, grant, load_plan, peer, wait

SMALL = Settings(slot_bytes=64 << 10, staging_bytes=1 << 20, **PATIENT)


@pytest.fixture
def pair(group: RankGroup) -> tuple[Rank, Rank]:
    p, d = group.rank(settings=SMALL), group.rank(settings=SMALL, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    return p, d


def give_up(p: Rank, d: Rank, held: Callable[[], bool], gate: Gate | None, *, ok: bool = False) -> None:
    """Cancel once ``held``; then everything that must hold after a request was given up."""
    assert wait(held, [p, d])
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert wait(lambda: d.received == {"req-d"}, [d]), "an abort reports without waiting for P"
    assert (d.failed == set()) == ok
    for name in d.layers:
        d.caches[name].fill_(-7)  # the engine has the blocks back
    if gate is not None:
        gate.open()
    assert wait(lambda: p.sent == {"req-p"}, [p, d]), "P frees, long before the lease is over"
    time.sleep(0.1)
    assert all((d.caches[name] == -7).all() for name in d.layers), "something wrote into pages that were given back"
    d.poll()
    p.poll()
    another_works(p, d)


def test_before_it_was_scheduled(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(StepPlan(consumer=b"c" * 16, keeps=(KeepLease("req-d", token, peer([p]), False),)))
    d.worker.post(StepPlan(consumer=b"c" * 16, releases=(UnneededLease("req-d", token),)))
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    d.poll()
    assert not d.received, "what was never started is never reported"
    another_works(p, d)


def test_allocated_while_the_handshake_is_under_way(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    gate = Gate(halves(p)[0], "serve", lambda now: False)
    begin(p, d)
    give_up(p, d, lambda: gate.calls > 3, gate)


def test_asked_before_p_has_the_lease(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    token = secrets.token_bytes(16)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    producer, _ = halves(p)
    assert wait(lambda: bool(early_asks(producer)), [p, d])
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert wait(lambda: d.failed == {"req-d"}, [d])
    assert wait(lambda: not early_asks(producer) and any(key[0] == token for key in early_votes(producer)), [p, d])
    p.worker.post(StepPlan(leases=(LeaseGrant("req-p", token, TOKENS, (pack_ids(THEIRS),)),)))
    assert wait(lambda: p.sent == {"req-p"}, [p, d]), "a release that came before its lease counts"
    another_works(p, d)


def test_a_release_by_a_d_that_never_asked_precedes_the_lease(pair: tuple[Rank, Rank]) -> None:
    """D makes itself known for that: P keeps no release of a stranger."""
    p, d = pair
    token, producer = secrets.token_bytes(16), halves(p)[0]
    keep = KeepLease("req-d", token, peer([p]), False)
    d.worker.post(StepPlan(consumer=b"c" * 16, keeps=(keep,), releases=(UnneededLease("req-d", token),)))
    assert wait(lambda: any(key[0] == token for key in early_votes(producer)), [p, d])
    p.worker.post(StepPlan(leases=(LeaseGrant("req-p", token, TOKENS, (pack_ids(THEIRS),)),)))
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    assert not early_votes(producer)
    another_works(p, d)


def test_an_ask_before_the_lease_is_served_when_it_comes(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    token = secrets.token_bytes(16)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: bool(early_asks(p)), [p, d])
    p.worker.post(StepPlan(leases=(LeaseGrant("req-p", token, TOKENS, (pack_ids(THEIRS),)),)))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


@pytest.mark.parametrize("plane", ["shm", "tcp", "tcp in pieces", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
@pytest.mark.parametrize("held", ["granted", "packing", "in flight"])
def test_while_p_packs_and_chunks_are_under_way(group: RankGroup, plane: str, held: str) -> None:
    settings = Settings(plane=plane.removesuffix(" in pieces"), slot_bytes=64 << 10, staging_bytes=1 << 20, **PATIENT)
    content = 64 if "pieces" in plane else 16
    p = group.rank(settings=settings, content=content)
    d = group.rank(settings=settings, content=content, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    producer, consumer = halves(p)[0], halves(d)[1]
    if held == "in flight":
        gate = Gate(consumer, "collect", lambda now: False)
    elif held == "granted":
        gate = Gate(producer, "pump", lambda now: False)
    else:
        real = producer.pump
        gate = Gate(producer, "pump", lambda now: gate.calls <= 2 and real(now))
    begin(p, d)
    give_up(p, d, lambda: gate.calls > 5 and bool(consumer.loads.running), gate)
    assert wait(lambda: not consumer.reads.by_number and not sends_of(producer).turns, [p, d]), (
        "reads that nobody waits for were kept"
    )


def test_while_a_message_is_written_to_pages(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tcp the kernel writes D's pages; from the abort on the rest of the message goes nowhere."""
    monkeypatch.setattr(tcp, "BYTES_PER_TURN", 100_000)
    settings = Settings(plane="tcp", **PATIENT)
    p = group.rank(settings=settings, content=2048)
    d = group.rank(settings=settings, content=2048, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    plane: Any = d.context.plane("tcp")
    real, turns = plane.progress, 0

    def some_turns() -> bool:
        nonlocal turns
        turns += any(receives(channel) for channel in plane.channels)
        return real() if turns < 4 else False

    gate = Gate(plane, "progress", some_turns)
    begin(p, d)
    give_up(p, d, lambda: turns >= 4, gate)


def test_while_d_reads_by_itself(group: RankGroup) -> None:
    settings = Settings(plane="cma", **PATIENT)
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    consumer = halves(d)[1]
    gate = Gate(d.context.plane("cma"), "progress", lambda: False)
    begin(p, d)
    give_up(p, d, lambda: gate.calls > 5 and bool(consumer.reads.by_number), gate)
    assert wait(lambda: not consumer.reads.by_number, [p, d])


def test_unpacked_while_committing(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    consumer = halves(d)[1]
    gate = Gate(consumer.reads, "commit", lambda read, now: None)
    begin(p, d)
    give_up(p, d, lambda: gate.calls > 0, gate)


def test_after_it_was_reported(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    begin(p, d)
    give_up(p, d, lambda: d.received == {"req-d"} and p.sent == {"req-p"}, None, ok=True)
