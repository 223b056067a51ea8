"""One process of ``host_planes.py``: the source or the target of one way to move blocks. Axes [L, B, H, N, C].

``python host_contenders.py KIND ROLE CONFIG``; one JSON line per command on stdin, one per answer on stdout.
"""

from __future__ import annotations

import base64
import json
import os
import select
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import zmq

from kvferry.connector.protocol import Span
from kvferry.connector.reads import PEER_BYTES_PER_TURN
from kvferry.connector.runs import Runs, runs, taken, wire_ordered
from kvferry.connector.spans import Chunk, chunks
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from kvferry.transport.plane import Pieces, ReadChannel, RecvChannel, SendChannel
from kvferry.transport.planes import make_plane

CPU = torch.device("cpu")
BLOCK_TOKENS = 16
RAW_MESSAGE, RAW_WINDOW = 4 << 20, 4


@dataclass(frozen=True)
class Config:
    """What all contenders move: ``mib`` of KV in scattered blocks, per block size in KiB."""

    mib: int
    kib: list[int]
    layers: int
    slot_bytes: int
    staging_bytes: int


class Cache:
    """A cache of twice the blocks that are moved, HND, each block one run of ``kib`` KiB, and the blocks' order."""

    def __init__(self, config: Config, kib: int, memory: torch.Tensor, seed: int) -> None:
        self.block_bytes = kib << 10
        self.num_blocks = (config.mib << 20) // config.layers // self.block_bytes
        self.num_tokens = self.num_blocks * BLOCK_TOKENS
        self.num_heads = max(1, kib // 8)
        self.content_bytes = self.block_bytes // self.num_heads // BLOCK_TOKENS
        self.nbytes = config.layers * self.num_blocks * self.block_bytes
        rng = np.random.default_rng(seed)
        self.memory = memory[: 2 * self.nbytes]
        self.layer_bytes = 2 * self.num_blocks * self.block_bytes
        self.bases = self.memory.data_ptr() + self.layer_bytes * np.arange(config.layers, dtype=np.int64)
        self.block_ids = rng.permutation(2 * self.num_blocks)[: self.num_blocks].astype(np.int64)
        self.span = Span(0, 0, config.layers, 0, self.num_heads, 0, self.num_tokens)

    def chunks(self, chunk_bytes: int) -> list[Chunk]:
        return chunks(self.span, self.content_bytes, chunk_bytes, BLOCK_TOKENS)

    def sides(self, chunk: Chunk, address: int) -> tuple[Pages, Pages]:
        """The chunk in the pages, and on the wire at ``address``."""
        head_bytes = BLOCK_TOKENS * self.content_bytes
        pages = Pages(
            bases=self.bases[chunk.layer : chunk.layer + chunk.num_layers],
            block_ids=self.block_ids,
            block_size=BLOCK_TOKENS,
            block_stride=self.block_bytes,
            head_stride=head_bytes,
            token_stride=self.content_bytes,
            token=chunk.token,
        )
        wire = wire_pages(address, chunk.num_layers, self.num_heads, chunk.num_tokens, self.content_bytes)
        return pages, wire

    def pieces(self, chunk: Chunk) -> Pieces:
        """Where the chunk lies in the pages, in wire order."""
        return wire_ordered(self.sides(chunk, 0)[0], self.num_heads, chunk.num_tokens, self.content_bytes)

    def copy(self, dst: Pages, src: Pages, chunk: Chunk) -> None:
        copy_pages(
            dst,
            src,
            num_heads=self.num_heads,
            num_tokens=chunk.num_tokens,
            content_bytes=self.content_bytes,
            device=CPU,
        )

    def chunk_bytes(self, chunk: Chunk) -> int:
        return chunk.num_layers * self.num_heads * chunk.num_tokens * self.content_bytes

    def addresses(self) -> np.ndarray:
        """int64 [L * blocks], where each block lies, in the order in which it is moved."""
        return (self.bases[:, None] + self.block_ids[None, :] * self.block_bytes).reshape(-1)

    def moved(self) -> torch.Tensor:
        """The bytes of the blocks in the order in which they are moved: uint8 [L, blocks, block bytes]."""
        view = self.memory.view(-1, 2 * self.num_blocks, self.block_bytes)
        return view[:, torch.from_numpy(self.block_ids)]


class Contender(Protocol):
    """``exchange`` passes blobs to and fro until one is None; ``move`` does one transfer."""

    def exchange(self, blob: bytes | None) -> bytes | None: ...
    def move(self, kib: int) -> float | None: ...


def stopped() -> bool:
    """Whether the orchestrator has something to say."""
    return bool(select.select([0], [], [], 0)[0])


class PlaneSource:
    def __init__(self, name: str, config: Config, caches: dict[int, Cache]) -> None:
        self.plane = make_plane(
            name, host="127.0.0.1", slot_bytes=config.slot_bytes, staging_bytes=config.staging_bytes
        )
        self.caches = caches
        self.channel: SendChannel | None = None
        self.tag = 0

    def exchange(self, blob: bytes | None) -> bytes | None:
        if blob is None:
            return self.plane.offer()
        self.channel, reply = self.plane.accept(blob)
        return self.channel.slot_bytes.to_bytes(8, "little") + reply

    def move(self, kib: int) -> float | None:
        cache, channel = self.caches[kib], self.channel
        assert channel is not None
        queue = iter(cache.chunks(channel.slot_bytes))
        chunk = next(queue, None)
        while True:
            moved = self.plane.progress()
            while chunk is not None and channel.gathers and channel.ready:
                channel.send_pieces(cache.pieces(chunk), self.tag)
                self.tag += 1
                chunk = next(queue, None)
                moved = True
            while chunk is not None and not channel.gathers and (slot := channel.acquire()) is not None:
                pages, wire = cache.sides(chunk, slot.address)
                cache.copy(wire, pages, chunk)
                channel.send(slot, cache.chunk_bytes(chunk), self.tag)
                self.tag += 1
                chunk = next(queue, None)
                moved = True
            assert channel.error is None, channel.error
            if not moved and sleep(self.plane):
                return None


class PlaneTarget:
    def __init__(self, name: str, config: Config, caches: dict[int, Cache]) -> None:
        self.plane = make_plane(
            name, host="127.0.0.1", slot_bytes=config.slot_bytes, staging_bytes=config.staging_bytes
        )
        self.caches = caches
        self.channel: RecvChannel | None = None
        self.slot_bytes = 0
        self.tag = 0

    def exchange(self, blob: bytes | None) -> bytes | None:
        assert blob is not None
        if self.channel is None:
            channel, payload = self.plane.connect(blob, "127.0.0.1")
            assert isinstance(channel, RecvChannel)
            self.channel = channel
            return payload
        self.slot_bytes = int.from_bytes(blob[:8], "little")
        self.plane.finish(self.channel, blob[8:])
        return None

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        cache, channel = self.caches[kib], self.channel
        assert channel is not None
        expected: dict[int, Chunk] = {}
        for chunk in cache.chunks(self.slot_bytes):
            expected[self.tag] = chunk
            channel.expect(self.tag, cache.chunk_bytes(chunk), partial(cache.pieces, chunk))
            self.tag += 1
        while expected:
            moved = self.plane.progress()
            for message in channel.poll():
                chunk = expected.pop(message.tag)
                if not message.placed:
                    pages, wire = cache.sides(chunk, message.address)
                    cache.copy(pages, wire, chunk)
                message.release()
                moved = True
            assert channel.error is None, channel.error
            if not moved:
                sleep(self.plane)
        return time.perf_counter() - start


def sleep(plane: Any) -> bool:
    """Wait for the plane as the mover does; True when the orchestrator speaks."""
    if not plane.arm():
        return stopped()
    poller = zmq.Poller()
    poller.register(0, zmq.POLLIN)
    for what, events in plane.pollables():
        poller.register(what, events)
    return any(what == 0 for what, _ in poller.poll(1000))


class NixlSource:
    """NIXL reads from here; its progress thread serves."""

    def __init__(self, role: str, config: Config, caches: dict[int, Cache]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"{role}-{os.getpid()}", nixl_agent_config())
        self.caches = caches
        self.registered = self.agent.register_memory(next(iter(caches.values())).memory)
        self.tables = {kib: [int(a) for a in cache.addresses()] for kib, cache in caches.items()}

    def exchange(self, blob: bytes | None) -> bytes | None:
        tables = {str(kib): table for kib, table in self.tables.items()}
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return json.dumps({"metadata": metadata, "tables": tables}).encode()

    def move(self, kib: int) -> float | None:
        while not sleep_on_stdin():
            pass
        return None


def sleep_on_stdin() -> bool:
    return bool(select.select([0], [], [], 1.0)[0])


class NixlTarget(NixlSource):
    """The target: READ of the same scattered blocks, from prepared lists."""

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


class CmaSource:
    """D reads from here by itself."""

    def __init__(self, role: str, config: Config, caches: dict[int, Cache]) -> None:
        self.plane = make_plane(
            "cma", host="127.0.0.1", slot_bytes=config.slot_bytes, staging_bytes=config.staging_bytes
        )
        self.caches = caches

    def exchange(self, blob: bytes | None) -> bytes | None:
        tables = {str(kib): [c.bases.tolist(), c.block_ids.tolist()] for kib, c in self.caches.items()}
        offer = base64.b64encode(self.plane.offer()).decode()
        return json.dumps({"offer": offer, "tables": tables}).encode()

    def move(self, kib: int) -> float | None:
        while not sleep_on_stdin():
            pass
        return None


class CmaTarget(CmaSource):
    """The target: what a hand-over does from the grant on, planning of the runs included."""

    def exchange(self, blob: bytes | None) -> bytes | None:
        assert blob is not None
        peer = json.loads(blob)
        self.channel, _ = self.plane.connect(base64.b64decode(peer["offer"]), "127.0.0.1")
        self.tables = {int(kib): [np.array(x, dtype=np.int64) for x in pair] for kib, pair in peer["tables"].items()}
        return None

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        cache, channel = self.caches[kib], self.channel
        assert isinstance(channel, ReadChannel)
        ours, _ = cache.sides(Chunk(0, len(cache.bases), 0, cache.num_tokens), 0)
        bases, block_ids = self.tables[kib]
        theirs = replace(ours, bases=bases, block_ids=block_ids)
        left: Runs | None = runs(ours, theirs, cache.num_heads, cache.num_tokens, cache.content_bytes)
        while left is not None:
            now, left = taken(left, PEER_BYTES_PER_TURN)
            channel.read(now.to, now.of, now.nbytes)
        return time.perf_counter() - start


class UcxxRaw:
    """Raw UCXX bulk: tagged messages of 4 MiB, four in flight, contiguous, with the plane's own settings."""

    def __init__(self, role: str, config: Config, caches: dict[int, Cache]) -> None:
        from kvferry.transport.ucx_worker import UcxWorker

        self.source = role == "source"
        self.worker = UcxWorker("127.0.0.1")
        self.nbytes = config.mib << 20
        self.memory = torch.ones(self.nbytes, dtype=torch.uint8)
        self.told = False

    def exchange(self, blob: bytes | None) -> bytes | None:
        if blob is not None:
            self.link = self.worker.link(blob)
        if self.told:
            return None
        self.told = True
        return self.worker.address

    def _pieces(self) -> Iterator[torch.Tensor]:
        return iter(self.memory.split(RAW_MESSAGE))

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        pieces, flying, piece = self._pieces(), [], None
        piece = next(pieces)
        while piece is not None or flying:
            while piece is not None and len(flying) < RAW_WINDOW:
                if self.source:
                    flying.append(self.link.send(piece, 1))
                else:
                    message = self.worker.probe()
                    if message is None:
                        break
                    flying.append(self.worker.receive(message, piece))
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
            self.sock.sendall(memoryview(self.memory))
            return None
        view = memoryview(self.memory)
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


def contender(kind: str, role: str, config: Config, caches: dict[int, Cache]) -> Contender:
    if kind in ("shm", "tcp", "ucx", "zmq"):
        return (PlaneSource if role == "source" else PlaneTarget)(kind, config, caches)
    if kind == "cma":
        return (CmaSource if role == "source" else CmaTarget)(role, config, caches)
    if kind == "nixl":
        return (NixlSource if role == "source" else NixlTarget)(role, config, caches)
    return {"ucxx raw": UcxxRaw, "raw socket": SocketRaw, "memcpy": Memcpy}[kind](role, config, caches)


def main() -> None:
    kind, role, raw = sys.argv[1:]
    config = Config(**json.loads(raw))
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    bulk = kind in ("ucxx raw", "raw socket", "memcpy")
    # One memory serves all block sizes: the source fills it once, the target is overwritten anyway.
    seed = 1 if role == "source" else 2
    memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, config.mib << 21, dtype=np.uint8))
    caches = {} if bulk else {kib: Cache(config, kib, memory, 1000 * seed + kib) for kib in config.kib}
    it = contender(kind, role, config, caches)
    buffered = b""
    while True:
        while b"\n" not in buffered:
            data = os.read(0, 1 << 20)
            if not data:
                return
            buffered += data
        line, buffered = buffered.split(b"\n", 1)
        command = json.loads(line)
        answer: Any = None
        if command["do"] == "exchange":
            blob = it.exchange(None if command["blob"] is None else base64.b64decode(command["blob"]))
            answer = None if blob is None else base64.b64encode(blob).decode()
        elif command["do"] == "move":
            answer = it.move(command["kib"])
        elif command["do"] == "digest":
            answer = zlib.crc32(caches[command["kib"]].moved().numpy())
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
