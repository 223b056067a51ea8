"""Whether what a process holds stays the same: the rule, and the table. Pure.

Per process and quantity, the samples after the warm-up give a slope (Theil and Sen: the median of the slopes between
pairs of samples, so that single peaks do not count). The growth is the slope times the time that was sampled. It must
not exceed ``BOUNDS``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WARM_UP = 0.4
"""The share of the run that does not count: links and sessions of dead peers last up to 240 s."""
BOUNDS: Mapping[str, float] = {
    "descriptors": 6, "threads": 1, "mappings": 16, "rss_mib": 12, "pss_mib": 16, "leases": 30, "kept": 30,
    "sessions": 6, "links": 3, "reads": 10, "blocks": 200, "requests": 10,
}  # fmt: skip
"""The most that a quantity may grow over the sampled time. Leases, reads, blocks and requests are those of hand-overs
under way; that none of them is left at the end is looked at apart."""
PER_RESTART: Mapping[str, float] = {"descriptors": 6, "mappings": 12, "sessions": 1, "links": 1, "pss_mib": 4}
"""What the peers of one restart add that are not forgotten yet. This and ``AT_FIRST`` count where the warm-up is
shorter than ``FORGOTTEN_SECONDS``, and not otherwise."""
AT_FIRST: Mapping[str, float] = {"rss_mib": 24, "pss_mib": 24}
"""What a process adds while each of its paths is taken for the first time."""
FORGOTTEN_SECONDS = 240.0
PAIRS = 20_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """One quantity of one process. ``warm``, ``end``: medians of the first and the last tenth after the warm-up."""

    process: str
    quantity: str
    warm: float
    end: float
    growth: float
    bound: float

    @property
    def flat(self) -> bool:
        return self.growth <= self.bound


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between pairs of points that are far apart, in units of y by unit of x."""
    half = len(points) // 2
    step = max(1, half * half // PAIRS)
    pairs = [(first, second) for first in points[:half] for second in points[half::step]]
    found = [(y - b) / (x - a) for (a, b), (x, y) in pairs if x > a]
    return statistics.median(found) if found else 0.0


def judge(process: str, samples: Sequence[Mapping[str, float]], seconds: float, restarts: int) -> list[Verdict]:
    """The verdicts of one process. ``samples``: with the key "at", seconds since the start; ``restarts``: of peers."""
    warm_up = WARM_UP * seconds
    after = [sample for sample in samples if sample["at"] >= warm_up]
    if len(after) < 4:
        return []
    tenth, lasted = max(1, len(after) // 10), after[-1]["at"] - after[0]["at"]
    verdicts = []
    for quantity, base in BOUNDS.items():
        growth = slope([(sample["at"], sample[quantity]) for sample in after]) * lasted
        extra = PER_RESTART.get(quantity, 0) * restarts + AT_FIRST.get(quantity, 0)
        bound = base + (extra if warm_up < FORGOTTEN_SECONDS else 0)
        warm, end = (statistics.median(s[quantity] for s in part) for part in (after[:tenth], after[-tenth:]))
        verdicts.append(Verdict(process, quantity, warm, end, round(growth, 2), bound))
    return verdicts


def table(verdicts: Sequence[Verdict]) -> str:
    """A line for each quantity: the process that grew most."""
    lines = [f"{'quantity':<12} {'process that grew most':<24} {'warm':>9} {'end':>9} {'growth':>9} {'bound':>7}"]
    for quantity in BOUNDS:
        found = [verdict for verdict in verdicts if verdict.quantity == quantity]
        if found:
            most = max(found, key=lambda verdict: verdict.growth - verdict.bound)
            lines.append(
                f"{quantity:<12} {most.process:<24} {most.warm:>9.1f} {most.end:>9.1f} {most.growth:>+9.1f} "
                f"{most.bound:>7.0f}{'' if most.flat else '  GROWS'}"
            )
    return "\n".join(lines)
