"""The other ways to move blocks in ``planes.py``, and the ceilings: one class per end. Axes [L, B, H, N, C].

What cannot change the form (NIXL) moves P's own pieces: to blocks of P's form on D.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.planes.endpoints import ArenaEndpoint, digest, noise
from benchmarks.planes.points import NIXL_RAW, Config, Point, Side
from kvferry.kernels.paged_copy import copy_pages
from kvferry.transport.planes.tcp import most_flows

LARGE_DESCRIPTOR = 64 << 20
RAW_MESSAGE = {"cuda": 32 << 20, "cpu": 4 << 20}
RAW_WINDOW = 4
HANDLE_BYTES = 64
"""Of a cudaIpcMemHandle_t."""


class NixlEndpoint(ArenaEndpoint):
    """READ from prepared lists: P's pieces, or few large descriptors where the bytes lie together."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        from nixl._api import nixl_agent, nixl_agent_config

        # On a host's few cores, a progress thread of D would take time from the loop that polls.
        thread = config.device == "cuda" or config.role == "source"
        self.agent = nixl_agent(f"{config.role}-{os.getpid()}", nixl_agent_config(enable_prog_thread=thread))
        self.registered = self.agent.register_memory(self.arena)
        self.memory = "DRAM" if self.device.type == "cpu" else "VRAM"
        self.lists: dict[tuple[str, str], tuple[Any, Any, Any]] = {}

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        if blob is None:
            metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
            return json.dumps({"metadata": metadata, "base": self.arena.data_ptr()})
        description = json.loads(blob)
        name = self.agent.add_remote_agent(base64.b64decode(description["metadata"]))
        self.name = name.decode() if isinstance(name, bytes) else name
        self.base = int(description["base"])
        return None

    def _rows(self, point: Point, way: str, side: Side, base: int) -> Any:
        """Descriptors ``[n, 3]``: address, bytes, device."""
        if way == "nixl_best":
            starts = np.arange(0, point.nbytes, LARGE_DESCRIPTOR)
            addresses, sizes = base + starts, np.minimum(LARGE_DESCRIPTOR, point.nbytes - starts)
        else:
            addresses = self.pieces(point, side, base)
            sizes = np.full(len(addresses), point.p.block_bytes)
        return np.stack([addresses, sizes, np.zeros_like(addresses)], axis=1).astype(np.uint64)

    def _prepared(self, point: str, way: str) -> tuple[Any, Any, Any]:
        """Local list, remote list and indices; vLLM's connector makes them at its handshake."""
        if (point, way) not in self.lists:
            ours = self._rows(self.points[point], way, "d", self.arena.data_ptr())
            theirs = self._rows(self.points[point], way, "p", self.base)
            local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, self.memory)
            remote = self.agent.prep_xfer_dlist(self.name, theirs, self.memory)
            self.lists[point, way] = local, remote, np.arange(len(ours), dtype=np.int32)
        return self.lists[point, way]

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        if way in NIXL_RAW:
            return self._timed(lambda: self._raw(self.points[point].nbytes, NIXL_RAW[way]), repeats)
        local, remote, indices = self._prepared(point, way)
        found = []
        for _ in range(repeats):
            handle = self.agent.make_prepped_xfer("READ", local, indices, remote, indices)
            started = time.perf_counter()  # after the preparation, which vLLM's connector pays for each request
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            found.append(time.perf_counter() - started)
            self.agent.release_xfer_handle(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL's transfer ended as {state}")
        return found

    def _raw(self, nbytes: int, operation: str) -> None:
        """Messages in one piece, ``RAW_WINDOW`` in flight; a WRITE brings D's bytes to P."""
        size, flying = RAW_MESSAGE[self.config.device], list[Any]()
        offsets = iter(range(0, nbytes, size))
        offset = next(offsets, None)
        while offset is not None or flying:
            while offset is not None and len(flying) < RAW_WINDOW:
                part = min(size, nbytes - offset)
                ours, theirs = (
                    self.agent.get_xfer_descs([(base + offset, part, 0)], self.memory)
                    for base in (self.arena.data_ptr(), self.base)
                )
                flying.append(self.agent.initialize_xfer(operation, ours, theirs, self.name))
                self.agent.transfer(flying[-1])
                offset = next(offsets, None)
            states = [(handle, self.agent.check_xfer_state(handle)) for handle in flying]
            if any(state == "ERR" for _, state in states):
                raise RuntimeError(f"a raw {operation} failed")
            for handle in (handle for handle, state in states if state != "PROC"):
                self.agent.release_xfer_handle(handle)
            flying = [handle for handle, state in states if state == "PROC"]


def _checked(result: tuple[Any, ...]) -> Any:
    """What a CUDA call returns beside its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if len(values) == 1 else values


class MappedEndpoint(ArenaEndpoint):
    """P's allocation mapped by D through CUDA IPC: the bare kernel, and one memcpy for all bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        from cuda.bindings import driver, runtime

        self.driver, self.runtime = driver, runtime

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        if blob is None:
            base, _ = _checked(self.driver.cuMemGetAddressRange(self.arena.data_ptr()))
            handle = _checked(self.runtime.cudaIpcGetMemHandle(int(base)))
            handle_bytes = ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)
            offset = self.arena.data_ptr() - int(base)
            return json.dumps({"handle": base64.b64encode(handle_bytes).decode(), "offset": offset})
        found = json.loads(blob)
        handle = self.runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(handle.getPtr()), base64.b64decode(found["handle"]), HANDLE_BYTES)
        mapped = _checked(self.runtime.cudaIpcOpenMemHandle(handle, self.runtime.cudaIpcMemLazyEnablePeerAccess))
        self.base = int(mapped) + int(found["offset"])
        return None

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        go = self._kernel(self.points[point]) if way == "kernel" else self._copy(self.points[point])
        stream = torch.cuda.current_stream()

        def launch_to_end() -> None:
            go()
            stream.synchronize()

        return self._timed(launch_to_end, repeats)

    def _kernel(self, point: Point) -> Callable[[], None]:
        ours, theirs = self.cache(point.d, "d"), self.cache(point.p, "p")
        bases = theirs.bases - self.arena.data_ptr() + self.base
        to = [ours.pages(ids) for ids in point.tables("d", point.d, ours.num_blocks)]
        of = [theirs.pages(ids, bases) for ids in point.tables("p", point.p, theirs.num_blocks)]

        def go() -> None:
            for dst, src in zip(to, of, strict=True):
                copy_pages(
                    dst, src, num_heads=point.p.heads, num_tokens=point.tokens, content_bytes=point.p.content,
                    device=self.device, sms=None, over_link=True,
                )  # fmt: skip

        return go

    def _copy(self, point: Point) -> Callable[[], None]:
        memcpy, kind = self.runtime.cudaMemcpyAsync, self.runtime.cudaMemcpyKind.cudaMemcpyDefault
        stream, to = torch.cuda.current_stream().cuda_stream, self.arena.data_ptr()
        return lambda: _checked(memcpy(to, self.base, point.nbytes, kind, stream))


class SocketsRaw(ArenaEndpoint):
    """As many TCP connections as ``tcp`` has between GPUs, with a thread each at either end: contiguous bytes of host
    memory, in calls of ``RAW_MESSAGE``. ``flows`` of the settings: another number."""

    def __init__(self, config: Config) -> None:
        super().__init__(msgspec.structs.replace(config, device="cpu"))
        self.flows = config.settings.get("flows") or most_flows(torch.device("cuda"))
        self.threads = ThreadPoolExecutor(self.flows)

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        if self.side == "p" and blob is None:
            self.listener = socket.create_server(("127.0.0.1", 0))
            return str(self.listener.getsockname()[1])
        if self.side == "d" and blob:
            self.socks = [socket.create_connection(("127.0.0.1", int(blob))) for _ in range(self.flows)]
            return "connected"
        if self.side == "p":
            self.socks = [self.listener.accept()[0] for _ in range(self.flows)]
        return None

    def serve(self, point: str, way: str, repeats: int) -> Any:
        self.parts = self._parts(point) * repeats

    def synchronize(self) -> None:
        self._on_each(self.parts, lambda sock, part: sock.sendall(part))

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        def receive(sock: socket.socket, part: memoryview) -> None:
            while part:
                part = part[sock.recv_into(part, 0, socket.MSG_WAITALL) :]

        return self._timed(lambda: self._on_each(self._parts(point), receive), repeats)

    def _parts(self, point: str) -> list[memoryview]:
        view, size = self.arena[: self.points[point].nbytes].numpy().data, RAW_MESSAGE["cpu"]
        return [view[start : start + size] for start in range(0, len(view), size)]

    def _on_each(self, parts: list[memoryview], do: Callable[[socket.socket, memoryview], None]) -> None:
        """Every n-th part by the n-th connection."""

        def all_of(number: int) -> None:
            for part in parts[number :: self.flows]:
                do(self.socks[number], part)

        list(self.threads.map(all_of, range(self.flows)))


class Memcpy(ArenaEndpoint):
    """A plain copy within one process."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.original = torch.empty_like(self.arena)
        noise(self.original, self.generator)

    def digest(self, point: str, way: str, side: Side) -> str:
        return digest((self.original if side == "p" else self.arena)[: self.points[point].nbytes])

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        nbytes = self.points[point].nbytes
        return self._timed(lambda: self.arena[:nbytes].copy_(self.original[:nbytes]), repeats)
