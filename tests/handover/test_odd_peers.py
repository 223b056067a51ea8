"""A D that does what ours does not: greets twice, asks twice, was forgotten. P answers, and serves on. A P that says
what it was not asked."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from kvferry.connector.engine import loop
from kvferry.connector.geometry.spans import Span
from kvferry.connector.geometry.token_sharding import TokenShard, TokenSharding
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import no_figures
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
from tests.support.inside import leases_of, replies_of, sends_of, sessions_of
from tests.support.ranks import Rank, grant, load_plan, peer, wait

Patch = pytest.MonkeyPatch


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return group.pair()


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


@pytest.mark.parametrize("over", [False, True])
def test_a_read_is_asked_for_once(pair: Pair, raw: RawD, over: bool) -> None:
    """``over``: also where it has ended."""
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    chunk_bytes = 64 << 10 if over else messages.MIN_SLOT_BYTES
    raw.send(ask(7, token, [WHOLE], chunk_bytes=chunk_bytes))
    assert raw.answer(messages.Grant).chunks > 0
    assert not over or wait(lambda: not sends_of(pair[0]).turns)
    raw.send(ask(7, token, [WHOLE]))
    refused = raw.answer(messages.Deny)
    assert refused.reason == "bounds" and "asked for before" in refused.detail
    another_works(*pair)


def retried_once(p: Rank, d: Rank) -> bool:
    begin(p, d)
    return ended(p, d) and d.figures()["retried"] == {"peer_lost": 1}


def test_a_d_that_p_has_forgotten_greets_again(shm: Pair) -> None:
    p, d = shm
    another_works(p, d)
    sessions_of(p).clear()  # what the bound on their number does
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


@pytest.mark.parametrize("where", ["get", "give"], ids=["before it is known", "once it is known"])
def test_a_load_that_breaks_while_it_starts_is_reported(p: Rank, d: Rank, where: str, monkeypatch: Patch) -> None:
    owner = d.consumer.links if where == "get" else d.consumer.loads
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


def test_a_p_that_says_that_it_has_stopped_what_nobody_has(shm: Pair) -> None:
    """D would take the chunks that are still to come for none."""
    p, d = shm
    replies = replies_of(p)
    reply = replies.send

    def and_stopped(identity: bytes, message: object) -> None:
        reply(identity, message)
        if isinstance(message, messages.Grant):
            reply(identity, messages.Stopped(read=message.read, sent=0))

    replies.send = and_stopped
    another_works(p, d)


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
    replies, late = replies_of(p), []
    reply, tick = replies.send, p.producer.tick
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

    replies.send, p.producer.tick = slowly, on_tick
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
    stats = d.context.stats
    assert wait(lambda: (stats.take() or no_figures())["failed"].get("internal", 0) > 0, [p, d]), "it is looked at"


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
