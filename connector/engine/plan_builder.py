"""The next step plan, as it comes together between two steps of the scheduler."""

from __future__ import annotations

from kvferry.connector.protocol import request_lifetime
from kvferry.connector.protocol.step_plan import KeepLease, LeaseGrant, Load, StepPlan, UnneededLease


class StepPlanBuilder:
    """Collects the parts of one step plan after the other."""

    def __init__(self, consumer: bytes) -> None:
        """``consumer``: names this life of this engine to P."""
        self._consumer = consumer
        self.step = 0
        """The number of the last plan that was taken."""
        self._reset()

    def _reset(self) -> None:
        self.leases: list[LeaseGrant] = []
        self._keeps: list[KeepLease] = []
        self._loads: list[Load] = []
        self._cancels: list[str] = []
        self._releases: list[UnneededLease] = []

    def add(self, request_id: str, effect: request_lifetime.RequestEffect) -> None:
        """Add an effect of the lifetime of a request."""
        match effect:
            case request_lifetime.PlanKeep(keep):
                self._keeps.append(keep)
            case request_lifetime.PlanLoad(load):
                self._loads.append(load)
            case request_lifetime.PlanCancel():
                self._cancels.append(request_id)
            case request_lifetime.PlanRelease(token):
                self._releases.append(UnneededLease(request_id, token))

    def take(self, *, idle: bool, after_prefill: bool) -> StepPlan:
        """The plan of the next step, with everything that was added since the last one."""
        self.step += 1
        plan = StepPlan(
            consumer=self._consumer,
            leases=tuple(self.leases),
            keeps=tuple(self._keeps),
            loads=tuple(self._loads),
            cancels=tuple(self._cancels),
            releases=tuple(self._releases),
            idle=idle,
            step=self.step,
            after_prefill=after_prefill,
        )
        self._reset()
        return plan
