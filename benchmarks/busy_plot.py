"""The plots of ``gpu_busy.py``: time to first token by prompt length, and what that of one request is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from busy_figures import BUSY, OURS, THEIRS

COLOURS = {OURS: "tab:blue", THEIRS: "tab:orange"}
LABELS = {
    "arrived": "request in", "planned": "planned", "reported": "reported", "scheduled": "scheduled",
    "token": "token out",
}  # fmt: skip
WAYS = ("in the step", "beside the steps")


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    lines = [line for way in WAYS if (line := chosen(result["timelines"], way)) is not None]
    panels = 1 + len(lines)
    figure, axes = pyplot.subplots(
        panels, 1, figsize=(11, 4.5 + 2.2 * len(lines)), height_ratios=[3] + [1.4] * len(lines), layout="constrained"
    )
    every = [axes] if panels == 1 else list(axes)
    lengths_panel(every[0], result["rows"])
    for axis, line in zip(every[1:], lines, strict=True):
        timeline_panel(axis, line)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def chosen(timelines: list[dict[str, Any]], way: str) -> dict[str, Any] | None:
    """The hand-over of KVFerry that is shown for a way: of 8001 tokens, on a busy D, into fresh blocks, or near it."""
    found = [line for line in timelines if (line["connector"], line["way"]) == (OURS, way)]
    return min(
        found,
        key=lambda line: (abs(line["sequences"] - BUSY), abs(line["tokens"] - 8001), line["order"] != "fresh"),
        default=None,
    )


def lengths_panel(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Median times to first token, and pale those of local hits; lines for each connector, load and order of blocks."""
    from matplotlib import ticker

    styles = {"fresh": "-", "scattered": "--"}
    loads = sorted({row["sequences"] for row in rows})
    for connector, colour in COLOURS.items():
        for order, dashes in styles.items():
            for sequences in loads:
                points = sorted(
                    (row for row in rows
                     if (row["connector"], row["order"], row["sequences"]) == (connector, order, sequences)),
                    key=lambda row: row["tokens"],
                )  # fmt: skip
                if points:
                    draw_line(axis, points, colour, dashes, "osD^v"[loads.index(sequences) % 5])
    axis.set(
        xscale="log", yscale="log", xlabel="prompt tokens", ylabel="ms, median",
        title="D's time to first token with KV from P; pale: of a local prefix hit",
    )  # fmt: skip
    lengths = sorted({row["tokens"] for row in rows})
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.minorticks_off()
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, ncols=2)


def draw_line(axis: Any, points: list[dict[str, Any]], colour: str, dashes: str, marker: str) -> None:
    first = points[0]
    label = f"{first['connector']}, {first['sequences']} decoding, {first['order']}"
    for name, shown, alpha in (("ttft_ms", label, 0.8), ("local_ttft_ms", None, 0.25)):
        y = [row[name] for row in points]
        axis.plot([row["tokens"] for row in points], y, dashes, marker=marker, color=colour, label=shown, alpha=alpha)


def timeline_panel(axis: Any, line: dict[str, Any]) -> None:
    """The stages of one hand-over; grey lines are the steps whose tokens D told of."""
    marks = line["marks"]
    for at in line["steps"]:
        axis.axvline(at, color="lightgrey", linewidth=1, zorder=0)
    begun, ended = (marks.get(f"gpu_{name}", marks.get(name)) for name in ("begun", "ended"))
    if begun is not None and ended is not None:
        axis.barh(0, ended - begun, left=begun, height=0.5, color=COLOURS[OURS], alpha=0.4)
        axis.text(begun, 0, f" copy, {begun:.2f} to {ended:.2f}", fontsize=8, va="center")
    stages = [(name, label) for name, label in LABELS.items() if name in marks]
    for number, (name, label) in enumerate(stages):
        height = 0.6 + 0.45 * number
        axis.plot([marks[name]] * 2, [-0.3, height], color="black", linewidth=0.8)
        axis.text(marks[name], height, f" {label} {marks[name]:.2f}", fontsize=8, va="center")
    last = max(marks.values())
    axis.set_xlim(-0.04 * last, 1.15 * last)
    axis.set(
        ylim=(-0.5, 0.9 + 0.45 * len(stages)), yticks=[], xlabel="ms since the request came in",
        title=f"{line['way']}: {line['tokens']} tokens, {line['sequences']} sequences decoding, {line['order']} "
        f"blocks; a local hit takes {line['local_ttft_ms']:.2f} ms",
    )  # fmt: skip
    axis.title.set_fontsize(10)
