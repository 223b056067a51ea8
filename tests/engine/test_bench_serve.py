"""``vllm bench serve``, as its users run it, against the router and a real pair of engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import ServerGroup, vllm_command
from tests.support.served import count, ended_leases, eventually, no_block_held
from tests.support.server import PATIENCE_SECONDS, Server, metric_sum

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
REQUESTS, TOKENS, OUTPUT, BESIDE = 40, 200, 12, 4
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def bench_serve(group: ServerGroup, router: Server, model: Path, backend: str, seed: int) -> dict[str, Any]:
    """The result that the command writes."""
    folder, name = group.logs, f"bench-{backend}"
    command = [*vllm_command(), "bench", "serve", "--backend", backend, "--endpoint", ENDPOINTS[backend]]
    command += ["--base-url", router.url, "--model", "model", "--tokenizer", str(model), "--seed", str(seed)]
    command += ["--dataset-name", "random", "--random-input-len", str(TOKENS), "--random-output-len", str(OUTPUT)]
    command += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(BESIDE), "--ignore-eos", "--temperature", "0"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", f"{name}.json", "--disable-tqdm"]
    client = group.spawn(name, command, host="127.0.0.1", port=0, environment={})
    eventually(lambda: not client.alive, "vllm bench serve has ended", PATIENCE_SECONDS)
    assert client.process.returncode == 0, client.log_tail()
    result: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return result


def of_router(router: Server, name: str, **labels: str) -> float:
    return metric_sum(router.metrics(), f"kvferry_router_{name}_total", **labels) or 0


def prompt_tokens(server: Server) -> dict[str, float]:
    """By where their KV cache came from."""
    samples, sources = server.metrics(), ("local_compute", "external_kv_transfer")
    return {each: metric_sum(samples, "vllm:prompt_tokens_by_source_total", source=each) or 0 for each in sources}


def test_all_requests_complete_and_d_has_the_kv_cache_from_p(group: ServerGroup, model: Path) -> None:
    p, d = (group.engine(name, model) for name in ("prefill", "decode"))
    group.wait_ready()
    router = group.router(p, d)
    for seed, backend in enumerate(ENDPOINTS, 1):
        before, released = prompt_tokens(d), ended_leases(p)[0]
        answered = of_router(router, "requests", status="200")
        result = bench_serve(group, router, model, backend, seed)
        assert (result["completed"], result["failed"]) == (REQUESTS, 0)
        assert result["total_output_tokens"] == REQUESTS * OUTPUT
        assert of_router(router, "requests", status="200") == answered + REQUESTS
        grown = {source: tokens - before[source] for source, tokens in prompt_tokens(d).items()}
        assert grown["local_compute"] <= REQUESTS, "D computes the last token of a prompt"
        assert grown["external_kv_transfer"] > 0.7 * result["total_input_tokens"], "some prompts begin alike"
        assert count(d).failed == 0
        no_block_held(p, d)
        eventually(lambda r=released: ended_leases(p)[0] >= r + REQUESTS, "all leases are released")
        assert ended_leases(p)[1] == 0, "a lease has ended by time"
    assert of_router(router, "requests") == of_router(router, "requests", status="200")
    assert of_router(router, "handovers", how="at_once") >= 2 * REQUESTS - BESIDE
    assert of_router(router, "handovers", how="decode_only") == of_router(router, "failed_legs") == 0
