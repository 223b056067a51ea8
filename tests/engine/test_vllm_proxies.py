"""The proxy servers of vLLM's repository, unmodified, before KVFerry's engines: ``make test-proxies`` downloads them.

The first sends the legs one after the other, the second both at once: D then knows P, and a name of the request.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest

from tests.support.engines import ROOT, free_port, python_path, transfer_config
from tests.support.served import (
    LONG_SECONDS,
    PATIENT,
    Pair,
    complete,
    count,
    counted,
    differ,
    no_block_held,
    prompt,
    records,
    started_pair,
    tokens_of,
)
from tests.support.server import EngineError, Server

pytestmark = [pytest.mark.engines, pytest.mark.proxies, pytest.mark.timeout(900)]
PROXIES = ROOT / ".vllm-proxies-0.32.0"
ENGINE_ID = "prefill-engine-1"
AS_NIXL = "kvferry.connector.vllm.as_nixl"
"""D runs under the name that Dynamo knows."""


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, int]]:
    """With P's control port."""
    control_port = free_port()
    settings = PATIENT | {"side_channel_port": control_port}
    p = transfer_config("KVFerryConnector", settings) | {"engine_id": ENGINE_ID}
    d = transfer_config("NixlConnector", PATIENT, on_gpu=True) | {"kv_connector_module_path": AS_NIXL}
    of_p, of_d = ({"arguments": ["--kv-transfer-config", json.dumps(config)]} for config in (p, d))
    with started_pair(tmp_path_factory.mktemp("proxies"), model, of_p, of_d) as pair:
        yield pair, control_port


def toy_proxy(pair: Pair, control_port: int) -> list[str]:
    p, d = pair.prefill, pair.decode
    hosts = ["--prefiller-host", p.host, "--prefiller-port", str(p.port)]
    return ["toy_proxy_server.py", *hosts, "--decoder-host", d.host, "--decoder-port", str(d.port)]


def push_proxy(pair: Pair, control_port: int) -> list[str]:
    p, d = (f"{server.host}:{server.port}" for server in (pair.prefill, pair.decode))
    where = ["--prefill-kv-host", "127.0.0.1", "--prefill-side-channel-port", str(control_port)]
    named = ["--prefill-engine-id", ENGINE_ID, *where]
    return ["disagg_proxy_pushconnector_demo.py", "--model", "model", "--prefill", p, "--decode", d, *named]


@pytest.mark.parametrize("proxy", [toy_proxy, push_proxy])
def test_a_proxy_of_vllm(engines: tuple[Pair, int], proxy: FunctionType) -> None:
    """All bytes and tokens are those of a plain hand-over, and P's blocks come back."""
    pair, (name, *arguments) = engines[0], proxy(*engines)
    assert (PROXIES / name).exists(), "the proxies are not here: make test-proxies downloads them"
    port = free_port()
    command = [sys.executable, str(PROXIES / name), *arguments, "--port", str(port)]
    environment = {"PYTHONPATH": python_path()}
    server = pair.group.spawn(proxy.__name__, command, host="127.0.0.1", port=port, environment=environment)
    try:
        first_answer(server, prompt(70, 1))
        for seed, tokens in enumerate((33, 400, 900)):
            ids = prompt(tokens, 1000 * len(name) + seed)
            pair.forget()
            before = count(pair.decode)
            answer = complete(server, ids)
            assert counted(pair.decode, before, tokens).by_plane
            assert differ(records(pair.decode), records(pair.prefill), ids) is None
            assert tokens_of(answer) == tokens_of(complete(pair.decode, ids, cache_salt="alone"))
        no_block_held(pair.prefill, pair.decode)
    finally:
        pair.group.stop(server)


def first_answer(server: Server, ids: list[int]) -> object:
    """The proxies have no common page that says when they are ready."""
    end = time.monotonic() + LONG_SECONDS
    while True:
        try:
            return complete(server, ids)
        except EngineError as error:
            assert server.alive and time.monotonic() < end, f"{error}\n{server.log_tail()}"
            time.sleep(0.2)
