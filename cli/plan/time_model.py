"""How long a hand-over takes: the form of the prediction, and its numbers for each data plane. Pure.

The busiest rank decides. A rank moves its reads one after the other in all, whether they take turns or not::

    seconds = fixed_seconds + messages x message_seconds + bytes / min(bytes_per_second of the pieces, link)

Where D reads P's pages by itself there are no messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from math import inf
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.cli.plan.handover import Pair, PlannedRead, RankName, plan_handover
from kvferry.transport.errors import ConfigError, did_you_mean

Seconds = Annotated[float, Meta(ge=0, le=3600)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]


STAND_INS = {"nixl/gpu": "ucx/gpu", "tcp/gpu": "tcp/host", "zmq/gpu": "zmq/host"}
"""Planes between hosts that nobody has measured with GPUs, and the measured planes whose costs are taken for theirs: a
guess, bounded by the link."""


class PlaneCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one data plane costs. Between two sizes of ``bytes_per_second`` the logarithms are interpolated."""

    fixed_seconds: Seconds  # Of a hand-over of nothing, from the request to the report
    message_seconds: Seconds  # Of a message beside its bytes
    bytes_per_second: Annotated[dict[int, Rate], Meta(min_length=1, max_length=64)]  # By the bytes of a piece
    p95_ratio: Annotated[float, Meta(ge=1, le=1000)]  # 95th percentile over the median

    def rate(self, piece_bytes: int) -> float:
        """Bytes per second for pieces of a size."""
        sizes, rates = zip(*sorted(self.bytes_per_second.items()), strict=True)
        return float(np.exp(np.interp(np.log(piece_bytes), np.log(sizes), np.log(rates))))


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of planes, each under ``PLANE/MEMORY`` as in ``tcp/host`` or ``cuda_ipc/gpu``, and where they were
    measured."""

    form: Annotated[str, Meta(pattern=r"\Akvferry-calibration-2\Z")]
    measured: Annotated[dict[str, str], Meta(max_length=64)]
    planes: Annotated[dict[str, PlaneCosts], Meta(min_length=1, max_length=64)]

    def measured_as(self, plane: str) -> str:
        """The plane whose costs are taken: another one where this one was not measured."""
        return plane if plane in self.planes else STAND_INS.get(plane, plane)

    def costs(self, plane: str) -> PlaneCosts:
        """The costs of a plane. Raises ConfigError: the calibration does not have it, nor a plane that stands in."""
        taken = self.measured_as(plane)
        if taken not in self.planes:
            known = sorted({*self.planes, *(name for name, other in STAND_INS.items() if other in self.planes)})
            memories = [name for name in known if name.startswith(f"{plane}/")]
            hint = f" (did you mean {' or '.join(map(repr, memories))}?)" if memories else did_you_mean(plane, known)
            raise ConfigError(f"plane {plane!r} is not in the calibration, expected one of {', '.join(known)}{hint}")
        return self.planes[taken]


def default_calibration() -> Calibration:
    """The calibration that ``benchmarks/plan/plan_fit.py`` made from measurements of this project."""
    return msgspec.json.decode((files(__package__) / "calibration.json").read_bytes(), type=Calibration)


def seconds_of(reads: Sequence[PlannedRead], costs: PlaneCosts, link: float = inf) -> float:
    """Of a hand-over alone. ``link``: bytes per second between two ranks, in each direction of each rank."""
    busy: dict[tuple[str, RankName], float] = defaultdict(float)
    for read in reads:
        moving = read.messages * costs.message_seconds + read.nbytes / min(link, costs.rate(read.piece_bytes))
        for end in (("p", read.p), ("d", read.d)):
            busy[end] += moving
    return costs.fixed_seconds + max(busy.values(), default=0.0)


class PromptPlan(msgspec.Struct, frozen=True):
    """One hand-over alone. Times are seconds."""

    tokens: int
    messages: int
    nbytes: int  # That all ranks of D read together
    seconds: float
    p95_seconds: float
    prefill_seconds: float
    share: float  # Of the prefill and the hand-over, the part that the hand-over takes


def prompt_plan(pair: Pair, tokens: int, costs: PlaneCosts, link: float, prefill_rate: float) -> PromptPlan:
    """The plan of a prompt. ``link``: bytes per second of a rank; ``prefill_rate``: tokens per second of P. Raises as
    ``plan_handover``."""
    reads = plan_handover(pair, tokens)
    seconds = seconds_of(reads, costs, link)
    messages, nbytes = sum(read.messages for read in reads), sum(read.nbytes for read in reads)
    prefill = tokens / prefill_rate
    p95 = seconds * costs.p95_ratio
    return PromptPlan(tokens, messages, nbytes, seconds, p95, prefill, share=seconds / (seconds + prefill))
