"""What a client of a prefill/decode pair does: stream a completion, and read what the engines count."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.server import PATIENCE_SECONDS, EngineError, Server, metric_sum


@dataclass(frozen=True)
class Names:
    """Prometheus names of one connector, without which its columns stay empty; ``required`` makes that an error."""

    bytes_sum: str
    seconds_sum: str
    failed: str
    required: bool


METRICS = {
    "KVFerryConnector": Names(
        "vllm:kvferry_bytes_transferred_sum", "vllm:kvferry_handover_time_seconds_sum",
        "vllm:kvferry_num_failed_handovers_total", True,
    ),
    "NixlConnector": Names(
        "vllm:nixl_bytes_transferred_sum", "vllm:nixl_xfer_time_seconds_sum", "vllm:nixl_num_failed_transfers_total",
        False,
    ),
}  # fmt: skip


@dataclass
class Answer:
    """``began`` is of ``time.perf_counter``, ``ttft`` in seconds."""

    token_ids: list[int]
    prompt_tokens: int
    began: float
    ttft: float


@functools.cache
def client() -> httpx.Client:
    """One for all: making one costs tens of milliseconds, which are not to be in anybody's time to first token."""
    return httpx.Client(trust_env=False, timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))


def stream(url: str, body: dict[str, Any]) -> Answer:
    """One streamed completion: the ids of its tokens, and seconds to the first.

    The ids come with those of the prompt, which takes time before the first token; ``return_token_ids`` in ``body`` set
    to False leaves out both.

    Raises:
        EngineError: an HTTP error, or an error in the stream.
    """
    body = {"return_token_ids": True, **body, "stream_options": {"include_usage": True}}
    ids: list[int] = []
    prompt_tokens, ttft = 0, 0.0
    client()
    began = time.perf_counter()
    for event in events(url, body):
        for choice in event["choices"]:  # vLLM sends none without a token
            ttft = ttft or time.perf_counter() - began
            ids += choice.get("token_ids") or []
        if event.get("usage"):
            prompt_tokens = event["usage"]["prompt_tokens"]
    return Answer(ids, prompt_tokens, began, ttft)


def events(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed completion. Raises EngineError, as ``stream`` does."""
    with client().stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise EngineError(f"{url}: HTTP {response.status_code}: {response.read()[:500]!r}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise EngineError(f"{url}: {event['error']}")
                yield event


def loads(engine: Server, names: Names) -> dict[str, float | None]:
    """The counters of D that a hand-over moves."""
    samples = engine.metrics()
    return {
        "tokens": metric_sum(samples, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"),
        "bytes": metric_sum(samples, names.bytes_sum),
        "seconds": metric_sum(samples, names.seconds_sum),
        "failed": metric_sum(samples, names.failed),
    }


def settled(engine: Server, names: Names, before: dict[str, float | None]) -> dict[str, float]:
    """What the counters grew by. The connector's reach the front end some steps after the tokens did, if it has any."""
    deadline = time.monotonic() + (PATIENCE_SECONDS if names.required else 3)
    while True:
        after = loads(engine, names)
        grown = {name: (value or 0) - (before[name] or 0) for name, value in after.items() if value is not None}
        if grown.get("bytes") or grown.get("failed") or time.monotonic() > deadline:
            return grown
        time.sleep(0.1)
