"""What the launcher tells an engine on GPUs, and how scattered a block table is said to be."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import engines
from tests.support.fragment import block_count, in_sequence
from tests.support.server import EngineError, parse_metrics


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``ServerGroup.engine`` without a process: the command and the environment that it would have had."""

    def spawn(self: Any, name: str, command: Sequence[str], *, environment: Mapping[str, str], **_: Any) -> Any:
        return SimpleNamespace(command=list(command), environment=dict(environment))

    monkeypatch.setattr(engines.ServerGroup, "spawn", spawn)
    monkeypatch.setattr(engines, "vllm_command", lambda: ["vllm"])
    return lambda **options: engines.ServerGroup(tmp_path).engine("one", tmp_path, **options)


def test_an_engine_on_gpus_sees_its_own_and_takes_its_share(started: Any) -> None:
    engine = started(gpus=(3, 2), kv_cache_bytes=1 << 30)
    assert engine.environment["CUDA_VISIBLE_DEVICES"] == "3,2"
    assert not [name for name in engine.environment if name.startswith("VLLM_CPU")]
    assert engine.command[engine.command.index("--kv-cache-memory-bytes") + 1] == str(1 << 30)


def test_an_engine_on_gpus_runs_with_cuda_graphs_of_few_sizes(started: Any) -> None:
    command = started(gpus=(0,), graph_sizes=(1, 40)).command
    assert "--enforce-eager" not in command
    assert json.loads(command[command.index("--compilation-config") + 1]) == {"cudagraph_capture_sizes": [1, 40]}
    assert "--enforce-eager" in started().command


def test_an_engine_on_the_cpu_is_told_nothing_of_gpus(started: Any) -> None:
    engine = started()
    assert "CUDA_VISIBLE_DEVICES" not in engine.environment and "--kv-cache-memory-bytes" not in engine.command


def test_nixl_stages_in_host_memory_on_the_cpu_only() -> None:
    assert engines.transfer_config("NixlConnector")["kv_buffer_device"] == "cpu"
    assert "kv_buffer_device" not in engines.transfer_config("NixlConnector", on_gpu=True)


def test_out_of_a_checkout_the_connector_is_named_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(engines, "version", missing)
    assert engines.transfer_config("KVFerryConnector")["kv_connector_module_path"] == "kvferry.connector.vllm.adapter"
    assert "kv_connector_module_path" not in engines.transfer_config("NixlConnector")


def test_a_path_relative_to_here_is_found_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/site", "", ".typing"]))
    assert engines.python_path(Path("/lib")).split(os.pathsep) == [
        str(engines.ROOT / ".typing"), "/lib", "/site", os.path.abspath(".typing"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "share"), [([4, 5, 6, 7], 1.0), ([7, 6, 5, 4], 0.0), ([4, 5, 9, 10, 2], 0.5), ([3], 0.0), ([], 0.0)]
)
def test_share_of_blocks_in_sequence(table: list[int], share: float) -> None:
    assert in_sequence(table) == share


def test_size_of_the_block_pool() -> None:
    samples = parse_metrics('vllm:cache_config_info{block_size="16",num_gpu_blocks="12288"} 1.0\n')
    assert block_count(SimpleNamespace(metrics=lambda: samples)) == 12288  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="one: no vllm:cache_config_info"):
        block_count(SimpleNamespace(name="one", metrics=dict))  # type: ignore[arg-type]
