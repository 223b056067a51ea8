"""P's part of the scheduler half: which prompts to hand over, and the leases. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any

from kvferry.connector.engine.block_contents import covers, first_held, used_blocks
from kvferry.connector.engine.held_blocks import HeldBlocks
from kvferry.connector.engine.plan_builder import StepPlanBuilder
from kvferry.connector.engine.prefills import Prefills
from kvferry.connector.engine.transfer_params import wants_prefill
from kvferry.connector.geometry.engine_types import BlockTable, RequestView, ScheduledTokens
from kvferry.connector.wire.step_plan import ID_BYTES, PeerEngine, pack_ids

logger = logging.getLogger("vllm.kvferry.scheduler")

PAUSE_SECONDS = 1.0
"""How long a paused engine holds its leases. vLLM does not end a pause, nor reset caches in it, while one is held; and
a D that is paused too would renew it up to ``lease_cap_seconds``. A D that is not loads meanwhile what it was told."""


STALE = "the engine's caches were reset while it computed the prompt"


class LeasePlanner:
    """The requests that are handed over from here, and their leases."""

    def __init__(
        self,
        tables: Sequence[BlockTable],
        plan: StepPlanBuilder,
        *,
        produces: bool,
        lookahead: int,
        may_stream: Callable[[str], bool],
        is_paused: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            plan: where the leases go.
            may_stream: whether the tokens of a request stand once they are computed.
            tables, produces, lookahead, is_paused, clock: as ``SchedulerHalf`` takes them.
        """
        self._tables = tuple(tables)
        self._has_states = any(table.kind == "state" for table in self._tables)
        self._plan = plan
        self._produces = produces
        self._lookahead = lookahead
        self._prompts = Prefills(self._tables, plan, clock)
        self._may_stream = may_stream
        self._prefills: dict[str, int] = {}  # by request: the last step that computed tokens of it
        self.held = HeldBlocks(clock)
        """The leases that some rank holds."""
        self._draining = False
        self._clock, self._is_paused = clock, is_paused
        self._paused_at: float | None = None
        self._stale: set[str] = set()  # requests with tokens that were computed before a reset

    def set_engine(self, us: PeerEngine) -> None:
        """Take the addresses of this engine, which D is given."""
        self._prompts.us = us

    def new_request(self, request: RequestView) -> None:
        """Follow the request until its end, where it is to be handed over."""
        if self._produces and wants_prefill(request.params):
            self._prefills[request.request_id] = 0
            self._prompts.add(request)

    def num_tokens_for_d(self, request: RequestView) -> int:
        """How many of a new request's last prompt tokens P must not compute, because D computes them.

        A state after the last prompt token cannot be taken back by one token. And the engine gives back the blocks
        outside the window of the *next* token: where a block ends there, D lacks it to compute the last prompt token.
        """
        prompt = request.num_prompt_tokens
        if not (self._produces and wants_prefill(request.params)) or request.whole_prompt or request.rejected:
            return 0
        count = max(self._lookahead, 1 if self._has_states else 0)
        for table in self._tables:
            if table.first_needed(prompt) // table.block_size != table.first_needed(prompt - 1) // table.block_size:
                count = max(count, 1)
        return count if count < prompt else 0

    def request_finished(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are still its own. As ``SchedulerHalf.request_finished``."""
        computed_in = self._prefills.pop(request.request_id, self._plan.step)
        stale = request.request_id in self._stale
        self._stale.discard(request.request_id)
        params = None
        if self._produces and completed and wants_prefill(request.params):
            params = self._lease(request, block_ids, computed_in, stale=stale)
        if params is None:
            self._prompts.give_up(request.request_id)
        return params is not None, params

    def _lease(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], computed_in: int, *, stale: bool
    ) -> dict[str, Any] | None:
        why = STALE if stale else self._cannot_lease(request, block_ids)
        if why is not None:
            logger.warning("kvferry: no hand-over of %s: %s", request.request_id, why)
            return None
        num_tokens = request.num_prompt_tokens
        tables = list(zip(self._tables, block_ids, strict=True))
        packed = tuple(pack_ids(used_blocks(table, ids, num_tokens)) for table, ids in tables)
        self.held.add(request.request_id, sum(map(len, packed)) // ID_BYTES)
        kept = tuple((table.kind, table.window, first_held(table, ids)) for table, ids in tables if table.window)
        return self._prompts.lease(request, packed, kept, computed_in)

    def drain(self) -> None:
        """Give no more leases."""
        if not self._draining:
            logger.info("kvferry: no more prompts are handed over from here; %d lease(s) are served", len(self.held))
        self._draining = True

    def stop_draining(self) -> None:
        """Give leases again."""
        self._draining = False

    def reset(self) -> bool:
        """The engine's caches were reset. As ``SchedulerHalf.reset_caches``. Returns whether no lease is held."""
        self._stale.update(request_id for request_id, step in self._prefills.items() if step)
        self._plan.urgent |= self._prompts.reset()
        self._end_leases()
        return not self.held

    def _end_leases(self) -> None:
        if self.held:
            self._plan.end_leases()

    @property
    def _pause_lasts(self) -> bool:
        return self._paused_at is not None and self._clock() >= self._paused_at + PAUSE_SECONDS

    def _may_lease(self, request_id: str) -> bool:
        return not (self._draining or self._pause_lasts or request_id in self._stale)

    def _cannot_lease(self, request: RequestView, block_ids: Sequence[Sequence[int]]) -> str | None:
        tokens, computed = request.num_prompt_tokens, request.num_computed_tokens
        if self._draining:
            return "this engine hands nothing over any more, it is being drained"
        if self._pause_lasts:
            return "this engine is paused"
        if self._prompts.us is None:
            return "the workers' addresses are unknown"
        if request.prompt_token_ids is None:
            return "its prompt is given as embeddings"
        if computed < tokens:
            return f"{computed} of its {tokens} prompt tokens are computed"
        if self._has_states and computed > tokens:
            return f"its state is that after {computed} tokens, its prompt has {tokens}"
        if any(not covers(table, ids, tokens) for table, ids in zip(self._tables, block_ids, strict=True)):
            return f"its blocks do not cover its {tokens} prompt tokens"
        return None

    def computed_any(self, step: int) -> bool:
        """Whether this step was the last one that computed tokens of a request that is to be handed over."""
        return step in self._prefills.values()

    @property
    def prefills(self) -> Set[str]:
        """The requests whose prompts are handed over from here."""
        return self._prefills.keys()

    @property
    def follows_prompts(self) -> bool:
        """Whether ``plan_step`` has something to do."""
        return self._prompts.any or len(self.held) > 0

    def plan_step(self, scheduled: Iterable[ScheduledTokens], preempted: Iterable[str], *, alone: bool) -> None:
        """Add to the plan what the next step does with these prompts. As ``SchedulerHalf.take_plan``. ``alone``: the
        step computes tokens of one request only."""
        if not self._is_paused():
            self._paused_at = None
        elif self._paused_at is None:
            self._paused_at = self._clock()
        elif self._pause_lasts:
            self._end_leases()
        if self._stale:
            scheduled = list(scheduled)
            self._stale.difference_update(tokens.request_id for tokens in scheduled if tokens.all_blocks)
        self._prompts.step(
            scheduled, preempted, streams=self._may_stream, may_lease=self._may_lease, alone=alone
        )  # fmt: skip

    def step_planned(self, step: int, computed: Collection[str]) -> None:
        """The step with this number computes tokens of the requests ``computed``."""
        if self._prefills:
            for request_id in self._prefills.keys() & computed:
                self._prefills[request_id] = step
