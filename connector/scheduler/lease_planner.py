"""P's part of the scheduler half: the prompts that are handed over from here, from their arrival to the lease. Pure.

P's ranks learn of a prompt with the first step that computes it, so a D may ask for it, and read it, before its lease
exists. They know it from its ``Prefill`` on, until its ``LeaseGrant`` or a ``PrefillStop`` that ends it: exactly one of
these two follows. Between two chunks of a prompt that streams, a ``PrefillStop`` that does not end it takes back the
blocks of all chunks before.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from kvferry.connector.geometry.engine_types import KVContent, RequestView, ScheduledTokens
from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.scheduler.planning import EngineFacts, covers, first_held, logger, used_blocks
from kvferry.connector.scheduler.prefixes import OfferedBlocks
from kvferry.connector.wire.params import (
    TRANSFER_ID,
    RemotePrompt,
    prompt_digest,
    prompt_names,
    to_transfer_params,
    usable_name,
    wants_prefill,
)
from kvferry.connector.wire.step_plan import (
    ID_BYTES,
    LeaseGrant,
    PeerEngine,
    Prefill,
    PrefillChunk,
    PrefillStop,
    QueuedPrompt,
    RankAddress,
    pack_ids,
)

PAUSE_SECONDS = 1.0
"""How long a paused engine holds its leases. vLLM does not end a pause, nor reset caches in it, while one is held; and
a D that is paused too would renew it up to 20 times as long. A D that is not loads meanwhile what it was told."""
STALE = "the engine's caches were reset while it computed the prompt"

_Kept = tuple[CacheKind, int, int]


class PromptPhase(enum.Enum):
    """Of a prompt: ``WAITING ─▶ COMPUTING ◀─▶ PREEMPTED``, and from each ``─▶ ENDED``."""

    WAITING = "waiting"
    """The engine has computed no token. The ranks know at most that it is in the queue."""
    COMPUTING = "computing"
    PREEMPTED = "preempted"
    """The engine has taken its blocks. One that is preempted twice has lost them once."""
    ENDED = "ended"  # its lease begins, or it will not be handed over


_BEGUN = (PromptPhase.COMPUTING, PromptPhase.PREEMPTED)


@dataclass(slots=True)
class _Prompt:
    """A prompt from the request's arrival on."""

    view: RequestView
    token: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Of the lease that follows."""
    phase: PromptPhase = PromptPhase.WAITING
    queued: bool = False
    """The ranks know that it waits."""
    streams: bool = False
    """The ranks get its blocks chunk by chunk."""
    digest: str = ""
    params: bytes = b""
    """``kv_transfer_params`` in MessagePack, and before it the digest: from its first step on."""
    reached: int = 0
    """The first token that no step has computed."""
    blocks: list[int] = field(default_factory=list)
    """For each table, how many blocks the ranks know."""
    computed_in: int = 0
    """The last step that computed tokens of it; 0 for none."""
    stale: bool = False
    """Tokens of it were computed before a reset of the caches."""


@dataclass(eq=False)
class LeasePlanner(EngineFacts):
    """The requests that are handed over from here, and their leases."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._has_states = any(table.kind == "state" for table in self.tables)
        self._prompts: dict[str, _Prompt] = {}
        self._new: list[str] = []  # since the last step
        self._us: PeerEngine | None = None  # this engine as D sees it
        self._held = HeldBlocks(self.clock)  # the leases that some rank holds
        self._draining = False
        self._paused_at: float | None = None
        self._offered = OfferedBlocks(self.prefix_seed, self.tables[0].block_size) if self.prefix_seed else None
        self._told: PeerEngine | None = None  # what the ranks know of this engine

    @property
    def ranks(self) -> tuple[RankAddress, ...]:
        """The addresses at which this engine's ranks listen; empty before ``set_ranks``."""
        return () if self._us is None else self._us.ranks

    def set_ranks(self, ranks: Iterable[RankAddress]) -> None:
        """Take the addresses at which this engine's ranks listen."""
        ordered = tuple(sorted(ranks, key=lambda rank: (rank.pp_rank, rank.tp_rank)))
        shardings = tuple(sorted({table.sharding for table in self.tables}))
        seconds = self.settings.lease_seconds
        self._us = PeerEngine(self.engine_id, self.tp_size, self.pp_size, seconds, ordered, self.host_id, shardings)
        if self._offered is not None:  # the ranks may be new, and have no offer
            self._offered.clear()

    # --- requests -----------------------------------------------------------------------------------------------

    def _add_prompt(self, view: RequestView) -> None:
        """Follow a request that is to be handed over until its end."""
        self._prompts[view.request_id] = _Prompt(view)
        self._new.append(view.request_id)

    def num_tokens_for_d(self, request: RequestView) -> int:
        """How many of a new request's last prompt tokens P must not compute, because D computes them.

        A state after the last prompt token cannot be taken back by one token. And the engine gives back the blocks
        outside the window of the *next* token: where a block ends there, D lacks it to compute the last prompt token.
        """
        prompt = request.num_prompt_tokens
        hands_over = self.produces and wants_prefill(request.params)
        if not hands_over or request.whole_prompt or request.rejected:
            return 0
        count = max(self.lookahead, 1 if self._has_states else 0)
        for table in self.tables:
            if table.first_needed(prompt) // table.block_size != table.first_needed(prompt - 1) // table.block_size:
                count = max(count, 1)
        return count if count < prompt else 0

    def _end_prompt(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``SchedulerHalf.request_finished``."""
        prompt = self._prompts.pop(request.request_id, None)
        if self.produces and completed and wants_prefill(request.params):
            stale = prompt is not None and prompt.stale
            why = STALE if stale else self._cannot_lease(request, block_ids)
            if why is None:
                return True, self._lease(prompt, request, block_ids)
            self._failed.warning("no hand-over", "kvferry: no hand-over of %s: %s", request.request_id, why)
        if prompt is not None:  # a D that asks for it must not wait
            if prompt.phase is PromptPhase.WAITING:
                self._begin(prompt, offers=False)
            self._give_up(prompt)
        return False, None

    def _cannot_lease(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> str | None:
        tokens, computed = request.num_prompt_tokens, request.num_computed_tokens
        if self._draining:
            return "this engine hands nothing over any more, it is being drained"
        if self._pause_lasts:
            return "this engine is paused"
        if self._us is None:
            return "the workers' addresses are unknown"
        if request.prompt_token_ids is None:
            return "its prompt is given as embeddings"
        if computed < tokens:
            return f"{computed} of its {tokens} prompt tokens are computed"
        if self._has_states and computed > tokens:
            return f"its state is that after {computed} tokens, its prompt has {tokens}"
        if any(not covers(table, ids, tokens) for table, ids in zip(self.tables, block_ids, strict=True)):
            return f"its blocks do not cover its {tokens} prompt tokens"
        return None

    def _lease(self, prompt: _Prompt | None, view: RequestView, block_ids: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The prompt is computed, and the engine holds its blocks. Returns the ``kv_transfer_params`` of P's answer."""
        computed_in = self._plan.step if prompt is None else prompt.computed_in
        if prompt is not None and self._changed(prompt, view):
            self._give_up(prompt)
            prompt = None
        if prompt is None:
            prompt = _Prompt(view)
        if prompt.phase is PromptPhase.WAITING:  # the engine has not told of its steps
            prompt.view = view
            self._begin(prompt, offers=True)
        tables = list(zip(self.tables, block_ids, strict=True))
        packed = tuple(pack_ids(used_blocks(table, ids, view.num_prompt_tokens)) for table, ids in tables)
        self._held.begin(view.request_id, sum(map(len, packed)) // ID_BYTES)
        kept = tuple((table.kind, table.window, first_held(table, ids)) for table, ids in tables if table.window)
        params, encoded = self._params(view, prompt, kept)
        prompt.phase = PromptPhase.ENDED
        self._plan.leases.append(
            LeaseGrant(
                view.request_id,
                prompt.token,
                view.num_prompt_tokens,
                packed,
                prompt.digest,
                computed_in,
                encoded if encoded != prompt.params else b"",
                view.traceparent,
            )
        )
        return params

    @staticmethod
    def _changed(prompt: _Prompt, view: RequestView) -> bool:
        """Whether D was, or would be, told of another prompt than the one that was computed."""
        first = prompt.view
        if prompt.phase is PromptPhase.WAITING:
            return False
        if prompt.phase is PromptPhase.ENDED or not prompt.params:
            return True
        if first.num_prompt_tokens != view.num_prompt_tokens or first.extra != view.extra:
            return True
        ours, theirs = first.prompt_token_ids, view.prompt_token_ids
        return ours is not theirs and list(ours or ()) != list(theirs or ())

    # --- prefixes -----------------------------------------------------------------------------------------------

    def offer_prefix(
        self, content: KVContent, block_ids: Sequence[int], asked: tuple[KVContent, bytes] | None = None
    ) -> None:
        """A request has ended by itself, and its blocks are still its own: other engines may read its KV until the
        engine reuses a block. ``content``: what the blocks hold, without tokens whose KV is not computed yet; where
        step outputs come in order, the device has computed it on all ranks. ``asked``: as in ``OfferedBlocks.offer``.
        """
        if self._offered is None or self._us is None or not self.streams():
            return
        new = self._offered.offer(content, block_ids, asked)
        if new is None:
            return
        offer, blocks = new
        if self._told is not self._us:
            self._told = self._us
            params = msgspec.msgpack.encode(to_transfer_params(RemotePrompt(bytes(16), 1, "", self._us)))
            offer = replace(offer, params=params)
        self._plan.offers.append(offer)
        self.watch_blocks(blocks)

    def block_reused(self, block_id: int) -> None:
        """The engine gives a block to another request, or has reset its prefix cache. The ranks learn of it before they
        get the work of the next step."""
        if self._offered is not None and self._offered.reused(block_id):
            self._plan.reused.append(block_id)
            self._plan.urgent = True

    # --- drain, pause, reset ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Give no more leases. The leases that are held are served until they end; ``leases_held`` counts them. For an
        engine that is about to end: D prefills what would have been handed over. ``stop_draining`` gives leases again.
        """
        if not self._draining:
            logger.info("kvferry: no more prompts are handed over from here; %d lease(s) are served", len(self._held))
        self._draining = True

    def stop_draining(self) -> None:
        """Give leases again."""
        self._draining = False

    @property
    def leases_held(self) -> int:
        """The number of leases that have not ended on all ranks. With ``drain`` it falls to 0, at the latest when
        ``lease_cap_seconds`` have passed."""
        return len(self._held)

    def leases_ended(self, request_ids: Iterable[str]) -> None:
        """All ranks have reported the end of these requests' leases."""
        self._held.end(request_ids)

    def _reset_prompts(self) -> bool:
        """The engine's caches were reset: prompts of which tokens are computed are given up, also where the engine
        computes them anew: a D that was told of one has it refused, and asks no more. Returns whether no lease is held.
        """
        for prompt in self._prompts.values():
            prompt.stale |= prompt.computed_in > 0
            if prompt.phase in _BEGUN:
                self._give_up(prompt)
                self._plan.urgent = True
        self._end_leases()
        return not self._held

    def _end_leases(self) -> None:
        self._plan.ends_leases |= bool(self._held)

    @property
    def _pause_lasts(self) -> bool:
        return self._paused_at is not None and self.clock() >= self._paused_at + PAUSE_SECONDS

    # --- every step ---------------------------------------------------------------------------------------------

    @property
    def prefills(self) -> Set[str]:
        """The requests whose prompts are handed over from here, once they are computed."""
        return self._prompts.keys()

    def _plan_prompts(
        self,
        scheduled: Iterable[ScheduledTokens],
        preempted: Iterable[str],
        may_stream: Callable[[str], bool],
        *,
        alone: bool,
    ) -> None:
        """Add to the plan what the next step does with these prompts. As ``SchedulerHalf.take_plan``. ``may_stream``:
        whether the tokens of a request stand once they are computed. ``alone``: the step computes tokens of one request
        only."""
        if not (self._prompts or self._new or self._held):
            return
        if not self.is_paused():
            self._paused_at = None
        elif self._paused_at is None:
            self._paused_at = self.clock()
        elif self._pause_lasts:
            self._end_leases()
        for request_id in preempted:
            if request_id in self._prompts:
                self._take_blocks(self._prompts[request_id])
        for tokens in scheduled:
            prompt = self._prompts.get(tokens.request_id)
            if prompt is not None:
                self._scheduled(prompt, tokens, may_stream(tokens.request_id), alone)
        new, self._new = self._new, []
        for prompt in [self._prompts[request_id] for request_id in new if request_id in self._prompts]:
            if prompt.phase is PromptPhase.WAITING and not prompt.queued and self._may_lease(prompt):
                prompt.queued = True
                view, token = prompt.view, prompt.token
                names = prompt_names(view.request_id, view.params, token)
                self._plan.queued.append(QueuedPrompt(view.request_id, token, names))

    def _may_lease(self, prompt: _Prompt) -> bool:
        return not (self._draining or self._pause_lasts or prompt.stale)

    def _scheduled(self, prompt: _Prompt, tokens: ScheduledTokens, may_stream: bool, alone: bool) -> None:
        # Of the tokens that a request finds in the prefix cache, others of this step may compute some.
        ready = tokens.start if alone or not (tokens.all_blocks or not prompt.blocks) else 0
        if prompt.phase is PromptPhase.WAITING:
            self._begin(prompt, tokens, offers=self._may_lease(prompt), streams=self._whole and may_stream)
            if not prompt.params:
                self._give_up(prompt)
        elif tokens.all_blocks:
            self._take_blocks(prompt)  # where the engine has not said so
            if prompt.streams and not may_stream:
                self._give_up(prompt)
        elif tokens.start < prompt.reached:  # the engine has found that computed tokens are not valid
            self._give_up(prompt)
        stop = min(tokens.start + tokens.count, prompt.view.num_prompt_tokens)
        prompt.reached = stop  # what lies behind the prompt may be drafts, which the engine takes back
        if prompt.streams and tokens.start < stop and prompt.phase in _BEGUN:
            ids, restarts = self._new_blocks(prompt, tokens), prompt.phase is PromptPhase.PREEMPTED
            prompt.phase = PromptPhase.COMPUTING
            self._plan.prefill_chunks.append(PrefillChunk(prompt.token, tokens.start, stop, ids, restarts, ready))

    def _new_blocks(self, prompt: _Prompt, tokens: ScheduledTokens) -> tuple[bytes, ...]:
        """The blocks that the ranks do not know, without those behind the prompt."""
        if tokens.all_blocks or not prompt.blocks:
            prompt.blocks = [0] * len(self.tables)
        packed = []
        for place, (table, ids) in enumerate(zip(self.tables, tokens.block_ids, strict=True)):
            needed = -(-prompt.view.num_prompt_tokens // table.block_size)
            new = list(ids[: max(0, needed - prompt.blocks[place])])
            prompt.blocks[place] += len(new)
            packed.append(pack_ids(new))
        return tuple(packed)

    def _begin(
        self, prompt: _Prompt, tokens: ScheduledTokens | None = None, *, offers: bool, streams: bool = False
    ) -> None:
        """Tell the ranks of a prompt. ``tokens``: what its first step computes; ``None`` where that is not known.
        Without ``offers`` the prompt is not handed over, and all that matters are its names."""
        view = prompt.view
        if offers and view.prompt_token_ids is not None and self._us is not None:
            prompt.digest = prompt_digest(view.prompt_token_ids, view.extra)
            prompt.params = self._params(view, prompt)[1]
        prompt.phase, prompt.streams = PromptPhase.COMPUTING, streams and bool(prompt.params)
        self._plan.prefills.append(
            Prefill(
                request_id=view.request_id,
                token=prompt.token,
                num_tokens=view.num_prompt_tokens,
                digest=prompt.digest,
                names=prompt_names(view.request_id, view.params, prompt.token),
                params=prompt.params,
                found=0 if tokens is None else tokens.start,
                step_tokens=0 if tokens is None else min(tokens.count, view.num_prompt_tokens - tokens.start),
                streams=prompt.streams,
            )
        )

    def _params(self, view: RequestView, prompt: _Prompt, kept: tuple[_Kept, ...] = ()) -> tuple[dict[str, Any], bytes]:
        """The ``kv_transfer_params`` of a prompt, as they are and in MessagePack. ``kept``: as in ``RemotePrompt``."""
        assert self._us is not None
        remote_prompt = RemotePrompt(prompt.token, view.num_prompt_tokens, prompt.digest, self._us, kept, view.adapter)
        params = to_transfer_params(remote_prompt)
        if transfer_id := usable_name((view.params or {}).get(TRANSFER_ID)):
            params[TRANSFER_ID] = transfer_id
        return params, msgspec.msgpack.encode(params)

    def _take_blocks(self, prompt: _Prompt) -> None:
        """The engine has preempted the request."""
        if prompt.phase is PromptPhase.COMPUTING:
            prompt.phase = PromptPhase.PREEMPTED
            self._plan.stops.append(PrefillStop(prompt.token, ended=False))

    def _give_up(self, prompt: _Prompt) -> None:
        """The prompt will not be handed over."""
        if prompt.phase in _BEGUN:
            self._plan.stops.append(PrefillStop(prompt.token, ended=True))
        prompt.phase = PromptPhase.ENDED


class HeldBlocks(dict[str, int]):
    """The leases of an engine that have not ended on all ranks: by request id, its number of blocks; and for how long
    they hold them. ``blocks``: of all leases.

    Blocks of all block tables count: a block that two leases hold, as prompts with one prefix do, counts twice.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock``: seconds, never going back."""
        super().__init__()
        self._clock, self._since = clock, clock()
        self._block_seconds = 0.0  # until ``_since``, since the last ``take_block_us``
        self.blocks = 0

    def begin(self, request_id: str, blocks: int) -> None:
        """A lease begins."""
        self._pass_time()
        self.blocks += blocks - self.get(request_id, 0)
        self[request_id] = blocks

    def end(self, request_ids: Iterable[str]) -> None:
        """These leases have ended. Those that are unknown do not count."""
        self._pass_time()
        for request_id in request_ids:
            self.blocks -= self.pop(request_id, 0)

    def take_block_us(self) -> int:
        """The sum over the blocks of the whole microseconds for which they were held since the last call; what is left
        of one counts at the next call."""
        self._pass_time()
        whole = int(self._block_seconds * 1e6)
        self._block_seconds -= whole / 1e6
        return whole

    def _pass_time(self) -> None:
        now = self._clock()
        self._block_seconds += self.blocks * (now - self._since)
        self._since = now
