"""The next step plan, as it comes together between two steps of the scheduler."""

from __future__ import annotations

from msgspec.structs import replace

from kvferry.connector.engine import prompt_prefill, request_lifetime
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    LeftAnswer,
    Load,
    Prefill,
    PrefillChunk,
    PrefillStop,
    QueuedPrompt,
    Rendezvous,
    StepPlan,
    UnneededLease,
)


class StepPlanBuilder:
    """Collects the parts of one step plan after the other."""

    def __init__(self, consumer: bytes) -> None:
        """``consumer``: names this life of this engine to P."""
        self._consumer = consumer
        self.step = 0
        """The number of the last plan that was taken."""
        self._nothing = {idle: StepPlan(consumer=consumer, idle=idle, nothing=True) for idle in (False, True)}
        self._reset()

    def _reset(self) -> None:
        self.urgent = False  # whether the engine must take the next plan also where it has no request
        self._empty = True
        self._leases: list[LeaseGrant] = []
        self._keeps: list[KeepLease] = []
        self._loads: list[Load] = []
        self._cancels: list[str] = []
        self._releases: list[UnneededLease] = []
        self._queued: list[QueuedPrompt] = []
        self._prefills: list[Prefill] = []
        self._chunks: list[PrefillChunk] = []
        self._stops: list[PrefillStop] = []
        self._rendezvous: list[Rendezvous] = []
        self._left: list[LeftAnswer] = []
        self._ends_leases = False

    def end_leases(self) -> None:
        """All leases end."""
        self._empty, self._ends_leases = False, True

    def add(self, request_id: str, effect: request_lifetime.RequestEffect | prompt_prefill.PromptEffect) -> None:
        """Add an effect of the lifetime of a request, or of its prompt."""
        self._empty = False
        match effect:
            case request_lifetime.PlanKeep(keep):
                self._keeps.append(keep)
            case request_lifetime.PlanLoad(load):
                self._loads.append(load)
            case request_lifetime.PlanCancel():
                self._cancels.append(request_id)
            case request_lifetime.PlanRelease(token):
                self._releases.append(UnneededLease(request_id, token))
            case request_lifetime.PlanRendezvous(rendezvous):
                self._rendezvous.append(rendezvous)
            case prompt_prefill.PlanQueued(prompt):
                self._queued.append(prompt)
            case prompt_prefill.PlanPrefill(prefill):
                self._prefills.append(prefill)
            case prompt_prefill.PlanChunk(chunk):
                self._chunks.append(chunk)
            case prompt_prefill.PlanStop(stop):
                self._stops.append(stop)
            case prompt_prefill.PlanLease(lease):
                self._leases.append(lease)

    def leave(self, left: LeftAnswer) -> None:
        """Add that a request does not need P's answer any more."""
        self._empty = False
        for number, asked in enumerate(self._rendezvous):
            if asked.request_id == left.request_id:
                self._rendezvous[number] = replace(asked, ended=left)
                return
        self._left.append(left)

    @property
    def loads_inside(self) -> bool:
        """Whether the next step computes with the tokens of a load of its plan."""
        return any(load.now for load in self._loads)

    def take(self, *, idle: bool, after_prefill: bool) -> StepPlan:
        """The plan of the next step, with everything that was added since the last one."""
        self.step += 1
        if self._empty and not after_prefill:
            return self._nothing[idle]
        plan = StepPlan(
            consumer=self._consumer,
            leases=tuple(self._leases),
            keeps=tuple(self._keeps),
            loads=tuple(self._loads),
            cancels=tuple(self._cancels),
            releases=tuple(self._releases),
            idle=idle,
            step=self.step,
            after_prefill=after_prefill,
            queued=tuple(self._queued),
            prefills=tuple(self._prefills),
            chunks=tuple(self._chunks),
            stops=tuple(self._stops),
            rendezvous=tuple(self._rendezvous),
            left=tuple(self._left),
            ends_leases=self._ends_leases,
        )
        self._reset()
        return plan
