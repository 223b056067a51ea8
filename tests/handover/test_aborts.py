"""A request given up at every stage of its hand-over: one report, no page touched afterwards, P's blocks freed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.wire.step_plan import KeepLease, StepPlan, UnneededLease
from kvferry.transport.planes import tcp_flows
from tests.handover.scenario import (
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
    is_wiped,
    lease_plan,
    load_from,
    wipe,
)
from tests.support.inside import early_asks, early_votes, receives, sends_of
from tests.support.ranks import Rank, grant, peer, wait


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return group.pair(**SMALL, **PATIENT)


def give_up(p: Rank, d: Rank, held: Callable[[], bool], gate: Gate | None, *, ok: bool = False) -> None:
    """Cancel once ``held``; then everything that must hold after a request was given up."""
    assert wait(held, [p, d])
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert wait(lambda: d.received == {"req-d"}, [d]), "an abort reports without waiting for P"
    assert (d.failed == set()) == ok
    wipe(d)
    if gate is not None:
        gate.open()
    assert wait(lambda: p.sent == {"req-p"}, [p, d]), "P frees, long before the lease is over"
    time.sleep(0.1)
    assert is_wiped(d), "something wrote into pages that were given back"
    d.poll(), p.poll()
    another_works(p, d)


@pytest.mark.parametrize("known", [False, True])
def test_before_it_was_scheduled(p: Rank, d: Rank, known: bool) -> None:
    """A release by a D that never asked may precede the lease: P keeps it, but none of a stranger."""
    token = secrets.token_bytes(16)
    if known:
        grant([p], "req-p", THEIRS, TOKENS, token)
    keep = KeepLease("req-d", token, peer([p]), False)
    d.worker.post(StepPlan(decode_engine=b"c" * 16, keeps=(keep,), releases=(UnneededLease("req-d", token),)))
    if not known:
        assert wait(lambda: any(key[0] == token for key in early_votes(p)), [p, d])
        p.worker.post(lease_plan(token))
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    d.poll()
    assert not early_votes(p) and not d.received, "what was never started is never reported"
    another_works(p, d)


@pytest.mark.parametrize("given_up", [False, True])
def test_asked_before_p_has_the_lease(p: Rank, d: Rank, given_up: bool) -> None:
    token = secrets.token_bytes(16)
    load_from(p, d, token)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    if given_up:
        d.worker.post(StepPlan(cancels=("req-d",)))
        assert wait(lambda: d.failed == {"req-d"}, [d])
        assert wait(lambda: not early_asks(p) and any(key[0] == token for key in early_votes(p)), [p, d])
    p.worker.post(lease_plan(token))
    assert ended(p, d) is not given_up
    another_works(p, d)


@pytest.mark.parametrize("plane", ["shm", "tcp", "tcp in pieces", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
@pytest.mark.parametrize("held", ["granted", "packing", "in flight"])
def test_while_p_packs_and_chunks_are_under_way(group: RankGroup, plane: str, held: str) -> None:
    content = 64 if "pieces" in plane else 16
    p, d = group.pair(plane=plane.removesuffix(" in pieces"), content=content, **SMALL, **PATIENT)
    if held == "in flight":
        gate = Gate(d.consumer, "collect", lambda now: False)
    else:
        real = p.producer.pump
        gate = Gate(p.producer, "pump", lambda now: held == "packing" and gate.calls <= 2 and real(now))
    begin(p, d)
    give_up(p, d, lambda: gate.calls > 5 and bool(d.consumer.loads.running), gate)
    assert wait(lambda: not d.consumer.reads.by_number and not sends_of(p).turns, [p, d]), "reads were kept"


def test_while_a_message_is_written_to_pages(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tcp the kernel writes D's pages; from the abort on the rest of the message goes nowhere."""
    monkeypatch.setattr(tcp_flows, "BYTES_PER_TURN", 100_000)
    p, d = group.pair(plane="tcp", content=2048, **PATIENT)
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
    p, d = group.pair(plane="cma", **PATIENT)
    gate = Gate(d.context.plane("cma"), "progress", lambda: False)
    begin(p, d)
    give_up(p, d, lambda: gate.calls > 5 and bool(d.consumer.reads.by_number), gate)
    assert wait(lambda: not d.consumer.reads.by_number, [p, d])


def test_after_it_was_reported(p: Rank, d: Rank) -> None:
    begin(p, d)
    give_up(p, d, lambda: d.received == {"req-d"} and p.sent == {"req-p"}, None, ok=True)
