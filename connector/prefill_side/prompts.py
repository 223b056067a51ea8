"""The prompts of P on one rank, each from P's queue to the end of its lease, and the prefixes that are lent::

    OPEN ──lease──▶ HELD ──released, expired, reset──▶ DRAINING ──last own read──▶ ENDED
      └── given up by P's engine; a lent prefix released, expired, reused ──▲

An OPEN prompt has the engine's blocks, which the engine may take back at any time, and then says so. They are one
``PromptBlocks`` until it does; what a step has computed into earlier ones counts no more. A *lent* prefix is computed,
lies in blocks that nobody holds, and ends when the engine takes one of them. Of a HELD prompt P holds the blocks.

An *own* read is one that P packs and sends, before the lease or under it. P waits for it in DRAINING, which a prompt
without one skips, because only its end proves that nothing reads the pages. A *peer* read is one by D itself. P can
neither see nor stop it, so it does not appear here. D must commit it.

The first ask of a decode engine fixes which of its ranks must release; the lease ends when all of one engine have.
Sets of ranks are numbers, one bit for each rank: a peer names thousands of ranks in a message, and a lease keeps them.
"""

from __future__ import annotations

import enum
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvferry.connector.config import Settings
from kvferry.connector.geometry.rank_geometry import KEEPS_ALL
from kvferry.connector.pages.caches import Ids
from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill, QueuedPrompt
from kvferry.transport.errors import quoted
from kvferry.transport.fair_table import FairTable
from kvferry.transport.grant_board import GrantBoard
from kvferry.transport.limited_log import RateLimitedLog

PREEMPTED_SECONDS = 5.0
"""How long reads wait for a prompt that the engine has preempted. D holds blocks for them. P's engine may wait for
blocks of leases that D releases only when it gets such blocks itself: both would wait until D's deadline."""
MAX_DECODE_ENGINES = 64
"""Decode engines whose votes P counts for one lease: it has one, or a few where D is replaced by another D."""
ENDED = 1 << 16
"""Tokens and names that P remembers after their prompt has ended, so that P refuses a late request at once. P does not
grant one for an unknown prompt either, but refuses it only after ``ask_hold_seconds``."""
DRAWN_TOKENS = 1 << 14
"""The same of tokens that a D has drawn for prefixes, of all D together."""


def rank_set(ranks: Iterable[int]) -> int:
    """A set of ranks as a number with one bit for each rank."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


class PromptState(enum.Enum):
    OPEN = "open"
    HELD = "held"
    DRAINING = "draining"
    ENDED = "ended"


class PromptPart(msgspec.Struct, eq=False):
    """The part of a prompt that one step computes."""

    ready: int
    """As in ``PrefillChunk``."""
    stop: int
    """It ends before this token."""
    blocks: PromptBlocks
    """Those that the step writes."""
    layers: set[tuple[int, int]] = msgspec.field(default_factory=set)
    """Those that are computed, as (region, layer)."""


@dataclass(slots=True, eq=False)
class Prompt:
    """One prompt of P, or a prefix that is lent. Times are local seconds, as ``now``."""

    token: bytes
    request_id: str
    ids: list[Ids]
    """The kernel blocks per region, as far as the engine has allocated them."""
    block_ids: tuple[bytes, ...]
    """The same as the engine named them, packed by ``pack_ids``."""
    names: tuple[str, ...] = ()
    """Of those that ``Prefill`` brings, the ones that D finds it by."""
    num_tokens: int = 0
    digest: str = ""
    """Of its tokens."""
    params: bytes = b""
    """As of ``Prefill``, and empty before that."""
    streams: bool = False
    """It may be read before its lease."""
    found: int = 0
    """As of ``Prefill``."""
    step_tokens: int = 0
    """As of ``Prefill``."""
    blocks: PromptBlocks | None = None
    """The present ones; ``None`` before its first step, and before the lease where it does not stream."""
    offered: PromptBlocks | None = None
    """Those of which D was told that it may read them before the lease."""
    lent: bool = False
    """It is a prefix in blocks that nobody holds, and of no request."""
    state: PromptState = PromptState.OPEN
    computed: int = 0
    """Tokens, from the first one on, whose KV lies in ``blocks``, of all layers."""
    parts: list[PromptPart] = field(default_factory=list)
    """Those of steps that have not ended."""
    deadline: float = math.inf
    """When the lease expires, or the reads that wait for a preempted prompt are refused."""
    cap: float = math.inf
    """No renewal moves ``deadline`` past this time."""
    votes: dict[bytes, int] = field(default_factory=dict)
    """Per life of a decode engine, its ranks that have not released (``rank_set``), of ``MAX_DECODE_ENGINES``."""
    reads: int = 0
    """Own reads that have not ended."""
    readers: dict[tuple[bytes, int], PromptBlocks] = field(default_factory=dict)
    """By identity and number, the reads by D that it was granted by message before the lease, and of which blocks."""
    reason: str = ""
    """Why the lease has ended, one of ``metrics.LEASE_ENDS``; empty where there was none."""
    begun_at: float = 0.0
    """The begin of the lease by ``RankContext.clock``."""
    traceparent: str = ""
    """As of the ``LeaseGrant``."""

    @property
    def granted(self) -> bool:
        """Whether P holds the blocks: what was read under the lease is valid."""
        return self.state is PromptState.HELD

    @property
    def preempted(self) -> bool:
        """Whether the engine has taken the blocks back, and computes the prompt later."""
        return self.state is PromptState.OPEN and self.blocks is not None and self.blocks.lost

    @property
    def readable(self) -> bool:
        """Whether D is told that it may read: under the lease, or what is computed, or nearly, before it."""
        return self.granted or (self.state is PromptState.OPEN and self.offered is self.blocks and self.intact)

    @property
    def taken_back(self) -> bool:
        """Whether a D that was told so must wait again."""
        return self.preempted or (self.state is PromptState.OPEN and self.offered not in (None, self.blocks))

    @property
    def leased(self) -> bool:
        """Whether a deadline and votes can end it."""
        return self.state is PromptState.HELD or (self.lent and self.state is PromptState.OPEN)

    @property
    def over(self) -> bool:
        """Whether no read may begin any more."""
        ended = self.state not in (PromptState.OPEN, PromptState.HELD)
        return ended or (self.lent and not self.intact)

    @property
    def intact(self) -> bool:
        """Whether it has blocks that are not lost."""
        return self.blocks is not None and not self.blocks.lost

    @property
    def whole(self) -> bool:
        """Whether all of the prompt lies in the blocks, which are not lost, and which P does not hold."""
        return self.state is PromptState.OPEN and self.computed >= self.num_tokens and self.intact

    def answer(self, read: int, chunks: int = 0, block_ids: tuple[bytes, ...] = ()) -> messages.Grant:
        """The Grant message of a read. Of read 0, with all blocks, it is what D finds on the grant board."""
        return messages.Grant(
            read=read, num_tokens=self.num_tokens, chunks=chunks, digest=self.digest, block_ids=block_ids
        )

    # --- while P's engine computes it ---------------------------------------------------------------------------

    def place(self, blocks: PromptBlocks, ids: list[Ids], block_ids: tuple[bytes, ...]) -> None:
        """A step computes into these blocks, of which ``ids`` and ``block_ids`` are new."""
        if blocks is not self.blocks:
            self.blocks, self.parts, self.ids, self.block_ids = blocks, [], ids, block_ids
            self.computed, self.deadline = 0, math.inf
        else:
            self.block_ids = tuple(map(bytes.__add__, self.block_ids, block_ids))
            self.ids = [np.concatenate(pair) for pair in zip(self.ids, ids, strict=True)]

    def advance(self, part: PromptPart, tokens: int) -> bool:
        """The first ``tokens`` tokens lie in the blocks of a part, of all layers, or more layers of the others do.
        Returns whether that counts."""
        if self.state is not PromptState.OPEN or part.blocks is not self.blocks or part.blocks.lost:
            return False
        self.computed = max(self.computed, tokens)
        return True

    def preempt(self, now: float) -> None:
        """The engine has taken the blocks back, and computes the prompt later."""
        if self.blocks is not None:
            self.blocks.lose()
        self.parts, self.computed, self.deadline = [], 0, now + PREEMPTED_SECONDS

    # --- who reads it, and until when ---------------------------------------------------------------------------

    def hold(self, settings: Settings, now: float) -> None:
        """The lease begins."""
        self.state = PromptState.OPEN if self.lent else PromptState.HELD
        self.cap = now + settings.lease_cap_seconds
        self.deadline = min(now + settings.lease_seconds, self.cap)

    def renew(self, settings: Settings, now: float) -> None:
        """D has sent a renewal, or a read has made progress."""
        if self.leased:
            self.deadline = max(self.deadline, min(now + settings.lease_seconds, self.cap))

    def asked(self, decode_engine: bytes, expected: int) -> None:
        """A rank of this decode engine reads. ``expected``: its ranks that will release here, a ``rank_set``."""
        if len(self.votes) < MAX_DECODE_ENGINES:
            self.votes.setdefault(decode_engine, expected)

    def released(self, decode_engine: bytes, rank: int, expected: int) -> bool:
        """A rank releases, also before the lease. Returns whether all ranks of its engine have: no lease must stand."""
        left = self.votes.get(decode_engine, expected) & ~(1 << rank)
        if decode_engine in self.votes or len(self.votes) < MAX_DECODE_ENGINES:
            self.votes[decode_engine] = left
        return not left

    def end(self, reason: str = "") -> None:
        """The lease ends, or without a reason the engine has given the prompt up. A posted grant is withdrawn before
        the engine may reuse the blocks."""
        if self.blocks is not None:
            self.blocks.lose()
        self.state = PromptState.DRAINING if self.reads else PromptState.ENDED
        self.reason, self.deadline = reason, math.inf

    def read_ended(self) -> bool:
        """The last access of an own read to the pages has ended. Returns whether the prompt has ended by that."""
        self.reads -= 1
        if self.reads or self.state is not PromptState.DRAINING:
            return False
        self.state = PromptState.ENDED
        return True


class Prompts:
    """All prompts of this rank, by token, until nothing reads the blocks. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext) -> None:
        self._rank_context = rank_context
        self._log = RateLimitedLog(logging.getLogger("vllm.kvferry.lookup"))
        self.table: dict[bytes, Prompt] = {}
        self.held = 0
        """How many leases have begun and have not been freed, lent prefixes too."""
        self._deadlines = Deadlines(self._due)
        self.by_name: dict[str, Prompt] = {}
        self.ended: OrderedDict[bytes | str, float] = OrderedDict()
        """Tokens and names of P's prompts that have ended. A name may come again: until when a question is refused."""
        self.drawn: FairTable[bytes, None] = FairTable(DRAWN_TOKENS)
        """Tokens of prefixes that a D has asked to read, by its identity: a D may draw any number."""
        self.board = GrantBoard()
        """Where the grants are posted, if ``posts_grants``."""
        self.posts_grants = any(plane.pulls for plane in rank_context.planes)
        # Before its lease a prompt is read only where the engine frees none of its blocks meanwhile.
        self.posts_early = self.posts_grants and all(
            region.kind in KEEPS_ALL for region in rank_context.caches.geometry.regions
        )

    def queue(self, queued: QueuedPrompt | Prefill) -> Prompt:
        """P's engine has a prompt in its queue. Where two live prompts have one name, the first keeps it."""
        taken = [name for name in queued.names if name in self.by_name]
        if taken:
            self._log.warning(
                "name",
                "kvferry: %s has the name %s of a prompt that this engine holds: a decode engine finds only the "
                "first by it; a router must give each request a transfer_id of its own",
                queued.request_id, quoted(taken[0]),
            )  # fmt: skip
        names = tuple(name for name in queued.names if name not in self.by_name)
        regions = len(self._rank_context.caches.views)
        none = [np.zeros(0, dtype=np.int64)] * regions
        prompt = Prompt(queued.token, queued.request_id, none, (b"",) * regions, names)
        self.table[queued.token] = prompt
        for name in names:
            self.by_name[name] = prompt
            self.ended.pop(name, None)
        return prompt

    def begin(self, prefill: Prefill) -> Prompt:
        """P's engine begins to compute a prompt."""
        prompt = self.table.get(prefill.token) or self.queue(prefill)
        prompt.num_tokens, prompt.digest, prompt.params = prefill.num_tokens, prefill.digest, prefill.params
        prompt.streams, prompt.found, prompt.step_tokens = prefill.streams, prefill.found, prefill.step_tokens
        return prompt

    def preempt(self, prompt: Prompt, now: float) -> None:
        """The engine has taken the blocks of a prompt back, and computes it later."""
        prompt.preempt(now)
        self._deadlines.note(prompt.token, prompt.deadline)

    def hold(self, grant: LeaseGrant, ids: list[Ids], now: float) -> Prompt:
        """Hold the blocks of a finished prompt, ``ids`` per region, and post the grant on the grant board. Reads that
        wait for them find all of their chunks from now on."""
        prompt = self.table.get(grant.token) or Prompt(grant.token, grant.request_id, ids, grant.block_ids)
        # Chunks that were sent stay good: the same tokens. The others are packed from the blocks of the lease.
        if prompt.blocks is None or not (prompt.intact and _begins_with(prompt.ids, ids)):
            if prompt.blocks is not None:
                prompt.blocks.lose()
            prompt.blocks = PromptBlocks()
        prompt.request_id, prompt.ids, prompt.block_ids = grant.request_id, ids, grant.block_ids
        prompt.num_tokens, prompt.digest, prompt.params = grant.num_tokens, grant.digest, grant.params or prompt.params
        prompt.begun_at, prompt.traceparent = self._rank_context.clock(), grant.traceparent
        if self.posts_grants:  # a D that reads P's pages by itself then needs no ask and no commit
            self.post(prompt)
        self._hold(prompt, now)
        return prompt

    def post(self, prompt: Prompt) -> None:
        """Post the grant of all blocks of a prompt, while they are not lost."""
        assert prompt.blocks is not None
        text = messages.encode_grant(prompt.answer(0, 0, prompt.block_ids))
        prompt.blocks.post(self.board, prompt.token, text)

    def lend(self, prefix: Prompt, blocks: PromptBlocks, now: float) -> None:
        """Let D read a prefix in ``blocks`` that nobody holds, until they are lost."""
        prefix.lent = prefix.streams = True
        prefix.blocks = blocks
        if self.posts_grants:
            self.post(prefix)
        self._hold(prefix, now)

    def _hold(self, prompt: Prompt, now: float) -> None:
        prompt.hold(self._rank_context.settings, now)
        self.table[prompt.token] = prompt
        self.held += 1
        self._deadlines.note(prompt.token, prompt.deadline)

    def is_over(self, token: bytes) -> bool:
        """Whether it is known that nobody can read under this token any more."""
        return token not in self.table and (token in self.ended or token in self.drawn)

    def forget(self, prompt: Prompt, now: float) -> None:
        """Nothing reads a prompt any more, or will."""
        del self.table[prompt.token]
        for name in prompt.names:
            del self.by_name[name]
        keys: tuple[bytes | str, ...] = () if prompt.lent else (prompt.token, *prompt.names)
        for key in keys:
            self.ended.pop(key, None)
            self.ended[key] = now + self._rank_context.settings.ask_hold_seconds
        while len(self.ended) > ENDED:
            self.ended.popitem(last=False)

    def due(self, now: float) -> list[Prompt]:
        """The prompts whose deadline has passed."""
        return [self.table[token] for token in self._deadlines.due(now)]

    def _due(self, token: bytes) -> float:
        prompt = self.table.get(token)
        return math.inf if prompt is None else prompt.deadline


def _begins_with(ours: list[Ids], theirs: list[Ids]) -> bool:
    """Whether in each region one list of blocks begins with the other one."""
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
    return all(np.array_equal(a, b) for a, b in pairs)
