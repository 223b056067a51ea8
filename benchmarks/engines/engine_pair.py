"""The models and places of engines that are measured, and the requests that are sent to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.server import Server
from tests.support.tiny_model import ModelSpec

OURS, THEIRS = "KVFerryConnector", "NixlConnector"
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""``uni``, which vLLM has by default for one GPU, named so that vLLM does not take ``mp`` for it on the CPU."""


@dataclass(frozen=True)
class Setup:
    """Where engines run and what suits them there; ``gpus`` are those of P and of D."""

    spec: ModelSpec
    block: int
    gpus: tuple[tuple[int, ...], tuple[int, ...]]
    nixl: dict[str, Any] = field(default_factory=dict)


GPU = Setup(
    ModelSpec(
        layers=32, hidden=1024, heads=32, kv_heads=8, head_dim=128, intermediate=2816, max_tokens=32768,
        dtype="bfloat16",
    ),
    block=16, gpus=((0,), (1,)),
)  # fmt: skip
"""128 KiB of KV per token, narrow beside that: a step waits for Python."""
LLAMA_8B = ModelSpec(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, max_tokens=32768, dtype="bfloat16"
)
"""But for its vocabulary."""
CPU = Setup(ModelSpec(layers=4, dtype="bfloat16"), block=32, gpus=((), ()), nixl={"num_threads": 1})


def body(prompt: list[int]) -> dict[str, Any]:
    """One token, whose id is not asked for: an answer would repeat those of the prompt."""
    return {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 1, "return_token_ids": False}


def prefill_leg(prefill: Server, request: dict[str, Any]) -> dict[str, Any]:
    """What D needs of P's answer."""
    answer = prefill.post("/v1/completions", request | {"kv_transfer_params": PREFILL_TAG})
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


def graph_sizes(sequences: list[int]) -> list[int]:
    """Batches that D's steps have: its sequences, and up to eight requests beside them."""
    return sorted({1, 2, 4, 8, *(size for count in sequences if count for size in (count, count + 1, count + 8))})
