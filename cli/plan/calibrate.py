"""The costs of a data plane, from hand-overs of one pair of ranks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from kvferry.cli.plan.time_model import PlaneCosts
from kvferry.transport.errors import ConfigError

DIGITS = 4


def measured_costs(
    nothing: Sequence[float], by_piece: Mapping[int, tuple[int, Sequence[float]]], turn_bytes: int
) -> PlaneCosts:
    """The costs without ``each_seconds``, which hand-overs at one time show; what messages cost is in the rates.

    Args:
        nothing: seconds of hand-overs of next to nothing.
        by_piece: by the bytes of a piece, the bytes of a hand-over and its seconds.
        turn_bytes: as in ``PlaneCosts``.

    Raises:
        ConfigError: the hand-overs with bytes took no longer than those without.
    """
    fixed = statistics.median(nothing)
    rates = {}
    for piece, (nbytes, seconds) in sorted(by_piece.items()):
        moving = statistics.median(seconds) - fixed
        if moving <= 0:
            raise ConfigError(f"hand-overs of {nbytes} bytes took no longer than empty ones; measure on a quiet host")
        rates[piece] = float(f"{nbytes / moving:.{DIGITS}g}")
    spreads = [float(np.percentile(seconds, 95)) / statistics.median(seconds) for _, seconds in by_piece.values()]
    spread = max(1.0, statistics.median(spreads))
    return PlaneCosts(float(f"{fixed:.{DIGITS}g}"), 0.0, 0.0, rates, float(f"{spread:.{DIGITS}g}"), turn_bytes)
