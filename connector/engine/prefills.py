"""The prompts that this engine computes for a D: P's scheduler half before the lease.

``prompt_prefill.PROMPT_PREFILL`` decides; its effects are parts of the step plans. P's ranks learn of a prompt with the
first step that computes it, so a D may ask for it, and read it, before its lease exists.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.connector.engine import prompt_prefill
from kvferry.connector.engine.plan_builder import StepPlanBuilder
from kvferry.connector.engine.prompt_names import TRANSFER_ID, prompt_names, usable_name
from kvferry.connector.engine.prompt_prefill import PromptEffect, PromptEvent, PromptPhase, PromptPrefill
from kvferry.connector.engine.transfer_params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.geometry.engine_types import BlockTable, RequestView, ScheduledTokens
from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import LeaseGrant, PeerEngine, Prefill, QueuedPrompt, pack_ids

_Kept = tuple[CacheKind, int, int]


@dataclass(slots=True)
class _Prompt:
    """A prompt from the request's arrival on. ``digest`` and ``params``: from its first step on. ``reached``: the first
    token that no step has computed. ``blocks``: for each table, how many blocks the ranks know."""

    view: RequestView
    lifetime: Lifetime[PromptPrefill, PromptEvent, PromptEffect]
    digest: str = ""
    params: bytes = b""
    reached: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def token(self) -> bytes:
        return self.lifetime.state.token


class Prefills:
    """All prompts that this engine computes for a D. ``us``: this engine as D sees it, once its ranks are known."""

    def __init__(self, tables: Sequence[BlockTable], plan: StepPlanBuilder, clock: Callable[[], float]) -> None:
        self._tables, self._plan, self._clock = tuple(tables), plan, clock
        self._whole = all(table.whole for table in self._tables)
        self._prompts: dict[str, _Prompt] = {}
        self._new: list[str] = []  # since the last step
        self.us: PeerEngine | None = None

    def add(self, view: RequestView) -> None:
        """A request whose prompt is handed over has arrived."""
        state = PromptPrefill(secrets.token_bytes(16))
        lifetime = Lifetime(prompt_prefill.PROMPT_PREFILL, state, self._clock())
        self._prompts[view.request_id] = _Prompt(view, lifetime)
        self._new.append(view.request_id)

    @property
    def any(self) -> bool:
        """Whether any prompt has not ended, or has come since the last step."""
        return bool(self._prompts or self._new)

    def reset(self) -> bool:
        """Give up the prompts of which tokens are computed. Each waits to be begun anew, under another token. Returns
        whether there were any."""
        begun = [prompt for prompt in self._prompts.values() if prompt.lifetime.state.phase in prompt_prefill.BEGUN]
        for prompt in begun:
            self._advance(prompt, prompt_prefill.PromptGivenUp())
            self.add(prompt.view)
        return bool(begun)

    def step(
        self,
        scheduled: Iterable[ScheduledTokens],
        preempted: Iterable[str],
        *,
        streams: Callable[[str], bool],
        may_lease: Callable[[str], bool],
        alone: bool,
    ) -> None:
        """Add to the plan what the next step does with these prompts.

        Args:
            scheduled: of which requests the step computes which tokens.
            preempted: the requests whose blocks the engine has taken since the last step.
            streams: whether a prompt that begins, or begins anew, may leave before all of it is computed: nothing may
                make its tokens invalid after they are computed.
            may_lease: whether this engine would give a lease of a prompt.
            alone: the step computes tokens of one request only.
        """
        for request_id in preempted:
            if request_id in self._prompts:
                self._advance(self._prompts[request_id], prompt_prefill.BlocksTaken())
        for tokens in scheduled:
            prompt = self._prompts.get(tokens.request_id)
            if prompt is not None:
                self._scheduled(prompt, tokens, streams, may_lease, alone)
        new, self._new = self._new, []
        for prompt in [self._prompts[request_id] for request_id in new if request_id in self._prompts]:
            view, token = prompt.view, prompt.token
            if prompt.lifetime.state.phase is PromptPhase.WAITING and may_lease(view.request_id):
                queued = QueuedPrompt(view.request_id, token, prompt_names(view.request_id, view.params, token))
                self._advance(prompt, prompt_prefill.LeftInQueue(queued))

    def _scheduled(
        self,
        prompt: _Prompt,
        tokens: ScheduledTokens,
        streams: Callable[[str], bool],
        may_lease: Callable[[str], bool],
        alone: bool,
    ) -> None:
        # Of the tokens that a request finds in the prefix cache, others of this step may compute some.
        ready = tokens.start if alone or not (tokens.all_blocks or not prompt.blocks) else 0
        if prompt.lifetime.state.phase is PromptPhase.WAITING:
            offers = may_lease(tokens.request_id)
            self._begin(prompt, tokens, offers=offers, streams=self._whole and streams(tokens.request_id))
            if not prompt.params:
                self._advance(prompt, prompt_prefill.PromptGivenUp())
        elif tokens.all_blocks:
            self._advance(prompt, prompt_prefill.BlocksTaken())  # where the engine has not said so
            if prompt.lifetime.state.streams and not streams(tokens.request_id):
                self._advance(prompt, prompt_prefill.PromptGivenUp())
        elif tokens.start < prompt.reached:  # the engine has found that computed tokens are not valid
            self._advance(prompt, prompt_prefill.PromptGivenUp())
        stop = min(tokens.start + tokens.count, prompt.view.num_prompt_tokens)
        prompt.reached = stop  # what lies behind the prompt may be drafts, which the engine takes back
        if prompt.lifetime.state.streams and tokens.start < stop:
            ids = self._new_blocks(prompt, tokens)
            self._advance(prompt, prompt_prefill.StepScheduled(tokens.start, stop, ids, ready))

    def _new_blocks(self, prompt: _Prompt, tokens: ScheduledTokens) -> tuple[bytes, ...]:
        """The blocks that the ranks do not know, without those behind the prompt."""
        if tokens.all_blocks or not prompt.blocks:
            prompt.blocks = [0] * len(self._tables)
        packed = []
        for place, (table, ids) in enumerate(zip(self._tables, tokens.block_ids, strict=True)):
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
        if offers and view.prompt_token_ids is not None and self.us is not None:
            prompt.digest = prompt_digest(view.prompt_token_ids, view.extra)
            prompt.params = self.params(view, prompt.token, prompt.digest)[1]
        prefill = Prefill(
            request_id=view.request_id,
            token=prompt.token,
            num_tokens=view.num_prompt_tokens,
            prompt=prompt.digest,
            names=prompt_names(view.request_id, view.params, prompt.token),
            params=prompt.params,
            found=0 if tokens is None else tokens.start,
            step_tokens=0 if tokens is None else min(tokens.count, view.num_prompt_tokens - tokens.start),
            streams=streams and bool(prompt.params),
        )
        self._advance(prompt, prompt_prefill.PrefillBegun(prefill))

    def params(
        self, view: RequestView, token: bytes, digest: str, kept: tuple[_Kept, ...] = ()
    ) -> tuple[dict[str, Any], bytes]:
        """The ``kv_transfer_params`` of a prompt, as they are and in MessagePack."""
        assert self.us is not None
        params = to_transfer_params(RemotePrompt(token, view.num_prompt_tokens, digest, self.us, kept, view.adapter))
        transfer_id = usable_name((view.params or {}).get(TRANSFER_ID))
        if transfer_id:
            params[TRANSFER_ID] = transfer_id
        return params, msgspec.msgpack.encode(params)

    def lease(
        self, view: RequestView, packed: tuple[bytes, ...], kept: tuple[_Kept, ...], computed_in: int
    ) -> dict[str, Any]:
        """The prompt is computed, and the engine holds its blocks. Returns the ``kv_transfer_params`` of P's answer.

        Args:
            view: the request at its end.
            packed: its blocks, per block table.
            kept: as in ``RemotePrompt``.
            computed_in: the last step that computed tokens of it.
        """
        prompt = self._prompts.pop(view.request_id, None)
        if prompt is not None and self._changed(prompt, view):
            self._advance(prompt, prompt_prefill.PromptGivenUp())
            prompt = None
        if prompt is None:
            self.add(view)
            prompt = self._prompts.pop(view.request_id)
        if prompt.lifetime.state.phase is PromptPhase.WAITING:  # the engine has not told of its steps
            prompt.view = view
            self._begin(prompt, offers=True)
        params, encoded = self.params(view, prompt.token, prompt.digest, kept)
        lease = LeaseGrant(
            view.request_id,
            prompt.token,
            view.num_prompt_tokens,
            packed,
            prompt.digest,
            computed_in,
            encoded if encoded != prompt.params else b"",
            view.traceparent,
        )
        self._advance(prompt, prompt_prefill.PromptLeased(lease))
        return params

    @staticmethod
    def _changed(prompt: _Prompt, view: RequestView) -> bool:
        """Whether D was, or would be, told of another prompt than the one that was computed."""
        state, first = prompt.lifetime.state, prompt.view
        if state.phase is PromptPhase.WAITING:
            return False
        if state.phase is PromptPhase.ENDED or not prompt.params:
            return True
        if first.num_prompt_tokens != view.num_prompt_tokens or first.extra != view.extra:
            return True
        ours, theirs = first.prompt_token_ids, view.prompt_token_ids
        return ours is not theirs and list(ours or ()) != list(theirs or ())

    def give_up(self, request_id: str) -> None:
        """A request has ended without a lease. A D that asks for its prompt must not wait."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        if prompt.lifetime.state.phase is PromptPhase.WAITING:
            self._begin(prompt, offers=False)
        self._advance(prompt, prompt_prefill.PromptGivenUp())

    def _advance(self, prompt: _Prompt, event: PromptEvent) -> None:
        for effect in prompt.lifetime.step(event, self._clock()):
            self._plan.add(prompt.view.request_id, effect)
