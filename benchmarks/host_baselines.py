"""The other ways to move blocks in ``host_planes.py``, and the ceilings: one class per end."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from host_endpoints import Cache, Config, ReadSource, stopped

RAW_MESSAGE, RAW_WINDOW = 4 << 20, 4


class NixlSource(ReadSource):
    """NIXL reads from here; its progress thread serves."""

    def __init__(self, role: str, config: Config, caches: Mapping[int, Cache | _Whole], thread: bool = True) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"{role}-{os.getpid()}", nixl_agent_config(enable_prog_thread=thread))
        self.caches = caches
        self.registered = self.agent.register_memory(next(iter(caches.values())).memory)
        self.tables = {kib: [int(a) for a in cache.addresses()] for kib, cache in caches.items()}

    def exchange(self, blob: bytes | None) -> bytes | None:
        tables = {str(kib): table for kib, table in self.tables.items()}
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return json.dumps({"metadata": metadata, "tables": tables}).encode()


class NixlTarget(NixlSource):
    """The target: READ of the same scattered blocks, from prepared lists. ``thread``: a progress thread beside the
    loop that polls; on two cores they take each other's time."""

    def exchange(self, blob: bytes | None) -> bytes | None:
        assert blob is not None
        peer = json.loads(blob)
        name = self.agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        name = name.decode() if isinstance(name, bytes) else name
        self.prepared = {}
        for kib, cache in self.caches.items():
            lists = []
            for agent, addresses in (("NIXL_INIT_AGENT", self.tables[kib]), (name, peer["tables"][str(kib)])):
                rows = [(address, cache.block_bytes, 0) for address in addresses]
                lists.append(self.agent.prep_xfer_dlist(agent, rows, "DRAM"))
            indices = np.arange(len(self.tables[kib]), dtype=np.int32)
            self.prepared[kib] = (*lists, indices)
        return None

    def move(self, kib: int) -> float | None:
        local, remote, indices = self.prepared[kib]
        handle = self.agent.make_prepped_xfer("READ", local, indices, remote, indices)
        start = time.perf_counter()  # after the preparation, which vLLM's connector pays for each request
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        took = time.perf_counter() - start
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)
        return took


class NixlRaw(NixlSource):
    """Raw NIXL: ``operation`` (READ or WRITE) of 4 MiB by D, four in flight, contiguous."""

    def __init__(self, role: str, config: Config, caches: Mapping[int, Cache], operation: str) -> None:
        memory = torch.ones(config.mib << 20, dtype=torch.uint8)
        super().__init__(role, config, {0: _Whole(memory)}, thread=role == "source")
        self.operation, self.memory = operation, memory

    def exchange(self, blob: bytes | None) -> bytes | None:
        if blob is None:
            return super().exchange(None)
        peer = json.loads(blob)
        name = self.agent.add_remote_agent(base64.b64decode(peer["metadata"]))
        self.name = name.decode() if isinstance(name, bytes) else name
        (self.theirs,) = peer["tables"]["0"]
        return None

    def move(self, kib: int) -> float | None:
        if not hasattr(self, "name"):
            return super().move(kib)
        start = time.perf_counter()
        offsets = iter(range(0, self.memory.numel(), RAW_MESSAGE))
        flying: list[Any] = []
        offset = next(offsets, None)
        while offset is not None or flying:
            while offset is not None and len(flying) < RAW_WINDOW:
                ours, theirs = (
                    self.agent.get_xfer_descs([(base + offset, RAW_MESSAGE, 0)], "DRAM")
                    for base in (self.memory.data_ptr(), self.theirs)
                )
                flying.append(self.agent.initialize_xfer(self.operation, ours, theirs, self.name))
                self.agent.transfer(flying[-1])
                offset = next(offsets, None)
            states = [(handle, self.agent.check_xfer_state(handle)) for handle in flying]
            assert all(state != "ERR" for _, state in states)
            flying = [handle for handle, state in states if state == "PROC"]
        return time.perf_counter() - start


class _Whole:
    """A memory in one piece, as ``NixlSource`` takes caches."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.block_bytes = memory, memory.numel()

    def addresses(self) -> list[int]:
        return [self.memory.data_ptr()]


class UcxxRaw:
    """Raw UCXX bulk: tagged messages of 4 MiB, four in flight, contiguous, with the plane's own settings."""

    def __init__(self, role: str, config: Config, caches: dict[int, Cache]) -> None:
        from kvferry.transport.planes.ucx_worker import UcxWorker, load_array

        array = load_array()
        self.source = role == "source"
        self.worker = UcxWorker("127.0.0.1", here=True)
        memory = torch.ones(config.mib << 20, dtype=torch.uint8)
        self.pieces = [array(piece.numpy()) for piece in memory.split(RAW_MESSAGE)]
        self.address_sent = False

    def exchange(self, blob: bytes | None) -> bytes | None:
        if blob is not None:
            self.link = self.worker.link(blob)
        if self.address_sent:
            return None
        self.address_sent = True
        return self.worker.address

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        pieces = iter(self.pieces)
        flying: list[Any] = []
        piece = next(pieces, None)
        while piece is not None or flying:
            while piece is not None and len(flying) < RAW_WINDOW:
                if self.source:
                    flying.append(self.link.send(piece, 1))
                else:
                    message = self.worker.probe()
                    if message is None:
                        break
                    flying.append(message.receive(piece))
                piece = next(pieces, None)
            self.worker.progress()
            flying = [request for request in flying if not request.completed]
        took = time.perf_counter() - start
        while self.source and not stopped():
            self.worker.progress()
        return took


class SocketRaw:
    """One TCP connection, ``sendall`` and ``recv_into`` of a contiguous buffer."""

    def __init__(self, role: str, config: Config, caches: dict[int, Cache]) -> None:
        self.source = role == "source"
        self.memory = np.ones(config.mib << 20, np.uint8)
        if self.source:
            self.listener = socket.create_server(("127.0.0.1", 0))

    def exchange(self, blob: bytes | None) -> bytes | None:
        if self.source:
            if blob is None:
                return self.listener.getsockname()[1].to_bytes(2, "little")
            self.sock, _ = self.listener.accept()
            return b""
        assert blob is not None
        if blob:
            self.sock = socket.create_connection(("127.0.0.1", int.from_bytes(blob, "little")))
            return b"connected"
        return None

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        if self.source:
            self.sock.sendall(self.memory.data)
            return None
        view = self.memory.data
        while view:
            view = view[self.sock.recv_into(view[:RAW_MESSAGE]) :]
        return time.perf_counter() - start


class Memcpy:
    """A plain copy of the same number of bytes; the source does nothing."""

    def __init__(self, role: str, config: Config, caches: dict[int, Cache]) -> None:
        self.a = torch.ones(config.mib << 20, dtype=torch.uint8)
        self.b = torch.ones_like(self.a)
        self.source = role == "source"

    def exchange(self, blob: bytes | None) -> bytes | None:
        return b"x" if self.source else None

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        if not self.source:
            self.b.copy_(self.a)
        return time.perf_counter() - start
