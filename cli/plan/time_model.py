"""How long a hand-over takes: the form of the prediction, and its numbers for each data plane. Pure.

The busiest rank decides. A rank moves its reads one after the other in all, whether they take turns or not::

    work     = turns x message_seconds + bytes / min(bytes_per_second of the pieces, link)
    seconds  = fixed_seconds + each_seconds + work

A turn is a message; where D reads P's pages by itself, it is what D copies before it goes on with another read. Of n
equal hand-overs that begin at once between the same ranks, with m turns each, number i has ended after
``((m - 1) x n + i) / m`` times the work of one. The spread of their times is that of sums of n independent times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from math import ceil, exp, inf, log
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.cli.plan.handover import Pair, PlannedRead, RankName, plan_handover
from kvferry.transport.errors import ConfigError, did_you_mean

Seconds = Annotated[float, Meta(ge=0, le=3600)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]


STAND_INS = {"nixl/gpu": "ucx/gpu", "tcp/gpu": "tcp/host", "zmq/gpu": "zmq/host"}
"""Planes between hosts that nobody has measured with GPUs, and the measured planes whose costs are taken for theirs: a
guess, bounded by the link."""


class PlaneCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one data plane costs.

    ``fixed_seconds``: of a hand-over of nothing, from the request to the report. ``each_seconds``: the part by which
    each of several hand-overs delays those behind it. ``message_seconds``: of a turn beside its bytes.
    ``bytes_per_second``: by the bytes of a piece, which is a run that is contiguous in both caches; between two sizes
    the logarithms are interpolated. ``p95_ratio``: the 95th percentile over the median, of equal hand-overs, each
    alone. ``turn_bytes``: where D reads P's pages, the most bytes of a turn; 0: a read is one turn.
    """

    fixed_seconds: Seconds
    each_seconds: Seconds
    message_seconds: Seconds
    bytes_per_second: Annotated[dict[int, Rate], Meta(min_length=1, max_length=64)]
    p95_ratio: Annotated[float, Meta(ge=1, le=1000)]
    turn_bytes: Annotated[int, Meta(ge=0)] = 0

    def rate(self, piece_bytes: int) -> float:
        """Bytes per second for pieces of a size."""
        known = sorted(self.bytes_per_second.items())
        place = bisect_left(known, (piece_bytes, 0.0))
        if place == 0 or place == len(known):
            return known[min(place, len(known) - 1)][1]
        (low, slow), (high, fast) = known[place - 1 : place + 1]
        share = (log(piece_bytes) - log(low)) / (log(high) - log(low))
        return exp(log(slow) + share * (log(fast) - log(slow)))

    def turns(self, read: PlannedRead) -> int:
        """The turns of a read."""
        return read.messages or (max(1, ceil(read.nbytes / self.turn_bytes)) if self.turn_bytes else 1)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of planes, each under ``PLANE/MEMORY`` as in ``tcp/host`` or ``cuda_ipc/gpu``, and where they were
    measured."""

    form: Annotated[str, Meta(pattern=r"\Akvferry-calibration-1\Z")]
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


def decoded_calibration(text: bytes, name: object) -> Calibration:
    """A calibration from its JSON. ``name``: of the file, for errors. Raises ConfigError: it is no JSON, or of another
    form."""
    try:
        return msgspec.json.decode(text, type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: no calibration: {error}") from None


def default_calibration() -> Calibration:
    """The calibration that ``benchmarks/plan/plan_fit.py`` made from measurements of this project."""
    file = files(__package__) / "calibration.json"
    return decoded_calibration(file.read_bytes(), file)


class Work(msgspec.Struct, frozen=True):
    """What the busiest rank of a hand-over moves. ``seconds``: alone, without the fixed part."""

    seconds: float
    turns: int


def work_of(reads: Sequence[PlannedRead], costs: PlaneCosts, link: float = inf) -> Work:
    """The work of a hand-over. ``link``: bytes per second between two ranks, in each direction of each rank."""
    seconds: Mapping[tuple[str, RankName], list[float]] = defaultdict(lambda: [0.0, 0])
    for read in reads:
        turns = costs.turns(read)
        moving = turns * costs.message_seconds + read.nbytes / min(link, costs.rate(read.piece_bytes))
        for end in (("p", read.p), ("d", read.d)):
            seconds[end][0] += moving
            seconds[end][1] += turns
    busiest = max(seconds.values(), default=[0.0, 0])
    return Work(busiest[0], max(1, int(busiest[1])))


def finish_seconds(work: Work, costs: PlaneCosts, number: int = 1, at_once: int = 1) -> float:
    """Seconds until ``number`` of ``at_once`` equal hand-overs, which begin together, have ended."""
    turns = ((work.turns - 1) * at_once + number) / work.turns
    return costs.fixed_seconds + number * costs.each_seconds + turns * work.seconds


class PromptPlan(msgspec.Struct, frozen=True):
    """One hand-over alone. Times are seconds. ``nbytes``: that all ranks of D read together. ``share``: of the prefill
    and the hand-over, the part that the hand-over takes."""

    tokens: int
    messages: int
    nbytes: int
    seconds: float
    p95_seconds: float
    prefill_seconds: float
    share: float


def prompt_plan(pair: Pair, tokens: int, costs: PlaneCosts, link: float, prefill_rate: float) -> PromptPlan:
    """The plan of a prompt. ``link``: bytes per second of a rank; ``prefill_rate``: tokens per second of P. Raises as
    ``plan_handover``."""
    reads = plan_handover(pair, tokens)
    seconds = finish_seconds(work_of(reads, costs, link), costs)
    messages, nbytes = sum(read.messages for read in reads), sum(read.nbytes for read in reads)
    prefill = tokens / prefill_rate
    p95 = seconds * costs.p95_ratio
    return PromptPlan(tokens, messages, nbytes, seconds, p95, prefill, share=seconds / (seconds + prefill))
