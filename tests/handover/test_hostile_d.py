"""Peers that mean harm or err, and parameters that clients made up: what they cost is bounded, others are served."""

from __future__ import annotations

import gc
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvferry.connector.decode_side import fetch, links, renew
from kvferry.connector.geometry.spans import MAX_SPANS, Span
from kvferry.connector.geometry.token_sharding import TokenShard, TokenSharding
from kvferry.connector.prefill_side import prompts, send, serve
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import KeepLease, Prefill, StepPlan
from kvferry.connector.worker import loop
from kvferry.transport.errors import GeometryError, ProtocolError
from kvferry.transport.host import AllowedPeers
from kvferry.transport.planes.shm import ShmPlane
from tests.handover.scenario import (
    OURS,
    PATIENT,
    THEIRS,
    TOKENS,
    WHOLE,
    Gate,
    Pair,
    RankGroup,
    RawD,
    another_works,
    ask,
    begin,
    breaks,
    ended,
    forget,
    has_all,
    lease_plan,
    leased,
    load_from,
    wipe,
)
from tests.support.inside import (
    leases_of,
    listener_of,
    prompts_of,
    sends_of,
    sessions_of,
)
from tests.support.pair import remote_peer
from tests.support.ranks import Rank, grant, load_plan, peer, wait
from tests.support.turns import MOST_BYTES, MOST_TURN_LINES, TurnLines, resident_bytes


@pytest.fixture
def pair(group: RankGroup, request: pytest.FixtureRequest) -> Pair:
    return group.pair(plane="shm" if "hostile" in request.fixturenames else "auto", **PATIENT)


@pytest.fixture
def hostile(group: RankGroup, pair: Pair) -> RawD:
    return group.raw(*pair)


def release(token: bytes, rank: int = 0, decode_engine: bytes = b"h" * 16, ranks: int = 1) -> messages.Release:
    return messages.Release(token=token, decode_engine=decode_engine, decode_rank=rank, expected=tuple(range(ranks)))


def test_releases_that_precede_their_lease_are_bounded(group: RankGroup, pair: Pair, hostile: RawD) -> None:
    """They were 389 MiB for 30 MiB of messages, and the last of them displaced those of an honest D."""
    p, _ = pair
    honest, other = group.raw(*pair), group.raw(*pair, attached=False)
    token = b"own" + secrets.token_bytes(13)
    honest.send(release(token))
    honest.settled()
    turn, before = TurnLines(p), resident_bytes()
    gate = Gate(p.producer, "serve", lambda now: False)  # P finds all of them at once
    for number in range(400):
        name = number.to_bytes(15, "big")
        hostile.send(release(b"h" + name, number, decode_engine=b"h" + name, ranks=4096))
        other.send(release(b"s" + name, number, decode_engine=b"h" + name, ranks=4096))
    gate.open()
    for raw in (hostile, other):
        raw.settled()
    assert 0 < p.producer.waiting.cost <= serve.WAITING_SPANS
    assert resident_bytes() - before < MOST_BYTES and turn.most < MOST_TURN_LINES
    p.worker.post(lease_plan(token))
    assert wait(lambda: p.sent == {"req-p"}, [p]), "the honest release counts"


def test_an_ask_that_waits_holds_no_digests(group: RankGroup) -> None:
    """They are 512 KB at most, and its cost has none of them."""
    p, d = group.pair(plane="shm", **PATIENT)
    raw, token = group.raw(p, d), secrets.token_bytes(16)
    prefill = Prefill("r", token, TOKENS, "", ("r",), b"", found=0, step_tokens=0, streams=False)
    p.worker.post(StepPlan(step=1, prefills=(prefill,)))
    assert wait(lambda: token in prompts_of(p), [p])
    raw.send(ask(0, token, prefix=bytes(16 * messages.MAX_DIGESTS)))
    raw.settled()
    assert [waiting.request.prefix for waiting in p.producer.waiting.values()] == [b""]


def test_consumers_of_one_lease_are_bounded(p: Rank, hostile: RawD) -> None:
    """Who knows the token may end the lease, but not fill P's memory with votes that never end it."""
    token = leased(p)
    assert wait(lambda: token in leases_of(p))
    before = resident_bytes()
    for number in range(500):
        hostile.send(release(token, 5, decode_engine=number.to_bytes(16, "big"), ranks=4096))
    hostile.settled()
    assert len(leases_of(p)[token].votes) == prompts.MAX_DECODE_ENGINES
    assert resident_bytes() - before < MOST_BYTES
    hostile.send(release(token))  # complete by itself
    assert wait(lambda: p.sent == {"req-p"}, [p])


def test_tokens_that_a_d_draws_displace_no_others(
    group: RankGroup, pair: Pair, hostile: RawD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,536 of them, in 6 s, displaced the ends of all leases: late asks then waited for ``ask_hold_seconds``."""
    p, honest, over = pair[0], group.raw(*pair), [leased(pair[0]), secrets.token_bytes(16)]
    monkeypatch.setattr(prompts, "ENDED", 64)
    monkeypatch.setattr(p.producer.prompts.drawn, "limit", 64)
    honest.send(release(over[0]))
    honest.send(ask(0, over[1], prefix=bytes(16)))
    assert honest.answer(messages.Deny).reason == "expired"
    for number in range(300):
        hostile.send(ask(number, number.to_bytes(16, "big"), prefix=bytes(16)))
    hostile.settled()
    for read, token in enumerate(over):
        honest.send(ask(read, token))
        assert honest.answer(messages.Deny).reason == "expired"
    assert len(p.producer.prompts.drawn) <= 64


def test_a_session_ends_with_its_connection(p: Rank, hostile: RawD) -> None:
    token = secrets.token_bytes(16)
    hostile.send(release(token))
    hostile.settled()
    assert len(sessions_of(p)) == 1
    hostile.connection.close()
    assert wait(lambda: not sessions_of(p), [p])
    p.worker.post(lease_plan(token))
    assert wait(lambda: p.sent == {"req-p"}, [p]), "what it has said before counts"


def test_a_session_ends_with_its_data_plane(p: Rank, hostile: RawD) -> None:
    (session,) = sessions_of(p).values()
    session.channel.fail("planted")
    assert wait(lambda: not sessions_of(p), [p])


def test_smaller_chunks_than_settings_allow_are_no_message() -> None:
    """Chunks of 16 bytes made a million parts of one prompt."""
    with pytest.raises(ProtocolError, match=f"Expected `int` >= {messages.MIN_SLOT_BYTES}"):
        messages.decode_request(messages.encode(ask(1, chunk_bytes=messages.MIN_SLOT_BYTES - 1)))
    with pytest.raises(ProtocolError, match=f"Expected `int` >= {messages.MIN_SLOT_BYTES}"):
        messages.decode_reply(messages.encode(messages.Attached(plane="shm", slot_bytes=16)))


def test_an_ask_of_many_spans_does_not_hold_p_up(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunks are made as they are sent: P answers at once, and keeps the spans only."""
    p, d = group.pair(plane="shm", blocks=140, layers=32, total_heads=8, **PATIENT)
    another_works(p, d)  # the first copy of a process takes longer
    token, hostile = grant([p], "req-p", list(range(1, 129)), 2048), group.raw(p, d)
    turn, before = TurnLines(p), resident_bytes()
    spans = [Span(0, n % 32, 1, n // 32 % 8, 1, n // 256 * 128, 128) for n in range(MAX_SPANS)]  # all of the prompt
    live = sends_of(p).live
    monkeypatch.setattr(live, "limit", send.LIVE_SPANS // 8)
    for read in range(10):
        hostile.send(ask(read, token, spans))
    assert hostile.answer(messages.Grant).chunks == MAX_SPANS
    hostile.settled()
    assert live.cost <= live.limit and len(live) < 5, "the oldest reads of this D have failed"
    assert turn.most < MOST_TURN_LINES
    assert resident_bytes() - before < 2 * MOST_BYTES  # shared with the messages that this test makes


def test_asks_of_one_peer_do_not_deny_those_of_another(group: RankGroup, pair: Pair, hostile: RawD) -> None:
    """Fifteen large asks for leases that never come used up the room of all, for ten seconds."""
    honest, token = group.raw(*pair), secrets.token_bytes(16)
    honest.send(ask(7, token, [WHOLE] * 60))
    honest.settled()
    for read in range(40):
        hostile.send(ask(read, bytes([read + 1]) * 16, [WHOLE] * (MAX_SPANS - read)))
    assert "too many requests" in hostile.answer(messages.Deny).detail
    hostile.settled()
    assert pair[0].producer.waiting.cost <= serve.WAITING_SPANS
    pair[0].worker.post(lease_plan(token))
    assert honest.answer(messages.Deny).reason == "bounds", "60 times the same span: it was served, not thrown out"
    another_works(*pair)


def test_a_large_hello_does_not_hold_p_up(group: RankGroup) -> None:
    """Comparing layers took time in proportion to ours for each of theirs: 450 ms for one message of 3 MiB."""
    p, d = (group.rank(layers=512, blocks=2, block_size=1, content=1, total_heads=1, plane="shm") for _ in "pd")
    hostile, other = (group.raw(p, d, attached=False) for _ in range(2))
    hello, turn = hostile.hello, TurnLines(p)
    (region,) = hello.geometry.regions
    for count in (16, 120):  # as many as a rank may have; as many as a message may have
        layers = [tuple(f"r{r}.layers.{n}" for n in range(512)) for r in range(count)]
        regions = tuple(msgspec.structs.replace(region, layers=names) for names in layers)
        geometry = msgspec.structs.replace(hello.geometry, regions=regions)
        hostile.send(msgspec.structs.replace(hello, geometry=geometry))
        other.send(hello)
        other.answer(messages.Welcome)
        refused = hostile.answer(messages.Refused)
        assert refused.field == ("layers" if count == 16 else "geometry"), refused
    assert "61440 layers in 120 regions, limit 8192" in refused.theirs
    assert turn.most < MOST_TURN_LINES


def unread(p: Rank, hostile: RawD, monkeypatch: pytest.MonkeyPatch, go_on: Callable[[int], bool]) -> int:
    """Send asks, of which P refuses each with a long text, and read nothing, while ``go_on`` says so of P's answers.
    Returns how many there are."""
    token, answers = leased(p), itertools.count()
    deny, given = p.producer.deny, 0

    def long(to: bytes, read: int, reason: messages.DenyReason, text: str = "") -> None:
        nonlocal given
        deny(to, read, reason, "x" * 1000)
        given += 1

    monkeypatch.setattr(p.producer, "deny", long)
    while go_on(given):
        number = next(answers)
        hostile.connection.send(messages.encode(ask(number, token, [Span(9, 0, 1, 0, 1, 0, 1)])))
        assert number < 100_000
        if number - given > 1000:
            assert wait(lambda number=number: number - given < 500 or not go_on(given))
    return given


def test_a_d_that_does_not_read_gets_its_replies_later(
    pair: Pair, hostile: RawD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many more than its socket holds, in order: else loads of D would wait for their end."""
    count = unread(pair[0], hostile, monkeypatch, lambda given: given < 9000)
    assert [hostile.answer(messages.Deny).read for _ in range(count)] == list(range(count))


def test_a_d_that_never_reads_loses_its_connection(
    p: Rank, d: Rank, hostile: RawD, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listener_of(p)
    before = resident_bytes()
    unread(p, hostile, monkeypatch, lambda given: not listener.dropped["flood"])
    assert wait(lambda: hostile.connection.lost) and resident_bytes() - before < MOST_BYTES
    monkeypatch.undo()
    another_works(p, d)


Patch = pytest.MonkeyPatch


@pytest.fixture
def shm(group: RankGroup) -> Pair:
    return group.pair(plane="shm")


@pytest.fixture
def raw(group: RankGroup, pair: Pair) -> RawD:
    return group.raw(*pair)


def test_a_second_attach_is_refused_once_the_first_was_used(group: RankGroup, pair: Pair) -> None:
    token, raw = grant(pair[:1], "req-p", THEIRS, TOKENS), group.raw(*pair, attached=False)
    welcome = raw.greet()
    for _ in range(3):  # D could not use what it was given
        raw.attach(welcome)
        raw.answer(messages.Attached)
    raw.send(ask(7, token, [WHOLE]))
    raw.answer(messages.Grant)
    raw.attach(welcome)
    assert "attached already" in raw.answer(messages.AttachRefused).reason
    another_works(*pair)


def test_a_number_is_of_one_read_at_a_time(pair: Pair, raw: RawD) -> None:
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    gate = Gate(pair[0].producer, "pump", lambda now: False)
    raw.send(ask(7, token, [WHOLE]))
    assert raw.answer(messages.Grant).chunks > 0
    raw.send(ask(7, token, [WHOLE]))
    refused = raw.answer(messages.Deny)
    assert refused.reason == "bounds" and "under way" in refused.detail
    gate.open()
    another_works(*pair)


def retried_once(p: Rank, d: Rank) -> bool:
    begin(p, d)
    return ended(p, d) and d.counts("num_retries") == {"peer_lost": 1}


def test_a_d_that_p_has_forgotten_greets_again(shm: Pair) -> None:
    p, d = shm
    another_works(p, d)
    sessions_of(p).clear()
    d.figures()
    assert retried_once(p, d)
    forget(p, d)
    another_works(p, d)


def test_an_attach_without_a_handshake_is_refused(group: RankGroup, pair: Pair) -> None:
    """Also that of a D that P has forgotten, which else waits until its handshake is late."""
    raw = group.raw(*pair, attached=False)
    raw.send(messages.Attach(plane="shm", payload=b"x"))
    refused = raw.answer(messages.AttachRefused)
    assert "forgotten" in refused.reason and refused.detached
    another_works(*pair)


def test_a_d_that_p_forgets_before_it_attaches_greets_again(shm: Pair) -> None:
    """D takes none of its planes for refused."""
    p, d = shm
    handle, forgotten = p.producer.handle, list[Any]()

    def forgets_once(identity: bytes, request: messages.Request, now: float, address: str) -> None:
        if isinstance(request, messages.Attach) and not forgotten:
            forgotten.append(sessions_of(p).pop(identity))
        handle(identity, request, now, address)

    p.producer.handle = forgets_once
    assert retried_once(p, d)


@pytest.mark.parametrize("where", ["get", "new"], ids=["before it is known", "once it is known"])
def test_a_load_that_breaks_while_it_starts_is_reported(p: Rank, d: Rank, where: str, monkeypatch: Patch) -> None:
    owner = d.consumer.links if where == "get" else d.consumer.reads
    real, calls = getattr(owner, where), list[Any]()

    def breaks_once(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return breaks() if len(calls) == 1 else real(*args, **options)

    monkeypatch.setattr(owner, where, breaks_once)
    begin(p, d)
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    monkeypatch.undo()
    another_works(p, d)
    assert not d.consumer.loads.running


def test_a_grant_that_comes_twice_counts_once(p: Rank, d: Rank) -> None:
    """A second copy into D's pages would go on when the load has ended."""
    reads, calls = d.consumer.reads, []
    grant, checked = reads.take_grant, reads.check_grant
    reads.take_grant = lambda *args: (grant(*args), grant(*args))[0]
    reads.check_grant = lambda *args: (calls.append(args), checked(*args))
    another_works(p, d)
    assert len(calls) == 1


def test_a_link_that_nobody_uses_gives_its_staging_back(group: RankGroup, monkeypatch: Patch) -> None:
    p, d = group.pair(plane="shm", staging_bytes=64 << 20)
    another_works(p, d)
    plane = p.context.plane("shm")
    assert isinstance(plane, ShmPlane)
    in_use = plane.left_bytes
    assert in_use < 64 << 20
    assert not wait(lambda: plane.left_bytes != in_use, [p, d], 0.5), "not at once: the next hand-over wants it"
    monkeypatch.setattr(messages, "IDLE_LINK_SECONDS", 0.3)
    assert wait(lambda: plane.left_bytes == 64 << 20 and not sessions_of(p), [p, d])
    another_works(p, d, "then")


def test_staging_that_is_used_up_leads_to_the_next_plane(group: RankGroup) -> None:
    """P closes D's connection before its refusal is here: that must not look like P's death."""
    p = group.rank(staging_bytes=8 << 20)
    p.fill(THEIRS, TOKENS)
    late = []
    reply, tick = p.producer.send, p.producer.tick
    p.context.planes = [plane for plane in p.context.planes if plane.name in ("shm", "tcp")]

    def slowly(identity: bytes, message: object) -> None:
        if isinstance(message, messages.Refused):
            late.append((time.monotonic() + 0.2, identity, message))
        else:
            reply(identity, message)

    def on_tick(now: float) -> None:
        tick(now)
        while late and late[0][0] < time.monotonic():
            reply(*late.pop(0)[1:])

    p.producer.send, p.producer.tick = slowly, on_tick
    planes = []
    for n in range(3):
        d = group.rank(engine_id=f"engine-{n}")
        another_works(p, d, f"{n}")
        planes.append(d.plane)
    assert planes[0] == "shm" and planes[-1] == "tcp", planes


def test_a_d_that_does_not_read_does_not_hold_up_the_others(group: RankGroup, monkeypatch: Patch) -> None:
    form: dict[str, Any] = {"plane": "tcp", "content": 4096, "layers": 8, "blocks": 18, **PATIENT}
    (p, slow), d = group.pair(**form), group.rank(**form)
    token, pushes = leased(p), sends_of(p)
    plane = slow.context.plane("tcp")
    assert plane is not None
    real = plane.progress
    stuck = Gate(plane, "progress", lambda: real() if not any(push.reading for push in list(pushes.turns)) else False)
    for n in range(8):
        slow.worker.post(load_plan(f"s{n}", token, peer([p]), OURS, 0, TOKENS, decode_engine=b"s" * 16))
    assert wait(lambda: len(pushes.turns) == 8 and any(push.reading for push in list(pushes.turns)), [slow])
    monkeypatch.setattr(loop, "TICK_SECONDS", 15.0)
    begun = time.monotonic()
    load_from(p, d, token)
    assert wait(lambda: d.received == {"req-d"}, [d]) and not d.failed
    assert time.monotonic() - begun < 100, "53 MB in 13 messages, each of which waited for a tick"
    monkeypatch.undo()
    stuck.open()
    assert wait(lambda: len(slow.received) == 8, [p, slow])


def test_a_plane_that_breaks_does_not_stop_the_others(pair: Pair, monkeypatch: Patch) -> None:
    p, d = pair
    for rank in pair:
        monkeypatch.setattr(rank.context.plane("tcp"), "progress", breaks)
    another_works(p, d)
    assert wait(lambda: "internal" in d.counts("num_failed_handovers"), [p, d]), "it is looked at"


@pytest.mark.parametrize("shard", [TokenShard(512, 0, 1), TokenShard(2, 1, 16)])
def test_a_d_asks_for_its_own_share_of_the_tokens(pair: Pair, raw: RawD, shard: TokenShard) -> None:
    """Any other would be a look at every token of the prompt, and there are as many as numbers."""
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    raw.send(ask(7, token, [Span(0, 0, 1, 0, 4, 0, TOKENS, shard)]))
    assert "none of that rank's" in raw.answer(messages.Deny).detail
    another_works(*pair)


@pytest.mark.parametrize("posted", [True, False])
@pytest.mark.parametrize(("prompt", "loaded"), [("feed", True), ("beef", False)])
def test_a_lease_of_another_prompt_is_not_loaded(p: Rank, d: Rank, prompt: str, loaded: bool, posted: bool) -> None:
    """What D has heard of the lease came from whoever sent the request; what P holds, P knows. It stays whose it is.
    ``posted``: D finds its grant on P's board."""
    token = b"t" * 16
    if posted:
        another_works(p, d)
        forget(p, d)
    p.worker.post(lease_plan(token, digest="feed"))
    assert wait(lambda: token in leases_of(p))
    plan = load_plan("req-d", token, peer([p]), OURS, 0, TOKENS)
    (load,) = plan.loads
    wipe(d)
    d.worker.post(msgspec.structs.replace(plan, loads=(msgspec.structs.replace(load, digest=prompt),)))
    assert wait(lambda: d.received == {"req-d"}, [p, d])
    assert d.failed == (set() if loaded else {"req-d"})
    assert has_all(d) == loaded
    if not loaded:
        assert wait(lambda: not d.consumer.renewals.kept, [p, d])
        d.worker.post(load_plan("honest", token, peer([p]), OURS, 0, TOKENS))
        assert wait(lambda: "honest" in d.received, [p, d]) and "honest" not in d.failed
    assert wait(lambda: p.sent == {"req-p"}, [p, d])


def test_p_is_the_one_that_the_parameters_named(p: Rank, d: Rank, caplog: pytest.LogCaptureFixture) -> None:
    """Who reads from whom was found out from the sizes there."""
    token = leased(p)
    sharding = msgspec.structs.replace(peer([p]), shardings=(TokenSharding(2, 16),))
    with caplog.at_level("WARNING", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", token, sharding, OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [p, d])
        assert wait(lambda: "shardings, in kv_transfer_params and in the prefill engine's handshake," in caplog.text)


Lines = pytest.LogCaptureFixture


@pytest.mark.parametrize("wrong", ["tp_size", "tp_rank", "engine_id"])
def test_a_real_p_under_a_wrong_form(pair: Pair, wrong: str) -> None:
    """The link to P was of the form that the first request named, and honest hand-overs over it failed."""
    p, d = pair
    real, token = peer([p]), grant(pair[:1], "req-p", THEIRS, TOKENS)
    rank = real.ranks[0]
    named: Any = {
        "tp_size": replace(real, tp_size=2, ranks=(rank, replace(rank, tp_rank=1))),
        "tp_rank": replace(real, tp_size=2, ranks=(replace(rank, tp_rank=1), replace(rank, tp_rank=0))),
        "engine_id": replace(real, engine_id="another"),
    }[wrong]
    engines = (named, real, named, real)  # in one step, over one link
    plans = [load_plan(f"{number}", token, engine, OURS, 0, TOKENS) for number, engine in enumerate(engines)]
    keeps, loads = (tuple(item for plan in plans for item in getattr(plan, name)) for name in ("keeps", "loads"))
    d.worker.post(replace(plans[0], keeps=keeps, loads=loads))
    assert wait(lambda: d.received == {"0", "1", "2", "3"}, [p, d])
    assert d.failed == (set() if wrong == "engine_id" else {"0", "2"})
    assert len(d.consumer.links) == 1
    another_works(p, d)


def test_made_up_incarnations_of_p_do_not_cost_the_first_honest_link(p: Rank, d: Rank) -> None:
    """Each made a connection to P of its own, and eight were all that D can have to one address."""
    for number in range(20):
        life = replace(p.address, incarnation=bytes([number]) * 16)
        made_up = bytes([number]) * 16  # a failed load releases its lease
        d.worker.post(load_plan(f"{number}", made_up, replace(peer([p]), ranks=(life,)), OURS, 0, TOKENS))
    begin(p, d, "honest")
    assert wait(lambda: len(d.received) == 21, [p, d])
    assert d.failed == {f"{number}" for number in range(20)}
    assert len(d.consumer.links) == 1
    another_works(p, d)


def fails_with(p: Rank, d: Rank, caplog: Lines, ended: str = "hand-over of req-d failed", engine: Any = None) -> str:
    """A load fails, in one line. The line follows the report."""
    with caplog.at_level("INFO", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", b"t" * 16, engine or peer([p]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [p, d])
        assert wait(lambda: ended in caplog.text)
    (line,) = [line for line in caplog.messages if ended in line]
    return line


def test_no_link_can_be_opened(pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: Lines) -> None:
    """One line and a failed load; it was a traceback for each rank and renewal."""
    with monkeypatch.context() as patch:
        patch.setattr(links, "Link", breaks)
        assert "planted" in fails_with(*pair, caplog)
    assert not any(record.exc_info for record in caplog.records)
    another_works(*pair)


def test_renewals_of_many_ranks_are_spread_over_ticks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renew, "RENEWED_PER_TICK", 3)
    p, d = pair
    keeper, asked, ticks = d.consumer.renewals, [], list[int]()
    ranks = tuple(replace(peer([p]).ranks[0], tp_rank=n, port=20000 + n) for n in range(16))
    engine = replace(peer([p]), tp_size=16, ranks=ranks, lease_seconds=1e-9)

    def link(address: Any, now: float) -> Any:
        asked.append(address)
        breaks()

    tick = keeper.send_renewals

    def counted(now: float) -> None:
        before = len(asked)
        tick(now)
        ticks.append(len(asked) - before)

    monkeypatch.setattr(keeper, "links", SimpleNamespace(get=link))
    monkeypatch.setattr(keeper, "send_renewals", counted)
    d.worker.post(StepPlan(decode_engine=b"c" * 16, keeps=(KeepLease("r", b"t" * 16, engine, False),)))
    assert wait(lambda: len(asked) >= 32, [d])
    assert max(ticks) == 3


def test_targets_that_the_list_does_not_admit(p: Rank, d: Rank, caplog: Lines) -> None:
    """D opens no connection there, and the load fails in one line."""
    d.context.allowed_peers = AllowedPeers(["127.0.0.1"])
    with socket.create_server(("127.0.0.3", 0)) as trap:
        trap.settimeout(0)
        nowhere = replace(peer([p]), ranks=(replace(p.address, host="127.0.0.3", port=trap.getsockname()[1]),))
        line = fails_with(p, d, caplog, engine=nowhere)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert "127.0.0.3 is not an allowed peer: allowed_peers (KVFERRY_ALLOWED_PEERS)" in line and "127.0.0.1/32" in line
    another_works(p, d)


def test_a_name_is_resolved_once_and_the_address_is_judged(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, caplog: Lines
) -> None:
    """A name server may answer with another address each time."""
    d.context.allowed_peers = AllowedPeers(["127.0.0.1"])
    asked: list[str] = []

    def rebinds(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1" if len(asked) > 1 else "192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinds)
    named = replace(peer([p]), ranks=(replace(p.address, host="rebinds.example"),))
    assert "192.0.2.1 is not an allowed peer" in fails_with(p, d, caplog, engine=named)
    assert asked == ["rebinds.example"]


def test_no_line_has_a_token(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, caplog: Lines) -> None:
    """The line of a command that broke had the whole load, and vLLM writes the whole plan when an engine dies."""
    monkeypatch.setattr(d.consumer.loads, "begin", breaks)
    fails_with(p, d, caplog, "unexpected error with req-d")
    plan = load_plan("req-d", b"t" * 16, peer([p]), OURS, 0, TOKENS)
    for text in (caplog.text, repr(plan)):
        assert "t" * 16 not in text and (b"t" * 16).hex() not in text


def boards() -> set[int]:
    """The inodes of grant boards with open descriptors; a mapping has one too."""
    found = set[int]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "kvferry-board" in os.readlink(place := f"/proc/self/fd/{number}"):
                found.add(os.stat(place).st_ino)
    return found


@pytest.mark.parametrize("again", [False, True], ids=["at once", "at the second attempt"])
def test_the_boards_of_dead_producers_are_unmapped(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(fetch, "SAME_PEER_SECONDS", 0.0)
    d = group.rank(engine_id="engine-d", plane="cma")
    links, reads = d.consumer.links, d.consumer.reads
    check = reads.check_grant

    def damaged_once(read: Any, given: Any) -> None:
        if again and read.fetch.number == 1:
            raise GeometryError("planted")
        check(read, given)

    monkeypatch.setattr(reads, "check_grant", damaged_once)
    gc.collect()
    gc.disable()
    try:
        before = boards()
        for number in range(2):
            p = group.process(engine_id="engine-p", plane="cma")
            p.fill(THEIRS, TOKENS)
            token = p.grant("req-p", THEIRS, TOKENS)
            d.worker.post(load_plan(f"req-{number}", token, remote_peer([p]), OURS, 0, TOKENS))
            assert wait(lambda number=number: f"req-{number}" in d.received, [d])
            assert not d.failed and boards() - before
            p.kill()
            assert wait(lambda: not len(links), [d])
        assert wait(lambda: not boards() - before, [d])
        assert d.counts("num_retries") == ({"data": 2} if again else {})
    finally:
        gc.enable()
