"""A request given up at every stage, and another one under its id: one report each, no page touched afterwards."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.wire.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.wire.step_plan import KeepLease, StepPlan, UnneededLease
from kvferry.transport.planes import tcp_flows
from tests.handover.scenario import (
    OTHERS,
    PATIENT,
    SMALL,
    THEIRS,
    TOKENS,
    Gate,
    Pair,
    RankGroup,
    another_works,
    begin,
    breaks,
    ended,
    has_all,
    is_wiped,
    lease_plan,
    load_from,
    wipe,
)
from tests.handover.slow_copies import SlowCopies, install
from tests.support.inside import early_asks, early_releases, receives, sends_of
from tests.support.ranks import Rank, Timed, grant, load_plan, peer, wait


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
    planes: list[Any] = [*d.context.planes, *p.context.planes]
    pools = [getattr(plane, name) for plane in planes for name in ("recv_pool", "send_pool") if hasattr(plane, name)]
    assert wait(lambda: all(pool.free == pool.capacity for pool in pools), [p, d]), "late messages are dropped"
    another_works(p, d)


@pytest.mark.parametrize("known", [False, True])
def test_before_it_was_scheduled(p: Rank, d: Rank, known: bool) -> None:
    """A release by a D that never asked, nor made a handshake, may precede the lease: P keeps it."""
    token = secrets.token_bytes(16)
    if known:
        grant([p], "req-p", THEIRS, TOKENS, token)
    keep = KeepLease("req-d", token, peer([p]), False)
    d.worker.post(StepPlan(decode_engine=b"c" * 16, keeps=(keep,), releases=(UnneededLease("req-d", token),)))
    if not known:
        assert wait(lambda: token in early_releases(p), [p, d])
        p.worker.post(lease_plan(token))
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    d.poll()
    assert wait(lambda: not early_releases(p)) and not d.received, "what was never started is never reported"
    another_works(p, d)


@pytest.mark.parametrize("given_up", [False, True])
def test_asked_before_p_has_the_lease(p: Rank, d: Rank, given_up: bool) -> None:
    token = secrets.token_bytes(16)
    load_from(p, d, token)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    if given_up:
        d.worker.post(StepPlan(cancels=("req-d",)))
        assert wait(lambda: d.failed == {"req-d"}, [d])
        assert wait(lambda: not early_asks(p) and token in early_releases(p), [p, d])
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
    arrived = lambda: any(link.channel is not None and link.channel.arrived for link in d.consumer.links)  # noqa: E731
    give_up(p, d, lambda: gate.calls > 5 and (held != "in flight" or arrived()), gate)
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


Draining = tuple[Rank, Rank, SlowCopies]


@pytest.fixture
def draining(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> Draining:
    """P with a prompt, D, and D's copies; a copy of the first load is under way."""
    copies = install(monkeypatch)
    p, d = group.pair(plane="shm", **PATIENT)
    copies[1].gate.clear()
    begin(p, d)
    assert wait(lambda: copies[1].running > 0, [p, d])
    return p, d, copies[1]


def load_again(p: Rank, d: Rank, *, one_plan: bool) -> StepPlan:
    """Cancel the first load and post the second one. Its lease, which P does not have yet."""
    token, cancels = secrets.token_bytes(16), ("req-d",)
    plan = load_plan("req-d", token, peer([p]), OTHERS, 0, TOKENS)
    if not one_plan:
        d.worker.post(StepPlan(plan.decode_engine, cancels=cancels))
    d.worker.post(StepPlan(plan.decode_engine, keeps=plan.keeps, loads=plan.loads, cancels=cancels if one_plan else ()))
    return lease_plan(token, "again")


@pytest.mark.parametrize("one_plan", [False, True])
def test_the_end_of_the_first_is_not_that_of_the_second(draining: Draining, one_plan: bool) -> None:
    p, d, copies = draining
    loads = d.consumer.loads.running
    first = next(iter(loads)).load
    lease = load_again(p, d, one_plan=one_plan)
    assert wait(lambda: len(loads) == 2, [p, d])
    copies.gate.set()
    assert wait(lambda: p.sent == {"req-p"}, [p, d]), "the first has ended, and released its lease"
    assert [each.load is first for each in loads] == [False]
    assert not wait(lambda: bool(d.received), [p, d], 0.2), "the second has not ended"
    p.worker.post(lease)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p", "again-p"}, [p, d])
    assert not d.failed and has_all(d, OTHERS)
    assert wait(lambda: not d.consumer.renewals.kept, [p, d])


def test_the_second_fails_by_itself_where_it_cannot_start(draining: Draining, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d, copies = draining
    monkeypatch.setattr(d.consumer.links, "source_addresses", breaks)
    lease = load_again(p, d, one_plan=False)
    assert wait(lambda: d.received == d.failed == {"req-d"}, [p, d]), "its report does not wait for the first"
    assert copies.running and len(d.consumer.loads.running) == 1
    p.worker.post(lease)
    assert wait(lambda: p.sent == {"again-p"}, [p, d])
    copies.gate.set()
    assert wait(lambda: p.sent == {"req-p", "again-p"}, [p, d])
    assert d.failed == {"req-d"}


def test_the_release_of_the_first_is_not_that_of_the_second(group: RankGroup) -> None:
    """In one step: the first request is dropped before it is scheduled, and another one comes under its id."""
    p, d = group.pair(**PATIENT)
    tokens = [grant([p], name, THEIRS, TOKENS) for name in ("first-p", "second-p")]
    ids = list(range(TOKENS))
    prompts = [RemotePrompt(token, TOKENS, prompt_digest(ids), peer([p])) for token in tokens]
    first, second = (RequestView("req-d", to_transfer_params(prompt), ids, TOKENS, 0) for prompt in prompts)
    table = BlockTable("full", d.block_size)
    engine = SchedulerHalf(Timed(**PATIENT), "d", [table], tp_size=1, pp_size=1, produces=False, consumes=True)
    engine.on_new_request(first)
    d.worker.post(engine.take_plan())
    keeper = d.consumer.renewals
    assert wait(lambda: bool(keeper.kept), [p, d])
    engine.request_finished(first, ((),), completed=False)
    engine.on_new_request(second)
    d.worker.post(engine.take_plan())
    assert wait(lambda: p.sent == {"first-p"}, [p, d]), "the second still needs its lease"
    engine.request_finished(second, ((),), completed=False)
    d.worker.post(engine.take_plan())
    assert wait(lambda: p.sent == {"first-p", "second-p"} and not keeper.kept, [p, d])
