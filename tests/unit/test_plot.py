"""Line charts as SVG: axes, and names beside the ends of their lines."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from kvferry.cli.plot import svg_chart

SPREAD: dict[str, list[tuple[float, float]]] = {
    "a": [(16, 4.0), (1024, 120.0), (32768, 335.0)],
    "b": [(16, 60.0), (32768, 320.0)],
    "c <&>": [(16, 3.0)],
}


def drawn(lines: dict[str, list[tuple[float, float]]]) -> tuple[ET.Element, dict[str, ET.Element]]:
    """The picture, and its texts."""
    root = ET.fromstring(svg_chart("title", "x", "y", lines))
    return root, {text.text or "": text for text in root.iter() if text.tag.endswith("text")}


@pytest.mark.parametrize(
    ("lines", "ticks"),
    [
        (SPREAD, ["0", "100", "200", "300", "400", "16", "1,024", "32,768"]),
        ({"one": [(100, 7.0)]}, ["0", "2", "4", "6", "8", "100"]),
        ({"many": [(float(x), 1.0) for x in range(1, 200)]}, ["0", "0.2", "0.4", "0.6", "0.8", "1", "10", "100"]),
    ],
)
def test_axes_have_ticks_where_points_are(lines: dict[str, list[tuple[float, float]]], ticks: list[str]) -> None:
    root, texts = drawn(lines)
    assert set(ticks) <= set(texts) and len(texts) - 3 - len(lines) <= len(ticks)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    points = [point.split(",") for line in root.iter() for point in line.attrib.get("points", "").split()]
    assert len(points) == sum(map(len, lines.values()))
    assert all(0 < float(x) < width and 0 < float(y) < height for x, y in points)


def test_each_name_stands_at_the_end_of_its_line_and_covers_no_other() -> None:
    lines = {f"line {number}": [(1.0, 10.0), (2.0, 10.0 + number / 100)] for number in range(12)}
    _, texts = drawn(lines)
    heights = [float(texts[name].attrib["y"]) for name in lines]
    assert all(below - above >= 15 for below, above in pairwise(heights)), "the largest value is on top"
    assert drawn(SPREAD)[1]["c <&>"].attrib["class"] == "c2"
