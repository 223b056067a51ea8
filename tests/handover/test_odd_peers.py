"""A D that does what ours does not: greets twice, asks twice, hoards asks, was forgotten. P answers, and serves on.
And a P that says what it was not asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.engine import loop
from kvferry.connector.geometry.spans import MAX_RANGES, MAX_SPANS, Span, check_spans
from kvferry.connector.geometry.token_sharding import TokenShard, TokenSharding
from kvferry.connector.prefill_side import serve
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import no_figures
from kvferry.connector.wire.step_plan import LeaseGrant, StepPlan, pack_ids
from kvferry.transport.errors import GeometryError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.shm import ShmPlane
from tests.handover.gates import PATIENT, Gate, halves
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works, begin
from tests.handover.rank_group import RankGroup
from tests.support.inside import replies_of, sends_of, sessions_of
from tests.support.ranks import Rank, grant, load_plan, peer, wait
from tests.transport.control_ends import Dialed

ReplyT = TypeVar("ReplyT")


class RawD:
    """A rank of D that speaks the protocol by hand, over the shm plane."""

    def __init__(self, p: Rank, like: Rank) -> None:
        self._p, self._like = p, like
        self._connection = Dialed(p.address.port, limit=8 << 20)
        self._replies: list[Any] = []
        self.plane = ShmPlane(PlaneContext("127.0.0.1", 64 << 10, 1 << 20))

    def send(self, message: messages.Request) -> None:
        """Also where the queue is full at the moment."""
        assert wait(lambda: self._connection.send(messages.encode(message)))

    def answer(self, kind: type[ReplyT]) -> ReplyT:
        """The next reply; it must be of that kind."""

        def arrived() -> bool:
            self._replies.extend(messages.decode_reply(frames) for frames in self._connection.receive())
            return bool(self._replies)

        assert wait(arrived, [self._p]), f"no {kind.__name__} came"
        reply = self._replies.pop(0)
        assert isinstance(reply, kind), reply
        return reply

    def start_handshake(self) -> messages.Welcome:
        rank_context = self._like.worker.rank_context
        assert rank_context is not None
        self.send(
            messages.Hello(
                engine_id=rank_context.engine_id,
                incarnation=rank_context.incarnation,
                geometry=rank_context.caches.geometry,
                model=dict(rank_context.model),
            )
        )
        return self.answer(messages.Welcome)

    def attach(self, welcome: messages.Welcome) -> None:
        """Send an Attach; the answer is the caller's."""
        offers = {offer.name: offer.payload for offer in welcome.planes}
        _, payload = self.plane.connect(offers["shm"], "127.0.0.1")
        self.send(messages.Attach(plane="shm", payload=payload))

    def ask(self, read: int, token: bytes, spans: int = 1) -> None:
        span = Span(0, 0, 1, 0, 4, 0, TOKENS)
        self.send(
            messages.Ask(
                read=read, token=token, consumer=b"r" * 16, consumer_rank=0, expected=(0,), spans=(span,) * spans,
                chunk_bytes=64 << 10,
            )
        )  # fmt: skip

    def close(self) -> None:
        self._connection.close()
        self.plane.close()


@pytest.fixture
def pair(group: RankGroup) -> tuple[Rank, Rank]:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    return p, d


@pytest.fixture
def raw(pair: tuple[Rank, Rank]) -> Iterator[RawD]:
    raw = RawD(*pair)
    yield raw
    raw.close()


def test_a_second_attach_is_refused_once_the_first_was_used(pair: tuple[Rank, Rank], raw: RawD) -> None:
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    welcome = raw.start_handshake()
    for _ in range(3):  # D could not use what it was given
        raw.attach(welcome)
        raw.answer(messages.Attached)
    raw.ask(7, token)
    raw.answer(messages.Grant)
    raw.attach(welcome)
    assert "attached already" in raw.answer(messages.AttachRefused).reason
    another_works(*pair)


def test_a_read_is_asked_for_once(pair: tuple[Rank, Rank], raw: RawD) -> None:
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    raw.attach(raw.start_handshake())
    raw.answer(messages.Attached)
    for again in (False, True):
        raw.ask(7, token)
        if again:
            assert "asked for before" in raw.answer(messages.Deny).detail
        else:
            assert raw.answer(messages.Grant).chunks > 0
    another_works(*pair)


def test_a_read_that_has_ended_is_not_asked_for_again(pair: tuple[Rank, Rank], raw: RawD) -> None:
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    raw.attach(raw.start_handshake())
    raw.answer(messages.Attached)
    raw.ask(7, token)
    raw.answer(messages.Grant)
    assert wait(lambda: not halves(pair[0])[0].sends.turns)
    raw.ask(7, token)
    assert raw.answer(messages.Deny).reason == "bounds"


def test_asks_that_wait_for_their_lease_are_bounded(
    pair: tuple[Rank, Rank], raw: RawD, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw.attach(raw.start_handshake())
    raw.answer(messages.Attached)
    for read in range(serve.HELD_SPANS // MAX_SPANS):
        raw.ask(read, bytes([read]) * 16, spans=MAX_SPANS)
    assert "too many asks" in raw.answer(messages.Deny).detail
    another_works(*pair)


def test_a_d_that_p_has_forgotten_greets_again(group: RankGroup) -> None:
    p = group.rank(settings=Settings(plane="shm"), engine_id="engine-p")  # over cma it would need P for nothing
    d = group.rank(settings=Settings(plane="shm"), engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    sessions = sessions_of(p)
    for session in list(sessions.values()):  # what the bound on their number does
        sessions.pop(session.identity)
    p.sent.clear()
    d.received.clear()
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and d.figures()["retried"] == {"peer_lost": 1}
    p.sent.clear()
    another_works(p, d)


def test_an_attach_without_a_handshake_is_refused(pair: tuple[Rank, Rank], raw: RawD) -> None:
    """Also that of a D that P has forgotten, which else waits until its handshake is late."""
    raw.send(messages.Attach(plane="shm", payload=b"x"))
    refused = raw.answer(messages.AttachRefused)
    assert "forgotten" in refused.reason and refused.detached
    another_works(*pair)


def test_a_d_that_p_forgets_before_it_attaches_greets_again(group: RankGroup) -> None:
    """D takes none of its planes for refused."""
    p, d = (group.rank(settings=Settings(plane="shm"), engine_id=f"engine-{name}") for name in "pd")
    p.fill(THEIRS, TOKENS)
    producer = halves(p)[0]
    attach = producer.handle
    forgotten: list[Any] = []

    def forgets_once(identity: bytes, request: messages.Request, now: float, address: str) -> None:
        if isinstance(request, messages.Attach) and not forgotten:
            forgotten.append(sessions_of(producer).pop(identity))
        attach(identity, request, now, address)

    producer.handle = forgets_once
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and d.figures()["retried"] == {"peer_lost": 1}


@pytest.mark.parametrize("where", ["get", "give"], ids=["before it is known", "once it is known"])
def test_a_load_that_breaks_while_it_starts_is_reported(
    pair: tuple[Rank, Rank], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    half = halves(d)[1]
    owner = half.links if where == "get" else half.loads
    real = getattr(owner, where)
    calls: list[Any] = []

    def breaks(*args: Any, **options: Any) -> Any:
        if not calls:
            calls.append(args)
            raise RuntimeError("planted")
        return real(*args, **options)

    token = grant([p], "req-p", THEIRS, TOKENS)
    monkeypatch.setattr(owner, where, breaks)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    monkeypatch.undo()
    another_works(p, d)
    assert not half.loads.running


def test_a_p_that_says_that_it_has_stopped_what_nobody_has(group: RankGroup) -> None:
    """D would take the chunks that are still to come for none."""
    settings = Settings(plane="shm")
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    producer = halves(p)[0]
    reply = replies_of(producer).send

    def and_stopped(identity: bytes, message: object) -> None:
        reply(identity, message)
        if isinstance(message, messages.Grant):
            reply(identity, messages.Stopped(read=message.read, sent=0))

    replies_of(producer).send = and_stopped
    another_works(p, d)


def test_a_grant_that_comes_twice_counts_once(pair: tuple[Rank, Rank]) -> None:
    """A second copy into D's pages would go on when the load has ended."""
    p, d = pair
    half = halves(d)[1]
    grant, checked, calls = half.reads.take_grant, half.reads.check_grant, []
    half.reads.take_grant = lambda *args: (grant(*args), grant(*args))[0]
    half.reads.check_grant = lambda *args: (calls.append(args), checked(*args))
    another_works(p, d)
    assert len(calls) == 1


def test_a_link_that_nobody_uses_gives_its_staging_back(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(plane="shm", staging_bytes=256 << 20)
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    plane = p.context.plane("shm")
    assert isinstance(plane, ShmPlane)
    in_use = plane.left_bytes
    assert settings.staging_bytes is not None and in_use < settings.staging_bytes
    assert not wait(lambda: plane.left_bytes != in_use, [p, d], 0.5), "not at once: the next hand-over wants it"
    monkeypatch.setattr(messages, "IDLE_LINK_SECONDS", 0.3)
    assert wait(lambda: plane.left_bytes == settings.staging_bytes and not sessions_of(p), [p, d])
    another_works(p, d)


def test_staging_that_is_used_up_leads_to_the_next_plane(group: RankGroup) -> None:
    """P closes D's connection before its refusal is here: that must not look like P's death."""
    p = group.rank(settings=Settings(staging_bytes=8 << 20))
    p.fill(THEIRS, TOKENS)
    producer = halves(p)[0]
    reply, tick, late = replies_of(producer).send, producer.tick, []
    context = p.worker.rank_context
    assert context is not None
    context.planes = [plane for plane in context.planes if plane.name in ("shm", "tcp")]

    def slowly(identity: bytes, message: object) -> None:
        if isinstance(message, messages.Refused):
            late.append((time.monotonic() + 0.2, identity, message))
        else:
            reply(identity, message)

    def on_tick(now: float) -> None:
        tick(now)
        while late and late[0][0] < time.monotonic():
            reply(*late.pop(0)[1:])

    replies_of(producer).send, producer.tick = slowly, on_tick
    planes = []
    for n in range(3):
        d = group.rank(engine_id=f"engine-{n}")
        token = grant([p], f"p{n}", THEIRS, TOKENS)
        d.worker.post(load_plan(f"d{n}", token, peer([p]), OURS, 0, TOKENS))
        assert wait(lambda d=d, n=n: d.received == {f"d{n}"}, [p, d])
        assert not d.failed
        planes.append(d.plane)
    assert planes[0] == "shm" and planes[-1] == "tcp", planes


def test_a_d_that_does_not_read_does_not_hold_up_the_others(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    form = {"settings": Settings(plane="tcp", **PATIENT), "content": 4096, "layers": 8}
    p, slow, d = group.rank(**form), group.rank(engine_id="slow", **form), group.rank(engine_id="engine-d", **form)
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    pushes = sends_of(p)
    plane = slow.context.plane("tcp")
    assert plane is not None
    real = plane.progress
    stuck = Gate(plane, "progress", lambda: real() if not any(push.reading for push in pushes.turns) else False)
    for n in range(8):
        slow.worker.post(load_plan(f"s{n}", token, peer([p]), OURS, 0, TOKENS, consumer=b"s" * 16))
    assert wait(lambda: len(pushes.turns) == 8 and any(push.reading for push in list(pushes.turns)), [slow])
    monkeypatch.setattr(loop, "TICK_SECONDS", 3.0)
    begun = time.monotonic()
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.received == {"req-d"}, [d]) and not d.failed
    assert time.monotonic() - begun < 20, "53 MB in 13 messages, each of which waited for a tick"
    monkeypatch.undo()
    stuck.open()
    assert wait(lambda: len(slow.received) == 8, [p, slow])


def test_a_plane_that_breaks_does_not_stop_the_others(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pair

    def breaks() -> bool:
        raise RuntimeError("planted")

    for rank in pair:
        assert rank.worker.rank_context is not None
        broken = rank.context.plane("tcp")
        monkeypatch.setattr(broken, "progress", breaks)
    another_works(p, d)
    stats = d.context.stats
    assert wait(lambda: (stats.take() or no_figures())["failed"].get("internal", 0) > 0, [p, d]), "it is looked at"


@pytest.mark.parametrize(
    ("shard", "words"), [(TokenShard(512, 0, 1), "none of that rank's"), (TokenShard(2, 1, 16), "none of that rank's")]
)
def test_a_d_asks_for_its_own_share_of_the_tokens(
    pair: tuple[Rank, Rank], raw: RawD, shard: TokenShard, words: str
) -> None:
    """Any other would be a look at every token of the prompt, and there are as many as numbers."""
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    raw.attach(raw.start_handshake())
    raw.answer(messages.Attached)
    span = Span(0, 0, 1, 0, 4, 0, TOKENS, shard)
    raw.send(
        messages.Ask(
            read=7, token=token, consumer=b"r" * 16, consumer_rank=0, expected=(0,), spans=(span,), chunk_bytes=64 << 10
        )
    )
    assert words in raw.answer(messages.Deny).detail
    another_works(*pair)


def test_the_token_ranges_of_an_ask_are_bounded(pair: tuple[Rank, Rank]) -> None:
    geometry = pair[0].context.caches.geometry
    spans = [Span(0, 0, 1, 0, 1, 0, 1 + number) for number in range(MAX_RANGES + 1)]
    with pytest.raises(GeometryError, match=f"spans of {MAX_RANGES + 1} different ranges of tokens"):
        check_spans(spans, geometry, 1 << 20)
    check_spans(spans[:2], geometry, 1 << 20)


@pytest.mark.parametrize(("prompt", "loaded"), [("feed", True), ("beef", False)])
def test_a_lease_of_another_prompt_is_not_loaded(group: RankGroup, prompt: str, loaded: bool) -> None:
    """What D has heard of the lease came from whoever sent the request; what P holds, P knows. It stays whose it is."""
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    lease = LeaseGrant("req-p", b"t" * 16, TOKENS, (pack_ids(THEIRS),), "feed")
    p.worker.post(StepPlan(leases=(lease,)))
    plan = load_plan("req-d", b"t" * 16, peer([p]), OURS, 0, TOKENS)
    (load,) = plan.loads
    d.worker.post(msgspec.structs.replace(plan, loads=(msgspec.structs.replace(load, prompt=prompt),)))
    assert wait(lambda: d.received == {"req-d"}, [p, d])
    assert d.failed == (set() if loaded else {"req-d"})
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS)) == loaded
    if not loaded:
        assert wait(lambda: not halves(d)[1].leases.kept, [p, d])
        d.worker.post(load_plan("honest", b"t" * 16, peer([p]), OURS, 0, TOKENS))
        assert wait(lambda: "honest" in d.received, [p, d]) and "honest" not in d.failed
    assert wait(lambda: p.sent == {"req-p"}, [p, d])


def test_p_is_the_one_that_the_parameters_named(group: RankGroup, caplog: pytest.LogCaptureFixture) -> None:
    """Who reads from whom was found out from the sizes there."""
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    sharding = msgspec.structs.replace(peer([p]), shardings=(TokenSharding(2, 16),))
    with caplog.at_level("WARNING", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", token, sharding, OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [p, d])
        assert wait(lambda: "shardings, in kv_transfer_params and in P's handshake," in caplog.text)
