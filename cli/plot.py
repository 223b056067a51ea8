"""A line chart with logarithmic axes as SVG. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 80, 200, 40, 60
COLOURS = ("#0b6e99", "#c8551b", "#4d7c0f", "#7c3aed", "#8a6d1a", "#b91c5c")

Line = Sequence[tuple[float, float]]


def svg_chart(title: str, x_name: str, y_name: str, lines: Mapping[str, Line]) -> str:
    """An SVG document with one line for each entry of ``lines``: its name, and points with positive coordinates."""
    points = [point for line in lines.values() for point in line]
    x_decades, y_decades = (_decades([point[axis] for point in points]) for axis in (0, 1))

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * _share(point[0], x_decades)
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(point[1], y_decades)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, TOP - 16, title, size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_name, anchor="middle"),
        f'<g transform="rotate(-90 18 {HEIGHT / 2})">{_text(18, HEIGHT / 2, y_name, anchor="middle")}</g>',
    ]
    for power in range(x_decades[0], x_decades[1] + 1):
        x, _ = place((10.0**power, 10.0 ** y_decades[0]))
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{10.0**power:g}", anchor="middle"))
    for power in range(y_decades[0], y_decades[1] + 1):
        _, y = place((10.0 ** x_decades[0], 10.0**power))
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end"))
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        placed = [place(point) for point in line]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 18 * number + 12, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    return low, max(high, low + 1)


def _share(value: float, decades: tuple[int, int]) -> float:
    return (log10(value) - decades[0]) / (decades[1] - decades[0])


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(text)}</text>'
    )
