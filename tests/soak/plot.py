"""The plot of a soak: what each lasting process held, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.soak.flatness import WARM_UP

PANELS = {
    "descriptors": "descriptors", "threads": "threads", "mappings": "mappings", "rss_mib": "resident memory, MiB",
    "leases": "leases", "blocks": "blocks in use", "sessions": "sessions", "links": "links",
    "turn_ms": "longest turn of the transfer thread, ms",
}  # fmt: skip


def plot(samples: Mapping[str, Sequence[Mapping[str, float]]], seconds: float, path: Path) -> None:
    """Write a PNG; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(15, 9), layout="constrained", sharex=True)
    every: list[Any] = list(axes.flat)
    for axis, (quantity, title) in zip(every, PANELS.items(), strict=True):
        for name, found in samples.items():
            shown = [sample for sample in found if sample["at"] <= seconds]
            axis.plot([s["at"] for s in shown], [s[quantity] for s in shown], linewidth=0.9, label=name)
        axis.axvspan(0, WARM_UP * seconds, color="lightgrey", alpha=0.4)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in every[-3:]:
        axis.set_xlabel("seconds; grey: warm-up")
    every[0].legend(fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
