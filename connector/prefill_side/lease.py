"""A prompt of P from its first step to the end of its lease, on one rank: the machine, and all leases.

``step(state, event, now) -> (state, effects)`` of the machine, which is pure::

    WAITING ─▶ COMPUTING ◀─▶ PREEMPTED ──▶ ABANDONED    (P's engine computes the prompt)
       └───────────┴─────────────┤
                                 ▼
                              GRANTED ──▶ RELEASED, EXPIRED    (P holds the blocks)

    LENT ──▶ RELEASED, EXPIRED    (nobody holds the blocks)

While P's engine computes the prompt, the blocks are the engine's. It may take them back at any time, and then says so.
Blocks have a life, which ends when the engine takes them back; what a step of an earlier life has computed counts no
more. A prompt that nobody reads before its lease is WAITING until then. A prefix in blocks that nobody holds is LENT:
it is computed, and the engine may take the blocks back, by which it ends.

An *own* read is one that P packs and sends, before the lease or under it. P waits for it, because only its end proves
that nothing reads the pages: ``Freed`` comes once, when the lease and the last own read have ended. A *peer* read is a
read by D's kernel over mapped memory. P can neither see nor stop it, so it does not appear here. D must commit it.

The first ask of a decode engine fixes which of its ranks must release; the lease ends when all of one engine have.
Sets of ranks are numbers, one bit for each rank: a peer names thousands of ranks in a message, and a lease keeps them.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.geometry.rank_geometry import KEEPS_ALL
from kvferry.connector.pages.caches import Ids
from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime, TransitionTable, ignore
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill
from kvferry.transport.fair_table import FairTable
from kvferry.transport.grant_board import GrantBoard

PREEMPTED_SECONDS = 5.0
"""How long reads wait for a prompt that the engine has preempted. D holds blocks for them. P's engine may wait for
blocks of leases that D releases only when it gets such blocks itself: both would wait until D's deadline."""
GIVEN_UP = "P's engine has given the prompt up"
NOT_RESUMED = "P's engine has preempted the prompt, and computes it later"
MAX_DECODE_ENGINES = 64
"""Decode engines whose votes P counts for one lease: it has one, or a few where D is replaced by another D."""
ENDED_TOKENS = 1 << 16
"""Tokens that P remembers after their lease has ended, so that P refuses a late ask at once. P does not grant an ask
with an unknown token either, but refuses it only after ``ask_hold_seconds``."""
DRAWN_TOKENS = 1 << 14
"""The same of tokens that a D has drawn for prefixes, of all D together."""

DecodeEngine = bytes
"""The name of one life of a decode engine."""
Reader = tuple[bytes, int]
"""The identity of a D, and the number of a read."""


class LeasePhase(enum.Enum):
    WAITING = "waiting for its first step"
    COMPUTING = "computing"
    PREEMPTED = "preempted"
    ABANDONED = "abandoned"
    GRANTED = "granted"
    LENT = "lent"
    RELEASED = "released"
    EXPIRED = "expired"


_P = LeasePhase
_COMPUTED = (_P.WAITING, _P.COMPUTING, _P.PREEMPTED)
_READABLE = (_P.GRANTED, _P.LENT)
_LIVE = (*_COMPUTED, *_READABLE)
_OVER = (_P.RELEASED, _P.EXPIRED)
WHY_STOPPED = {_P.ABANDONED: GIVEN_UP, _P.PREEMPTED: NOT_RESUMED}
"""Why own reads are stopped in a phase, in the refusal."""


def rank_set(ranks: Iterable[int]) -> int:
    """A set of ranks as a number with one bit for each rank."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


class LeaseState(msgspec.Struct, frozen=True):
    """Times are local seconds, as ``now``."""

    settings: Settings
    phase: LeasePhase = LeasePhase.WAITING
    life: int = 0
    """The number of the present life of the blocks."""
    computed: int = 0
    """Tokens, from the first one on, whose KV lies in the present blocks, of all layers."""
    deadline: float = math.inf
    """When a Tick changes something: the lease expires, or the reads that wait for a preempted prompt are refused."""
    cap: float = math.inf
    """No renewal moves ``deadline`` past this time."""
    votes: Mapping[DecodeEngine, int] = {}
    """Per decode engine, the ranks that have not released yet (``rank_set``), of at most ``MAX_DECODE_ENGINES``."""
    reads: int = 0
    """Own reads that have not ended."""
    reason: str = ""
    """Why the lease has ended: one of ``metrics.LEASE_ENDS``."""


class LeaseEventKind(enum.Enum):
    """What happens to a prompt or its lease. The values are the names in a log line."""

    STEP_PLANNED = "StepPlanned"
    """A step has begun that computes tokens of the prompt."""
    RESTARTED = "PromptRestarted"
    """The same, in new blocks, from their first token on."""
    ADVANCED = "StepAdvanced"
    """The device has computed more into the blocks of ``life``: the first ``tokens`` tokens lie there, of all layers,
    or more layers of the others. ``whole``: these are all tokens. ``nearly``: in ``NEARLY_SECONDS`` they are."""
    PREEMPTED = "PromptPreempted"
    """The engine has taken the blocks back, and computes the prompt later."""
    ABANDONED = "PromptAbandoned"
    """The engine has taken the blocks back, and the prompt will not be handed over."""
    BEGUN = "LeaseBegun"
    """The prompt is computed, and from now on the lease holds its blocks."""
    ASKED = "ReadAsked"
    """A rank of ``decode_engine`` asks to read. ``expected``: its ranks that will release the lease here."""
    READ_STARTED = "ReadStarted"
    READ_ENDED = "ReadEnded"
    """The last access of an own read to P's pages has ended."""
    RENEWED = "LeaseRenewed"
    """D has sent a renewal, or a read has made progress."""
    RELEASED = "LeaseReleased"
    """By this ``rank`` of ``decode_engine``; ``expected`` as in ASKED."""
    REVOKED = "LeaseRevoked"
    """P's engine was paused, or its caches were reset, or it reuses the blocks of a lent prefix: the lease expires
    before its time."""
    TICK = "Tick"


class LeaseEvent(msgspec.Struct, frozen=True):
    kind: LeaseEventKind
    decode_engine: DecodeEngine = b""
    rank: int = 0
    expected: int = 0
    life: int = 0
    tokens: int = 0
    whole: bool = False
    nearly: bool = False


class LeaseEffect(enum.Enum):
    """What the owner must do."""

    RESUME = "ResumeReads"
    """Own reads that wait may find more chunks whose bytes lie in the blocks."""
    OFFER = "OfferPrompt"
    """The prompt is nearly computed: a D that reads P's pages by itself may ask, and waits for the rest."""
    POST = "PostGrant"
    """All of the prompt lies in the blocks: a D that reads them by itself may do so from now on."""
    STOP = "StopReads"
    """The own reads get no more bytes, or not soon: refuse them (``WHY_STOPPED``). One READ_ENDED follows for each."""
    FREE = "FreeBlocks"
    """Report to the engine, once, that nothing reads the blocks any more, and ``LeaseState.reason``."""


Outcome = tuple[LeaseState, tuple[LeaseEffect, ...]]
_K, _E = LeaseEventKind, LeaseEffect

# --- transitions: while P's engine computes the prompt ----------------------------------------------------------


def _restart(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    return replace(state, phase=_P.COMPUTING, life=state.life + 1, computed=0, deadline=math.inf), (_E.RESUME,)


def _advanced(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    if event.life != state.life:
        return state, ()
    if event.tokens > state.computed:
        state = replace(state, computed=event.tokens)
        if event.whole:
            return state, (_E.RESUME, _E.POST)
    return state, (_E.RESUME, _E.OFFER) if event.nearly else (_E.RESUME,)


def _preempted(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    return replace(state, phase=_P.PREEMPTED, computed=0, deadline=now + PREEMPTED_SECONDS), ()


def _not_resumed(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    if now < state.deadline:
        return state, ()
    return replace(state, deadline=now + PREEMPTED_SECONDS), (_E.STOP,)


def _abandoned(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    return replace(state, phase=_P.ABANDONED, deadline=math.inf), (_E.STOP,)


def _begun(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    cap = state.settings.lease_cap_seconds
    deadline = now + min(state.settings.lease_seconds, cap)
    return replace(state, phase=_P.GRANTED, deadline=deadline, cap=now + cap), ()


def lent_at(settings: Settings, now: float, tokens: int) -> LeaseState:
    """A new lease of a prefix of ``tokens`` tokens in blocks that nobody holds."""
    begun, _ = _begun(LeaseState(settings), LeaseEvent(_K.BEGUN), now)
    return replace(begun, phase=_P.LENT, computed=tokens)


# --- transitions: who reads, and until when ---------------------------------------------------------------------


def _asked(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    if event.decode_engine in state.votes or len(state.votes) >= MAX_DECODE_ENGINES:
        return state, ()
    return replace(state, votes={**state.votes, event.decode_engine: event.expected}), ()


def _read_started(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    return replace(state, reads=state.reads + 1), ()


def _read_ended(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    return replace(state, reads=state.reads - 1), ()


def _renewed(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    later = min(now + state.settings.lease_seconds, state.cap)
    return replace(state, deadline=max(state.deadline, later)), ()


def _released(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    known = state.votes.get(event.decode_engine)
    left = (event.expected if known is None else known) & ~(1 << event.rank)
    if not left:
        return _end(state, _P.RELEASED, "released")
    if known is None and len(state.votes) >= MAX_DECODE_ENGINES:
        return state, ()
    return replace(state, votes={**state.votes, event.decode_engine: left}), ()


def _tick(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    if now < state.deadline:
        return state, ()
    return _end(state, _P.EXPIRED, "cap" if now >= state.cap else "expired")


def _end(state: LeaseState, phase: LeasePhase, reason: str) -> Outcome:
    ended = replace(state, phase=phase, deadline=math.inf, reason=reason)
    return ended, (_E.STOP if state.reads else _E.FREE,)


def _last_read_ended(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    left = replace(state, reads=state.reads - 1)
    return left, () if left.reads else (_E.FREE,)


def _read_too_late(state: LeaseState, event: LeaseEvent, now: float) -> Outcome:
    raise AssertionError(f"a read was started under a lease that is {state.phase.value}")


LEASE: TransitionTable[LeaseState, LeaseEvent, LeaseEffect] = TransitionTable(
    "lease",
    LeasePhase,
    LeaseEventKind,
    (
        (
            (_P.WAITING, _P.COMPUTING),
            (_K.STEP_PLANNED,),
            lambda state, event, now: (replace(state, phase=_P.COMPUTING), (_E.RESUME,)),
        ),
        (_COMPUTED, (_K.RESTARTED,), _restart),
        # Which blocks hold the tokens before these is not known, so reads wait for the lease.
        ((_P.PREEMPTED,), (_K.STEP_PLANNED,), ignore),
        ((_P.COMPUTING,), (_K.ADVANCED,), _advanced),
        ((_P.PREEMPTED,), (_K.TICK,), _not_resumed),
        (_COMPUTED, (_K.PREEMPTED,), _preempted),
        (_COMPUTED, (_K.ABANDONED,), _abandoned),
        (_COMPUTED, (_K.BEGUN,), _begun),
        (_LIVE, (_K.ASKED,), _asked),
        (_LIVE, (_K.READ_STARTED,), _read_started),
        ((*_LIVE, _P.ABANDONED), (_K.READ_ENDED,), _read_ended),
        (_READABLE, (_K.RENEWED,), _renewed),
        (_READABLE, (_K.RELEASED,), _released),
        (_READABLE, (_K.REVOKED,), lambda state, event, now: _end(state, _P.EXPIRED, "reset")),
        (_READABLE, (_K.TICK,), _tick),
        ((*_OVER, _P.ABANDONED), (_K.READ_STARTED,), _read_too_late),
        (_OVER, (_K.READ_ENDED,), _last_read_ended),
        # A step that was under way when the blocks were lost; what concerns the lease before it; all after the end.
        (LeasePhase, LeaseEventKind, ignore),
    ),
)


# --- the leases of a rank ---------------------------------------------------------------------------------------


class PromptPart(msgspec.Struct, eq=False):
    """The part of a prompt that one step computes: tokens before ``stop``, in one ``life`` of the blocks. ``ready``: as
    in ``PrefillChunk``. ``layers``: those that are computed, as (region, layer)."""

    ready: int
    stop: int
    life: int
    layers: set[tuple[int, int]] = msgspec.field(default_factory=set)


@dataclass(slots=True, eq=False)
class Lease:
    """A prompt, and its lease once P holds the blocks."""

    grant: LeaseGrant | Prefill
    """Its length and digest."""
    ids: list[Ids]
    """The kernel blocks per region, as far as the engine has allocated them."""
    block_ids: tuple[bytes, ...]
    """The same as the engine named them, packed by ``pack_ids``."""
    lifetime: Lifetime[LeaseState, LeaseEvent, LeaseEffect]
    blocks: PromptBlocks | None = None
    """Their present life, where the prompt may be read before its lease; ``None`` before its first step."""
    parts: list[PromptPart] = field(default_factory=list)
    """Those of steps that have not ended."""
    readers: dict[Reader, PromptBlocks] = field(default_factory=dict)
    """The reads by D of these blocks that D was granted by message, before the lease."""
    posted: int | None = None
    """Where the lease's grant lies on the grant board."""
    begun_at: float = 0.0
    """The begin of the lease by ``RankContext.clock``."""
    traceparent: str = ""
    """As of the ``LeaseGrant``."""
    lent: bool = False
    """It is of a prefix in blocks that nobody holds, and of no request."""

    @property
    def granted(self) -> bool:
        """Whether P holds the blocks: what was read under the lease is valid."""
        return self.lifetime.state.phase is _P.GRANTED

    @property
    def begun(self) -> bool:
        """Whether P holds the blocks, or held them and own reads have not ended."""
        return self.lifetime.state.phase in (_P.GRANTED, *_OVER)

    @property
    def intact(self) -> bool:
        """Whether the prompt has blocks that are not lost."""
        return self.granted if self.blocks is None else not self.blocks.lost

    @property
    def whole(self) -> bool:
        """Whether all of the prompt lies in the blocks, which are not lost, and which P does not hold."""
        state = self.lifetime.state
        readable = state.phase in (_P.COMPUTING, _P.LENT)
        return readable and state.computed >= self.grant.num_tokens and self.intact

    def answer(self, read: int, chunks: int = 0, block_ids: tuple[bytes, ...] = ()) -> messages.Grant:
        """The Grant message of a read. Of read 0, with all blocks, it is what D finds on the grant board."""
        grant = self.grant
        return messages.Grant(
            read=read, num_tokens=grant.num_tokens, chunks=chunks, digest=grant.digest, block_ids=block_ids
        )


class Leases:
    """All prompts and leases of this rank, by token, until nothing reads the blocks. Used by the transfer thread only.

    Attributes:
        held: how many leases have begun and have not been freed, lent prefixes too.
        ended: tokens of P's prompts that no lease holds any more, or never will.
        drawn: tokens of prefixes that a D has asked to read, by its identity: a D may draw any number.
        board: where the grants are posted, if ``posts_grants``.
    """

    def __init__(self, rank_context: RankContext) -> None:
        self._rank_context = rank_context
        self.table: dict[bytes, Lease] = {}
        self.held = 0
        self._deadlines = Deadlines(self._due)
        self.ended: OrderedDict[bytes, None] = OrderedDict()
        self.drawn: FairTable[bytes, None] = FairTable(DRAWN_TOKENS)
        self.board = GrantBoard()
        self.posts_grants = any(plane.pulls for plane in rank_context.planes)
        # Before its lease a prompt is read only where the engine frees none of its blocks meanwhile.
        self.posts_early = self.posts_grants and all(
            region.kind in KEEPS_ALL for region in rank_context.caches.geometry.regions
        )

    def prepare(self, prefill: Prefill, now: float) -> None:
        """The engine begins to compute a prompt that may be read before its lease."""
        regions = len(self._rank_context.caches.views)
        none = [np.zeros(0, dtype=np.int64)] * regions
        self.table[prefill.token] = self._new(prefill, none, (b"",) * regions, now)

    def _new(self, grant: LeaseGrant | Prefill, ids: list[Ids], block_ids: tuple[bytes, ...], now: float) -> Lease:
        return Lease(grant, ids, block_ids, Lifetime(LEASE, LeaseState(self._rank_context.settings), now))

    def begin(self, grant: LeaseGrant, ids: list[Ids], now: float) -> None:
        """Hold the blocks of a finished prompt, ``ids`` per region, and post the grant on the grant board. Reads that
        wait for them find all of their chunks from now on."""
        token, lease, kept = grant.token, self.table.get(grant.token), True
        if lease is None:
            lease = self._new(grant, ids, grant.block_ids, now)
        else:
            # Chunks that were sent stay good: the same tokens. The others are packed from the blocks of the lease.
            kept = lease.lifetime.state.phase is _P.COMPUTING and lease.intact and _begins_with(lease.ids, ids)
            lease.grant, lease.ids, lease.block_ids = grant, ids, grant.block_ids
        lease.begun_at, lease.traceparent = self._rank_context.clock(), grant.traceparent
        if self.posts_grants:  # a D that reads P's pages by itself then needs no ask and no commit
            text = messages.encode_grant(lease.answer(0, 0, lease.block_ids))
            posted = None if lease.blocks is None else lease.blocks.take_posted(text)
            lease.posted = self.board.post(token, text) if posted is None else posted
        if not kept:
            if lease.blocks is not None:
                lease.blocks.lose()
            lease.blocks = PromptBlocks()
        self.table[token] = lease
        self.held += 1
        self.step(lease, LeaseEvent(_K.BEGUN), now)

    def lend(self, grant: LeaseGrant, ids: list[Ids], life: PromptBlocks, now: float) -> None:
        """Let D read a prefix in blocks that nobody holds, while their ``life`` lasts. ``ids``: as of ``begin``."""
        state = lent_at(self._rank_context.settings, now, grant.num_tokens)
        begun_at, lifetime = self._rank_context.clock(), Lifetime(LEASE, state, now)
        lease = Lease(grant, ids, grant.block_ids, lifetime, life, begun_at=begun_at, lent=True)
        if self.posts_grants:
            life.post(self.board, grant.token, messages.encode_grant(lease.answer(0, 0, lease.block_ids)))
        self.table[grant.token] = lease
        self.held += 1
        self._deadlines.note(grant.token, state.deadline)

    def step(self, lease: Lease, event: LeaseEvent, now: float) -> tuple[LeaseEffect, ...]:
        """Give a lease an event. Returns the effects that the caller must perform."""
        before = lease.lifetime.state.deadline
        effects = lease.lifetime.step(event, now)
        state = lease.lifetime.state
        if state.deadline < before:
            self._deadlines.note(lease.grant.token, state.deadline)
        if lease.posted is not None and state.phase is not _P.GRANTED:
            self.board.withdraw(lease.posted)  # before the engine may reuse the blocks
            lease.posted = None
        return effects

    def is_over(self, token: bytes) -> bool:
        """Whether it is known that nobody can read under this token any more."""
        return token not in self.table and (token in self.ended or token in self.drawn)

    def remember_end(self, token: bytes) -> None:
        """No lease holds the blocks of this token from now on."""
        self.ended[token] = None
        if len(self.ended) > ENDED_TOKENS:
            self.ended.popitem(last=False)

    def due(self, now: float) -> list[Lease]:
        """The leases to which a Tick is due."""
        return [self.table[token] for token in self._deadlines.due(now)]

    def _due(self, token: bytes) -> float:
        lease = self.table.get(token)
        return math.inf if lease is None else lease.lifetime.state.deadline


def _begins_with(ours: list[Ids], theirs: list[Ids]) -> bool:
    """Whether in each region one list of blocks begins with the other one."""
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
    return all(np.array_equal(a, b) for a, b in pairs)
