"""A D that has the key and means harm. What it makes P keep, and how long it holds P's thread, is bounded; a D beside
it is served."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import Settings
from kvferry.connector.geometry.spans import MAX_SPANS, Span
from kvferry.connector.prefill_side import lease, send, serve
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, StepPlan, pack_ids
from kvferry.transport.control.listener import Delivery
from kvferry.transport.errors import ProtocolError
from tests.handover.gates import PATIENT, Gate, halves
from tests.handover.opening import THEIRS, TOKENS, another_works
from tests.handover.rank_group import RankGroup
from tests.handover.test_odd_peers import RawD
from tests.support.inside import early_asks, early_votes, leases_of, listener_of, replies_of, sends_of, sessions_of
from tests.support.ranks import grant, wait
from tests.support.turns import MOST_BYTES, MOST_TURN_LINES, TurnLines, resident_bytes

FORM: dict[str, Any] = {"settings": Settings(plane="shm", **PATIENT)}


class Peers:
    """P, a D, and peers that speak by hand."""

    def __init__(self, group: RankGroup, **form: Any) -> None:
        self.p, self.d = group.rank(**{**FORM, **form}), group.rank(engine_id="engine-d", **{**FORM, **form})
        self.raws: list[RawD] = []

    def close(self) -> None:
        for each in self.raws:
            each.close()

    @property
    def producer(self) -> Any:
        return halves(self.p)[0]

    def raw(self, *, greets: bool = True, attaches: bool = True) -> RawD:
        raw = RawD(self.p, self.d)
        self.raws.append(raw)
        if greets:
            welcome = raw.start_handshake()
            if attaches:
                raw.attach(welcome)
                raw.answer(messages.Attached)
        return raw

    def settled(self, raw: RawD) -> None:
        """P has answered all that this peer has sent."""
        last = messages.Commit(read=(1 << 32) - 1, token=bytes(16))
        raw.send(last)

        def answered() -> bool:
            replies = [messages.decode_reply(frames) for frames in raw._connection.receive()]
            return any(isinstance(reply, messages.Committed) and reply.read == last.read for reply in replies)

        assert wait(answered)


@pytest.fixture
def make_peers(group: RankGroup) -> Iterator[Callable[..., Peers]]:
    """Peers of a form, which are closed whatever a test did."""
    with ExitStack() as stack:
        yield lambda **form: stack.enter_context(closing(Peers(group, **form)))


@pytest.fixture
def peers(make_peers: Callable[..., Peers]) -> Peers:
    peers = make_peers()
    peers.p.fill(THEIRS, TOKENS)
    return peers


def release(token: bytes, rank: int = 0, consumer: bytes = b"h" * 16, ranks: int = 1) -> messages.Release:
    return messages.Release(token=token, consumer=consumer, consumer_rank=rank, expected=tuple(range(ranks)))


def lease_of(token: bytes) -> StepPlan:
    return StepPlan(leases=(LeaseGrant("early-p", token, TOKENS, (pack_ids(THEIRS),)),))


def test_releases_that_precede_their_lease_are_bounded(peers: Peers) -> None:
    """They were 389 MiB for 30 MiB of messages, and the last of them displaced those of an honest D."""
    honest, hostile, stranger = peers.raw(), peers.raw(), peers.raw(greets=False)
    token = secrets.token_bytes(16)
    honest.send(release(token))
    peers.settled(honest)
    turn, before = TurnLines(peers.p), resident_bytes()
    gate = Gate(peers.producer, "serve", lambda now: False)  # P finds all of them at once
    for number in range(400):
        name = number.to_bytes(16, "big")
        hostile.send(release(name, number, consumer=name, ranks=4096))
        stranger.send(release(name[::-1], number, consumer=name, ranks=4096))
    gate.open()
    for raw in (hostile, stranger):
        peers.settled(raw)
    early = early_votes(peers.producer)
    assert early.cost <= serve.EARLY_RANKS
    assert not any(key[0][-1:] == b"\0" for key in early), "a stranger's are not kept"
    assert resident_bytes() - before < MOST_BYTES and turn.most < MOST_TURN_LINES
    peers.p.worker.post(lease_of(token))
    assert wait(lambda: peers.p.sent == {"early-p"}, [peers.p]), "the honest release counts"


def test_consumers_of_one_lease_are_bounded(peers: Peers) -> None:
    """Who knows the token may end the lease, but not fill P's memory with votes that never end it."""
    hostile = peers.raw()
    token = grant([peers.p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: token in leases_of(peers.producer))
    before = resident_bytes()
    for number in range(500):
        hostile.send(release(token, 5, consumer=number.to_bytes(16, "big"), ranks=4096))
    peers.settled(hostile)
    assert len(leases_of(peers.producer)[token].lifetime.state.votes) == lease.MAX_CONSUMERS
    assert resident_bytes() - before < MOST_BYTES
    hostile.send(release(token))  # complete by itself
    assert wait(lambda: peers.p.sent == {"req-p"}, [peers.p])


def test_cancels_of_reads_that_never_were_keep_nothing(peers: Peers) -> None:
    """Each left an entry in its session for ever."""
    hostile = peers.raw()
    for number in range(3000):
        hostile.send(messages.Cancel(read=number, posted=5))
        if number % 200 == 0:
            hostile._connection.receive()
    peers.settled(hostile)
    assert len(sends_of(peers.producer).ended) == 0
    another_works(peers.p, peers.d)


def test_reads_that_have_ended_are_bounded(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sends_of(peers.producer).ended, "limit", 100)
    hostile = peers.raw()
    for number in range(300):
        hostile.send(messages.Ask(
            read=number, token=b"t" * 16, consumer=b"h" * 16, consumer_rank=0, expected=(0,), spans=(),
            chunk_bytes=messages.MIN_CHUNK_BYTES,
        ))  # fmt: skip
        hostile.send(messages.Cancel(read=number, posted=0))
    peers.settled(hostile)
    assert 0 < len(sends_of(peers.producer).ended) <= 100


def test_smaller_chunks_than_settings_allow_are_no_message(peers: Peers) -> None:
    """Chunks of 16 bytes made a million parts of one prompt."""
    ask = messages.Ask(
        read=1, token=b"t" * 16, consumer=b"h" * 16, consumer_rank=0, expected=(0,), spans=(),
        chunk_bytes=messages.MIN_CHUNK_BYTES - 1,
    )  # fmt: skip
    with pytest.raises(ProtocolError, match=f"Expected `int` >= {messages.MIN_CHUNK_BYTES}"):
        messages.decode_request(messages.encode(ask))
    attached = messages.Attached(plane="shm", slot_bytes=16)
    with pytest.raises(ProtocolError, match=f"Expected `int` >= {messages.MIN_SLOT_BYTES}"):
        messages.decode_reply(messages.encode(attached))


def test_an_ask_of_many_spans_does_not_hold_p_up(make_peers: Callable[..., Peers]) -> None:
    """Its chunks are made as they are sent: P answers at once, and keeps the spans only."""
    form = {"blocks": 140, "layers": 32, "total_heads": 8}
    peers = make_peers(**form)
    tokens = 2048
    peers.p.fill(THEIRS, TOKENS)
    another_works(peers.p, peers.d)  # the first copy of a process takes longer
    token = grant([peers.p], "req-p", list(range(1, 129)), tokens)
    hostile = peers.raw()
    turn, before = TurnLines(peers.p), resident_bytes()
    spans = tuple(
        Span(0, n % 32, 1, n // 32 % 8, 1, n // 256 * 128, 128) for n in range(MAX_SPANS)
    )  # all of the prompt
    for read in range(60):
        hostile.send(messages.Ask(
            read=read, token=token, consumer=b"h" * 16, consumer_rank=0, expected=(0,), spans=spans,
            chunk_bytes=messages.MIN_CHUNK_BYTES,
        ))  # fmt: skip
    assert hostile.answer(messages.Grant).chunks == MAX_SPANS
    peers.settled(hostile)
    live = sends_of(peers.producer).live
    assert live.cost <= send.LIVE_SPANS and len(live) < 40, "the oldest reads of this D have failed"
    assert turn.most < MOST_TURN_LINES
    assert resident_bytes() - before < 2 * MOST_BYTES  # shared with the messages that this test makes


def test_asks_of_one_peer_do_not_deny_those_of_another(peers: Peers) -> None:
    """Fifteen large asks for leases that never come used up the room of all, for ten seconds."""
    hostile, honest = peers.raw(), peers.raw()
    token = secrets.token_bytes(16)
    honest.ask(7, token, spans=60)
    peers.settled(honest)
    for read in range(40):
        hostile.ask(read, bytes([read + 1]) * 16, spans=MAX_SPANS - read)
    assert "too many asks" in hostile.answer(messages.Deny).detail
    peers.settled(hostile)
    peers.p.worker.post(lease_of(token))
    assert honest.answer(messages.Deny).reason == "bounds", "60 times the same span: it was served, not thrown out"
    early = early_asks(peers.producer)
    assert early.cost <= serve.HELD_SPANS


def test_a_large_hello_does_not_hold_p_up(make_peers: Callable[..., Peers]) -> None:
    """Comparing layers took time in proportion to ours for each of theirs: 450 ms for one message of 3 MiB."""
    peers = make_peers(layers=512, blocks=2, block_size=1, content=1, total_heads=1)
    hostile, other = peers.raw(greets=False), peers.raw(greets=False)
    context = peers.d.worker.rank_context
    assert context is not None
    geometry = context.caches.geometry
    hello = messages.Hello(
        engine_id="engine-d", incarnation=context.incarnation, geometry=geometry, model=dict(context.model)
    )
    region = geometry.regions[0]
    turn = TurnLines(peers.p)
    for count in (16, 120):  # as many as a rank may have; as many as a message may have
        layers = [tuple(f"r{r}.layers.{n}" for n in range(512)) for r in range(count)]
        regions = tuple(msgspec.structs.replace(region, layers=names) for names in layers)
        large = msgspec.structs.replace(hello, geometry=msgspec.structs.replace(geometry, regions=regions))
        hostile.send(large)
        other.send(hello)
        other.answer(messages.Welcome)
        refused = hostile.answer(messages.Refused)
        assert refused.field == ("layers" if count == 16 else "geometry"), refused
    assert "61440 layers in 120 regions, limit 8192" in refused.theirs
    too_large = msgspec.structs.replace(hello, model={"m": "x" * 1000, **{str(n): "y" * 1000 for n in range(60)}})
    assert len(messages.encode(too_large)[2]) < messages.MAX_REQUEST_BYTES
    assert turn.most < MOST_TURN_LINES


def test_a_d_that_does_not_read_gets_its_replies_later(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection holds a thousand; the others were dropped, and with them the end of reads that D waits for."""
    slow = peers.raw()
    producer = peers.producer
    listener = listener_of(producer)
    real: Callable[[bytes, list[bytes]], Delivery] = listener.send
    full = [True]

    def send(identity: bytes, frames: list[bytes]) -> Delivery:
        return Delivery.FULL if full[0] else real(identity, frames)

    monkeypatch.setattr(listener, "send", send)
    for read in range(50):
        slow.send(messages.Cancel(read=read, posted=0))
    assert wait(lambda: len(replies_of(producer).kept) == 50)
    full[0] = False
    assert [slow.answer(messages.Stopped).read for _ in range(50)] == list(range(50)), "all of them, in order"
    assert len(replies_of(producer).kept) == 0 and listener.dropped["full"] == 0


def test_a_d_that_never_reads_loses_its_session(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With real queues: the socket and its connection hold some thousand replies. D finds its channel closed."""
    deaf, producer = peers.raw(), peers.producer
    token = grant([peers.p], "req-p", THEIRS, TOKENS)
    monkeypatch.setattr(replies_of(producer).kept, "limit", 1 << 20)
    channel = next(iter(sessions_of(producer).values())).channel
    detail, deny = "x" * 1000, producer.deny
    monkeypatch.setattr(producer, "deny", lambda to, read, reason, text="": deny(to, read, reason, detail))
    with caplog.at_level("WARNING", "vllm.kvferry"):
        end = time.monotonic() + 60
        number = 0
        while channel.error is None and not replies_of(producer).lost and len(sessions_of(producer)):
            assert time.monotonic() < end, f"{number} asks, {len(replies_of(producer).kept)} replies kept"
            deaf._connection.send(messages.encode(messages.Ask(
                read=number, token=token, consumer=b"h" * 16, consumer_rank=0, expected=(0,),
                spans=(Span(9, 0, 1, 0, 1, 0, 1),), chunk_bytes=messages.MIN_CHUNK_BYTES,
            )))  # fmt: skip
            number += 1
        assert wait(lambda: not sessions_of(producer))
    assert wait(lambda: any("does not read the replies" in r.getMessage() for r in caplog.records))
    another_works(peers.p, peers.d)
