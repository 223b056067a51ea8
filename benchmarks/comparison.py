"""The one rule by which two connectors are compared end to end, for ``gpu_e2e.py`` and ``e2e_vs_nixl.py``.

TTFT is D's time to the first token of a prompt whose KV comes from P. What counts is the difference of the two
connectors' median TTFT. A connector's local hit, its time for a prompt in D's prefix cache, stands beside TTFT and is
never subtracted: what a connector's threads take from it would make its hand-overs look short.

The interval of 95 % is a percentile bootstrap: both connectors' requests are drawn anew with replacement,
independently, 10,000 times, and the difference of the medians is taken each time. Requests of one start of an engine
resemble one another, which this does not count: intervals are rather too narrow than too wide.
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


def comparison(
    ours: Sequence[float], theirs: Sequence[float], local_ours: Sequence[float], local_theirs: Sequence[float]
) -> dict[str, Any]:
    """Of samples in ms: TTFT with either connector, and of prefix hits on either D."""
    medians = [statistics.median(samples) for samples in (ours, theirs, local_ours, local_theirs)]
    return of_medians(*medians) | {"ttft_difference_95_ms": list(difference_interval(ours, theirs))}


def of_medians(ours: float, theirs: float, local_ours: float, local_theirs: float) -> dict[str, Any]:
    """The same where only the medians are known, without an interval."""
    return {
        "ttft_ms": {OURS: round(ours, 2), THEIRS: round(theirs, 2)},
        "ttft_difference_ms": round(ours - theirs, 2),
        "ttft_difference_95_ms": None,
        "local_ttft_ms": {OURS: round(local_ours, 2), THEIRS: round(local_theirs, 2)},
        "ratio": round(ours / theirs, 4),
    }


def difference_text(found: dict[str, Any], digits: int = 1) -> str:
    """The difference with its interval, for a table; KVFerry is faster where it is negative."""
    text = f"{round(found['ttft_difference_ms'], digits) + 0.0:+.{digits}f}"
    interval = found["ttft_difference_95_ms"]
    return text if interval is None else f"{text} ({interval[0]:+.{digits}f} to {interval[1]:+.{digits}f})"


def compared_cells(found: dict[str, Any], digits: int = 1) -> list[str]:
    """The cells of a table under ``tables.COMPARED_HEADS``."""
    ttft, local = (
        [f"{found[name][connector]:.{digits}f}" for connector in (OURS, THEIRS)]
        for name in ("ttft_ms", "local_ttft_ms")
    )
    return [*ttft, difference_text(found, digits), *local]


def load_result(path: Path) -> dict[str, Any]:
    """A result whose samples are to be compared again."""
    result: dict[str, Any] = json.loads(path.read_text())
    return result
