"""What the streaming benchmark makes of its samples: rows, and targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.engines.streaming_pair import ALONE, AT_ONCE, OURS_NAME, PULL_NAME, SERIAL, Sample

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
        "way": way, "samples": len(samples), "first_ms": ms(first),
        "second_ms": ms([sample.arrived[1] for sample in samples]),
        "last_ms": ms([sample.arrived[-1] for sample in samples]),
        "prefill_ms": ms([sample.prefill for sample in samples]),
        "prefill_slower_percent": slower(lambda sample: sample.prefill),
        "core_slower_percent": slower(lambda sample: sample.core),
        "d_step_ms": ms(decode_steps) if decode_steps else None,
        "mib": round(statistics.median(sample.curve[-1][1] if sample.curve else 0 for sample in samples) / 2**20, 1),
        "before_end": round(statistics.median(sample.before_end for sample in samples), 3),
        "moving_ms": ms([sample.moving for sample in samples]),
        "empty_steps": {
            engine: round(statistics.median(sample.empty[engine] / sample.arrived[-1] for sample in samples))
            for engine in ("P", "D")
        },
        "each_first_ms": [round(value * 1e3, 1) for value in first],
    }  # fmt: skip


# --- targets ----------------------------------------------------------------------------------------------------------


def targets(rows: Sequence[Row]) -> list[Row]:
    """What KVFerry should reach, and what it has reached: ``target``, ``cell``, ``figure``, ``limit``, ``met``."""
    found = {(row["name"], row["tokens"], row["gb_per_s"], row["way"]): row for row in rows}
    verdicts: list[Row] = []
    for name, tokens, rate in dict.fromkeys(key[:3] for key in found):
        cell = {key[3]: row for key, row in found.items() if key[:3] == (name, tokens, rate)}
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
        what, verdicts = "first token: 1.1 times the transfer alone, and a step of D, ms", []
    else:
        what, limit = "first token: that of P alone, a step of D and 5 ms, ms", alone["first_ms"] + step + 5
        share, at_least = at_once["before_end"], {"limit": ">= 0.95", "met": at_once["before_end"] >= 0.95}
        verdicts = [{"target": "share of the bytes at D when P's last step ends", "figure": share, **at_least}]
    verdicts.append(_at_most(what, at_once["first_ms"], limit))
    verdicts.append(_at_most("P's prefill slower than alone, %", at_once["prefill_slower_percent"], 1))
    if theirs is not None and tokens >= 8000:
        share = at_once["first_ms"] / theirs["first_ms"]
        verdicts.append(_at_most("first token, share of NixlConnector's (pull)", share, 0.5))
    return verdicts


def _at_most(target: str, figure: float, limit: float) -> Row:
    return {"target": target, "figure": round(figure, 3), "limit": f"<= {limit:.4g}", "met": figure <= limit}
