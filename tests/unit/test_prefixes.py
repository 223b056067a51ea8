"""Prefixes by digest: what two prompts share, which blocks hold it now, and what a request makes of an answer."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import BlockTable, KVContent, RequestView
from kvferry.connector.prefill_side.prefixes import MAX_LENT, PrefixIndex
from kvferry.connector.scheduler.prefixes import (
    OfferedBlocks,
    model_seed,
    names_sources,
    prefix_digests,
    sources_of,
    with_hints,
)
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.wire.messages import DIGEST_BYTES, PREFIX_TOKENS
from kvferry.connector.wire.params import RemotePrompt, to_transfer_params
from kvferry.connector.wire.step_plan import LoadEnd, LookupResult, PeerEngine, RankAddress, StepPlan, pack_ids

SEED = model_seed({"architectures": "Labelled"})
P = PeerEngine("p", 1, 1, 30.0, (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),))
ANSWER = msgspec.msgpack.encode(to_transfer_params(RemotePrompt(bytes(16), 1, "", P)))
SOURCE = {"remote_host": "10.0.0.1", "remote_port": 1234, "remote_engine_id": "p"}
IDS = list(range(100))


def shared(one: KVContent, other: KVContent, seed: bytes = SEED) -> int:
    """Tokens that a reader of ``other`` would take of ``one``."""
    ours, theirs = prefix_digests(SEED, one), prefix_digests(seed, other)
    count = 0
    while ours[: count + DIGEST_BYTES] == theirs[: count + DIGEST_BYTES] and count < min(len(ours), len(theirs)):
        count += DIGEST_BYTES
    return count // DIGEST_BYTES * PREFIX_TOKENS


def test_two_prompts_share_the_digests_of_their_common_prefix() -> None:
    whole = KVContent(IDS)
    assert shared(whole, whole) == 96
    for place in (0, 15, 16, 47, 95, 96, 99):
        common = place // PREFIX_TOKENS * PREFIX_TOKENS
        assert shared(whole, KVContent([*IDS[:place], 7777, *IDS[place:]])) == common, "a token was inserted"
        assert shared(whole, KVContent([*IDS[:place], *IDS[place + 1 :]])) == common, "a token was taken out"
    assert shared(whole, KVContent(IDS[:40])) == 32


def test_what_kv_depends_on_beside_tokens() -> None:
    """A salt and an adapter change all of it; an image the tokens from its place on."""
    plain = KVContent(IDS, ("",))
    assert shared(plain, KVContent(IDS, ("one tenant",))) == 0
    assert shared(KVContent(IDS, ("", "lora", "a1")), KVContent(IDS, ("", "lora", "a2"))) == 0
    assert shared(KVContent(IDS, ("a", "b")), KVContent(IDS, ("ab",))) == 0
    assert shared(plain, plain, model_seed({"architectures": "Other"})) == 0
    image = KVContent(IDS, ("",), ((40, 20, "image"),))
    assert shared(image, image) == 96
    for other in (plain, KVContent(IDS, ("",), ((40, 20, "another"),)), KVContent(IDS, ("",), ((41, 20, "image"),))):
        assert shared(image, other) == 32


def test_digests_go_on_from_any_prefix() -> None:
    content = KVContent(IDS, ("salt",), ((40, 20, "image"),))
    every = prefix_digests(SEED, content)
    for first in range(1, 6):
        before = every[(first - 1) * DIGEST_BYTES : first * DIGEST_BYTES]
        assert prefix_digests(SEED, content, first, before) == every[first * DIGEST_BYTES :]


class Pool:
    """A source: an engine's blocks with what they hold, offered to one rank's index. Tokens are few, so that histories
    part and meet."""

    def __init__(self, per_block: int, blocks: int = 24, seed: int = 0) -> None:
        self.random, self.per_block, self.size = random.Random(seed), per_block, per_block * PREFIX_TOKENS
        self.offered = OfferedBlocks(SEED, self.size)
        self.index = PrefixIndex(blocks, per_block)
        self.holds: dict[int, list[int]] = {}  # by block: the prompt up to its last token that is computed in it
        self.free = list(range(blocks))
        self.steps = 0
        self.offers: list[Any] = []

    def history(self) -> list[int]:
        """A prompt that begins as one before, or as none."""
        known = self.random.choice([[], *self.holds.values()])
        kept = known[: self.random.randrange(len(known) + 1)]
        return [*kept, *(self.random.randrange(3) for _ in range(self.random.randrange(70)))]

    def finish(self, ids: list[int]) -> None:
        """A request ends. It found whole blocks of its prefix in the prefix cache, and got others for the rest."""
        blocks: list[int] = []
        new: list[int] = []
        for start in range(0, len(ids), self.size):
            part = ids[: start + self.size]
            same = [block for block, held in self.holds.items() if held == part and len(part) % self.size == 0]
            if same and not new:
                blocks.append(same[0])
                continue
            choice = [block for block in self.free if block not in blocks]
            if not choice:
                break
            block = self.random.choice(choice)
            self.reuse([block])
            self.holds[block] = part
            new.append(block)
            blocks.append(block)
        asked = ids[: self.random.randrange(len(ids) + 1)] if self.random.random() < 0.5 else self.history()
        prompt = KVContent(asked), prefix_digests(SEED, KVContent(asked))
        found = self.offered.offer(KVContent(ids), blocks, prompt)
        if found is not None:
            self.offers.append(found[0])
            self.post()

    def reuse(self, blocks: list[int]) -> bool:
        """The engine gives these blocks to others. Returns whether a lent prefix was lost."""
        for block in blocks:
            self.holds.pop(block, None)
        return self.post([block for block in blocks if self.offered.reused(block)])

    def post(self, reused: list[int] | None = None) -> bool:
        offers, self.offers, self.steps = tuple(self.offers), [], self.steps + 1
        return self.index.update(StepPlan(step=self.steps, offers=offers, reused=pack_ids(reused or [])))


@pytest.mark.parametrize("per_block", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_only_blocks_that_hold_the_prefix_are_lent(per_block: int, seed: int) -> None:
    """Random histories that share prefixes, in blocks that are reused; what is lent lies there, token by token."""
    pool = Pool(per_block, seed=seed)
    lent_tokens = 0
    for turn in range(150):
        pool.finish(pool.history())
        if pool.random.random() < 0.5:
            pool.reuse(pool.random.sample(range(24), pool.random.randrange(1, 4)))
        ids = pool.history()
        count = pool.index.find(prefix_digests(SEED, KVContent(ids)))
        if not count:
            continue
        tokens = count * PREFIX_TOKENS
        token = turn.to_bytes(16, "big")
        lent = pool.index.lend(token, prefix_digests(SEED, KVContent(ids[:tokens])), "10.0.0.2")
        assert lent is not None
        life, blocks = lent
        assert len(blocks) == -(-tokens // pool.size)
        for place, block in enumerate(blocks):
            stop = min(tokens, (place + 1) * pool.size)
            assert pool.holds[block][:stop] == ids[:stop]
        lent_tokens += tokens
        if pool.random.random() < 0.5:
            gone = pool.random.choice(blocks)
            assert pool.reuse([gone]) and life.lost and pool.index.take_lost() == [token]
        else:
            others = [block for block in range(24) if block not in blocks]
            assert not pool.reuse(others[:2]) and not life.lost
            pool.index.end(token)
    assert lent_tokens > 300


def test_one_turn_after_the_other_is_offered_once() -> None:
    """Of the next turn the ranks learn what is new."""
    offered = OfferedBlocks(SEED, 32)
    first = offered.offer(KVContent(IDS[:70]), [3, 4, 5])
    assert first is not None and first[1] == [3, 4] and len(first[0].digests) == 4 * DIGEST_BYTES
    assert offered.offer(KVContent(IDS[:70]), [3, 4, 9]) is None, "nothing is new"
    second = offered.offer(KVContent(IDS), [3, 4, 6, 7])
    assert second is not None and second[1] == [6] and second[0].first == 4
    assert second[0].digests == prefix_digests(SEED, KVContent(IDS))[4 * DIGEST_BYTES :]
    assert offered.reused(4) and not offered.reused(4)


def test_how_much_is_lent_is_bounded() -> None:
    """One peer leaves places for others, and each of them for the next."""
    pool = Pool(1)
    pool.finish(IDS[:20])
    digests = prefix_digests(SEED, KVContent(IDS[:16]))
    assert pool.index.lend(b"x" * 16, digests + b"odd", "a") is None
    assert pool.index.lend(b"x" * 16, bytes(16), "a") is None
    for address, most in (("a", MAX_LENT // 2), ("b", MAX_LENT // 4), ("c", MAX_LENT // 8)):
        tokens = [f"{address}{number:15}".encode() for number in range(most + 1)]
        assert [pool.index.lend(token, digests, address) is not None for token in tokens] == [*[True] * most, False]
    pool.index.end(tokens[0])
    assert pool.index.lend(tokens[0], digests, "a") is None
    assert pool.index.lend(tokens[0], digests, "c") is not None


# --- a request of D -----------------------------------------------------------------------------------------------


class Reader:
    """The scheduler half of D, with one request that names sources."""

    def __init__(self, sources: object = (SOURCE,), num_local: int = 0, consumes: bool = True, **more: Any) -> None:
        self.now, self.num_local = 0.0, num_local
        self.half = SchedulerHalf(
            Settings(prefix_reads=True), "d", [BlockTable("full", 16)], tp_size=1, pp_size=1, produces=True,
            consumes=consumes, prefix_seed=SEED, clock=lambda: self.now,
        )  # fmt: skip
        named = list(sources) if isinstance(sources, tuple) else sources
        self.view = RequestView("r", {"sources": named}, IDS, 100, 0, content=KVContent(IDS, ("",)), **more)
        self.half.on_new_request(self.view)

    def asks(self) -> tuple[int | None, bool]:
        """What the engine is told when it asks."""
        return self.half.num_new_matched_tokens(self.view, self.num_local)

    def answer(self, found: int, params: bytes = ANSWER, **more: Any) -> None:
        self.half.lookups_answered({"r": LookupResult(params, found=found, **more)})

    @property
    def counted(self) -> dict[str, int]:
        figures = self.half.take_stats()
        return {} if figures is None else figures["counts"].get("prefix_reads", {})


def test_a_request_reads_what_the_source_has() -> None:
    reader = Reader()
    assert not reader.half.take_plan().lookups, "D does not know yet what it has itself"
    assert reader.asks() == (None, False)
    (wanted,) = reader.half.take_plan().lookups
    assert (wanted.host, wanted.port, wanted.engine_id) == ("10.0.0.1", 1234, "p")
    assert wanted.prefix == prefix_digests(SEED, KVContent(IDS, ("",)))
    reader.answer(80)
    assert reader.asks() == (80, True)
    reader.half.after_alloc(reader.view, [[1, 2, 3, 4, 5, 6, 7]], 80)
    plan = reader.half.take_plan()
    (load,), (keep,) = plan.loads, plan.keeps
    assert load.prefix == wanted.prefix[: 5 * DIGEST_BYTES] and load.digest == load.prefix[-DIGEST_BYTES:].hex()
    assert load.token == keep.token != bytes(16) and load.tokens == ((0, 80),)
    reader.half.loads_finished(["r"], {"r": LoadEnd()})
    assert reader.counted == {"loaded": 1}
    assert reader.asks() == (0, False)


@pytest.mark.parametrize(
    ("found", "num_local", "reason"), [(0, 0, "no_lease"), (16, 0, "no_lease"), (96, 80, "cached")]
)
def test_too_little_is_not_read(found: int, num_local: int, reason: str) -> None:
    reader = Reader(num_local=num_local)
    reader.num_local = 0 if num_local else num_local
    assert reader.asks() == (None, False)
    reader.num_local = num_local
    assert reader.asks() == (None, False)
    reader.answer(found)
    assert reader.asks() == (0, False) and reader.counted == {f"local {reason}": 1}
    plan = reader.half.take_plan()
    assert not plan.keeps and not plan.loads


LLM_D = {"kv_request_id": "9c5b1ab8", "remote_host": "10.9.9.9", "remote_port": 7777}
FETCH = {
    "action_id": "a1", "action_type": "kv.fetch", "action_version": "1.0",
    "payload": {"source_control_endpoint": "tcp://10.0.0.5:25000", "block_hashes": [1, 2**64 - 1], "mode": "copy"},
}  # fmt: skip
ANOTHER_ACTION = {"action_id": "a0", "action_type": "kv.migrate", "action_version": "1.0", "payload": {}}
NEXT_TURN = {
    "do_remote_prefill": False, "do_remote_decode": True, "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "decode-engine", "remote_request_id": "chatcmpl-1", "remote_host": "10.0.0.7",
    "remote_port": 5600, "remote_num_tokens": 192,
}  # fmt: skip
"""Of llm-d's sidecar (llm-d/llm-d-router, pkg/sidecar/proxy: connector_p2p_source_test.go at 9cac78f1605c and
connector_nixlv2_bidirectional_test.go at 7e99424dac34), and of Dynamo's router (its hint, protocol version 0.1)."""


def hint(*actions: object) -> dict[str, Any]:
    return {"kv_hint": {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}}


@pytest.mark.parametrize(
    ("params", "asked"),
    [
        ({"remote_kv_source": LLM_D}, [("10.9.9.9", 7777, "")]),
        ({"remote_kv_source": LLM_D, "remote_decoder": {"kv_request_id": "1"}}, [("10.9.9.9", 7777, "")]),
        (hint(ANOTHER_ACTION, FETCH, 7, {}), [("10.0.0.5", 25000, "")]),
        (NEXT_TURN, [("10.0.0.7", 5600, "decode-engine")]),
        (NEXT_TURN | {"remote_kv_source": LLM_D}, [("10.9.9.9", 7777, ""), ("10.0.0.7", 5600, "decode-engine")]),
        ({"sources": [SOURCE], "remote_kv_source": LLM_D}, [("10.0.0.1", 1234, "p"), ("10.9.9.9", 7777, "")]),
        (hint(ANOTHER_ACTION), []),
        ({"kv_hint": "x"}, []),
        ({"do_remote_decode": True, "remote_host": None, "remote_block_ids": None}, None),
        ({"do_remote_prefill": True, "remote_host": "10.0.0.7", "remote_port": 5600}, None),
        (None, None),
    ],
)
def test_how_routers_name_sources(params: Any, asked: list[tuple[str, int, str]] | None) -> None:
    assert names_sources(params) == (asked is not None)
    found = [(wanted.host, wanted.port, wanted.engine_id) for wanted in sources_of("r", params)]
    assert found == (asked or [])


def test_vllms_hints_are_dynamos() -> None:
    class Envelope(msgspec.Struct):
        protocol_version: str
        message_id: str
        actions: list[dict[str, Any]]

    for params in (None, 7, {"report": True}):
        told = with_hints(params, Envelope("0.1", "m", [FETCH]))
        assert [wanted.port for wanted in sources_of("r", told)] == [25000]
    assert told["report"] is True


def test_the_next_source_is_asked() -> None:
    other = {**SOURCE, "remote_port": 2345}
    reader = Reader((SOURCE, other))
    reader.asks()
    assert [wanted.port for wanted in reader.half.take_plan().lookups] == [1234]
    reader.answer(0, error="this is engine q", reason="no_lease")
    assert reader.asks() == (None, False)
    (second,) = reader.half.take_plan().lookups
    assert second.port == 2345 and second.prefix == prefix_digests(SEED, KVContent(IDS, ("",)))
    reader.answer(16)
    assert reader.asks() == (0, False) and reader.counted == {"local no_lease": 1}


def test_who_answered_is_in_the_answer() -> None:
    """A request with an empty list asks nobody."""
    reader = Reader([])
    reader.half.set_ranks(P.ranks)
    assert reader.asks() == (0, False) and not reader.counted
    _, answer = reader.half.request_finished(reader.view, [[]], completed=True)
    assert answer == {"source": {**SOURCE, "remote_engine_id": "d", "remote_key": ""}}


def test_a_source_cannot_say_more_than_was_asked() -> None:
    reader = Reader()
    reader.asks()
    reader.answer(1 << 30)
    assert reader.asks() == (96, True)


@pytest.mark.parametrize("late", [False, True])
def test_how_long_a_request_waits(late: bool) -> None:
    reader = Reader()
    assert reader.asks() == (None, False)
    reader.half.take_plan()
    reader.now = 0.0199
    assert reader.asks() == (None, False)
    reader.now = 0.0201
    assert reader.asks() == (0, False) and reader.counted == {"local no_answer": 1}
    assert reader.half.take_plan().left
    if late:
        reader.answer(96)
    assert reader.asks() == (0, False) and not reader.half.take_plan().keeps


@pytest.mark.parametrize(("sources", "reason"), [
    ("10.0.0.1", "malformed"), ([SOURCE] * 5, "malformed"), ([7], "malformed"),
    ([{**SOURCE, "remote_port": 0}], "malformed"), ([{**SOURCE, "remote_host": None}], "malformed"),
    ([{**SOURCE, "remote_host": "a\nb"}], "malformed"), ([{**SOURCE, "remote_key": "x"}], "malformed"),
])  # fmt: skip
def test_sources_that_cannot_be_asked(sources: object, reason: str) -> None:
    reader = Reader(sources)
    assert reader.asks() == (0, False) and reader.counted == {f"local {reason}": 1}
    assert not reader.half.take_plan().lookups


def test_an_engine_that_only_hands_over_says_that_it_reads_nothing() -> None:
    reader = Reader(consumes=False)
    assert reader.asks() == (0, False)
    figures = reader.half.take_stats()
    assert figures is not None and figures["counts"] == {"prefix_reads": {"local wrong_role": 1}}
    reader = Reader([], consumes=False)
    assert reader.asks() == (0, False) and not reader.counted, "it is only asked for its address"


def test_a_request_that_has_most_of_its_prompt_asks_nobody() -> None:
    reader = Reader(num_local=80)
    assert reader.asks() == (0, False) and reader.counted == {"local cached": 1}
    assert not reader.half.take_plan().lookups


@pytest.mark.parametrize("when", ["new", "asked", "offered"])
def test_a_request_that_ends_before_its_load(when: str) -> None:
    reader = Reader()
    if when != "new":
        reader.asks()
        reader.half.take_plan()
    if when == "offered":
        reader.answer(96)
    reader.half.request_finished(reader.view, [[]], completed=False)
    plan = reader.half.take_plan()
    assert reader.counted == {"local ended": 1}
    assert (len(plan.left), len(plan.releases)) == {"new": (0, 0), "asked": (1, 0), "offered": (0, 1)}[when]


def test_a_reset_is_urgent_until_the_next_plan() -> None:
    """Also where nothing was asked yet, so that the plan is empty: an idle engine would take steps for ever."""
    reader = Reader()
    assert reader.half.reset_caches() and reader.half.has_urgent_plan
    assert reader.half.take_plan().nothing and not reader.half.has_urgent_plan


@pytest.mark.parametrize("params", [b"", b"\xc1", msgspec.msgpack.encode({"do_remote_prefill": True, "kvferry": 7})])
def test_an_answer_that_is_malformed(params: bytes) -> None:
    reader = Reader()
    reader.asks()
    reader.answer(96, params)
    assert reader.asks() == (0, False)
    assert sum(reader.counted.values()) == 1


# --- the scheduler half of a source -------------------------------------------------------------------------------


def test_a_block_that_is_reused_is_in_the_plan_of_that_step() -> None:
    watched: list[int] = []
    half = SchedulerHalf(
        Settings(prefix_reads=True), "p", [BlockTable("full", 16)], tp_size=1, pp_size=1, produces=True, consumes=True,
        prefix_seed=SEED, watch_blocks=watched.extend,
    )  # fmt: skip
    half.offer_prefix(KVContent(IDS), [1, 2, 3, 4, 5, 6, 7])
    assert not half.take_plan().offers, "the ranks' addresses are not known"
    half.set_ranks(P.ranks)
    half.offer_prefix(KVContent(IDS), [1, 2, 3, 4, 5, 6, 7])
    half.offer_prefix(KVContent([5] * 40), [8, 9])
    first, second = half.take_plan().offers
    assert first.params and not second.params and watched == [1, 2, 3, 4, 5, 6, 8, 9]
    assert not half.has_urgent_plan
    half.block_reused(7)
    half.block_reused(4)
    assert half.has_urgent_plan
    plan = half.take_plan()
    assert plan.reused == pack_ids([4]) and not plan.nothing and not plan.wakes_thread
    half.set_ranks(P.ranks)  # they begin anew
    half.offer_prefix(KVContent([5] * 40), [8, 9])
    (again,) = half.take_plan().offers
    assert again.params and again.first == 0
