"""Hand-overs between two real engines over HTTP: bytes, tokens, counters, aborts, bad input. One pair for all tests."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvferry.cli.main import app
from kvferry.transport.channels import CPU
from kvferry.transport.registry import preferred_planes
from tests.support.engines import ServerGroup, vllm_command
from tests.support.served import (
    Pair,
    at_once,
    complete,
    count,
    descendants,
    differ,
    ended_leases,
    eventually,
    loaded_prompt,
    no_block_held,
    prefill_leg,
    prompt,
    records,
    released,
    stream_and_leave,
    tokens_of,
)
from tests.support.server import PATIENCE_SECONDS, Server, metric_sum
from tests.support.tiny_model import ModelSpec, build_model

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("tokens", [2, 31, 32, 33, 200, 1500])
def test_bytes_and_tokens(pair: Pair, tokens: int) -> None:
    ids = prompt(tokens, tokens)
    with_hand_over = pair.check(ids, plane=preferred_planes(CPU)[0])
    assert with_hand_over["usage"]["prompt_tokens"] == tokens
    alone = complete(pair.decode, ids, cache_salt=f"alone-{tokens}")
    assert tokens_of(with_hand_over) == tokens_of(alone)


def test_the_log_and_the_page_of_d_are_short(pair: Pair) -> None:
    """One line of vLLM's for all hand-overs of its interval, and each line of KVFerry from its own place."""
    pair.check(prompt(100, 9))

    def summed_up() -> bool:
        complete(pair.decode, [7], max_tokens=1)
        return "Num hand-overs=" in pair.decode.log_text()

    eventually(summed_up, "vLLM logs its figures")
    lines = [line for line in pair.decode.log_text().splitlines() if "kvferry: " in line]
    places = {found[1] for line in lines if (found := re.search(r"\[(\w+\.py):\d+\] kvferry: ", line))}
    assert len(places) > 1 and "limited_log.py" not in places and not any(" done: " in line for line in lines)
    series = [name for name, _ in pair.decode.metrics() if name.startswith("vllm:kvferry_")]
    assert 88 < len(series) < 260 and not any("prefix" in name for name in series)


def test_check_asks_a_router_or_the_two_engines_themselves(pair: Pair) -> None:
    for urls in ([pair.router.url], [pair.prefill.url, pair.decode.url]):
        done = CliRunner().invoke(app, ["check", *urls, "--json", "--timeout", "900"], env={"VLLM_API_KEY": ""})
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["tokens"] == found["prompt_tokens"] > 100 and found["report"]["plane"] == preferred_planes(CPU)[0]
    alone = CliRunner().invoke(app, ["check", pair.decode.url])
    assert alone.exit_code == 2 and "give two engines as" in alone.stderr
    no_block_held(pair.prefill, pair.decode)


def test_planted_corruption_is_noticed(pair: Pair) -> None:
    """One bit, flipped on D after the load and before its first decode step."""
    ids = prompt(300, 2)
    pair.decode.rpc("kv_corrupt")
    complete(pair.router, ids)
    assert "KV bytes differ in 1 of 4 layers" in str(differ(records(pair.decode), records(pair.prefill), ids))
    pair.check(prompt(300, 3))


def test_sixteen_at_once(pair: Pair) -> None:
    lengths = [20 + 37 * n for n in range(16)]
    prompts = [prompt(n, 100 + n) for n in lengths]
    answers, _ = at_once(pair.prefill, pair.decode, prompts, lambda ids: complete(pair.router, ids))
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == lengths


@pytest.mark.parametrize("serial", [True, False])
def test_a_client_that_goes_during_the_prefill_leg(pair: Pair, serial: bool) -> None:
    """P answers after the client has gone. Where D is asked after P, P's lease is released; where both were asked at
    once, P and D abort the request. No lease is left to expire."""
    router = pair.router
    if serial:
        router = pair.group.router(pair.prefill, pair.decode, arguments=["--serial"], name="serial")
    ids, leases = prompt(1200, 25 + serial), ended_leases(pair.prefill)
    engine = descendants(pair.prefill.process.pid)
    for pid in engine:
        os.kill(pid, signal.SIGSTOP)
    try:
        seconds, early = 1.0, True
        while early:  # where the router had not read the request
            seen = len(router.log_text())
            stream_and_leave(router, ids, 1 << 20, seconds)
            eventually(lambda seen=seen: "the client is gone" in router.log_text()[seen:], "the router has seen it")
            early = "the client is gone before its request was read" in router.log_text()[seen:]
            seconds *= 2
    finally:
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
    if serial:
        released(pair.prefill, leases)
        pair.group.stop(router)
    no_block_held(pair.prefill, pair.decode)
    assert ended_leases(pair.prefill)[1] == leases[1], "no lease has ended by time"


def test_many_clients_that_go_away(pair: Pair) -> None:
    def leave(number: int) -> None:
        stream_and_leave(pair.router, prompt(600, 300 + number), 1 << 20, 0.1 * (number % 12))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(24)))
    no_block_held(pair.prefill, pair.decode)
    complete(pair.decode, [7], max_tokens=1)  # a step, with which D tells what it counted
    pair.check(prompt(130, 10))


def test_other_weights_of_one_configuration(pair: Pair, model: Path, tmp_path: Path) -> None:
    """D loads nothing of them, and says why: from its start, and where weights change while both engines run."""
    p, folder = pair.prefill, build_model(tmp_path / "other", ModelSpec(layers=4, seed=8))
    d = pair.group.engine("other", folder)
    pair.group.wait_ready(servers=[d])
    d.rpc("kv_watch")

    def refused(seed: int) -> None:
        ids = prompt(200, seed)
        alone, before = tokens_of(complete(d, ids, cache_salt=f"alone {seed}")), count(d)
        reasons = metric_sum(d.metrics(), "vllm:kvferry_prompts_total", reason="incompatible") or 0
        assert tokens_of(complete(d, ids, kv_transfer_params=prefill_leg(p, ids))) == alone
        eventually(
            lambda: metric_sum(d.metrics(), "vllm:kvferry_prompts_total", reason="incompatible") == reasons + 1,
            "the prompt is counted by its reason",
        )
        assert (count(d) - before).by_plane == {}

    def reload(server: Server, weights: Path) -> None:
        server.post("/pause")
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
        server.post("/resume")

    try:
        refused(71)
        (line,) = re.findall(r"peer refused: weights digest differs[^\n]*", d.log_text())[:1]
        assert re.search(
            rf"ours is [0-9a-f]{{16}} of {folder}, revision unset, the peer's is [0-9a-f]{{16}} of {model}", line
        )
        assert "model_tag" in line
        reload(d, model)
        loaded_prompt(p, d, prompt(200, 72))
        reload(p, folder)
        eventually(lambda: "this rank has other weights" in p.log_text(), "P tells its D")
        refused(73)
        reload(d, folder)
        loaded_prompt(p, d, prompt(200, 74))
        reload(p, model), reload(d, model)
        d.rpc("reset_weights")  # vLLM writes the parameters themselves
        refused(75)
    finally:
        pair.group.stop(d)
        reload(p, model)
        complete(pair.router, prompt(200, 76))  # P has forgotten its other D, too


# vLLM's own benchmark, as its users run it

REQUESTS, TOKENS, OUTPUT, BESIDE = 20, 200, 12, 4
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


def test_vllm_bench_serve(pair: Pair, model: Path) -> None:
    """All its requests complete, and D has the KV cache from P."""
    p, d = pair.prefill, pair.decode
    router = pair.group.router(p, d, name="bench-router")
    expired, failed = ended_leases(p)[1], count(d).failed
    for seed, backend in enumerate(ENDPOINTS, 1):
        before, freed = prompt_tokens(d), ended_leases(p)[0]
        asked = of_router(router, "decode_legs")
        result = bench_serve(pair.group, router, model, backend, seed)
        assert (result["completed"], result["failed"]) == (REQUESTS, 0)
        assert result["total_output_tokens"] == REQUESTS * OUTPUT
        assert of_router(router, "decode_legs") == asked + REQUESTS
        grown = {source: tokens - before[source] for source, tokens in prompt_tokens(d).items()}
        assert grown["local_compute"] <= REQUESTS, "D computes the last token of a prompt"
        assert grown["external_kv_transfer"] > 0.7 * result["total_input_tokens"], "some prompts begin alike"
        assert count(d).failed == failed
        no_block_held(p, d)
        eventually(lambda freed=freed: ended_leases(p)[0] >= freed + REQUESTS, "all leases are released")
        assert ended_leases(p)[1] == expired, "a lease has ended by time"
    assert of_router(router, "requests") == of_router(router, "requests", status="200")
    assert of_router(router, "decode_legs", how="at_once") >= 2 * REQUESTS - BESIDE
    assert of_router(router, "decode_legs", how="decode_only") == of_router(router, "failed_legs") == 0
    pair.group.stop(router)
