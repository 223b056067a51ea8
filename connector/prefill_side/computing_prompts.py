"""The prompts that P's engine computes while their reads are sent.

``computing_prompt.COMPUTING_PROMPT`` decides. This file knows the blocks of these prompts, and which bytes lie in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from kvferry.connector.pages.caches import Ids, PageBox, RankCaches
from kvferry.connector.pages.computed_steps import ComputedStep, PromptBlocks
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.prefill_side import lease
from kvferry.connector.prefill_side.computing_prompt import (
    COMPUTING_PROMPT,
    BlocksLost,
    ChunkPlanned,
    ComputingEvent,
    ComputingPhase,
    ComputingState,
    FailReads,
    LayersComputed,
    LeaseBegins,
    PostGrant,
    ResumeReads,
    TokensComputed,
)
from kvferry.connector.prefill_side.held_lease import granted
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime, Tick
from kvferry.connector.wire.step_plan import Prefill, PrefillChunk, PrefillStop, unpack_ids
from kvferry.transport.errors import GeometryError
from kvferry.transport.grant_board import GrantBoard

Reader = tuple[bytes, int]
"""The identity of a D, and the number of a read."""


class PromptPart(msgspec.Struct, eq=False):
    """The part of a prompt that one step computes: tokens before ``stop``, in one ``life`` of the blocks. ``ready``: as
    in ``PrefillChunk``. ``layers``: those that are computed, as (region, layer)."""

    ready: int
    stop: int
    life: int
    layers: set[tuple[int, int]] = msgspec.field(default_factory=set)


class ComputingPrompt:
    """One prompt. ``grant``: its length and digest, as a grant has them. ``ids``: the kernel blocks per region, as far
    as the engine has allocated them, and ``block_ids`` the same as the engine named them, packed by ``pack_ids``.
    ``blocks``: their present life; ``None`` before the first step."""

    def __init__(self, prefill: Prefill, caches: RankCaches, now: float) -> None:
        self.grant = prefill
        self.ids: list[Ids] = [np.zeros(0, dtype=np.int64) for _ in caches.views]
        self.block_ids: tuple[bytes, ...] = (b"",) * len(caches.views)
        self.blocks: PromptBlocks | None = None
        self.parts: list[PromptPart] = []  # of steps that have not ended
        self.lifetime = Lifetime(COMPUTING_PROMPT, ComputingState(), now)
        self.readers: dict[Reader, PromptBlocks] = {}
        """The reads by D of these blocks that D was granted by message, before the lease."""
        self._caches = caches
        self._votes: dict[bytes, int] = {}

    @property
    def granted(self) -> bool:
        """Whether a lease holds the blocks."""
        return self.lifetime.state.phase is ComputingPhase.GRANTED

    def is_last(self, part: PromptPart) -> bool:
        """Whether the prompt is computed once this part of it is, in blocks that are not lost."""
        state = self.lifetime.state
        computing = state.phase is ComputingPhase.COMPUTING and part.life == state.life
        return computing and part.stop >= self.grant.num_tokens and self._has_blocks

    @property
    def whole(self) -> bool:
        """Whether all of the prompt lies in the blocks, which are not lost."""
        state = self.lifetime.state
        computed = state.phase is ComputingPhase.COMPUTING and state.computed >= self.grant.num_tokens
        return computed and self._has_blocks

    @property
    def _has_blocks(self) -> bool:
        """Whether the prompt has blocks that are not lost."""
        return self.blocks is not None and not self.blocks.lost

    def asked(self, consumer: bytes, expected: tuple[int, ...]) -> None:
        """A rank of ``consumer`` asks to read, as ``lease.Asked``."""
        if len(self._votes) < lease.MAX_CONSUMERS:
            self._votes.setdefault(consumer, lease.rank_set(expected))

    def asks(self) -> Iterator[lease.Asked]:
        """What the lease must know of the asks before it."""
        for consumer, expected in self._votes.items():
            yield lease.Asked(consumer, frozenset(lease.ranks_of(expected)))

    def boxes(self, ask: messages.Ask, first: int = 0) -> Iterator[PageBox | None]:
        """The chunks of a read in wire order, from chunk number ``first`` on. ``None`` in place of a chunk: its bytes
        do not lie in the blocks yet. Ends with an error where the lease does not hold all blocks.

        Raises:
            GeometryError: that error.
        """
        number, caches = 0, self._caches
        for span in ask.spans:
            ours = caches.geometry.regions[span.region]
            cut = caches.span_cut(span, ask.chunk_bytes, ours)
            if number + len(cut) <= first:
                number += len(cut)
                continue
            end = span.token + span.num_tokens
            while not (self._allocated(span.region, end) or self.granted):
                yield None
            ids = self.ids[span.region]
            caches.check_held(span.region, ids, span.token, end)
            whole = caches.box(span, span.region, span.layer, span.head, ids, ours.shard)
            # Where ranks shard the tokens, a chunk counts only those that both sides hold.
            dense = ours.shard.whole and span.shard.whole
            for chunk, box in zip(cut, caches.cut(whole, span, ask.chunk_bytes, ours), strict=True):
                if number >= first:
                    stop = span.token + chunk.token + chunk.num_tokens if dense else end
                    while not self._holds(span.region, span.layer + chunk.layer, chunk.num_layers, stop):
                        yield None
                    yield box
                number += 1

    def post(self, board: GrantBoard) -> bool:
        """Post a grant of all tokens, which lie in the blocks. Returns whether it is posted."""
        assert self.blocks is not None
        text = messages.encode_grant(granted(self.grant, 0, 0, self.block_ids))
        return self.blocks.post(board, self.grant.token, text)

    def _allocated(self, region: int, stop: int) -> bool:
        """Whether the engine has allocated the blocks of all tokens before ``stop``."""
        blocks = len(self.ids[region]) * self._caches.views[region].block_size
        return self._caches.geometry.regions[region].shard.count(stop) <= blocks

    def _holds(self, region: int, layer: int, num_layers: int, stop: int) -> bool:
        """Whether the KV of all tokens before ``stop`` lies in the blocks, for ``num_layers`` layers of a region from
        number ``layer`` on."""
        state = self.lifetime.state
        if state.phase is not ComputingPhase.COMPUTING:
            return state.phase is ComputingPhase.GRANTED
        stop = min(stop, self.grant.num_tokens)
        if stop <= state.computed:
            return True
        wanted = [(region, number) for number in range(layer, layer + num_layers)]
        return any(part.stop >= stop and part.layers.issuperset(wanted) for part in self.parts)


class _StepInFlight(msgspec.Struct, eq=False):
    """A step and its parts of prompts. ``seen``: what of the step has been handled."""

    step: ComputedStep
    parts: list[tuple[ComputingPrompt, PromptPart]]
    seen: tuple[bool, int, bool] = (False, 0, False)


class ComputingPrompts:
    """All prompts that this rank computes, by the token of their later lease. Used by the transfer thread only."""

    def __init__(
        self,
        caches: RankCaches,
        resume: Callable[[bytes], None],
        refuse: Callable[[bytes, float, str], None],
        computed: Callable[[ComputingPrompt, float], None],
        nearly: Callable[[ComputingPrompt], None],
    ) -> None:
        """
        Args:
            caches: of this rank.
            resume: called with a token: reads under it that wait may find more chunks.
            refuse: called with a token, the time and the reason: the reads under it get no more bytes.
            computed: called with a prompt that lies in its blocks as a whole, before its lease.
            nearly: called before, when it should be so in ``NEARLY_SECONDS``.
        """
        self._caches, self._resume, self._refuse = caches, resume, refuse
        self._computed, self._nearly = computed, nearly
        self.prompts: dict[bytes, ComputingPrompt] = {}
        self._deadlines = Deadlines(self._due)
        self.steps: list[_StepInFlight] = []
        """The steps that the device has not ended, the oldest first."""

    def get(self, token: bytes) -> ComputingPrompt | None:
        """The prompt under this token, while it is computed."""
        return self.prompts.get(token)

    def begin(self, prefill: Prefill, now: float) -> None:
        """The engine begins to compute a prompt that may be read meanwhile."""
        self.prompts[prefill.token] = ComputingPrompt(prefill, self._caches, now)

    def plan(self, chunks: tuple[PrefillChunk, ...], step: ComputedStep, now: float) -> None:
        """A step begins that computes these chunks.

        Raises:
            GeometryError: a block id is out of range.
        """
        parts, wrong = [], None
        for chunk, blocks in zip(chunks, step.blocks, strict=True):
            prompt = self.prompts.get(chunk.token)
            if prompt is None:
                continue
            try:
                new = [self._caches.kernel_ids(region, unpack_ids(ids)) for region, ids in enumerate(chunk.block_ids)]
            except GeometryError as error:
                # Which blocks hold the tokens is not known any more: reads wait for the lease.
                self._step(prompt, BlocksLost(ended=False), now)
                wrong = error
                continue
            if blocks is not prompt.blocks:
                prompt.blocks, prompt.parts, prompt.ids, prompt.block_ids = blocks, [], new, chunk.block_ids
            else:
                prompt.block_ids = tuple(map(bytes.__add__, prompt.block_ids, chunk.block_ids))
                prompt.ids = [np.concatenate(pair) for pair in zip(prompt.ids, new, strict=True)]
            self._step(prompt, ChunkPlanned(chunk.restarts), now)
            part = PromptPart(chunk.ready, chunk.stop, prompt.lifetime.state.life)
            prompt.parts.append(part)
            parts.append((prompt, part))
        self.steps.append(_StepInFlight(step, parts))
        if wrong is not None:
            raise wrong

    @property
    def has_news(self) -> bool:
        """Whether a step has advanced since ``look``."""
        return any(flight.seen != flight.step.progress for flight in self.steps)

    def look(self, now: float) -> None:
        """Look at the steps that the device has not ended."""
        for flight in list(self.steps):
            step = flight.step
            seen = step.progress
            if seen == flight.seen:
                continue
            begun, computed, ended = seen
            layers = step.layers[flight.seen[1] : computed]
            flight.seen = seen
            if ended:
                self.steps.remove(flight)
            for prompt, part in flight.parts:
                part.layers.update(layers)
                tokens = part.stop if ended else part.ready if begun else 0
                whole = tokens >= prompt.grant.num_tokens
                self._step(prompt, TokensComputed(part.life, tokens, whole), now)
                if layers and not ended:
                    self._step(prompt, LayersComputed(part.life), now)
                    if step.nearly and prompt.is_last(part):
                        self._nearly(prompt)
                if ended and part in prompt.parts:
                    prompt.parts.remove(part)

    def tick(self, now: float) -> None:
        """Refuse the reads of prompts that the engine has preempted and does not resume."""
        for token in self._deadlines.due(now):
            self._step(self.prompts[token], Tick(), now)

    def _due(self, token: bytes) -> float:
        prompt = self.prompts.get(token)
        return math.inf if prompt is None else prompt.lifetime.state.due

    def stop(self, stop: PrefillStop, now: float) -> None:
        """The engine has taken the blocks of a prompt back."""
        prompt = self.prompts.get(stop.token)
        if prompt is not None:
            if stop.ended:
                del self.prompts[stop.token]
            self._step(prompt, BlocksLost(stop.ended), now)

    def lose(self, token: bytes) -> None:
        """The lease of a prompt cannot begin: its blocks are the engine's again."""
        prompt = self.prompts.get(token)
        if prompt is not None and prompt.blocks is not None:
            prompt.blocks.lose()

    def grant(self, token: bytes, ids: list[Ids], now: float) -> ComputingPrompt | None:
        """The lease of a prompt begins, with its blocks. Returns the prompt, which is forgotten here."""
        prompt = self.prompts.pop(token, None)
        if prompt is not None:
            # Chunks that were sent stay good: the same tokens. The others are packed from the blocks of the lease.
            if prompt.lifetime.state.phase is not ComputingPhase.COMPUTING or not _begins_with(prompt.ids, ids):
                if prompt.blocks is not None:
                    prompt.blocks.lose()
                prompt.blocks = PromptBlocks()
            prompt.ids = ids
            self._step(prompt, LeaseBegins(), now)
        return prompt

    def _step(self, prompt: ComputingPrompt, event: ComputingEvent, now: float) -> None:
        effects = prompt.lifetime.step(event, now)
        if isinstance(event, BlocksLost):
            self._deadlines.note(prompt.grant.token, prompt.lifetime.state.due)
        for effect in effects:
            match effect:
                case ResumeReads():
                    self._resume(prompt.grant.token)
                case PostGrant():
                    self._computed(prompt, now)
                case FailReads(why):
                    self._refuse(prompt.grant.token, now, why)


def _begins_with(ours: list[Ids], theirs: list[Ids]) -> bool:
    """Whether in each region one list of blocks begins with the other one."""
    pairs = [(a[: len(b)], b[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
    return all(np.array_equal(a, b) for a, b in pairs)
