"""One process of ``host_planes.py``: the source or the target of one way to move blocks. Axes [L, B, H, N, C].

``python host_contenders.py KIND ROLE CONFIG``; one JSON line per command on stdin, one per answer on stdout.
Here are our data planes; the others are in ``host_rivals``.
"""

from __future__ import annotations

import base64
import json
import os
import select
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import FileIO
from typing import Any

import numpy as np
import torch
from host_baselines import Memcpy, NixlRaw, NixlSource, NixlTarget, SocketRaw, UcxxRaw
from host_endpoints import Cache, Config, Endpoint, ReadSource, stopped
from tables import NIXL, NIXL_PLANE, NIXL_RAW, NIXL_THREAD

from kvferry.connector.geometry.byte_ranges import byte_ranges
from kvferry.connector.geometry.spans import Chunk
from kvferry.connector.pages.checksums import (
    PlacedMessage,
    Verdict,
    new_trailer,
    sealed_pieces,
    trailer_bytes,
)
from kvferry.kernels.checksum import ChecksumName, WireCheck, trailer_fits, write_trailer
from kvferry.transport.channels import CPU, ByteRanges, Copy, PageRead, Pieces, PullChannel, RecvChannel, SendChannel
from kvferry.transport.plane import PlaneContext
from kvferry.transport.registry import make_plane


class PlaneEndpoint:
    """Either end over one of our data planes."""

    def __init__(self, name: str, config: Config, caches: dict[int, Cache]) -> None:
        self.plane = make_plane(
            name,
            PlaneContext(
                config.host,
                slot_bytes=config.slot_bytes,
                staging_bytes=config.staging_bytes,
                encrypt=config.encrypt,
            ),
        )
        self.peer = config.peer
        self.caches = caches
        self.checksum: ChecksumName | None = "xxh3" if config.checksum else None


class PlaneSource(PlaneEndpoint):
    def __init__(self, name: str, config: Config, caches: dict[int, Cache]) -> None:
        super().__init__(name, config, caches)
        self.channel: SendChannel | None = None
        self.tag = 0
        self.trailer = new_trailer()

    def exchange(self, blob: bytes | None) -> bytes | None:
        if blob is None:
            return self.plane.offer()
        channel, reply = self.plane.accept(blob)
        assert not channel.pulls
        self.channel = channel
        self.chunk_bytes = channel.slot_bytes - trailer_bytes(self.checksum)
        return self.chunk_bytes.to_bytes(8, "little") + reply

    def move(self, kib: int) -> float | None:
        cache, channel = self.caches[kib], self.channel
        assert channel is not None
        queue = iter(cache.chunks(self.chunk_bytes))
        chunk = next(queue, None)
        while True:
            moved = self.plane.progress()
            while (
                chunk is not None
                and channel.sends_in_place
                and channel.send_pieces(self.pieces(cache, chunk), self.tag)
            ):
                self.tag += 1
                chunk = next(queue, None)
                moved = True
            while chunk is not None and not channel.sends_in_place and (slot := channel.acquire()) is not None:
                pages, wire = cache.sides(chunk, slot.address)
                cache.copy(wire, pages, chunk)
                nbytes = cache.chunk_bytes(chunk)
                if self.checksum is not None:
                    write_trailer(WireCheck(self.checksum, self.tag), slot.address, nbytes)
                channel.send(slot, nbytes + trailer_bytes(self.checksum), self.tag)
                self.tag += 1
                chunk = next(queue, None)
                moved = True
            assert channel.error is None, channel.error
            if not moved and sleep(self.plane):
                return None

    def pieces(self, cache: Cache, chunk: Chunk) -> Callable[[], Pieces]:
        pieces = partial(cache.pieces, chunk)
        return pieces if self.checksum is None else partial(sealed_pieces, pieces, self.tag, self.trailer)


class PlaneTarget(PlaneEndpoint):
    def __init__(self, name: str, config: Config, caches: dict[int, Cache]) -> None:
        super().__init__(name, config, caches)
        self.channel: RecvChannel | None = None
        self.chunk_bytes = 0
        self.tag = 0

    def exchange(self, blob: bytes | None) -> bytes | None:
        assert blob is not None
        if self.channel is None:
            channel, payload = self.plane.connect(blob, self.peer)
            assert not channel.pulls
            self.channel = channel
            return payload
        self.chunk_bytes = int.from_bytes(blob[:8], "little")
        self.plane.finish(self.channel, blob[8:])
        return None

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        cache, channel = self.caches[kib], self.channel
        assert channel is not None
        expected: dict[int, Chunk] = {}
        placed: dict[int, PlacedMessage] = {}
        for chunk in cache.chunks(self.chunk_bytes):
            expected[self.tag] = chunk
            into: Callable[[], Pieces] = partial(cache.pieces, chunk)
            if self.checksum is not None:
                placed[self.tag] = PlacedMessage(into)
                into = placed[self.tag].into
            channel.expect(self.tag, cache.chunk_bytes(chunk) + trailer_bytes(self.checksum), into)
            self.tag += 1
        while expected:
            moved = self.plane.progress()
            for message in channel.poll():
                chunk = expected.pop(message.tag)
                if message.placed:
                    assert self.checksum is None or placed.pop(message.tag).fits(message.tag)
                else:
                    if self.checksum is not None:
                        verdict = Verdict(CPU)
                        assert trailer_fits(
                            verdict.check(self.checksum, message.tag), message.address, cache.chunk_bytes(chunk)
                        )
                    pages, wire = cache.sides(chunk, message.address)
                    cache.copy(pages, wire, chunk)
                message.release()
                moved = True
            assert channel.error is None, channel.error
            if not moved:
                sleep(self.plane)
        return time.perf_counter() - start


def sleep(plane: Any) -> bool:
    """Wait for the plane as the transfer thread does; True when the orchestrator speaks."""
    if not plane.arm():
        return stopped()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    for fd, events in plane.pollables():
        poll.register(fd, events)
    return any(fd == 0 for fd, _ in poll.poll(1000))


class CmaSource(ReadSource, PlaneEndpoint):
    def exchange(self, blob: bytes | None) -> bytes | None:
        tables = {str(kib): [c.bases.tolist(), c.block_ids.tolist()] for kib, c in self.caches.items()}
        offer = base64.b64encode(self.plane.offer()).decode()
        return json.dumps({"offer": offer, "tables": tables}).encode()


class Read(PageRead):
    def __init__(self, ranges: ByteRanges) -> None:
        self._ranges = ranges

    def byte_ranges(self) -> ByteRanges:
        return self._ranges

    def launch(self) -> Copy:
        raise NotImplementedError("caches in host memory, in another process")


class CmaTarget(CmaSource):
    """The target: what a hand-over does from the grant on, planning of the runs included."""

    def exchange(self, blob: bytes | None) -> bytes | None:
        assert blob is not None
        peer = json.loads(blob)
        channel, _ = self.plane.connect(base64.b64decode(peer["offer"]), "127.0.0.1")
        assert channel.pulls
        self.channel: PullChannel = channel
        self.tables = {int(kib): [np.array(x, dtype=np.int64) for x in pair] for kib, pair in peer["tables"].items()}
        return None

    def move(self, kib: int) -> float | None:
        start = time.perf_counter()
        cache, channel = self.caches[kib], self.channel
        ours, _ = cache.sides(Chunk(0, len(cache.bases), 0, cache.num_tokens), 0)
        bases, block_ids = self.tables[kib]
        theirs = replace(ours, bases=bases, block_ids=block_ids)
        ranges = byte_ranges(ours, theirs, cache.num_heads, cache.num_tokens, cache.content_bytes)
        copy = channel.read(Read(ranges))
        while not copy.done:
            self.plane.progress()
        assert not copy.error, copy.error
        return time.perf_counter() - start


def contender(kind: str, role: str, config: Config, caches: dict[int, Cache]) -> Endpoint:
    if kind in ("shm", "tcp", "ucx", "zmq", NIXL_PLANE):
        name = "nixl" if kind == NIXL_PLANE else kind
        return (PlaneSource if role == "source" else PlaneTarget)(name, config, caches)
    if kind == "cma":
        return (CmaSource if role == "source" else CmaTarget)(kind, config, caches)
    if kind in (NIXL, NIXL_THREAD):
        if role == "source":
            return NixlSource(role, config, caches)
        return NixlTarget(role, config, caches, thread=kind == NIXL_THREAD)
    if kind in NIXL_RAW:
        return NixlRaw(role, config, caches, NIXL_RAW[kind])
    raw: dict[str, Callable[..., Endpoint]] = {"ucxx raw": UcxxRaw, "raw socket": SocketRaw, "memcpy": Memcpy}
    return raw[kind](role, config, caches)


def main() -> None:
    kind, role, raw = sys.argv[1:]
    config = Config(**json.loads(raw))
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    bulk = kind in ("ucxx raw", "raw socket", "memcpy", *NIXL_RAW)
    # One memory serves all block sizes: the source fills it once, the target is overwritten anyway.
    seed = 1 if role == "source" else 2
    memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, config.mib << 21, dtype=np.uint8))
    caches = {} if bulk else {kib: Cache(config, kib, memory, 1000 * seed + kib) for kib in config.kib}
    it = contender(kind, role, config, caches)
    orders = FileIO(0)  # takes one line and no more: a source that waits for the next must find it on stdin
    for line in iter(orders.readline, b""):
        command = json.loads(line)
        answer: Any = None
        if command["do"] == "exchange":
            blob = it.exchange(None if command["blob"] is None else base64.b64decode(command["blob"]))
            answer = None if blob is None else base64.b64encode(blob).decode()
        elif command["do"] == "move":
            answer = it.move(command["kib"])
        elif command["do"] == "digest":
            answer = zlib.crc32(caches[command["kib"]].moved().numpy().data)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
