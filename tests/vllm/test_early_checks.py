"""What vLLM refuses while it makes its configuration, before it loads any weights."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig

import kvferry.connector.vllm as package
from kvferry.connector.vllm import adapter
from kvferry.transport.errors import KVFerryError
from kvferry.transport.planes import ucx
from tests.support.engines import free_port

pytestmark = pytest.mark.vllm
ADAPTER = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": adapter.__name__}


class StandInModelRunner:
    execute_model = None

    def load_model(self, make: Callable[[], object]) -> None:
        make()


def flag(**settings: object) -> dict[str, object]:
    return {**ADAPTER, "kv_connector_extra_config": settings}


def make(flag: dict[str, object], ranks: int) -> None:
    """The configuration of an engine, which imports the adapter for the first time."""
    sys.modules.pop(adapter.__name__, None)
    VllmConfig(
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **flag),
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="mp"),
    )
    assert adapter.__name__ in sys.modules


@pytest.mark.parametrize("version", ["0.9.2", "0.26.0", "0.31.1rc1.dev7+g1a2b"])
def test_an_older_vllm_is_refused(version: str) -> None:
    with pytest.raises(KVFerryError) as caught:
        package.check_release(version)
    assert str(caught.value) == f"vLLM is {version}, KVFerry expects 0.32 or later; pip install -U 'vllm>=0.32'"


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.1.dev2+g1a2b", "1.0", "0.1.dev1+g1a2b", "dev"])
def test_a_vllm_that_may_have_all_is_not_refused(version: str) -> None:
    package.check_release(version)


def test_an_older_vllm_is_refused_before_what_it_lacks_is_imported(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text('__version__ = "0.26.0"')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", "import kvferry.connector.vllm.as_nixl"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("kvferry.transport.errors.KVFerryError: vLLM is 0.26.0, KVFerry ")


def test_what_cannot_start_is_refused_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused where all is right, and in a worker that loads its model."""

    def multi(*children: dict[str, object]) -> dict[str, object]:
        connectors = [{**child, "kv_role": "kv_both"} for child in children]
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}

    monkeypatch.setattr(ucx, "find_spec", lambda name: None)
    monkeypatch.setattr(package, "adapter", adapter)
    for name in (adapter.__name__, "ucxx", "nixl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with socket.socket() as taken:
        port = 0
        while not port:  # the one before it is free, and stays ours
            before = free_port()
            with suppress(OSError):
                taken.bind(("127.0.0.1", before + 1))
                port = before + 1
        taken.listen()
        cases = [
            (flag(plan="tcp"), 1, "unknown setting 'plan' (did you mean 'plane'?)"),
            (multi(flag(lease_second=1)), 1, "'lease_second'"),
            (multi(flag(), flag()), 1, "connectors of MultiConnector: 2 are KVFerryConnector, expected one"),
            (flag(key_file=str(tmp_path / "none")), 1, "does not exist; make it with `kvferry keygen"),
            (flag(plane="ucx"), 1, "plane: 'ucx' cannot be used: ucx: ucxx is not installed; pip install"),
            (flag(plane="cuda_ipc"), 1, "it carries GPU memory, the caches lie in host memory"),
            (flag(plane="shm", encrypt=True, side_channel_host="192.0.2.1"), 1, "not an address of this"),
            (flag(side_channel_port=port), 1, f"port {port} of 127.0.0.1 is in use"),
            (flag(side_channel_port=port - 1), 2, f"port {port} of 127.0.0.1 is in use"),
            (flag(side_channel_port=65535), 2, "a rank would get port 65536"),
        ]
        for each, ranks, words in cases:
            with pytest.raises(KVFerryError) as refused:
                make(each, ranks)
            assert words in str(refused.value) and "\n" not in str(refused.value), each
        make(multi(flag(plane="tcp")), 1)
        StandInModelRunner().load_model(lambda: make(flag(side_channel_port=port), 1))
    assert not {"ucxx", "nixl"} & sys.modules.keys(), "the process may fork"
