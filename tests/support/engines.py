"""Starts ``vllm serve`` engines and their router, waits until they answer, and ends them, whatever happens.

    with ServerGroup(Path("logs")) as group:
        prefill = group.engine("prefill", model, connector="KVFerryConnector")
        decode = group.engine("decode", model, connector="KVFerryConnector")
        group.wait_ready()
        router = group.router(prefill, decode)

Each process runs under a guard process (see process_guard.py) in a process group of its own. It ends with all its
descendants: by ``close()``, on exceptions, on SIGTERM, at interpreter exit, and when this process is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from tests.support.server import EngineError, Server

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# One thread each (several engines share the machine), no hub.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc and /reset_prefix_cache, for the byte check
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
GRAPH_SIZES = (1, 2, 4, 8, 16)
"""Batch sizes that engines on GPUs capture CUDA graphs for: few, because each one takes time at the start."""
START_SECONDS = 400.0
"""An engine starts in 25 s on an idle machine; others may use it too."""
ROUTER_PATIENCE = ("--connect-timeout", "60", "--prefill-timeout", "600", "--abandoned-prefill-timeout", "300",
    "--health-interval", "60",
)  # fmt: skip
"""Of a router on a host that may stand still: it must not take an engine for one that has failed."""
# Engines on the CPU: no binding of threads, small cache.
CPU_ENVIRONMENT = {**_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Engines on GPUs: a sampler that needs no compiler on the machine, and nothing of NVLink multicast, which a virtual
# machine that has a part of a host's GPUs may not use.
GPU_ENVIRONMENT = {
    **_ENVIRONMENT,
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_NVLS_ENABLE": "0",
}


_HELD: list[socket.socket] = []
"""Bound and not listening: a server that sets SO_REUSEADDR, as all do, may listen there, and nobody else picks it."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, below the range from which the system gives ports to connections. It stays this
    process's, also while its server is away."""
    for port in random.sample(range(20000, 32000), 64):
        held = socket.socket()
        try:
            held.bind((host, port))  # fails beside any other socket, because SO_REUSEADDR is not set yet
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _HELD.append(held)
        return port
    raise EngineError(f"no free port among 64 tried between 20000 and 32000 on {host}")


def vllm_command() -> list[str]:
    """The ``vllm`` command. Raises EngineError where vLLM is not installed."""
    try:
        version("vllm")
    except PackageNotFoundError:
        raise EngineError("vLLM is not installed in this Python; run `make install`, or pip install vllm") from None
    return [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def python_path(*folders: Path) -> str:
    """PYTHONPATH for a process that finds KVFerry and ``tests.support`` of this checkout, these folders, and what this
    process finds by its own, wherever it runs."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths: list[str | Path] = [ROOT / ".typing", *folders, *inherited]
    return os.pathsep.join(os.path.abspath(path) for path in paths)


def transfer_config(
    connector: str, extra: Mapping[str, Any] | None = None, on_gpu: bool = False, policy: str = "recompute"
) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of one engine; ``policy`` is that of failed loads. KVFerry is named by its module
    where it runs out of a checkout."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both", "kv_load_failure_policy": policy}
    if connector.startswith("Nixl") and not on_gpu:
        config["kv_buffer_device"] = "cpu"
    if connector == "KVFerryConnector":
        try:
            version("kvferry")
        except PackageNotFoundError:  # then vLLM has no entry point to find it by
            config["kv_connector_module_path"] = "kvferry.connector.vllm.adapter"
    if extra:
        config["kv_connector_extra_config"] = dict(extra)
    return config


class ServerGroup:
    """The processes of one demonstration, test session or benchmark."""

    def __init__(self, logs: Path, say: Callable[[str], None] | None = None, grace: float = 5.0) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = logs
        self.servers: list[Server] = []
        self._say = say or (lambda line: print(line, flush=True))
        self._grace = grace
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # SIGTERM would end this process without unwinding; as SystemExit it runs close(). SIGINT raises by itself.
        with suppress(ValueError):  # not the main thread: its owner sees to signals, the guard processes to the rest
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._old_handlers[number] = signal.signal(number, _exit_on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        host: str,
        port: int,
        environment: Mapping[str, str] | None = None,
        netns: str | None = None,
    ) -> Server:
        """Start one process under a guard process; ``netns`` names a network namespace to run it in (needs root)."""
        log = self.logs / f"{name}.log"
        read_end, write_end = os.pipe()
        enter = ["ip", "netns", "exec", netns] if netns else []
        guard = [sys.executable, str(HERE / "process_guard.py"), "--pipe", str(read_end)]
        guard += ["--grace", str(self._grace), "--"]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*guard, *enter, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                pass_fds=[read_end],
                start_new_session=True,
            )
        os.close(read_end)
        server = Server(name, process, write_end, log, host, port)
        self.servers.append(server)
        return server

    def engine(
        self,
        name: str,
        model: Path,
        *,
        connector: str | None = "KVFerryConnector",
        extra: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        dtype: str = "float32",
        max_model_len: int = 4096,
        block_size: int = 32,
        kv_bytes: bool = True,
        netns: str | None = None,
        gpus: Sequence[int] = (),
        kv_cache_bytes: int = 2 << 30,
        policy: str = "recompute",
        graph_sizes: Sequence[int] = GRAPH_SIZES,
    ) -> Server:
        """Start a vLLM engine; it answers only after ``wait_ready``.

        ``dtype`` is the model's (vLLM would take bfloat16 for a float32 one); ``connector`` None starts one without
        a connector; ``extra`` is its ``kv_connector_extra_config``, ``policy`` that of failed loads; ``kv_bytes``
        loads the worker extension of kv_bytes.py. ``gpus``: it sees these and no others, and each of its ranks has
        ``kv_cache_bytes`` for KV, so that engines share a GPU; none: it runs on the CPU, without a compiler. On GPUs
        it compiles the model and captures CUDA graphs for batches of ``graph_sizes`` tokens.
        """
        port = port or free_port()
        command = [*vllm_command(), "serve", str(model)]
        command += ["--served-model-name", "model", "--host", host, "--port", str(port)]
        command += ["--max-model-len", str(max_model_len), "--max-num-batched-tokens", str(max_model_len)]
        command += ["--dtype", dtype, "--block-size", str(block_size), "--max-num-seqs", "16"]
        env = {**(GPU_ENVIRONMENT if gpus else CPU_ENVIRONMENT), "VLLM_HOST_IP": host}
        env["PYTHONPATH"] = python_path()
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            # The share is only what must be free at the start. Sizes as JSON would be void beside another -cc.NAME.
            command += ["--kv-cache-memory-bytes", str(kv_cache_bytes), "--gpu-memory-utilization", "0.05"]
            command += [f"-cc.cudagraph_capture_sizes={json.dumps(list(graph_sizes))}"]
        else:
            command += ["--enforce-eager"]
        if kv_bytes:
            command += ["--worker-extension-cls", "tests.support.kv_bytes.KVBytes"]
        if connector:
            command += ["--kv-transfer-config", json.dumps(transfer_config(connector, extra, bool(gpus), policy))]
        if connector and connector.startswith("Nixl"):
            env["VLLM_PLUGINS"] = ""  # nothing of ours in the process that is compared with
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        env.update(environment or {})
        server = self.spawn(name, [*command, *arguments], host=host, port=port, environment=env, netns=netns)
        server.is_engine = True
        return server

    def router(
        self, prefill: Server, decode: Server, *, host: str = "127.0.0.1", arguments: Sequence[str] = (),
        netns: str | None = None, name: str = "router", environment: Mapping[str, str] = {},
    ) -> Server:  # fmt: skip
        """Start the router in front of both and wait until it answers; ``name``: so that several have each its log."""
        port = free_port()
        command = [sys.executable, "-m", "kvferry.cli.main", "router", "--host", host, "--port", str(port)]
        command += ["--prefill", prefill.url, "--decode", decode.url, *ROUTER_PATIENCE, *arguments]
        environment = {"PYTHONPATH": python_path(), **environment}
        server = self.spawn(name, command, host=host, port=port, environment=environment, netns=netns)
        self.wait_ready(servers=[server])
        return server

    def wait_ready(
        self,
        timeout: float = START_SECONDS,
        servers: Sequence[Server] | None = None,
        probe: Callable[[Server], bool] = Server.healthy,
    ) -> None:
        """Wait until all (or these) answer on /health, with a line of progress every few seconds; warm engines up.

        Raises:
            EngineError: one of them ended, or the time is over; with the end of its log.
        """
        waiting = [s for s in (self.servers if servers is None else servers) if s.ready_seconds is None]
        begun = logged_at = time.monotonic()
        while waiting:
            for server in list(waiting):
                if not server.alive:
                    raise EngineError(
                        f"{server.name} ended with code {server.process.returncode} while starting; "
                        f"the end of {server.log}:\n{server.log_tail()}"
                    )
                if probe(server):
                    if server.is_engine:
                        server.warm_up()
                    server.ready_seconds = time.monotonic() - server.started
                    self._say(f"{server.name}: ready on port {server.port} after {server.ready_seconds:.0f} s")
                    waiting.remove(server)
            now = time.monotonic()
            if now - begun > timeout:
                late = waiting[0]
                raise EngineError(
                    f"{late.name} did not answer on {late.url}/health within {timeout:.0f} s; "
                    f"the end of {late.log}:\n{late.log_tail()}"
                )
            if now - logged_at >= 5:
                logged_at = now
                self._say("\n".join(f"  {s.name}: starting, {now - s.started:.0f} s ({s.stage()})" for s in waiting))
            if waiting:
                time.sleep(0.2)

    def stop(self, server: Server) -> None:
        """End one process and all its descendants."""
        _end([server], self._grace)
        self.servers = [s for s in self.servers if s is not server]

    def close(self) -> None:
        """End all of them, at the same time. Idempotent."""
        servers, self.servers = self.servers, []
        _end(servers, self._grace)


def _end(servers: Sequence[Server], grace: float) -> None:
    for server in servers:
        if server.pipe >= 0:
            os.close(server.pipe)  # the guard process sees it; it also happens when this process is killed
            server.pipe = -1
    deadline = time.monotonic() + grace + 10
    for server in servers:
        try:
            server.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill_group(server)  # the guard process itself hangs
            server.process.wait()
        if (server.process.returncode or 0) < 0:
            _kill_group(server)  # a signal ended the guard process before it ended the rest


def _kill_group(server: Server) -> None:
    """SIGKILL to all of a guard process's group. While the group has members, its number stays with it."""
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
