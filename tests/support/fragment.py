"""Traffic that leaves the free blocks of an engine in scattered order, and how scattered a block table is.

vLLM takes blocks from the head of a queue and puts the blocks of a finished request at its end. Requests that decode
side by side take blocks in turn, so that those of one request lie far apart, and a queue that is made of such requests'
blocks gives every later request a scattered block table.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from tests.support.server import EngineError, Server

OUTPUTS = (0.5, 1.5, 3.0, 6.0)
"""Blocks that a request decodes, of four kinds that run side by side."""


def block_count(engine: Server) -> int:
    """Of the engine's block pool."""
    for name, labels in engine.metrics():
        if name == "vllm:cache_config_info":
            return int(dict(labels)["num_gpu_blocks"])
    raise EngineError(f"{engine.name}: no vllm:cache_config_info among its metrics")


def in_sequence(block_ids: Sequence[int]) -> float:
    """The share of a table's blocks that lie right behind the one before: 1 for fresh tables, near 0 for scattered."""
    steps = [after - before for before, after in pairwise(block_ids)]
    return steps.count(1) / max(1, len(steps))


def scatter(engine: Server, block_tokens: int, beside: int, vocabulary: int, turns: float = 1.5, seed: int = 0) -> None:
    """Send prompts of one to three blocks, ``beside`` at a time, of mixed length and with answers of mixed length.

    It ends when the blocks of the whole pool went through them ``turns`` times.
    """
    rng = random.Random(seed)
    left = turns * block_count(engine)

    def batch(blocks: float) -> dict[str, Any]:
        lengths = [rng.randrange(block_tokens, 3 * block_tokens) for _ in range(beside // len(OUTPUTS))]
        prompts = [[rng.randrange(2, vocabulary) for _ in range(length)] for length in lengths]
        options = {"max_tokens": int(blocks * block_tokens), "ignore_eos": True, "temperature": 0}
        return {"model": "model", "prompt": prompts, **options}

    with ThreadPoolExecutor(len(OUTPUTS)) as pool:
        while left > 0:
            list(pool.map(lambda body: engine.post("/v1/completions", body), map(batch, OUTPUTS)))
            left -= beside * (2 + sum(OUTPUTS) / len(OUTPUTS))
