"""The loads of ``where_to_prefill.py``: conversations of Mooncake's trace, and turns of random lengths. The turns
of single conversations are for ``prefix_reads.py``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SAMPLE = Path(__file__).resolve().parent / "conversation_sample.json"
"""The requests 2000 to 2299 of the trace. Of a request: ms, tokens of the prompt and of
the answer, the earlier one that shares most blocks, and how many it shares."""
TURNS = SAMPLE.with_name("conversation_turns.json")
"""The first six turns of four conversations whose answers have at most 2500 tokens together."""
GRAIN_MS = 3000
BLOCK_TOKENS = 512
"""Prompt tokens of one of ``hash_ids``."""


class TracedRequest(NamedTuple):
    """``timestamp``: milliseconds. ``hash_ids``: one number for each ``BLOCK_TOKENS`` tokens of the prompt, the last
    ones perhaps fewer; equal where everything up to there is equal."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


Turns = list[list[int]]
"""Of one conversation: by turn, the tokens of the prompt and of the answer."""


def agent_turns(rng: random.Random, start: int, turns: int, growth: int = 632, answer: int = 96) -> Turns:
    """A conversation whose first prompt has ``start`` tokens, and which grows by ``growth`` a turn in the median, the
    answer among them."""
    found = [[start, answer]]
    for _ in range(turns - 1):
        grown = max(answer + 16, round(growth * min(2.0, math.exp(rng.gauss(0, 0.5)))))
        found.append([found[-1][0] + grown, answer])
    return found


def conversations(rate: float, count: int, shrink: int = 1) -> list[TracedRequest]:
    """So many requests of the trace, so many per second."""
    rng, number, found = random.Random(1), 0, list[TracedRequest]()
    rows = json.loads(SAMPLE.read_text())[:count]
    stretch = len(rows) / rate / ((rows[-1][0] + GRAIN_MS) / 1e3)
    for arrived, tokens, answer, parent, shared in rows:
        blocks = list(found[parent].hash_ids[:shared]) if shared else []
        for _ in range(-(-tokens // BLOCK_TOKENS) - shared):
            blocks.append(number := number + 1)
        at = (arrived + rng.uniform(0, GRAIN_MS)) * stretch
        found.append(TracedRequest(at, tokens, max(1, answer // shrink), tuple(blocks)))
    return sorted(found, key=lambda request: request.timestamp)


def turns(rate: float, count: int, shrink: int = 1) -> list[TracedRequest]:
    rng, at, found = random.Random(2), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate) * 1e3
        answer, tokens = max(1, rng.randint(20, 200) // shrink), rng.randint(60, 300)
        blocks = range(number << 8, (number << 8) - (-tokens // BLOCK_TOKENS))
        found.append(TracedRequest(at, tokens, answer, tuple(blocks)))
    return found


LOADS: dict[str, Callable[..., list[TracedRequest]]] = {"conversations": conversations, "short turns": turns}
