"""What vLLM refuses while it makes its configuration, before it loads any weights; in a process of its own, because it
imports the adapter once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

SCRIPT = """
import json, sys
from kvferry.transport.planes import ucx
ucx.find_spec = lambda name: None
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
ADAPTER = "kvferry.connector.vllm.adapter"

class StandInModelRunner:
    execute_model = None
    def load_model(self, make):
        make()

for flag, ranks, runner in json.loads(sys.argv[1]):
    assert ADAPTER not in sys.modules
    def make():
        VllmConfig(
            kv_transfer_config=KVTransferConfig(kv_role="kv_both", **flag),
            parallel_config=ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="mp"),
        )
    try:
        StandInModelRunner().load_model(make) if runner else make()
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]))
    else:
        print(json.dumps(["", ""]))
        del sys.modules[ADAPTER]
assert "ucxx" not in sys.modules and "nixl" not in sys.modules, "the process may fork"
"""
ADAPTER = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.connector.vllm.adapter"}
IN_WORKER = 0
"""In place of ranks."""


def flag(**settings: object) -> dict[str, object]:
    return {**ADAPTER, "kv_connector_extra_config": settings}


def test_what_cannot_start_is_refused_before_the_weights(tmp_path: Path) -> None:
    """Nothing is refused where all is right, and in a worker that loads its model."""

    def multi(*children: dict[str, object]) -> dict[str, object]:
        connectors = [{**child, "kv_role": "kv_both"} for child in children]
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            (flag(plan="tcp"), 1, "unknown setting 'plan' (did you mean 'plane'?)"),
            (multi(flag(lease_second=1)), 1, "'lease_second'"),
            (multi(flag(), flag()), 1, "connectors of MultiConnector: 2 are KVFerryConnector, expected one"),
            (flag(key_file=str(tmp_path / "none")), 1, "does not exist; make it with `kvferry keygen"),
            (flag(plane="ucx"), 1, "plane: 'ucx' cannot be used: ucx: ucxx is not installed; pip install"),
            (flag(plane="cuda_ipc"), 1, "it carries GPU memory, the caches lie in host memory"),
            (flag(require_plane=["ucx", "cuda_ipc"]), 1, "can have none of ucx, cuda_ipc: ucx: ucxx is not installed"),
            (
                flag(plane="shm", checksum=True, encrypt=True, side_channel_host="192.0.2.1"),
                1,
                "not an address of this",
            ),
            (flag(side_channel_port=port), 1, f"port {port} of 127.0.0.1 is in use"),
            (flag(side_channel_port=port - 1), 2, f"port {port} of 127.0.0.1 is in use"),
            (flag(side_channel_port=65535), 2, "a rank would get port 65536"),
            (flag(require_plane=["ucx", "tcp"]), 1, ""),
            (multi(flag(plane="tcp")), 1, ""),
            (flag(side_channel_port=port), IN_WORKER, ""),
        ]
        argument = json.dumps([(each, ranks or 1, ranks == IN_WORKER) for each, ranks, _ in cases])
        command = [sys.executable, "-c", SCRIPT, argument]
        done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    assert len(said) == len(cases), done.stdout
    for (each, _, words), (kind, text) in zip(cases, said, strict=True):
        assert words in text and "\n" not in text and kind == ("KVFerryError" if words else ""), (each, kind, text)
