"""The pictures of docs/benchmarks.md as SVG, by matplotlib (extra: bench)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "kvferry", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True}  # fmt: skip


def svg(figure: Figure) -> str:
    written = StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return "".join(line.rstrip() + "\n" for line in written.getvalue().splitlines())


@rc_context(STYLE)
def lines_picture(title: str, x_name: str, y_name: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Measured points, their x axis logarithmic."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel=x_name, ylabel=y_name, xscale="log")
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), marker="o", markersize=4, label=name)
    ticks = sorted({x for line in lines.values() for x, _ in line})
    axes.set_xticks(ticks, [f"{x:,.0f}" for x in ticks])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.grid(axis="y")
    figure.legend(loc="outside right center", frameon=False)
    return svg(figure)


@rc_context(STYLE)
def streaming_picture(result: Mapping[str, Any]) -> str:
    """The first token of the longest prompt, by plane and way; below it, where the result has curves, bytes in time."""
    longest = max(row["tokens"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["tokens"] == longest]
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row["name"] for row in rows))}
    curves = result.get("curves") or []
    figure = Figure(figsize=(8, 0.22 * len(rows) + 1 + 3.6 * bool(curves)), layout="constrained")
    bars, *others = figure.subplots(1 + bool(curves), squeeze=False)[:, 0]
    labels = [f"{row['name']}, {row['way']}" for row in rows]
    drawn = bars.barh(labels, [row["first_ms"] for row in rows], color=[colours[row["name"]] for row in rows])
    bars.bar_label(drawn, fmt="%.0f", padding=3)
    bars.invert_yaxis()
    bars.set_title(f"First token of {longest} tokens ({result['versions']['gpus']}), ms")
    for axes in others:
        for curve in curves:
            points = [(curve["points"][0][0], 0), *curve["points"]]
            name, ended = curve["name"], curve["prefill_end_ms"]
            dashes = "--" if curve["way"] == "serial" else "-"
            label = f"{name.split(', ')[-1]}, {curve['way']}"
            axes.plot(*zip(*points, strict=True), linestyle=dashes, color=colours[name], label=label)
            axes.plot(ended, max((mib for ms, mib in points if ms <= ended), default=0), "o", color=colours[name])
        axes.set(title="Bytes at D of one prompt, MiB; a dot: P's last step has ended",
                 xlabel="ms since the client sent its request")  # fmt: skip
        axes.grid()
        axes.legend(frameon=False)
    return svg(figure)
