"""Engines of other forms, each against one plain engine, in both directions: ranks, stages, drafts, children, replicas.

The plain engine prefills in chunks. Bytes are compared per layer and head, of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import SharedEngines
from tests.support.engines import free_port, transfer_config
from tests.support.served import (
    PATIENT,
    PatientServerGroup,
    at_once,
    complete,
    corrupted,
    count,
    counted,
    differ,
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


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    with PatientServerGroup(tmp_path_factory.mktemp("forms")) as group:
        chunked = arguments("--max-num-batched-tokens", str(CHUNK), "--scheduling-policy", "priority")
        plain = group.engine("plain", model, kv_bytes=False, arguments=chunked)
        group.wait_ready()
        plain.rpc("kv_watch")
        yield SharedEngines(group, model, plain, kv_bytes=False)


@pytest.fixture
def shared(running: SharedEngines) -> Iterator[SharedEngines]:
    with running.of_a_test():
        yield running


def arguments(*more: str) -> list[str]:
    """Of an engine whose KV is digested per head: for comparisons between different numbers of ranks."""
    return ["--worker-extension-cls", "tests.support.kv_heads.KVHeads", *more]


def beside(shared: SharedEngines, name: str, *more: str, **options: Any) -> Server:
    (engine,) = shared.beside(name, arguments=arguments(*more), **options)
    engine.rpc("kv_watch")
    return engine


# vLLM's CPU engine of two stages ends at its first forward when it is started with --enforce-eager.
TWO = {
    "ranks": (["--tensor-parallel-size", "2"], [f".attn#{head}" for head in (0, HEADS // 2)]),
    "stages": (["--pipeline-parallel-size", "2", "--no-enforce-eager"], [f"layers.{n}." for n in (0, LAYERS // 2)]),
}
"""Arguments, and in which place of each rank a flipped bit is seen."""


@pytest.mark.parametrize("form", TWO)
def test_two_and_one(shared: SharedEngines, form: str) -> None:
    plain, (more, places) = shared.one, TWO[form]
    two = beside(shared, form, *more, "--max-num-batched-tokens", str(CHUNK))
    for p, d in ((two, plain), (plain, two)):
        for tokens in (20, 64, 2 * CHUNK + 33):
            ids = prompt(tokens, tokens + len(form) + (p is two))
            alone = tokens_of(complete(d, ids, cache_salt="alone"))
            assert [loaded_prompt(p, d, ids)] == alone or form == "ranks", "sums of two ranks are rounded otherwise"
    for rank, place in enumerate(places):
        said = corrupted(plain, two, prompt(40, 900 + rank), "1", str(rank))
        assert f"differ in 1 of {LAYERS * HEADS} layers" in said and place in said, said


def test_drafts_priorities_and_too_few_blocks(shared: SharedEngines) -> None:
    """vLLM's n-gram drafts, and more requests than blocks: some are preempted, on D after their prompt was loaded."""
    plain = shared.one
    busy = beside(
        shared, "busy", "--speculative-config", json.dumps(DRAFTS), "--num-gpu-blocks-override", str(FEW_BLOCKS),
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

    def through(ids: list[int]) -> Any:
        common: dict[str, Any] = {"priority": prompts.index(ids) % 3, "cache_salt": salt}
        params = prefill_leg(p, ids, max_tokens=prefilled, **common)
        return complete(d, ids, max_tokens=60, kv_transfer_params=params, **common)

    answers, _ = at_once(p, d, prompts, through)
    assert [tokens_of(answer) for answer in answers] == alone
    no_block_held(p, d)


def preemptions(server: Server) -> float:
    return metric_sum(server.metrics(), "vllm:num_preemptions_total") or 0


def test_beside_another_connector(shared: SharedEngines, tmp_path: Path) -> None:
    """The second child of MultiConnector, after vLLM's store of prompts in files."""
    ours, store = (transfer_config("KVFerryConnector", PATIENT), transfer_config("ExampleConnector"))
    store["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    plain = shared.one
    multi = beside(shared, "multi", connector="MultiConnector", extra={"connectors": [store, ours]})
    for p, d in ((multi, plain), (plain, multi)):
        for tokens in (20, 300):
            ids = prompt(tokens, tokens + 4 + (p is multi))
            assert [loaded_prompt(p, d, ids)] == tokens_of(complete(d, ids, cache_salt="alone"))
    # This prompt is stored by now, and the store is asked first: P is released, at once.
    before, lines = count(multi), len(plain.log_text())
    answer = complete(multi, ids, kv_transfer_params=prefill_leg(plain, ids), cache_salt="again")
    assert tokens_of(answer) == tokens_of(complete(plain, ids))
    no_block_held(plain)
    assert count(multi).by_plane == before.by_plane
    assert "lease of" not in plain.log_text()[lines:]


def test_two_replicas_of_an_engine(shared: SharedEngines, tmp_path: Path) -> None:
    """Two data-parallel ranks behind one HTTP server: P or D each by itself, with ports in a row."""
    plain, port = shared.one, free_port()
    replicas = "--data-parallel-size", "2", "--api-server-count", "1"
    both = beside(shared, "dp2", *replicas, extra={"side_channel_port": port})
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
