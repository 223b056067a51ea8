"""A line chart as SVG, for a page in light or dark: measured points, each line named at its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 72, 216, 48, 56
LABEL_HEIGHT, TICK_WIDTH, MOST_TICKS = 17, 38, 8
COLOURS = (
    ("#0b6e99", "#58b7e6"), ("#c8551b", "#f0965c"), ("#4d7c0f", "#a3d45c"), ("#7c3aed", "#b79cf5"),
    ("#8a6d1a", "#d9b84a"), ("#b91c1c", "#f28b82"),
)  # fmt: skip
"""Of a line on light and on dark ground."""

Line = Sequence[tuple[float, float]]


def svg_chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Line]) -> str:
    """An SVG document with one line for each entry of ``lines``: its name, and points with positive coordinates. The
    x axis is logarithmic, the y axis begins at 0."""
    xs = sorted({x for line in lines.values() for x, _ in line})
    x_low, x_high = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] / 2, xs[0] * 2)
    y_ticks = _steps(max(y for line in lines.values() for _, y in line))
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x_at(x: float) -> float:
        return LEFT + 12 + (right - LEFT - 24) * log10(x / x_low) / log10(x_high / x_low)

    def y_at(y: float) -> float:
        return bottom - (bottom - TOP) * y / y_ticks[-1]

    parts = [
        svg_text((LEFT + right) / 2, HEIGHT - 12, x_name, "middle"),
        f'<g transform="rotate(-90 18 {(TOP + bottom) / 2})">{svg_text(18, (TOP + bottom) / 2, y_name, "middle")}</g>',
    ]
    for y in y_ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y_at(y):.1f}H{right}"/>')
        parts.append(svg_text(LEFT - 8, y_at(y) + 4, f"{y:,.10g}", "end"))
    last = 0.0
    for x in xs if len(xs) <= MOST_TICKS else _decades(x_low, x_high):
        if x_low <= x <= x_high and x_at(x) - last >= TICK_WIDTH:
            last = x_at(x)
            parts.append(f'<path class="grid" d="M{last:.1f} {bottom}v5"/>')
            parts.append(svg_text(last, bottom + 20, f"{x:,.10g}", "middle"))
    for number, line in enumerate(lines.values()):
        placed = [(x_at(x), y_at(y)) for x, y in line]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="c{number % len(COLOURS)}" points="{drawn}"/>')
        parts += [f'<circle class="c{number % len(COLOURS)}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in placed]
    ends = [y_at(line[-1][1]) for line in lines.values()]
    for number, (name, y) in enumerate(zip(lines, _apart(ends), strict=True)):
        parts.append(svg_text(right + 8, y + 4, name, f"c{number % len(COLOURS)}"))
    return svg(title, WIDTH, HEIGHT, parts)


def svg(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """An SVG document of ``width`` x ``height`` pixels: ``parts`` below a title. Those of a class ``c0`` have the
    first of ``COLOURS``, and so on; lines of the class ``grid`` are pale."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>", f"<style>{_style()}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>', svg_text(16, 26, title, "title"),
    )  # fmt: skip
    return "\n".join([*head, *parts, "</svg>", ""])


def svg_text(x: float, y: float, text: str, name: str = "") -> str:
    """``name``: its class, which may be ``middle`` or ``end``: where in the text ``x`` lies."""
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _decades(low: float, high: float) -> list[float]:
    first, last = floor(log10(low)), ceil(log10(high))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _steps(high: float) -> list[float]:
    """From 0 to at least ``high`` in four or five equal steps."""
    power = 10.0 ** floor(log10(high / 4))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power * 5 >= high)
    return [number * step for number in range(ceil(high / step) + 1)]


def _apart(wanted: Sequence[float]) -> list[float]:
    """Heights near the wanted ones, in their order, so that no label covers another one."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    found = dict(enumerate(wanted))
    for above, below in pairwise(order):
        found[below] = max(found[below], found[above] + LABEL_HEIGHT)
    limit = float(HEIGHT - BOTTOM)
    for number in reversed(order):
        found[number] = limit = min(found[number], limit)
        limit -= LABEL_HEIGHT
    return [found[number] for number in range(len(wanted))]


def _style() -> str:
    def scheme(shade: int, ground: str, text: str, grid: str) -> str:
        lines = "".join(
            f".c{number}{{fill:{colour[shade]}}}polyline.c{number}{{fill:none;stroke:{colour[shade]}}}"
            for number, colour in enumerate(COLOURS)
        )
        return f".ground{{fill:{ground}}}text{{fill:{text}}}.grid{{stroke:{grid}}}{lines}"

    return (
        "text{font:13px system-ui,sans-serif}.title{font-size:15px;font-weight:600}.middle{text-anchor:middle}"
        ".end{text-anchor:end}polyline{stroke-width:2.25;stroke-linejoin:round}"
        + scheme(0, "#fff", "#222", "#ddd")
        + f"@media(prefers-color-scheme:dark){{{scheme(1, '#12161c', '#e4e8ee', '#2f3743')}}}"
    )
