"""What a worker half sends its engine's scheduler with each step's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvferry.connector.step_loads.step_outcome import StepOutcome
from kvferry.connector.wire.step_plan import LoadEnd, LookupResult, of_both
from kvferry.connector.wire.transfer_estimate import EstimateKey, TransferEstimate


class KVFerryWorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """How long hand-overs took, which loads inside the step stand, and what P's told D of leases.

    vLLM makes this object when it has launched the step, and reads it when the step's tokens are there. It is known
    then whether the loads stand, and not before. So ``result`` is asked for as late as possible: by the scheduler of
    the same process, where the outputs of ranks are put together, and where the output leaves the process.
    """

    def __init__(
        self,
        estimates: Mapping[EstimateKey, TransferEstimate],
        outcome: StepOutcome | None = None,
        standing: Mapping[str, int] | None = None,
        met: Mapping[str, LookupResult] | None = None,
        ends: Mapping[str, LoadEnd] | None = None,
    ) -> None:
        """
        Args:
            estimates: how long hand-overs took.
            outcome: of this rank's loads inside the step.
            standing: for each request, the number of other ranks whose load stands.
            met: what P has said last, by request that waits for it.
            ends: of loads beside the steps, and of those inside this step that failed.
        """
        self.estimates, self.met, self.ends = dict(estimates), dict(met or {}), dict(ends or {})
        self._outcome, self._standing = outcome, Counter(standing or {})

    def result(self) -> Counter[str]:
        """The number of ranks on which the load of each request stands. Waits for the transfer thread until that is
        known: for one turn, if the step's tokens are there."""
        if self._outcome is not None:
            self._standing.update(self._outcome.standing())
            self.ends |= {name: LoadEnd(kind) for name, kind in self._outcome.failures().items()}
            self._outcome = None
        return self._standing

    def aggregate(self, other: KVFerryWorkerMeta) -> KVFerryWorkerMeta:
        """Of two sets of ranks."""
        standing = self.result() + other.result()
        both = {name: of_both(end, self.ends[name]) for name, end in other.ends.items() if name in self.ends}
        return KVFerryWorkerMeta(
            self.estimates | other.estimates, standing=standing, met=self.met | other.met,
            ends=self.ends | other.ends | both,
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        # vLLM waits for the tokens (``get_output``), then pickles, and calls no connector between. An earlier wait
        # would hold up the engine's thread; with the next step's output, tokens of a failed load would be used already.
        return KVFerryWorkerMeta, (self.estimates, None, dict(self.result()), self.met, self.ends)


def standing_loads(meta: object) -> Counter[str]:
    """The number of ranks on which each load inside the step stands, of what vLLM carries as worker metadata."""
    return meta.result() if isinstance(meta, KVFerryWorkerMeta) else Counter()
