"""What the streaming benchmarks make of their samples: rows, targets, tables, and timelines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from streaming_pair import ALONE, AT_ONCE, OURS_NAME, PULL_NAME, SERIAL, Curve, Sample

CURVE_POINTS = 40
SHORT_TOKENS = 128
Turns = Sequence[dict[str, Sample]]
Row = dict[str, Any]


def ms(values: Sequence[float], digits: int = 1) -> float:
    return round(statistics.median(values) * 1e3, digits)


def rows_of(turns: Turns, **cell: Any) -> list[Row]:
    """A row for each way: medians. What is compared with another way is compared in each turn, then the median is
    taken of the differences or ratios."""
    return [row(way, turns) | cell for way in turns[0]]


def row(way: str, turns: Turns) -> Row:
    samples = [turn[way] for turn in turns]
    alone = [turn[ALONE] for turn in turns]
    pairs = list(zip(samples, alone, strict=True))

    def slower(seconds: Callable[[Sample], float]) -> float:
        return round(100 * (statistics.median(seconds(ours) / seconds(theirs) for ours, theirs in pairs) - 1), 1)

    decode_steps = [
        step["end"] - step["begin"] for sample in samples for step in sample.decoding if step["tokens"] == 1
    ]
    first = [sample.arrived[0] for sample in samples]
    return {
        "way": way,
        "samples": len(samples),
        "first_ms": ms(first),
        "after_prefill_ms": ms([sample.arrived[0] - sample.prefill_end for sample in samples]),
        "second_ms": ms([sample.arrived[1] for sample in samples]),
        "last_ms": ms([sample.arrived[-1] for sample in samples]),
        "prefill_ms": ms([sample.prefill for sample in samples]),
        "prefill_slower_percent": slower(lambda sample: sample.prefill),
        "core_slower_percent": slower(lambda sample: sample.of_prefill("core")),
        "core_ms": ms([sample.of_prefill("core") for sample in samples]),
        "queued_ms": ms([sample.of_prefill("queued") for sample in samples]),
        "d_step_ms": ms(decode_steps) if decode_steps else None,
        "mib": round(statistics.median(sample.curve[-1][1] if sample.curve else 0 for sample in samples) / 2**20, 1),
        "before_end": round(statistics.median(sample.before_end for sample in samples), 3),
        "moving_ms": ms([sample.moving for sample in samples]),
        "empty_steps": {
            engine: round(statistics.median(sample.empty[engine] / sample.arrived[-1] for sample in samples))
            for engine in ("P", "D")
        },
        "cores_percent": {engine: cores_of(engine, samples) for engine in ("P", "D")},
        "each_first_ms": [round(value * 1e3, 1) for value in first],
    }  # fmt: skip


def cores_of(engine: str, samples: Sequence[Sample]) -> dict[str, float]:
    """By thread of an engine, the share of a core that it had; threads with less than 1 % are left out."""
    names = {name for sample in samples for name in sample.threads[engine]}
    shares = {
        name: round(
            100 * statistics.median(s.threads[engine].get(name, (0.0, 0.0))[0] / s.arrived[-1] for s in samples), 1
        )
        for name in sorted(names)
    }
    return {name: share for name, share in shares.items() if share >= 1}


def timeline(sample: Sample, **cell: Any) -> Row:
    """One request for the plot, with fewer points and digits."""

    def thin(curve: Curve) -> list[tuple[float, int]]:
        changes = curve[:1] + [point for before, point in pairwise(curve) if point[1] != before[1]]
        every = max(1, len(changes) // CURVE_POINTS)
        return [(round(at, 4), count) for at, count in [*changes[:-1:every], *changes[-1:]]]

    return cell | {
        "way": sample.way,
        "arrived": [round(at, 4) for at in sample.arrived],
        "steps": [
            {"begin": round(step["begin"], 4), "end": round(step["end"], 4), "tokens": step["tokens"],
             "layers": [round(at, 4) for at in step["layers"]]}
            for step in sample.steps
        ],
        "link": thin(sample.link),
        "sent": thin(sample.sent),
        "placed": thin(sample.placed),
    }  # fmt: skip


def middle(turns: Turns, way: str) -> Sample:
    """The sample of a way with the median time to the first token."""
    return sorted((turn[way] for turn in turns), key=lambda sample: sample.arrived[0])[len(turns) // 2]


# --- targets ----------------------------------------------------------------------------------------------------------


def targets(rows: Sequence[Row]) -> list[Row]:
    """What KVFerry should reach, and what it has reached: ``target``, ``cell``, ``figure``, ``limit``, ``met``."""
    found = {(row["name"], row["tokens"], row["gb_per_s"], row["way"]): row for row in rows}
    verdicts: list[Row] = []
    for name, tokens, rate in dict.fromkeys((row["name"], row["tokens"], row["gb_per_s"]) for row in rows):
        cell = {way: found[name, tokens, rate, way] for way in (SERIAL, AT_ONCE, ALONE)
                if (name, tokens, rate, way) in found}  # fmt: skip
        if not name.startswith(OURS_NAME) or AT_ONCE not in cell:
            continue
        theirs = found.get((PULL_NAME, tokens, rate, SERIAL))
        where = f"{name}, {tokens} tokens" + (f", {rate:g} GB/s" if rate else "")
        verdicts += [{"cell": where} | one for one in _of_cell(cell, theirs, tokens)]
    return verdicts


def _of_cell(cell: dict[str, Row], theirs: Row | None, tokens: int) -> list[Row]:
    alone, serial, at_once = cell[ALONE], cell[SERIAL], cell[AT_ONCE]
    step = at_once["d_step_ms"] or 0.0
    if tokens <= SHORT_TOKENS:
        noise = statistics.pstdev(serial["each_first_ms"])
        what = "first token at once: that serially and its spread, ms"
        return [_at_most(what, at_once["first_ms"], serial["first_ms"] + noise)]
    if serial["moving_ms"] > alone["prefill_ms"]:
        limit = 1.1 * serial["moving_ms"] + step
        verdicts = [
            _at_most("first token: 1.1 times the transfer alone, and a step of D, ms", at_once["first_ms"], limit)
        ]
    else:
        what, limit = "first token: that of P alone, a step of D and 5 ms, ms", alone["first_ms"] + step + 5
        verdicts = [
            _at_least("share of the bytes at D when P's last step ends", at_once["before_end"], 0.95),
            _at_most(what, at_once["first_ms"], limit),
        ]
    verdicts.append(_at_most("P's prefill slower than alone, %", at_once["prefill_slower_percent"], 1))
    if theirs is not None and tokens >= 8000:
        share = at_once["first_ms"] / theirs["first_ms"]
        verdicts.append(_at_most("first token, share of NixlConnector's (pull)", share, 0.5))
    return verdicts


def _at_most(target: str, figure: float, limit: float) -> Row:
    return {"target": target, "figure": round(figure, 3), "limit": f"<= {limit:.4g}", "met": figure <= limit}


def _at_least(target: str, figure: float, limit: float) -> Row:
    return {"target": target, "figure": round(figure, 3), "limit": f">= {limit:.3g}", "met": figure >= limit}


# --- plot -------------------------------------------------------------------------------------------------------------


def plot(lines: Sequence[Row], path: Path) -> None:
    """Timelines: P's chunks and layers, what it had sent, what had come over the link and lay in D's pages, and the
    tokens at the client. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    curves = {"sent": ("tab:red", "P has sent"), "link": ("tab:orange", "over the link"),
              "placed": ("tab:purple", "in D's pages")}  # fmt: skip
    lines = [line for line in lines if line["way"] != ALONE]
    figure, axes = pyplot.subplots(
        len(lines), 1, figsize=(11, 1.9 * len(lines)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, line in zip(axes[:, 0], lines, strict=True):
        for step in line["steps"]:
            axis.barh(1.25, step["end"] - step["begin"], left=step["begin"], height=0.25, color="tab:blue", alpha=0.5)
            axis.plot(step["layers"], [1.25] * len(step["layers"]), "|", color="tab:blue", markersize=6)
        total = max([1, *(count for name in curves for _, count in line[name][-1:])])
        for name, (colour, label) in curves.items():
            if line[name]:
                x, y = zip(*line[name], strict=True)
                axis.plot(x, [count / total for count in y], drawstyle="steps-post", color=colour, label=label)
        axis.plot(line["arrived"], [1.6] * len(line["arrived"]), "v", color="tab:green")
        axis.set_ylim(-0.05, 1.8)
        axis.set_yticks([0, 1, 1.25, 1.6], ["0 bytes", "all bytes", "P's steps", "tokens"], fontsize=7)
        axis.set_title(f"{line['name']}, {line['tokens']} tokens, {line['way']}", fontsize=9)
        axis.legend(fontsize=6, loc="lower right")
    axes[-1, 0].set_xlabel("seconds since the client sent its request")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
