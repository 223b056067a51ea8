"""The picture of a result of ``streaming.py``, as SVG: the first token by plane and way, and bytes in time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.cli.plot import COLOURS, svg, svg_text

WIDTH, LEFT, RIGHT, TOP, LINE, PANEL = 760, 200, 600, 44, 20, 250
"""Of a panel, in pixels: its axes lie between LEFT and RIGHT. LINE: from one bar to the next. PANEL: of the curves."""
Row = Mapping[str, Any]


def streaming_picture(result: Row) -> str:
    """Of the longest prompt. The second panel is there where the result has curves, with those that it has."""
    longest = max(row["tokens"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["tokens"] == longest]
    colours = {name: f"c{number % len(COLOURS)}" for number, name in enumerate(dict.fromkeys(r["name"] for r in rows))}
    parts, height = bars(rows, colours)
    if result.get("curves"):
        parts += curves(result["curves"], colours, height)
        height += TOP + PANEL + 56
    return svg(f"First token of {longest} tokens ({result['versions']['gpus']}), ms", WIDTH, height, parts)


def bars(rows: Iterable[Row], colours: Mapping[str, str]) -> tuple[list[str], int]:
    """A bar for each row, and the height below the last one."""
    rows = list(rows)
    parts, y, before = [], TOP, ""
    most = max(row["first_ms"] for row in rows)
    for row in rows:
        y += LINE // 2 * bool(before and row["name"] != before)
        if row["name"] != before:
            parts.append(svg_text(16, y + 13, row["name"]))
        before, width = row["name"], (RIGHT - LEFT) * row["first_ms"] / most
        parts.append(svg_text(LEFT - 8, y + 13, row["way"], "end"))
        parts.append(f'<rect class="{colours[before]}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{LINE - 4}"/>')
        parts.append(svg_text(LEFT + width + 6, y + 13, f"{row['first_ms']:.0f}"))
        y += LINE
    return parts, y + 12


def curves(found: Iterable[Row], colours: Mapping[str, str], top: int) -> list[str]:
    """MiB at D over ms since the client sent its request; dashed: serially; a dot: P's last step has ended."""
    found = list(found)
    low, high = top + TOP + PANEL, top + TOP
    end, most = (max(curve["points"][-1][axis] for curve in found) for axis in (0, 1))
    end = max(end, *(curve["prefill_end_ms"] for curve in found))

    def at(ms: float, mib: float) -> tuple[float, float]:
        return 64 + (RIGHT - 64) * ms / end, low - (low - high) * mib / most

    parts = [svg_text(16, top + 26, "Bytes at D of one prompt, MiB; a dot: P's last step has ended", "title")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(end * share, most * share)
        parts += [f'<path class="grid" d="M64 {y:.1f}H{RIGHT}"/>', svg_text(56, y + 4, f"{most * share:.0f}", "end")]
        parts.append(svg_text(x, low + 20, f"{end * share:.0f}", "middle"))
    parts.append(svg_text((64 + RIGHT) / 2, low + 40, "ms since the client sent its request", "middle"))
    for number, curve in enumerate(found):
        colour, points = colours[curve["name"]], [(curve["points"][0][0], 0), *curve["points"]]
        dash = ' stroke-dasharray="6 4"' if curve["way"] == "serial" else ""
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        parts.append(f'<polyline class="{colour}"{dash} points="{drawn}"/>')
        ended = curve["prefill_end_ms"]
        x, y = at(ended, max((mib for ms, mib in points if ms <= ended), default=0))
        parts.append(f'<circle class="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
        height = high + 13 + LINE * number
        parts.append(f'<polyline class="{colour}"{dash} points="{RIGHT + 8},{height - 4} {RIGHT + 32},{height - 4}"/>')
        parts.append(svg_text(RIGHT + 36, height, f"{curve['name'].split(', ')[-1]}, {curve['way']}"))
    return parts
