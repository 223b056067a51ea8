"""Two Ray nodes on one machine without a GPU, a prefill engine on one and a decode engine on the other, some prompts.

    python examples/ray_serve/two_nodes.py MODEL_FOLDER

Prints one line of JSON for each prompt: its token ids, and those of the answer; and at last the folder of the logs. The
lines that begin with ``kvferry:`` stand there in the ``worker-*.out`` files.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.llm import build_pd_openai_app

from examples.ray_serve.app import KV_TRANSFER_CONFIG, engines
from tests.support.engines import CPU_ENVIRONMENT, python_path

HOSTS = {"prefill": "127.0.0.2", "decode": "127.0.0.3"}
"""The addresses of the nodes; all of them are this machine's."""
ENGINE = {"dtype": "float32", "max_model_len": 4096, "block_size": 32, "enforce_eager": True, "max_num_seqs": 16}
LENGTHS = (33, 300, 1000)
NEW_TOKENS = 8


@contextmanager
def two_nodes() -> Iterator[None]:
    """A Ray cluster of two nodes. What an engine must know of its node comes from the environment of the node."""
    nodes: list[dict[str, Any]] = []
    for role, host in HOSTS.items():
        environment = {**CPU_ENVIRONMENT, "PYTHONPATH": python_path(), "KVFERRY_SIDE_CHANNEL_HOST": host}
        nodes.append({"num_cpus": 4, "resources": {role: 1}, "env_vars": environment})
    cluster = Cluster(initialize_head=True, head_node_args=nodes[0] | {"include_dashboard": False})
    try:
        cluster.add_node(**nodes[1])
        ray.init(address=cluster.address)
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def config(model: str, role: str) -> Any:
    """One engine, on the node of its role."""
    transfer = KV_TRANSFER_CONFIG | {"kv_connector_module_path": "kvferry.connector.vllm.adapter"}
    engine_kwargs = ENGINE | {"kv_transfer_config": transfer}
    bundles = {"bundles": [{"CPU": 1, role: 1}]}
    return engines(model, replicas=1, engine_kwargs=engine_kwargs, placement_group_config=bundles)


def complete(port: int, ids: Sequence[int]) -> list[int]:
    """The token ids of the answer."""
    body = {"model": "model", "prompt": list(ids), "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        tokens: list[int] = json.loads(response.read())["choices"][0]["token_ids"]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="folder of a model that fits into this machine's memory twice")
    parser.add_argument("--port", type=int, default=8000, help="of the HTTP server")
    arguments = parser.parse_args()
    model, rng = arguments.model, random.Random(1)
    with two_nodes():
        serve.start(http_options={"host": "127.0.0.1", "port": arguments.port})
        serve.run(
            build_pd_openai_app({"prefill_config": config(model, "prefill"), "decode_config": config(model, "decode")})
        )
        for length in LENGTHS:
            ids = [rng.randrange(2, 1000) for _ in range(length)]
            print(json.dumps({"prompt": ids, "answer": complete(arguments.port, ids)}), flush=True)
        session = ray.get_runtime_context().get_session_name()
        print(f"logs: /tmp/ray/{session}/logs", flush=True)


if __name__ == "__main__":
    main()
