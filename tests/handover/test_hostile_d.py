"""A D that has the key and means harm. What it makes P keep, and how long it holds P's thread, is bounded; a D beside
it is served."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import msgspec
import pytest

from kvferry.connector.geometry.spans import MAX_SPANS, Span
from kvferry.connector.prefill_side import lease, send, serve, session
from kvferry.connector.wire import messages
from kvferry.transport.control.listener import Delivery
from kvferry.transport.errors import ProtocolError
from tests.handover.scenario import PATIENT, WHOLE, Gate, Pair, RankGroup, RawD, another_works, ask, lease_plan, leased
from tests.support.inside import (
    board_of,
    early_asks,
    early_votes,
    leases_of,
    listener_of,
    replies_of,
    sends_of,
    sessions_of,
)
from tests.support.ranks import Rank, grant, wait
from tests.support.turns import MOST_BYTES, MOST_TURN_LINES, TurnLines, resident_bytes


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return group.pair(plane="shm", **PATIENT)


@pytest.fixture
def hostile(group: RankGroup, pair: Pair) -> RawD:
    return group.raw(*pair)


def release(token: bytes, rank: int = 0, decode_engine: bytes = b"h" * 16, ranks: int = 1) -> messages.Release:
    return messages.Release(token=token, decode_engine=decode_engine, decode_rank=rank, expected=tuple(range(ranks)))


def test_releases_that_precede_their_lease_are_bounded(group: RankGroup, pair: Pair, hostile: RawD) -> None:
    """They were 389 MiB for 30 MiB of messages, and the last of them displaced those of an honest D."""
    p, _ = pair
    honest, stranger = group.raw(*pair), group.raw(*pair, attached=False)
    token = b"own" + secrets.token_bytes(13)
    honest.send(release(token))
    honest.settled()
    turn, before = TurnLines(p), resident_bytes()
    gate = Gate(p.producer, "serve", lambda now: False)  # P finds all of them at once
    for number in range(400):
        name = number.to_bytes(15, "big")
        hostile.send(release(b"h" + name, number, decode_engine=b"h" + name, ranks=4096))
        stranger.send(release(b"s" + name, number, decode_engine=b"h" + name, ranks=4096))
    gate.open()
    for raw in (hostile, stranger):
        raw.settled()
    early = early_votes(p)
    assert early.cost <= serve.EARLY_RANKS
    assert not any(key[0].startswith(b"s") for key in early), "a stranger's are not kept"
    assert resident_bytes() - before < MOST_BYTES and turn.most < MOST_TURN_LINES
    p.worker.post(lease_plan(token))
    assert wait(lambda: p.sent == {"req-p"}, [p]), "the honest release counts"


def test_consumers_of_one_lease_are_bounded(p: Rank, hostile: RawD) -> None:
    """Who knows the token may end the lease, but not fill P's memory with votes that never end it."""
    token = leased(p)
    assert wait(lambda: token in leases_of(p))
    before = resident_bytes()
    for number in range(500):
        hostile.send(release(token, 5, decode_engine=number.to_bytes(16, "big"), ranks=4096))
    hostile.settled()
    assert len(leases_of(p)[token].lifetime.state.votes) == lease.MAX_DECODE_ENGINES
    assert resident_bytes() - before < MOST_BYTES
    hostile.send(release(token))  # complete by itself
    assert wait(lambda: p.sent == {"req-p"}, [p])


def test_cancels_of_reads_that_never_were_keep_nothing(pair: Pair, hostile: RawD) -> None:
    """Each left an entry in its session for ever."""
    for number in range(300):
        hostile.send(messages.Cancel(read=number))
    hostile.settled()
    assert len(sends_of(pair[0]).ended) == 0
    another_works(*pair)


def test_reads_that_have_ended_are_bounded(pair: Pair, hostile: RawD, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = sends_of(pair[0]).ended
    monkeypatch.setattr(ended, "limit", 100)
    for number in range(300):
        hostile.send(ask(number))
        hostile.send(messages.Cancel(read=number))
    hostile.settled()
    assert 0 < len(ended) <= 100


def test_tokens_that_a_d_draws_displace_no_others(
    group: RankGroup, pair: Pair, hostile: RawD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65,536 of them, in 6 s, displaced the ends of all leases: late asks then waited for ``ask_hold_seconds``."""
    p, honest, over = pair[0], group.raw(*pair), [leased(pair[0]), secrets.token_bytes(16)]
    monkeypatch.setattr(lease, "ENDED_TOKENS", 64)
    monkeypatch.setattr(p.producer.leases.drawn, "limit", 64)
    honest.send(release(over[0]))
    honest.send(messages.LendPrefix(token=over[1], digests=bytes(16)))
    honest.settled()
    for number in range(300):
        hostile.send(messages.LendPrefix(token=number.to_bytes(16, "big"), digests=bytes(16)))
    hostile.settled()
    for read, token in enumerate(over):
        honest.send(ask(read, token))
        assert honest.answer(messages.Deny).reason == "expired"
    assert len(p.producer.leases.drawn) <= 64


def test_a_host_with_many_sessions_ends_its_own(p: Rank, hostile: RawD, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects again and again ended the session of the D that was silent for longest, and its reads."""
    monkeypatch.setattr(session, "SESSIONS", 8)
    sessions = session.Sessions(p.context, board_of(p).place)
    for number in range(40):
        identity, address = bytes([number]), "10.0.0.2" if number else "10.0.0.1"
        for displaced in sessions.displaced(identity):
            sessions.end(displaced)
        sessions.begin(identity, hostile.hello, address, float(number))
    assert list(sessions.table) == [bytes([number]) for number in (0, *range(33, 40))]


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
    assert "too many asks" in hostile.answer(messages.Deny).detail
    hostile.settled()
    assert early_asks(pair[0]).cost <= serve.HELD_SPANS
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


def test_a_d_that_does_not_read_gets_its_replies_later(
    pair: Pair, hostile: RawD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection holds a thousand; the others were dropped, and with them the end of reads that D waits for."""
    listener, replies = listener_of(pair[0]), replies_of(pair[0])
    with monkeypatch.context() as patch:
        patch.setattr(listener, "send", lambda identity, frames: Delivery.FULL)
        for read in range(50):
            hostile.send(messages.Cancel(read=read))
        assert wait(lambda: len(replies.kept) == 50)
    assert [hostile.answer(messages.Stopped).read for _ in range(50)] == list(range(50)), "all of them, in order"
    assert wait(lambda: len(replies.kept) == 0) and listener.dropped["full"] == 0


def test_a_d_that_never_reads_loses_its_session(
    p: Rank, d: Rank, hostile: RawD, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With real queues: the socket and its connection hold some thousand replies. D finds its channel closed."""
    token = leased(p)
    replies, sessions = replies_of(p), sessions_of(p)
    monkeypatch.setattr(replies.kept, "limit", 1 << 20)
    channel = next(iter(sessions.values())).channel
    deny: Callable[..., None] = p.producer.deny
    monkeypatch.setattr(p.producer, "deny", lambda to, read, reason, text="": deny(to, read, reason, "x" * 1000))
    with caplog.at_level("WARNING", "vllm.kvferry"):
        end, number = time.monotonic() + 300, 0
        while channel.error is None and not replies.lost and len(sessions):
            assert time.monotonic() < end, f"{number} asks, {len(replies.kept)} replies kept"
            hostile.connection.send(messages.encode(ask(number, token, [Span(9, 0, 1, 0, 1, 0, 1)])))
            number += 1
        assert wait(lambda: not sessions)
    assert wait(lambda: any("does not read the replies" in r.getMessage() for r in caplog.records))
    another_works(p, d)
