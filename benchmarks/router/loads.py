"""The loads of ``where_to_prefill.py``: conversations of Mooncake's trace, and short turns."""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvferry.cli.plan.trace import BLOCK_TOKENS, TracedRequest, parsed_trace

SAMPLE = Path(__file__).resolve().parent / "conversation_sample.json"
SAMPLE_BEGIN, SAMPLE_REQUESTS = 2000, 600
"""Later conversations have earlier turns in the sample; the first ones of the trace have none."""
GRAIN_MS = 3000
POLICIES = ("always", "never", "decide")


def sampled(path: Path) -> list[list[int]]:
    """Of each request: ms, tokens of the prompt and of the answer, the earlier one that shares most blocks, and how
    many it shares."""
    trace = parsed_trace(path.read_bytes().splitlines())[SAMPLE_BEGIN:][:SAMPLE_REQUESTS]
    found, holders = [], dict[int, int]()  # by block, the first request that has it
    for number, request in enumerate(trace):
        shared = sum(block in holders for block in request.hash_ids)  # a block has all before it
        parent = holders[request.hash_ids[shared - 1]] if shared else 0
        at = int(request.timestamp - trace[0].timestamp)
        found.append([at, request.input_length, request.output_length, parent, shared])
        holders |= {block: number for block in request.hash_ids if block not in holders}
    return found


def conversations(rate: float, count: int = SAMPLE_REQUESTS, shrink: int = 1) -> list[TracedRequest]:
    """So many requests of the sample, so many per second."""
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


def short_turns(rate: float, count: int = SAMPLE_REQUESTS, shrink: int = 1) -> list[TracedRequest]:
    rng, at, found = random.Random(2), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate) * 1e3
        answer = max(1, rng.randint(20, 200) // shrink)
        found.append(TracedRequest(at, rng.randint(60, 300), answer, (number,)))
    return found


LOADS = {"conversations": conversations, "short turns": short_turns}
