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
from tests.support.engines import free_port
from tests.support.served import (
    PatientServerGroup,
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
from tests.support.server import Server

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
CHUNK = 256
LAYERS, HEADS = 4, 8


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
    return ["--worker-extension-cls", "tests.support.kv_bytes.KVHeads", *more]


def beside(shared: SharedEngines, name: str, *more: str, **options: Any) -> Server:
    (engine,) = shared.beside(name, arguments=arguments(*more), **options)
    engine.rpc("kv_watch")
    return engine


# vLLM's CPU engine of two stages ends at its first forward when started with --enforce-eager. Nothing is compiled.
TWO = {
    "ranks": (["--tensor-parallel-size", "2"], [f".attn#{head}" for head in (0, HEADS // 2)]),
    "stages": (
        ["--pipeline-parallel-size", "2", "--no-enforce-eager", "-cc.backend=eager"],
        [f"layers.{n}." for n in (0, LAYERS // 2)],
    ),
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
