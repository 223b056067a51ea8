"""Runs prefill.sh, decode.sh and router.sh on this machine as if on two hosts, and sends a prompt through them.

    sudo .venv/bin/python examples/two_node/run_netns.py

Two network namespaces joined by a veth pair, each with an address of its own: nothing of one is reachable from the
other but over that link, as with two hosts. Needs root. Everything is removed at the end. Exit code 1 if the hand-over
was not one.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import httpx

from tests.support.engines import CPU_ENVIRONMENT, ROUTER_PATIENCE, ServerGroup, python_path, vllm_command
from tests.support.kv_bytes import compare
from tests.support.pd_client import METRICS, loads, settled, stream
from tests.support.server import EngineError, Server
from tests.support.tiny_model import build_model, prompt_of

ATTEMPTS = 3
HERE = Path(__file__).resolve().parent
_CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def two_hosts() -> Iterator[tuple[str, str, str, str]]:
    """Two namespaces and their addresses: (name of P's, its address, name of D's, its address)."""
    mark = os.getpid()
    p, d = f"kvferry-p{mark}", f"kvferry-d{mark}"
    p_address, d_address = "10.231.77.1", "10.231.77.2"
    made: list[str] = []
    try:
        for name in (p, d):
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "kvf0", "netns", p, "type", "veth", "peer", "name", "kvf0", "netns", d)
        for name, address in ((p, p_address), (d, d_address)):
            ip("-n", name, "addr", "add", f"{address}/30", "dev", "kvf0")
            ip("-n", name, "link", "set", "kvf0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield p, p_address, d, d_address
    finally:
        for name in made:  # the veth pair goes with them
            subprocess.run(["ip", "netns", "delete", name], check=False)


def enter(namespace: str) -> None:
    """Move this process (and what it starts) into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise EngineError(f"cannot enter {namespace}: {os.strerror(ctypes.get_errno())}")


def start(group: ServerGroup, name: str, address: str, model: Path, netns: str | None) -> Server:
    arguments = ["--served-model-name", "model", "--max-model-len", "4096", "--enforce-eager"]
    arguments += [
        "--block-size",
        "32",
        "--dtype",
        "float32",
        "--worker-extension-cls",
        "tests.support.kv_bytes.KVBytes",
    ]
    env = {
        **CPU_ENVIRONMENT,
        "PORT": "8000",
        "KVFERRY_ALLOWED_PEERS": "10.231.77.0/24",
        "VLLM": os.environ.get("VLLM", " ".join(vllm_command())),
        "PYTHONPATH": python_path(),
    }
    script = [str(HERE / f"{name}.sh"), str(model), address, *arguments]
    server = group.spawn(name, script, host=address, port=8000, environment=env, netns=netns)
    server.is_engine = True
    return server


def run(folder: Path, tokens: int) -> None:
    """Raises EngineError, naming what was not as it should be."""
    model = build_model(folder / "model")
    with two_hosts() as (p_name, p_address, d_name, d_address), ServerGroup(folder / "netns-logs") as group:
        print(f"host of prefill: {p_address} in {p_name}; host of decode, router and client: {d_address} in {d_name}")
        enter(d_name)
        prefill = start(group, "prefill", p_address, model, p_name)
        decode = start(group, "decode", d_address, model, None)
        group.wait_ready()
        command = [str(HERE / "router.sh"), p_address, d_address, "--host", d_address, *ROUTER_PATIENCE]
        kvferry = {"KVFERRY": f"{sys.executable} -m kvferry.cli.main"}
        router = group.spawn("router", command, host=d_address, port=9000, environment=kvferry)
        group.wait_ready()
        for engine in (prefill, decode):
            engine.rpc("kv_watch")
        names = METRICS["KVFerryConnector"]
        for seed in range(ATTEMPTS):
            before = loads(decode, names)
            body = {"model": "model", "prompt": prompt_of(model, tokens, seed), "max_tokens": 16, "temperature": 0}
            answer = stream(router.url, body)
            grown = settled(decode, names, before)
            if not grown.get("failed"):
                break
            print(f"D gave the load up, as on a machine that keeps its threads waiting, see {decode.log}")
            for engine in (prefill, decode):
                engine.rpc("kv_records")
        loaded, size, ms = grown.get("tokens", 0), grown.get("bytes", 0), grown.get("seconds", 0) * 1e3
        print(f"{answer.prompt_tokens} tokens in the prompt, {loaded:.0f} loaded from {p_address}:", end=" ")
        print(f"{size / 2**20:.1f} MiB in {ms:.1f} ms; {len(answer.token_ids)} tokens decoded")
        differ = compare(decode.rpc("kv_records")[0], prefill.rpc("kv_records")[0])
        if differ or loaded < tokens - 1:
            raise EngineError(differ or f"only {loaded:.0f} of {tokens} tokens were loaded")
        print("KV bytes on the decode host equal those on the prefill host")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=HERE.parent.parent / ".demo")
    args = parser.parse_args()
    if os.geteuid():
        print("run_netns.py needs root to make network namespaces: sudo python examples/two_node/run_netns.py")
        return 2
    try:
        run(args.folder, args.tokens)
    except (EngineError, httpx.HTTPError, OSError) as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
