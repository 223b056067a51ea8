"""A prefix in blocks that nobody holds: D reads it as any prompt, and believes nothing of it once P's engine has
reused a block."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvferry.connector.decode_side.read import Reads
from kvferry.connector.geometry.engine_types import KVContent
from kvferry.connector.pages.caches import RankCaches
from kvferry.connector.prefill_side import prefixes
from kvferry.connector.scheduler.prefixes import model_seed, prefix_digests
from kvferry.connector.wire import messages
from kvferry.connector.wire.messages import DIGEST_BYTES
from kvferry.connector.wire.step_plan import KeepLease, Load, PrefixOffer, StepPlan, pack_ids
from tests.handover.scenario import OURS, PATIENT, PLANES, SMALL, THEIRS, TOKENS, RankGroup, ask, wipe
from tests.support.inside import prompts_of
from tests.support.ranks import Rank, let_time_pass, peer, reason_of, wait

DIGESTS = prefix_digests(model_seed({}), KVContent(range(TOKENS)))
LENGTH = TOKENS // 16 * 16
BLOCKS = THEIRS[: LENGTH // 16]


def offer(ranks: Sequence[Rank]) -> None:
    """A request with the prompt has ended on P."""
    plan = StepPlan(step=1, offers=(PrefixOffer(0, pack_ids(BLOCKS), DIGESTS, b"ranks"),))
    for rank in ranks:
        rank.worker.post(plan)


def reuse(p: Rank, block: int = BLOCKS[2], step: int = 2) -> None:
    """P's engine gives a block to another request, which writes into it."""
    p.worker.take_back(StepPlan(step=step, reused=pack_ids([block])))
    wipe(p)


def load(ranks: Sequence[Rank], readers: Sequence[Rank], tokens: int = LENGTH, name: str = "req-d") -> bytes:
    """Load so many tokens; the token that D has drawn."""
    token, engine, prefix = secrets.token_bytes(16), peer(ranks), DIGESTS[: tokens // 16 * DIGEST_BYTES]
    prompt = prefix[-DIGEST_BYTES:].hex()
    plan = StepPlan(
        decode_engine=b"c" * 16,
        keeps=(KeepLease(name, token, engine, False),),
        loads=(Load(name, token, engine, (pack_ids(OURS),), ((0, tokens),), prompt, prefix=prefix),),
    )
    for reader in readers:
        reader.worker.post(plan)
    return token


def nothing_lent(p: Rank) -> bool:
    return not prompts_of(p) and not p.thread.prefixes.lent


@pytest.mark.parametrize("plane", PLANES)
def test_a_prefix_is_read_and_nothing_of_it_is_left(group: RankGroup, plane: str) -> None:
    p, d = group.pair(plane=plane)
    offer([p])
    for tokens in (LENGTH, 32):
        load([p], [d], tokens, f"req-{tokens}")
        assert wait(lambda tokens=tokens: f"req-{tokens}" in d.received, [p, d]) and not d.failed
        assert torch.equal(d.read(OURS, tokens), d.wanted(tokens))
        assert wait(lambda: nothing_lent(p))
    assert not p.sent, "P's engine hears nothing of it"
    assert p.counts("prefix_reads") == {"lent read": 2}


@pytest.mark.parametrize("form", [(1, 2), (2, 1)], ids=str)
def test_ranks_that_share_a_prefix(group: RankGroup, form: tuple[int, int]) -> None:
    """It is lent until the last reader has released it."""
    of_p = [group.rank(engine_id="engine-p", tp_rank=n, tp_size=form[0]) for n in range(form[0])]
    of_d = [group.rank(engine_id="engine-d", tp_rank=n, tp_size=form[1]) for n in range(form[1])]
    for rank in of_p:
        rank.fill(THEIRS, TOKENS)
    offer(of_p)
    load(of_p, of_d)
    assert wait(lambda: all("req-d" in rank.received for rank in of_d), [*of_p, *of_d])
    assert all(torch.equal(rank.read(OURS, LENGTH), rank.wanted(LENGTH)) for rank in of_d)
    assert wait(lambda: all(nothing_lent(rank) for rank in of_p))


@pytest.mark.parametrize("plane", PLANES)
def test_a_block_is_reused_in_mid_read(group: RankGroup, plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P's engine writes into it at once. Where P sends, just before P packs its bytes; else just before D's commit."""
    p, d = group.pair(plane=plane, **SMALL, **PATIENT)
    offer([p])
    of, name = (Reads, "commit") if plane == "cma" else (RankCaches, "pack")
    real = getattr(of, name)
    done: list[bool] = []

    def late(*args: Any, **options: Any) -> Any:
        if not done:
            done.append(True)
            reuse(p)
        return real(*args, **options)

    monkeypatch.setattr(of, name, late)
    load([p], [d])
    assert wait(lambda: "req-d" in d.received, [p, d])
    assert d.failed == {"req-d"} and reason_of(d) == "expired"
    assert wait(lambda: nothing_lent(p)) and p.counts("prefix_reads") == {"lent reused": 1}


def test_a_block_is_reused_before_the_read(group: RankGroup) -> None:
    p, d = group.pair(**PATIENT)
    offer([p])
    reuse(p)
    load([p], [d], 32, "short")
    assert wait(lambda: "short" in d.received, [p, d]) and not d.failed & {"short"}
    load([p], [d])
    assert wait(lambda: "req-d" in d.received, [p, d]) and d.failed == {"req-d"}
    assert nothing_lent(p)


def test_a_reader_that_dies_holds_nothing_up(group: RankGroup) -> None:
    p, d = group.pair(lease_seconds=30.0)
    offer([p])
    raw = group.raw(p, d)
    raw.send(ask(1, prefix=DIGESTS))
    assert wait(lambda: bool(prompts_of(p)))
    let_time_pass(p, 31.0)
    assert wait(lambda: nothing_lent(p)) and p.counts("prefix_reads") == {"lent expired": 1}
    raw.send(ask(1, prefix=DIGESTS))
    raw.settled()
    assert nothing_lent(p), "its token is over"


def test_the_peers_of_one_host_share_its_places(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a peer would have them all by connections of its own."""
    monkeypatch.setattr(prefixes, "MAX_LENT", 2)
    p, d = group.pair(**PATIENT)
    offer([p])
    for token in (b"1" * 16, b"2" * 16):
        raw = group.raw(p, d)
        raw.send(ask(1, token, prefix=DIGESTS))
        raw.settled()
    assert p.thread.prefixes.lent.keys() == {b"1" * 16} and p.counts("prefix_reads") == {"lent gone": 1}


def test_what_p_answers(group: RankGroup) -> None:
    """At once, and without a handshake."""
    p, d = group.pair()
    raw = group.raw(p, d, attached=False)

    def found(digests: bytes, engine_id: str = "") -> int | None:
        raw.send(messages.Resolve(number=1, name="", prefix=digests, engine_id=engine_id))
        reply = raw.reply()
        if isinstance(reply, messages.Unresolved):
            assert reply.final
            return None
        assert isinstance(reply, messages.Resolved) and reply.granted and reply.params == b"ranks"
        return reply.found

    assert found(DIGESTS) is None, "P has never offered anything"
    offer([p])
    assert found(DIGESTS) == found(DIGESTS, "engine-p") == LENGTH
    assert found(DIGESTS[: 2 * DIGEST_BYTES]) == 32
    assert found(bytes(64)) == found(b"x" * 33) == 0
    assert found(DIGESTS, "another") is None
    reuse(p)
    assert found(DIGESTS) == 32
