"""The scheduler half: the plan of each engine step. No vLLM, no I/O.

P's decisions are in ``lease_planner``, D's in ``load_planner``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.geometry.engine_types import RequestView, ScheduledTokens
from kvferry.connector.scheduler.lease_planner import LeasePlanner
from kvferry.connector.scheduler.load_planner import ACTIVE, LoadPlanner, RequestPhase
from kvferry.connector.scheduler.prefixes import SOURCE, names_sources, next_turn_params, source_params
from kvferry.connector.wire.metrics import Figures, HandoverStats
from kvferry.connector.wire.params import HANDED_OVER, wants_load, wants_prefill
from kvferry.connector.wire.step_plan import StepPlan

REQUEST_LEVELS = {
    "awaiting_prompt": RequestPhase.AWAITED, "awaiting_blocks": RequestPhase.OFFERED, "loading": RequestPhase.LOADING,
}  # fmt: skip
"""By level, the phase of the requests that it counts."""


@dataclass(eq=False)
class SchedulerHalf(LeasePlanner, LoadPlanner):
    """One engine's decisions. Called from the engine's scheduler, by one thread."""

    # --- every request ------------------------------------------------------------------------------------------

    def on_new_request(self, request: RequestView) -> None:
        """P notes a prompt that it is to hand over. D checks whether P holds this request's KV: if so, its lease is
        renewed from now on; if the KV cannot be used, the lease is released. Idempotent."""
        if request.request_id not in self._requests:
            if self.produces and wants_prefill(request.params):
                self._add_prompt(request)
            self._new_load(request)
            self._check_role(request)

    def _check_role(self, request: RequestView) -> None:
        """One line, and a count, where a router sends a request of one role to an engine that has only the other."""
        if wants_prefill(request.params) and not self.produces:
            wrong, role, right = "to hand its prompt over (do_remote_decode)", "kv_consumer", "kv_producer"
        elif wants_load(request.params) and not self.consumes:
            wrong, role, right = "to load its prompt (do_remote_prefill)", "kv_producer", "kv_consumer"
        else:
            return
        if not (self.consumes and wants_load(request.params)):  # else it is loaded
            self._settle(self._requests[request.request_id], "local", "wrong_role")
        self._log.warning(
            role,
            "kvferry: %s asks this engine %s, but its kv_role is %s: nothing is handed over; start it as %s or kv_both",
            request.request_id, wrong, role, right,
        )  # fmt: skip

    def num_new_matched_tokens(self, request: RequestView, num_local: int) -> tuple[int | None, bool]:
        """Tokens to load beyond the ``num_local`` that the engine has, and whether asynchronously. ``None``: P has not
        told of the prompt yet, and the engine must ask again in its next step.

        The engine computes the last prompt token in any case. Where all tables are whole, the result may include this
        token. Otherwise it must not: the engine would free blocks of a window that only that token needs, and a state
        would process that token twice.
        """
        self.on_new_request(request)
        return self._matched_tokens(request, num_local)

    def request_finished(
        self, request: RequestView, block_ids: Sequence[Sequence[int]], *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are still its own. Returns whether they stay held until ``finished_sending``, and
        the parameters for D. ``block_ids``: its blocks, per block table. ``completed``: it ended by itself (stop or
        length), not by abort or error."""
        handed_over = self._end_load(request)
        held, params = self._end_prompt(request, block_ids, completed=completed)
        more = {} if handed_over is None else {HANDED_OVER: handed_over}
        if completed and self.prefix_seed and self.ranks:
            source = source_params(self.engine_id, self.ranks[0])
            if names_sources(request.params):
                more[SOURCE] = source
            elif wants_load(request.params):
                more |= next_turn_params(request.request_id, source)
        return held, {**(params or {}), **more} if more else params

    # --- resets -------------------------------------------------------------------------------------------------

    def reset_caches(self) -> bool:
        """The engine's caches were reset: no KV that was computed before is handed over from here, or loaded here.

        All leases end with the next plan. Prompts under computation are given up, and loads are cancelled.
        Returns whether no lease and no load is left. Otherwise the caller may ask again after a few steps.
        """
        unheld, unloaded = self._reset_prompts(), self._reset_loads()
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
        levels = self._stats.levels
        levels["leases"], levels["lease_blocks"] = len(self._held), self._held.blocks
        for level, phase in REQUEST_LEVELS.items():
            levels[level] = self._phases[phase]
        if microseconds := self._held.take_block_us():
            self._stats.count("lease_block_seconds", by=microseconds)
        return self._stats

    def take_stats(self) -> Figures | None:
        """The metrics of this half since the last call; ``None`` where there are none. Zeros are reported once."""
        quiet = not (self._held or any(self._phases[phase] for phase in ACTIVE))
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
        """The work of the workers since the last step. ``idle``: the engine computes nothing in this step.
        ``computed``: the requests that it computes tokens of in this step. ``preempted``: the requests whose blocks it
        has taken since the last step. ``scheduled``: which tokens the step computes, of the requests in ``computed``
        that ``prefills`` names; without them D learns of a prompt when all of it is computed."""
        self._plan_prompts(scheduled, preempted, self._may_stream, alone=len(computed) == 1)
        prompts, last = self._prompts, self._plan.step
        after_prefill = bool(prompts) and any(prompt.computed_in == last for prompt in prompts.values())
        plan = self._plan.take(idle=idle, after_prefill=after_prefill)
        for request_id in prompts.keys() & computed if prompts else ():
            prompts[request_id].computed_in = self._plan.step
        return self._loads_planned(plan, preempted)

    def _may_stream(self, request_id: str) -> bool:
        """Whether the tokens of a prompt stand once they are computed. Those that a load brings may prove to be
        missing, also where the prompt finds them in the prefix cache: a load inside a step ends after that step."""
        loads = self._plan.loads_inside or (self.steps is not None and self.steps.loads_inside)
        return self.streams() and not loads and not self._loads_itself(request_id)
