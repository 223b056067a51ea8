"""What the hand-over of a prompt moves, how long it takes, and its share of the time to the first token. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from kvferry.cli.plan.fleet import Handover
from kvferry.cli.plan.handover_plan import Pair, plan_handover
from kvferry.cli.plan.time_model import PlaneCosts, finish_seconds, work_of


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
    """The plan of a prompt. ``link``: bytes per second of a rank; ``prefill_rate``: tokens per second of P.

    Raises:
        ConfigError, IncompatiblePeerError, GeometryError: as ``plan_handover``.
    """
    reads = plan_handover(pair, tokens)
    seconds = finish_seconds(work_of(reads, costs, link), costs)
    prefill = tokens / prefill_rate
    return PromptPlan(
        tokens=tokens,
        messages=sum(read.messages for read in reads),
        nbytes=sum(read.nbytes for read in reads),
        seconds=seconds,
        p95_seconds=seconds * costs.p95_ratio,
        prefill_seconds=prefill,
        share=seconds / (seconds + prefill),
    )


def handover_of(pair: Pair, costs: PlaneCosts, link: float) -> Handover:
    """The times of a hand-over by its tokens, as ``Fleet`` needs them."""

    def times(tokens: int) -> tuple[float, float]:
        return costs.each_seconds + work_of(plan_handover(pair, tokens), costs, link).seconds, costs.fixed_seconds

    cached: Callable[[int], tuple[float, float]] = lru_cache(maxsize=1 << 20)(times)
    return cached
