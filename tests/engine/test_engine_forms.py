"""Engines of other forms, each against one plain engine, in both directions: ranks, stages, drafts, children, replicas.

The plain engine prefills in chunks. Bytes are compared per layer and head, of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import ServerGroup, free_port
from tests.support.served import (
    PATIENT,
    PER_HEAD,
    PatientServerGroup,
    complete,
    corrupted,
    count,
    counted,
    differ,
    eventually,
    loaded_prompt,
    no_block_held,
    prefill_leg,
    prompt,
    records,
    tokens_of,
)
from tests.support.server import Server, metric_sum

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
CHUNK = 256
LAYERS, HEADS = 4, 8
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
ATTEMPTS = 5
FEW_BLOCKS = 12
"""Of 32 tokens each, one of which vLLM keeps to itself: three of the requests below need more in the end."""


@dataclass
class SharedEngines:
    """One plain engine for all tests of this module; others beside it on demand, ended after the test."""

    group: ServerGroup
    model: Path
    plain: Server

    def beside(self, name: str, *arguments: str, **kwargs: Any) -> Server:
        engine = start(self.group, self.model, name, *arguments, **kwargs)
        ready(self.group, engine)
        return engine


def start(group: ServerGroup, model: Path, name: str, *arguments: str, **kwargs: Any) -> Server:
    return group.engine(name, model, **{**PER_HEAD, "arguments": [*PER_HEAD["arguments"], *arguments]}, **kwargs)


def ready(group: ServerGroup, *engines: Server) -> None:
    group.wait_ready(servers=engines)
    for engine in engines:
        engine.rpc("kv_watch")


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    with PatientServerGroup(tmp_path_factory.mktemp("forms")) as group:
        plain = start(group, model, "plain", "--max-num-batched-tokens", str(CHUNK), "--scheduling-policy", "priority")
        ready(group, plain)
        yield SharedEngines(group, model, plain)


@pytest.fixture
def shared(running: SharedEngines) -> Iterator[SharedEngines]:
    yield running
    for engine in running.group.servers[:]:
        assert engine.alive, engine.log_tail()
        eventually(engine.healthy, f"{engine.name} answers on /health")
        if engine is not running.plain:
            running.group.stop(engine)


def test_two_ranks_and_one(shared: SharedEngines) -> None:
    two = shared.beside("tp2", "--tensor-parallel-size", "2", "--max-num-batched-tokens", str(CHUNK))
    for p, d in ((two, shared.plain), (shared.plain, two)):
        for tokens in (20, 64, 2 * CHUNK + 33):
            loaded_prompt(p, d, prompt(tokens, tokens + (p is two)))
    for rank, head in ((0, 0), (1, HEADS // 2)):
        said = corrupted(shared.plain, two, prompt(40, 900 + rank), "1", str(rank))
        assert f"differ in 1 of {LAYERS * HEADS} layers" in said and said.endswith(f".attn#{head}"), said


def test_two_stages_and_one(shared: SharedEngines) -> None:
    """vLLM's CPU engine of two stages ends at its first forward when it is started with --enforce-eager."""
    two = shared.beside(
        "pp2", "--pipeline-parallel-size", "2", "--no-enforce-eager", "--max-num-batched-tokens", str(CHUNK)
    )
    for p, d in ((two, shared.plain), (shared.plain, two)):
        for tokens in (20, 64, 2 * CHUNK + 33):
            ids = prompt(tokens, tokens + 2 + (p is two))
            alone = tokens_of(complete(d, ids, cache_salt="alone"))
            assert [loaded_prompt(p, d, ids)] == alone
    for stage in range(2):
        said = corrupted(shared.plain, two, prompt(40, 900 + stage), "1", str(stage))
        assert f"differ in 1 of {LAYERS * HEADS} layers" in said and f"layers.{stage * LAYERS // 2}." in said, said


def test_drafts_priorities_and_too_few_blocks(shared: SharedEngines) -> None:
    """vLLM's n-gram drafts, and more requests than blocks: some are preempted, on D after their prompt was loaded."""
    plain = shared.plain
    busy = shared.beside(
        "busy", "--speculative-config", json.dumps(DRAFTS), "--num-gpu-blocks-override", str(FEW_BLOCKS),
        "--max-model-len", "320", "--max-num-batched-tokens", "320", "--scheduling-policy", "priority",
    )  # fmt: skip
    prompts = [prompt(60 + n, 50 + n) for n in range(6)]
    alone = [tokens_of(complete(plain, ids, max_tokens=60, cache_salt="alone")) for ids in prompts]
    for p, d in ((plain, busy), (busy, plain)):
        for attempt in range(ATTEMPTS):  # a host that stands still may let one request end before the next one comes
            preempted = preemptions(busy)
            at_the_same_time(p, d, prompts, alone, salt=f"{d.name}-{attempt}", prefilled=60 if p is busy else 1)
            if preemptions(busy) > preempted:
                break
        else:
            pytest.fail(f"blocks were to run out in one of {ATTEMPTS} attempts")
    assert (metric_sum(busy.metrics(), "vllm:spec_decode_num_accepted_tokens_total") or 0) > 0


def at_the_same_time(
    p: Server, d: Server, prompts: list[list[int]], alone: list[Any], *, salt: str, prefilled: int
) -> None:
    """Hand over all prompts together: all bytes and tokens are right. ``prefilled``: tokens that P generates."""
    records(p), records(d)
    before = count(d)

    def through(number: int) -> Any:
        ids = prompts[number]
        common: dict[str, Any] = {"priority": number % 3, "cache_salt": salt}
        params = prefill_leg(p, ids, max_tokens=prefilled, **common)
        return complete(d, ids, max_tokens=60, kv_transfer_params=params, **common)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(through, range(len(prompts))))
    assert [tokens_of(answer) for answer in answers] == alone
    counted(d, before, sum(map(len, prompts)), requests=len(prompts))
    mine, theirs = records(d), records(p)
    assert [differ(mine, theirs, ids) for ids in prompts] == [None] * len(prompts)
    no_block_held(p, d)


def preemptions(server: Server) -> float:
    return metric_sum(server.metrics(), "vllm:num_preemptions_total") or 0


def test_beside_another_connector(shared: SharedEngines, tmp_path: Path) -> None:
    """The second child of MultiConnector, after vLLM's store of prompts in files."""
    children = [
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
        },
        {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": PATIENT,
        },
    ]
    plain = shared.plain
    multi = shared.beside("multi", connector="MultiConnector", extra={"connectors": children})
    for p, d in ((multi, plain), (plain, multi)):
        for tokens in (20, 300):
            ids = prompt(tokens, tokens + 4 + (p is multi))
            assert [loaded_prompt(p, d, ids)] == tokens_of(complete(d, ids, cache_salt="alone"))
    # This prompt is stored by now, and the store is asked first: P is released, at once.
    before, lines = count(multi), len(plain.log.read_text(errors="replace"))
    answer = complete(multi, ids, kv_transfer_params=prefill_leg(plain, ids), cache_salt="again")
    assert tokens_of(answer) == tokens_of(complete(plain, ids))
    no_block_held(plain)
    assert count(multi).by_plane == before.by_plane
    assert "lease of" not in plain.log.read_text(errors="replace")[lines:]


def test_two_replicas_of_an_engine(shared: SharedEngines, tmp_path: Path) -> None:
    """Two data-parallel ranks behind one HTTP server: P or D each by itself, with ports in a row."""
    plain, port = shared.plain, free_port()
    both = shared.beside(
        "dp2", "--data-parallel-size", "2", "--api-server-count", "1", extra={"side_channel_port": port}
    )
    engine_ids = set()
    for replica in range(2):
        for tokens in (20, 300):
            ids = prompt(tokens, 2000 + tokens + replica)
            params = prefill_leg(both, ids, replica=replica)
            assert params["remote_port"] == port + replica
            engine_ids.add(params["remote_engine_id"])
            before = count(plain)
            complete(plain, ids, kv_transfer_params=params)
            counted(plain, before, tokens)
            assert differ(records(plain), saved(both, replica, tmp_path), ids) is None

            ids = prompt(tokens, 3000 + tokens + replica)
            params, before = prefill_leg(plain, ids), count(both, replica)
            complete(both, ids, replica=replica, kv_transfer_params=params)
            counted(both, before, tokens, replica)
            assert differ(saved(both, replica, tmp_path), records(plain), ids) is None
            no_block_held(both, plain)
    assert sorted(name.rpartition("_")[2] for name in engine_ids) == ["dp0", "dp1"]


def saved(server: Server, replica: int, folder: Path) -> list[dict[str, Any]]:
    """The records of one data-parallel rank."""
    server.rpc("kv_save_records", str(folder))
    found: list[dict[str, Any]] = json.loads((folder / f"dp{replica}-rank0.json").read_text())
    return found
