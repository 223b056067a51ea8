"""The scheduler half: the plan of each engine step. No vLLM, no I/O.

P's decisions are in ``lease_planner``, D's in ``load_planner``.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from kvferry.connector.engine.engine_facts import EngineFacts
from kvferry.connector.engine.lease_planner import LeasePlanner
from kvferry.connector.engine.load_planner import LoadPlanner, RequestPhase
from kvferry.connector.engine.params import wants_load, wants_prefill
from kvferry.connector.engine.plan_builder import StepPlanBuilder
from kvferry.connector.geometry.engine_types import RequestView, ScheduledTokens
from kvferry.connector.step_loads.step_load_rule import StepLoadRule
from kvferry.connector.wire.metrics import Figures, HandoverStats
from kvferry.connector.wire.step_plan import LookupResult, PeerEngine, RankAddress, StepPlan
from kvferry.connector.wire.transfer_estimate import EstimateKey, TransferEstimate
from kvferry.transport.wake import RateLimitedLog

logger = logging.getLogger("vllm.kvferry.scheduler")

REQUEST_LEVELS = {
    "awaiting_prompt": RequestPhase.AWAITED, "awaiting_blocks": RequestPhase.OFFERED, "loading": RequestPhase.LOADING,
}  # fmt: skip
"""By level, the phase of the requests that it counts."""


@dataclass(eq=False)
class SchedulerHalf(EngineFacts):
    """One engine's decisions. Called from the engine's scheduler, by one thread."""

    def __post_init__(self) -> None:
        self._log = RateLimitedLog(logger)
        self._stats = HandoverStats("scheduler")
        self._quiet = False  # nothing was under way when the metrics were taken last
        self._plan = StepPlanBuilder(secrets.token_bytes(16))
        self._leases = LeasePlanner(self, self._plan, self._may_stream)
        self._loads = LoadPlanner(self, self._plan)

    @property
    def step_load_rule(self) -> StepLoadRule:
        """Which loads go inside a step."""
        return self._loads.rule

    @property
    def ranks(self) -> tuple[RankAddress, ...]:
        """The addresses at which this engine's ranks listen; empty before ``set_ranks``."""
        return () if self._leases.us is None else self._leases.us.ranks

    def set_ranks(self, ranks: Iterable[RankAddress]) -> None:
        """Take the addresses at which this engine's ranks listen."""
        ordered = tuple(sorted(ranks, key=lambda rank: (rank.pp_rank, rank.tp_rank)))
        shardings = tuple(sorted({table.sharding for table in self.tables}))
        seconds = self.settings.lease_seconds
        self._leases.us = PeerEngine(
            self.engine_id, self.tp_size, self.pp_size, seconds, ordered, self.host_id, shardings
        )

    # --- every request ------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """Check whether P holds this request's KV. If so, its lease is renewed from now on; if the KV cannot be used,
        the lease is released. Idempotent."""
        if request.request_id in self._loads:
            return
        self._check_role(request)
        self._leases.new_request(request)
        self._loads.new_request(request)

    def _check_role(self, request: RequestView) -> None:
        """One line where a router sends a request of one role to an engine that has only the other."""
        if wants_prefill(request.params) and not self.produces:
            wrong, role, right = "to hand its prompt over (do_remote_decode)", "kv_consumer", "kv_producer"
        elif wants_load(request.params) and not self.consumes:
            wrong, role, right = "to load its prompt (do_remote_prefill)", "kv_producer", "kv_consumer"
        else:
            return
        self._log.warning(
            role,
            "kvferry: %s asks this engine %s, but its kv_role is %s: nothing is handed over; start it as %s or kv_both",
            request.request_id, wrong, role, right,
        )  # fmt: skip

    def request_finished(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are still its own.

        Args:
            request: the request.
            block_ids: its blocks, per block table.
            completed: it ended by itself (stop or length), not by abort or error.

        Returns:
            Whether the blocks stay held until ``finished_sending``, and the parameters for D.
        """
        self._loads.request_finished(request.request_id)
        return self._leases.request_finished(request, block_ids, completed=completed)

    # --- D ------------------------------------------------------------------------------------------------------

    def num_new_matched_tokens(self, request: RequestView, num_local: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the ``num_local`` that the engine has, and whether asynchronously. ``None``: P has not
        told of the prompt yet, and the engine must ask again in its next step.

        The engine computes the last prompt token in any case. Where all tables are whole, the result may include this
        token. Otherwise it must not: the engine would free blocks of a window that only that token needs, and a state
        would process that token twice.
        """
        self.on_new_request(request)
        return self._loads.num_new_matched_tokens(request, num_local)

    def after_alloc(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """vLLM has decided: load ``num_external`` tokens into these blocks, or nothing."""
        self._loads.after_alloc(request, block_ids, num_external)

    def loads_finished(
        self, request_ids: Iterable[str], estimates: Mapping[EstimateKey, TransferEstimate] | None = None
    ) -> None:
        """The workers have reported these loads, whether they failed or not. ``estimates``: how long loads took that
        the ranks measured, also loads inside a step."""
        self._loads.loads_finished(request_ids, estimates)

    def lookups_answered(self, results: Mapping[str, LookupResult]) -> None:
        """P has answered where its lease was known by name only, or has said that its engine has the prompt, or cannot
        be asked. ``results``: by request, as the first rank's worker half has returned them."""
        self._loads.lookups_answered(results)

    # --- P ------------------------------------------------------------------------------------------------------

    @property
    def prefills(self) -> Set[str]:
        """The requests whose prompts are handed over from here, once they are computed."""
        return self._leases.prefills

    def _may_stream(self, request_id: str) -> bool:
        """Whether the tokens of a prompt stand once they are computed. Those that a load brings may prove to be
        missing, also where the prompt finds them in the prefix cache: a load inside a step ends after that step."""
        loads = self._plan.loads_inside or (self.steps is not None and self.steps.loads_inside)
        return self.streams() and not loads and not self._loads.loads_itself(request_id)

    def num_tokens_for_d(self, request: RequestView) -> int:
        """How many of a new request's last prompt tokens P must not compute, because D computes them."""
        return self._leases.num_tokens_for_d(request)

    def drain(self) -> None:
        """Give no more leases. The leases that are held are served until they end; ``leases_held`` counts them. For an
        engine that is about to end: D prefills what would have been handed over. ``stop_draining`` gives leases again.
        """
        self._leases.drain()

    def stop_draining(self) -> None:
        """Give leases again."""
        self._leases.stop_draining()

    @property
    def leases_held(self) -> int:
        """The number of leases that have not ended on all ranks. With ``drain`` it falls to 0, at the latest when
        ``lease_cap_seconds`` have passed."""
        return len(self._leases.held)

    def leases_ended(self, request_ids: Iterable[str]) -> None:
        """All ranks have reported the end of these requests' leases."""
        self._leases.held.remove(request_ids)

    # --- resets -------------------------------------------------------------------------------------------------

    def reset_caches(self) -> bool:
        """The engine's caches were reset: no KV that was computed before is handed over from here, or loaded here.

        All leases end with the next plan. Prompts under computation are given up; one of which the engine computes all
        tokens anew, with the blocks of ``ScheduledTokens.all_blocks``, is handed over as another. Loads are cancelled.

        Returns:
            Whether no lease and no load is left. Otherwise the caller may ask again after a few steps.
        """
        unheld, unloaded = self._leases.reset(), self._loads.reset()
        return unheld and unloaded

    @property
    def has_urgent_plan(self) -> bool:
        """Whether the engine must take a step, even without requests: peers read what its last plan made readable."""
        return self._plan.urgent

    # --- every step ---------------------------------------------------------------------------------------------

    @property
    def stats(self) -> HandoverStats:
        """The metrics of this half, with the levels of now. Take them at the end of each step: after the last step
        before the engine idles they are what they stay."""
        held, levels = self._leases.held, self._stats.levels
        levels["leases"], levels["lease_blocks"] = len(held), held.blocks
        for level, phase in REQUEST_LEVELS.items():
            levels[level] = self._loads.num_in(phase)
        if block_ms := held.take_block_ms():
            self._stats.total("lease_block_ms", block_ms)
        return self._stats

    def take_stats(self) -> Figures | None:
        """The metrics of this half since the last call; ``None`` where there are none. Zeros are reported once."""
        quiet = not (self._leases.held or self._loads.active)
        if quiet and self._quiet:
            return None
        self._quiet = quiet
        return self.stats.take()

    def take_plan(
        self,
        *,
        idle: bool = False,
        computed: Collection[str] = (),
        preempted: Collection[str] = (),
        scheduled: Iterable[ScheduledTokens] = (),
    ) -> StepPlan:
        """The work of the workers since the last step.

        Args:
            idle: the engine computes nothing in this step.
            computed: the requests that the engine computes tokens of in this step.
            preempted: the requests whose blocks the engine has taken since the last step.
            scheduled: which tokens the step computes, of the requests in ``computed`` that ``prefills`` names. Without
                them D learns of a prompt when all of it is computed.
        """
        self._leases.plan_step(scheduled, preempted, alone=len(computed) == 1)
        after_prefill = self._leases.computed_any(self._plan.step)
        plan = self._plan.take(idle=idle, after_prefill=after_prefill)
        self._leases.step_planned(self._plan.step, computed)
        return self._loads.step_planned(plan, preempted)
