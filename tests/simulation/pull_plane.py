"""A data plane over which D reads P's pages, at two moments (as ``cma`` and ``cuda_ipc``), so a read can be torn."""

from __future__ import annotations

import ctypes
import os
from typing import Any, ClassVar

from kvferry.transport.channels import ByteRanges, Copy, DChannel, PageRead, PChannel, PullChannel, PulledChannel
from kvferry.transport.peer_process import Ends, PeerProcess
from tests.simulation.memory import Use
from tests.simulation.plane_base import MOVE_SECONDS, End, SimPlane


class PullPlane(SimPlane):
    """D reads P's pages by itself."""

    name: ClassVar[str] = "sim_pull"
    pulls: ClassVar[bool] = True
    same_host: ClassVar[bool] = True

    def connect(self, offer: bytes, host: str) -> tuple[DChannel, bytes]:
        return Reader(self, self.peer(offer)), b""

    def accept(self, payload: bytes) -> tuple[PChannel, bytes]:
        return PulledChannel(), b""


class SimProcess(PeerProcess):
    """A process of the simulation, as its peer sees it. Its files are files of this process."""

    def __init__(self, host: Any) -> None:
        self.pid, self.fd, self._host = os.getpid(), -1, host

    @property
    def ended(self) -> bool:
        return not self._host.alive

    def check_holds_end(self, ends: Ends | None) -> None:
        """The offer came from this process."""


class Reader(End, PullChannel):
    """D's end. P's memory is mapped some time after the channel is made."""

    def __init__(self, plane: PullPlane, other: Any) -> None:
        self.plane, self.other, self.ready = plane, other, False
        self.process = SimProcess(other)
        self._copies: dict[PullCopy, None] = {}
        self.open()
        timeline = plane.network.timeline
        timeline.after(MOVE_SECONDS * timeline.rng.random(), self._map)

    def _map(self) -> None:
        self.ready = True
        self.plane.host.mark(self.plane)

    def read(self, request: PageRead) -> Copy:
        copy = PullCopy(self, request.byte_ranges())
        self._copies[copy] = None
        return copy

    def ended(self, copy: PullCopy) -> None:
        self._copies.pop(copy, None)

    def cancel(self, copy: Copy) -> None:
        assert isinstance(copy, PullCopy)
        if copy.cancellable:
            copy.end("cancelled")

    def close(self) -> None:
        for copy in list(self._copies):
            self.cancel(copy)
        self.shut()


class PullCopy(Copy):
    """Reads one half of the ranges some time after it has begun, and the other half some time later. Half of these
    copies belong to a device's stream, and cannot be cancelled."""

    __slots__ = ("_at", "_ranges", "_reader", "cancellable")

    def __init__(self, reader: Reader, ranges: ByteRanges) -> None:
        timeline = reader.plane.network.timeline
        on_device = timeline.rng.random() < 0.5
        super().__init__(on_stream=on_device)
        self.cancellable = not on_device
        self._reader, self._ranges, self._at = reader, ranges, 0
        pages = reader.plane.host.pages
        pages.writes.append(Use(self, pages.at(ranges.dst.tolist())))
        if on_device:
            reader.plane.host.copies.under_way[self] = lambda: self._turn(len(ranges.nbytes))
        half = len(ranges.nbytes) // 2
        timeline.after(MOVE_SECONDS * timeline.rng.random(), lambda: self._turn(half))

    def _turn(self, stop: int) -> None:
        reader = self._reader
        host = reader.plane.host
        if self.done or not host.alive:
            return
        if not reader.other.alive:
            self.peer_lost = True
            self.end("P's memory is gone")
            return
        part = slice(self._at, stop)
        for dst, src, nbytes in zip(*(column[part].tolist() for column in self._ranges), strict=True):
            ctypes.memmove(dst, src, nbytes)
            self.moved += nbytes
        self._at = stop
        if stop < len(self._ranges.nbytes):
            timeline = reader.plane.network.timeline
            seconds = MOVE_SECONDS * timeline.rng.random() * (50 if timeline.rng.random() < 0.02 else 1)
            timeline.after(seconds, lambda: self._turn(len(self._ranges.nbytes)))
            host.mark(reader.plane)
        else:
            self.end("")

    def end(self, why: str) -> None:
        """No page is touched any more."""
        if not self.done:
            self.error, self.done = why, True
            self._reader.plane.host.copies.under_way.pop(self, None)
            self._reader.ended(self)
            self._reader.plane.host.mark(self._reader.plane)
