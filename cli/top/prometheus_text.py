"""Prometheus' text format, as vLLM's ``/metrics`` has it: samples only. Pure.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvferry.transport.errors import ProtocolError

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: the name of its series, its labels, and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The samples of a page.

    Raises:
        ProtocolError: a line is neither a comment nor a sample; one line.
    """
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            if match is None:
                raise ValueError
            yield Sample(match[1], _labels(match[2] or ""), float(match[3]))
        except ValueError:
            raise ProtocolError(f"line {number} is no sample of Prometheus: {line[:80]!r}") from None


def _labels(text: str) -> dict[str, str]:
    found, position = {}, 0
    while position < len(text.rstrip()):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError
        found[match[1]] = _ESCAPED.sub(lambda escaped: _ESCAPES.get(escaped[1], escaped[1]), match[2])
        position = match.end()
    return found
