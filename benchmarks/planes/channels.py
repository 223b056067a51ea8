"""Our planes by their channels, in host memory, without halves of a worker: either end. Axes [L, B, H, N, C]."""

from __future__ import annotations

import base64
import json
import select
import time
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.planes.endpoints import ArenaEndpoint, told
from benchmarks.planes.points import Config, Point, Side
from kvferry.connector.geometry.byte_ranges import byte_ranges, wire_ordered
from kvferry.connector.geometry.spans import Chunk, Span, cut_span
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from kvferry.transport.channels import CPU, ByteRanges, Copy, PageRead, Pieces, PullChannel, RecvChannel, SendChannel
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.tcp import TcpPlane
from kvferry.transport.registry import make_plane

SLOT_BYTES, STAGING_BYTES = 4 << 20, 256 << 20


class PlaneEnd(ArenaEndpoint):
    """``settings``: the plane, the addresses of this host and of the peer, ``encrypt``, ``flows``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        settings = config.settings
        context = PlaneContext(
            settings["host"], slot_bytes=SLOT_BYTES, staging_bytes=STAGING_BYTES, encrypt=settings.get("encrypt", False)
        )
        self.plane = make_plane(settings["plane"], context)
        if "flows" in settings:
            assert isinstance(self.plane, TcpPlane)
            self.plane.flows = settings["flows"]
        self.chunk_bytes, self.tag = 0, 0

    def pages(self, point: Point, side: Side) -> Pages:
        return self.cache(point.p, "p").pages(self.table(point, side))

    def parts(self, point: Point) -> list[tuple[Chunk, Pages]]:
        """The messages of a transfer, and where each lies in the pages of this side."""
        form, pages = point.p, self.pages(point, self.side)
        span = Span(0, 0, form.layers, 0, form.heads, 0, point.tokens)
        return [
            (chunk, replace(pages, bases=pages.bases[chunk.layer : chunk.layer + chunk.num_layers], token=chunk.token))
            for chunk in cut_span(span, form.content, self.chunk_bytes, form.block)
        ]


def nbytes_of(point: Point, chunk: Chunk) -> int:
    return chunk.num_layers * point.p.heads * chunk.num_tokens * point.p.content


def pieces_of(point: Point, chunk: Chunk, pages: Pages) -> Pieces:
    """Where the chunk lies in the pages, in wire order."""
    return wire_ordered(pages, point.p.heads, chunk.num_tokens, point.p.content)


def copy(point: Point, chunk: Chunk, pages: Pages, address: int, *, to_wire: bool) -> None:
    form = point.p
    wire = wire_pages(address, chunk.num_layers, form.heads, chunk.num_tokens, form.content)
    dst, src = (wire, pages) if to_wire else (pages, wire)
    copy_pages(dst, src, num_heads=form.heads, num_tokens=chunk.num_tokens, content_bytes=form.content, device=CPU)


def sleep(plane: Any) -> bool:
    """Wait for the plane as the transfer thread does; True when the orchestrator speaks."""
    if not plane.arm():
        return told()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    for fd, events in plane.pollables():
        poll.register(fd, events)
    return any(fd == 0 for fd, _ in poll.poll(1000))


class PlaneSource(PlaneEnd):
    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        if blob is None:
            return base64.b64encode(self.plane.offer()).decode()
        channel, reply = self.plane.accept(base64.b64decode(blob))
        assert not channel.pulls
        self.channel: SendChannel = channel
        self.chunk_bytes = channel.slot_bytes
        return json.dumps([self.chunk_bytes, base64.b64encode(reply).decode()])

    def serve(self, point: str, way: str, repeats: int) -> Any:
        self.todo = self.points[point], repeats

    def synchronize(self) -> None:
        """Send, until the orchestrator says that D has everything."""
        point, repeats = self.todo
        queue = iter(self.parts(point) * repeats)
        part = next(queue, None)
        while True:
            moved = self.plane.progress()
            while part is not None and self._send(point, *part):
                self.tag += 1
                part = next(queue, None)
                moved = True
            assert self.channel.error is None, self.channel.error
            if not moved and sleep(self.plane):
                return

    def _send(self, point: Point, chunk: Chunk, pages: Pages) -> bool:
        """Whether there was room."""
        channel = self.channel
        if channel.sends_in_place:
            return channel.send_pieces(partial(pieces_of, point, chunk, pages), self.tag)
        slot = channel.acquire()
        if slot is None:
            return False
        copy(point, chunk, pages, slot.address, to_wire=True)
        channel.send(slot, nbytes_of(point, chunk), self.tag)
        return True


class PlaneTarget(PlaneEnd):
    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        assert blob is not None
        if not hasattr(self, "channel"):
            channel, payload = self.plane.connect(base64.b64decode(blob), self.config.settings["peer"])
            assert not channel.pulls
            self.channel: RecvChannel = channel
            return base64.b64encode(payload).decode()
        self.chunk_bytes, reply = json.loads(blob)
        self.plane.finish(self.channel, base64.b64decode(reply))
        return None

    def serve(self, point: str, way: str, repeats: int) -> Any:
        """Announce all messages to the channel before P sends any. The time that this takes counts."""
        begun = time.perf_counter()
        self.expected: dict[int, tuple[Chunk, Pages]] = {}
        it = self.points[point]
        for chunk, pages in self.parts(it):
            self.expected[self.tag] = chunk, pages
            self.channel.expect(self.tag, nbytes_of(it, chunk), partial(pieces_of, it, chunk, pages))
            self.tag += 1
        self.announced = time.perf_counter() - begun

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        begun, it, expected = time.perf_counter(), self.points[point], self.expected
        while expected:
            moved = self.plane.progress()
            for message in self.channel.poll():
                chunk, pages = expected.pop(message.tag)
                if not message.placed:
                    copy(it, chunk, pages, message.address, to_wire=False)
                message.release()
                moved = True
            assert self.channel.error is None, self.channel.error
            if not moved:
                sleep(self.plane)
        return [self.announced + time.perf_counter() - begun]


class PullSource(PlaneEnd):
    """P, whose memory D reads by itself."""

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        return json.dumps([base64.b64encode(self.plane.offer()).decode(), self.arena.data_ptr()])


class Read(PageRead):
    def __init__(self, ranges: ByteRanges) -> None:
        self._ranges = ranges

    def byte_ranges(self) -> ByteRanges:
        return self._ranges

    def launch(self) -> Copy:
        raise NotImplementedError("caches in host memory, in another process")


class PullTarget(PlaneEnd):
    """D: what a hand-over does from the grant on, planning of the runs included."""

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        assert blob is not None
        offer, self.base = json.loads(blob)
        channel, _ = self.plane.connect(base64.b64decode(offer), self.config.settings["peer"])
        assert channel.pulls
        self.channel: PullChannel = channel
        return None

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        return self._timed(lambda: self._read(self.points[point]), repeats)

    def _read(self, point: Point) -> None:
        ours, cache = self.pages(point, "d"), self.cache(point.p, "p")
        theirs = cache.pages(self.table(point, "p"), cache.bases - self.arena.data_ptr() + self.base)
        read = self.channel.read(Read(byte_ranges(ours, theirs, point.p.heads, point.tokens, point.p.content)))
        while not read.done:
            self.plane.progress()
        assert not read.error, read.error
