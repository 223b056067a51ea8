"""What a worker half sends its engine's scheduler with each step's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvferry.connector.step_loads.step_loads import StepOutcome
from kvferry.connector.wire.step_plan import LoadEnd, LookupResult, of_both
from kvferry.connector.wire.transfer_estimate import EstimateKey, TransferEstimate

NOTHING: Mapping[Any, Any] = {}


class KVFerryWorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """How long hand-overs took, how loads have ended, and what P's told D of leases.

    vLLM makes this object when it has launched the step, and reads it when the step's tokens are there. It is known
    then how the loads have ended with which the step computes, and not before. So ``ends`` is asked for as late as
    possible: by the scheduler of the same process, where the outputs of ranks are put together, and where the output
    leaves the process.
    """

    def __init__(
        self,
        estimates: Mapping[EstimateKey, TransferEstimate] = NOTHING,
        outcome: StepOutcome | None = None,
        met: Mapping[str, LookupResult] = NOTHING,
        ends: Mapping[str, LoadEnd] = NOTHING,
    ) -> None:
        """
        Args:
            estimates: how long hand-overs took.
            outcome: of this rank's loads that the step computes with.
            met: what P has said last, by request that waits for it.
            ends: of loads beside the steps, by request.
        """
        self.estimates, self.met, self._ends, self._outcome = dict(estimates), dict(met), dict(ends), outcome

    @property
    def ends(self) -> dict[str, LoadEnd]:
        """How loads have ended, of the step too, by request. Waits for the transfer thread until that is known: for one
        turn, if the step's tokens are there."""
        if self._outcome is not None:
            self._ends |= self._outcome.ends()
            self._outcome = None
        return self._ends

    def aggregate(self, other: KVFerryWorkerMeta) -> KVFerryWorkerMeta:
        """Of two sets of ranks."""
        both = {name: of_both(end, self.ends[name]) for name, end in other.ends.items() if name in self.ends}
        ends = self.ends | other.ends | both
        return KVFerryWorkerMeta(self.estimates | other.estimates, met=self.met | other.met, ends=ends)

    def __reduce__(self) -> tuple[Any, ...]:
        # vLLM waits for the tokens (``get_output``), then pickles, and calls no connector between. An earlier wait
        # would hold up the engine's thread; with the next step's output, tokens of a failed load would be used already.
        return KVFerryWorkerMeta, (self.estimates, None, self.met, self.ends)


def load_ends(meta: object) -> Mapping[str, LoadEnd]:
    """How loads have ended, by request, of what vLLM carries as worker metadata."""
    return meta.ends if isinstance(meta, KVFerryWorkerMeta) else NOTHING
