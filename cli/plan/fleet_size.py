"""How a fleet fares under a trace, and the fewest engines that keep TTFT and TPOT within targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvferry.cli.plan.fleet import EngineModel, Fleet, Handover, RequestRecord
from kvferry.cli.plan.trace import TracedRequest
from kvferry.transport.errors import ConfigError

MAX_ENGINES = 1024
"""Bound on the engines of one side."""


class Targets(msgspec.Struct, frozen=True):
    """At ``percentile`` of all requests, TTFT and TPOT are at most so many seconds."""

    ttft: float
    tpot: float
    percentile: float


class FleetReport(msgspec.Struct, frozen=True):
    """How a fleet fared. Times are seconds. ``percentile`` names the one of ``ttft`` and ``tpot``, beside the medians.
    Parts of the mean TTFT: ``p_queue``, ``prefill``, ``d_queue``, ``handover``, ``first_step``. ``reused_tokens``: the
    share of all prompt tokens that P had in its prefix cache. ``p_busy``: the share of the time in which P engines
    compute. ``expired_leases``: requests whose prompt D had to compute. ``seconds``: to the last token."""

    p_engines: int
    d_engines: int
    requests: int
    percentile: float
    ttft_p50: float
    ttft: float
    tpot_p50: float
    tpot: float
    p_queue: float
    prefill: float
    d_queue: float
    handover: float
    first_step: float
    reused_tokens: float
    p_busy: float
    expired_leases: int
    seconds: float

    def meets(self, targets: Targets) -> bool:
        return self.ttft <= targets.ttft and self.tpot <= targets.tpot


def fleet_report(records: Sequence[RequestRecord], num_p: int, num_d: int, percentile: float) -> FleetReport:
    """The summary of ``Fleet.run``. TPOT counts requests of two and more tokens."""
    tpot = [record.tpot for record in records if record.request.output_length > 1] or [0.0]
    ttft_p50, ttft_most = np.percentile([record.ttft for record in records], [50, percentile]).tolist()
    tpot_p50, tpot_most = np.percentile(tpot, [50, percentile]).tolist()
    times = np.array(
        [(r.arrived, r.prefill_began, r.prefill_ended, r.admitted, r.loaded, r.first_token, r.ended) for r in records]
    )
    p_queue, prefill, d_queue, handover, first_step = np.diff(times[:, :6], axis=1).mean(axis=0).tolist()
    end, prompt_tokens = float(times[:, 6].max()), sum(record.request.input_length for record in records)
    return FleetReport(
        num_p, num_d, len(records), percentile, ttft_p50, ttft_most, tpot_p50, tpot_most,
        p_queue, prefill, d_queue, handover, first_step,
        reused_tokens=sum(record.reused for record in records) / prompt_tokens,
        p_busy=float((times[:, 2] - times[:, 1]).sum()) / (num_p * end),
        expired_leases=sum(record.expired for record in records), seconds=end,
    )  # fmt: skip


class FleetPlanner:
    """Fleets of any size under one trace; each size is simulated once."""

    def __init__(
        self, trace: Sequence[TracedRequest], model: EngineModel, handover: Handover, percentile: float
    ) -> None:
        self._trace, self._model, self._handover, self._percentile = trace, model, handover, percentile
        self._reports: dict[tuple[int, int], FleetReport] = {}

    def report(self, num_p: int, num_d: int) -> FleetReport:
        """How a fleet of this size fares."""
        if (num_p, num_d) not in self._reports:
            records = Fleet(num_p, num_d, self._model, self._handover).run(self._trace)
            self._reports[num_p, num_d] = fleet_report(records, num_p, num_d, self._percentile)
        return self._reports[num_p, num_d]

    def fewest(self, targets: Targets) -> FleetReport:
        """The fewest P engines where D engines are many, and then the fewest D engines for so many P.

        More engines help the mean of a load, but not each request. So the answer is a size at which the targets are met
        while they are not with one engine less; a search over all sizes might find another. Raises ConfigError: no
        number of engines meets the targets.
        """
        many = min(MAX_ENGINES, len(self._trace))
        best = self.report(many, many)
        if not best.meets(targets):
            raise ConfigError(
                f"no fleet of up to {many} P and {many} D engines meets the targets: at percentile "
                f"{self._percentile:g} TTFT is {best.ttft:.3g} s and TPOT {best.tpot:.3g} s at best; allow more, or "
                "plan faster engines"
            )
        num_p = _least(lambda count: self.report(count, many).meets(targets), many)
        num_d = _least(lambda count: self.report(num_p, count).meets(targets), many)
        return self.report(num_p, num_d)


def _least(enough: Callable[[int], bool], most: int) -> int:
    """A number with ``enough`` whose predecessor has not; ``most`` has. Doubles first, because less is simulated so."""
    high = 1
    while high < most and not enough(high):
        high *= 2
    high, low = min(high, most), high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return high
