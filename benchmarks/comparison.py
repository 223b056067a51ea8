"""The one rule by which two connectors are compared end to end, for ``gpu_e2e.py`` and ``e2e_vs_nixl.py``.

TTFT is D's time to the first token of a prompt whose KV comes from P. The figure that counts is the difference of the
two connectors' median TTFT: it needs no baseline. Its interval of 95 % is a percentile bootstrap: both connectors'
requests are drawn anew with replacement, independently, 10,000 times, and the difference of the medians is taken each
time. Requests of one start of an engine resemble one another, which this does not count: intervals are rather too
narrow than too wide.

Hand-over time is the median TTFT less the time that D takes for a prompt that it has in its own prefix cache. This
baseline is the same for both connectors, the lower of their medians: a prefix hit moves nothing, and what a connector's
threads take from it is that connector's cost.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

OURS, THEIRS = "KVFerryConnector", "NixlConnector"
RESAMPLES, PORTION, SEED = 10_000, 500, 0
TIMES = ("ttft_ms", "handover_ms")


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The interval of 95 % of median(ours) - median(theirs), by bootstrap; the same for the same samples."""
    rng = np.random.default_rng(SEED)
    medians = [
        np.concatenate(
            [np.median(rng.choice(values, (PORTION, len(values))), axis=1) for _ in range(RESAMPLES // PORTION)]
        )
        for values in (np.asarray(ours, float), np.asarray(theirs, float))
    ]
    low, high = np.percentile(medians[0] - medians[1], [2.5, 97.5])
    return round(float(low), 2), round(float(high), 2)


def baseline(local_medians: Sequence[float]) -> float:
    """What is subtracted from both connectors' TTFT, in ms."""
    return min(local_medians)


def comparison(
    ours: Sequence[float], theirs: Sequence[float], local_ours: Sequence[float], local_theirs: Sequence[float]
) -> dict[str, Any]:
    """Of samples in ms: TTFT with either connector, and of prefix hits on either D."""
    medians = [statistics.median(samples) for samples in (ours, theirs, local_ours, local_theirs)]
    return of_medians(*medians) | {"ttft_difference_95_ms": list(difference_interval(ours, theirs))}


def of_medians(ours: float, theirs: float, local_ours: float, local_theirs: float) -> dict[str, Any]:
    """The same where only the medians are known, without an interval."""
    base = baseline((local_ours, local_theirs))
    times = ours - base, theirs - base
    return {
        "ttft_ms": {OURS: round(ours, 2), THEIRS: round(theirs, 2)},
        "ttft_difference_ms": round(ours - theirs, 2),
        "ttft_difference_95_ms": None,
        "baseline_ms": round(base, 2),
        "handover_ms": {OURS: round(times[0], 2), THEIRS: round(times[1], 2)},
        "ratio": round(times[0] / times[1], 4) if times[1] > 0 else None,
    }


def difference_text(found: dict[str, Any], digits: int = 1) -> str:
    """The difference with its interval, for a table; KVFerry is faster where it is negative."""
    text = f"{round(found['ttft_difference_ms'], digits) + 0.0:+.{digits}f}"
    interval = found["ttft_difference_95_ms"]
    return text if interval is None else f"{text} ({interval[0]:+.{digits}f} to {interval[1]:+.{digits}f})"


def compared_cells(found: dict[str, Any], digits: int = 1) -> list[str]:
    """The cells of a table under ``tables.COMPARED_HEADS``."""
    ttft, handover = ([f"{found[name][connector]:.{digits}f}" for connector in (OURS, THEIRS)] for name in TIMES)
    return [*ttft, difference_text(found, digits), *handover]


def load_result(path: Path) -> dict[str, Any]:
    """A result whose samples are to be compared again."""
    result: dict[str, Any] = json.loads(path.read_text())
    return result
