"""Data planes over the simulated network. On ``sim_pull`` D reads P's pages by itself, at two moments (as ``cma`` and
``cuda_ipc``), so a read can be torn. On the others P sends: ``sim_push`` packs and unpacks slots (as ``shm``), and
``sim_place`` sends and receives in place where the pieces of pages are long enough (as ``tcp``)."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from kvferry.transport.channels import (
    ByteRanges,
    Copy,
    DChannel,
    PageRead,
    PChannel,
    Pieces,
    PullChannel,
    PulledChannel,
    Received,
    SendChannel,
    Slot,
)
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.peer_process import Ends, PeerProcess
from kvferry.transport.plane import Plane
from kvferry.transport.planes.push import PushReceiver
from kvferry.transport.staging import SlotPool
from tests.simulation.memory import Use
from tests.simulation.network import Lane

MOVE_SECONDS = 400e-6
"""The longest time for which one message, or one read of pages, is under way in memory."""
SLOT_BYTES, SLOTS, WINDOW = 64 << 10, 8, 2


class SimPlane(Plane):
    """``host``: a ``Node``. ``ends``: its channels that are open."""

    def __init__(self, host: Any) -> None:
        self.host, self.network = host, host.network
        self.ends: dict[Any, None] = {}

    def offer(self) -> bytes:
        return int(self.host.number).to_bytes(8, "big")

    def peer(self, offer: bytes) -> Any:
        """The process of an offer."""
        peer = self.network.hosts.get(int.from_bytes(offer, "big"))
        if peer is None or not peer.alive:
            raise PlaneUnavailableError("P is not there")
        return peer

    def soon(self, act: Callable[[], None], times: float = 1.0) -> None:
        """Let ``act`` happen when the next bytes have moved."""
        timeline = self.network.timeline
        timeline.after(MOVE_SECONDS * timeline.rng.random() * times, act)

    def pollables(self) -> list[tuple[int, int]]:
        return []

    @property
    def active(self) -> bool:
        return False

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        for end in list(self.ends):
            end.close()


class End:
    """One end of a stream or of a mapping: it joins two processes until it is closed or has an error."""

    plane: SimPlane
    other: Any
    error: TransportError | None
    fail: Callable[[str], None]

    def open(self) -> None:
        self.plane.ends[self] = None
        self.plane.network.join(self.plane.host, self.other, self, self.broke)

    @property
    def is_open(self) -> bool:
        return self.error is None and self in self.plane.ends

    def mark(self) -> None:
        self.plane.host.mark(self.plane)

    def broke(self, why: str) -> None:
        if self.plane.host.alive and self in self.plane.ends:
            self.fail(why)
            self.mark()

    def shut(self) -> bool:
        """Close this end; whether it was open."""
        if self not in self.plane.ends:
            return False
        del self.plane.ends[self]
        self.plane.network.leave(self.plane.host, self.other, self)
        return True


# --- D reads ------------------------------------------------------------------------------------------------------


class PullPlane(SimPlane):
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
        self.copies: dict[PullCopy, None] = {}
        self.open()
        plane.soon(self._map)

    def _map(self) -> None:
        self.ready = True
        self.mark()

    def read(self, request: PageRead) -> Copy:
        copy = PullCopy(self, request.byte_ranges())
        self.copies[copy] = None
        return copy

    def cancel(self, copy: Copy) -> None:
        assert isinstance(copy, PullCopy)
        if copy.cancellable:
            copy.end("cancelled")

    def close(self) -> None:
        for copy in list(self.copies):
            self.cancel(copy)
        self.shut()


class PullCopy(Copy):
    """Reads one half of the ranges some time after it has begun, and the other half some time later. Half of these
    copies belong to a device's stream, and cannot be cancelled."""

    __slots__ = ("_at", "_ranges", "_reader", "cancellable")

    def __init__(self, reader: Reader, ranges: ByteRanges) -> None:
        plane = reader.plane
        on_device = plane.network.timeline.rng.random() < 0.5
        super().__init__(on_stream=on_device)
        self.cancellable = not on_device
        self._reader, self._ranges, self._at = reader, ranges, 0
        pages = plane.host.pages
        pages.writes.append(Use(self, pages.at(ranges.dst.tolist())))
        if on_device:
            plane.host.copies.under_way[self] = lambda: self._turn(len(ranges.nbytes))
        plane.soon(lambda: self._turn(len(ranges.nbytes) // 2))

    def _turn(self, stop: int) -> None:
        reader, whole = self._reader, len(self._ranges.nbytes)
        if self.done or not reader.plane.host.alive:
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
        if stop == whole:
            self.end("")
            return
        timeline = reader.plane.network.timeline
        seconds = MOVE_SECONDS * timeline.rng.random() * (50 if timeline.rng.random() < 0.02 else 1)
        timeline.after(seconds, lambda: self._turn(whole))
        reader.mark()

    def end(self, why: str) -> None:
        """No page is touched any more."""
        if not self.done:
            self.error, self.done = why, True
            self._reader.plane.host.copies.under_way.pop(self, None)
            self._reader.copies.pop(self, None)
            self._reader.mark()


# --- P sends ------------------------------------------------------------------------------------------------------


class PushPlane(SimPlane):
    """Slots at both ends."""

    name: ClassVar[str] = "sim_push"
    in_place: ClassVar[bool] = False

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.send_pool = SlotPool(SLOT_BYTES, SLOTS * SLOT_BYTES)
        self.recv_pool = SlotPool(SLOT_BYTES, SLOTS * SLOT_BYTES)
        self.starving: dict[Receiver, None] = {}  # ends with messages for which there was no slot

    def connect(self, offer: bytes, host: str) -> tuple[DChannel, bytes]:
        channel = Receiver(self, self.peer(offer))
        channel.name = self.network.name()
        self.network.streams[channel.name] = channel
        return channel, channel.name

    def accept(self, payload: bytes) -> tuple[PChannel, bytes]:
        receiver = self.network.streams.pop(payload, None)
        if receiver is None or receiver not in receiver.plane.ends or not receiver.plane.host.alive:
            raise TransportError("no such stream")
        receiver.sender = (PlacingSender if self.in_place else Sender)(self, receiver)
        return receiver.sender, b""

    def progress(self) -> bool:
        for end in list(self.starving) if self.active else ():
            end.go_on()
        return False

    @property
    def active(self) -> bool:
        return bool(self.starving) and bool(self.recv_pool.free)


class PlacePlane(PushPlane):
    name: ClassVar[str] = "sim_place"
    in_place: ClassVar[bool] = True


class Sender(End, SendChannel):
    """P's end."""

    def __init__(self, plane: PushPlane, receiver: Receiver) -> None:
        self.plane: PushPlane = plane
        self.other, self.receiver, self.slot_bytes = receiver.plane.host, receiver, SLOT_BYTES
        self.lane = Lane(plane.network, plane.host, self.other)
        self._taken = 0
        self.open()

    def acquire(self) -> Slot | None:
        if not self.is_open or self._taken >= WINDOW:
            return None
        slot = self.plane.send_pool.take()
        self._taken += slot is not None
        return slot

    def give_back(self, slot: Slot) -> None:
        self._taken -= 1
        self.plane.send_pool.put(slot)

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        if not self.is_open:
            self.give_back(slot)
            return
        self.plane.network.timeline.after(MOVE_SECONDS / 8, lambda: self._left(slot, nbytes, tag))

    def _left(self, slot: Slot, nbytes: int, tag: int) -> None:
        """The kernel has taken the bytes of a slot."""
        if self.plane.host.alive:
            data = ctypes.string_at(slot.address, nbytes)
            self.give_back(slot)
            self.deliver(tag, data)

    def deliver(self, tag: int, data: bytes, *, whole: bool = True) -> None:
        self.mark()
        if self.is_open:
            self.lane.send("chunk", lambda: self.receiver.arrive(tag, data, whole=whole))

    def close(self) -> None:
        if self.shut():
            self.lane.send(
                "end of stream", lambda: self.receiver.broke("the prefill rank closed the channel"), sure=True
            )


class PlacingSender(Sender):
    """P's end that reads P's pages while a message leaves: the first half, and some time later the second."""

    sends_in_place = True

    def __init__(self, plane: PushPlane, receiver: Receiver) -> None:
        super().__init__(plane, receiver)
        self._reading: tuple[int, Pieces, Use] | None = None

    def send_pieces(self, pieces: Callable[[], Pieces], tag: int) -> bool:
        if not self.is_open or self._reading is not None:
            return False
        found, pages = pieces(), self.plane.host.pages
        use = Use(None, pages.at(found.addresses.tolist()))
        pages.reads.append(use)
        self._reading = tag, found, use
        half = len(found.nbytes) // 2
        first = _read(found, 0, half)

        def finish() -> None:
            if self._reading is not None and self._reading[2] is use and self.plane.host.alive:
                self._end(first + _read(found, half, len(found.nbytes)))

        self.plane.soon(finish)
        return True

    def _end(self, data: bytes, *, whole: bool = True) -> None:
        assert self._reading is not None
        tag, _, use = self._reading
        self._reading = None
        self.plane.host.pages.reads.remove(use)
        self.deliver(tag, data, whole=whole)

    @property
    def reading(self) -> int | None:
        return None if self._reading is None else self._reading[0]

    def stop_reading(self) -> None:
        if self._reading is not None:
            self._end(bytes(int(self._reading[1].nbytes.sum())), whole=False)

    def _give_up(self) -> None:
        self.stop_reading()

    def close(self) -> None:
        self.stop_reading()
        super().close()


class Receiver(End, PushReceiver):
    """D's end."""

    def __init__(self, plane: PushPlane, other: Any) -> None:
        super().__init__()
        self.plane: PushPlane = plane
        self.other, self.name = other, b""
        self.sender: Sender | None = None  # once P has accepted
        self._queue: deque[tuple[int, bytes, bool]] = deque()  # messages that wait for a slot
        self._placing: dict[int, Use] = {}
        self.open()

    def arrive(self, tag: int, data: bytes, *, whole: bool = True) -> None:
        """A message has arrived. ``whole``: P has not stopped to read its pages in the middle of it."""
        if self.is_open:
            self._queue.append((tag, data, whole))
            self.go_on()
            self.mark()

    def go_on(self) -> None:
        """Take the messages that wait."""
        self.plane.starving.pop(self, None)
        while self._queue:
            tag, data, whole = self._queue[0]
            counted, expected = len(data) if whole else 0, self.expected.get(tag)
            slot, in_place = None, self.plane.in_place and expected is not None and expected.into is not None
            if expected is not None and expected.nbytes != len(data):
                self.fail(f"message {tag:#x} has {len(data)} bytes, expected {expected.nbytes}")
                return
            if expected is not None and not in_place and (slot := self.plane.recv_pool.take()) is None:
                self.plane.starving[self] = None
                return
            self._queue.popleft()
            if expected is None:  # forgotten, never announced, or doubled
                continue
            del self.expected[tag]
            if slot is None:
                assert expected.into is not None
                self._place(tag, data, expected.into(), counted)
            else:
                ctypes.memmove(slot.address, data, len(data))
                self.arrived.append(Received(tag, slot.address, counted, partial(self.plane.recv_pool.put, slot)))

    def _place(self, tag: int, data: bytes, into: Pieces, counted: int) -> None:
        """Write the first half of a message into D's pages, and the second half some time later."""
        pages = self.plane.host.pages
        use = self._placing[tag] = Use(None, pages.at(into.addresses.tolist()))
        pages.writes.append(use)
        half = len(into.nbytes) // 2
        done = _write(into, 0, half, data, 0)

        def finish() -> None:
            if self.plane.host.alive and self.is_open:
                if self._placing.get(tag) is use:
                    _write(into, half, len(into.nbytes), data, done)
                    self._ended(tag)
                self.arrived.append(Received(tag, 0, counted, lambda: None, placed=True))
                self.mark()

        self.plane.soon(finish)

    def _ended(self, tag: int) -> None:
        use = self._placing.pop(tag, None)
        if use is not None:
            self.plane.host.pages.writes.remove(use)

    def forget(self, tag: int) -> None:
        self._ended(tag)
        super().forget(tag)

    def _give_up(self) -> None:
        for tag in list(self._placing):
            self._ended(tag)
        self._queue.clear()
        self.plane.starving.pop(self, None)

    def close(self) -> None:
        self._give_up()
        self.release_arrived()
        self.plane.network.streams.pop(self.name, None)
        if self.shut() and self.sender is not None:
            lane, sender = Lane(self.plane.network, self.plane.host, self.other), self.sender
            lane.send("end of stream", lambda: sender.broke("the decode rank closed the channel"), sure=True)


def _read(pieces: Pieces, start: int, stop: int) -> bytes:
    ends = zip(pieces.addresses[start:stop].tolist(), pieces.nbytes[start:stop].tolist(), strict=True)
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in ends)


def _write(pieces: Pieces, start: int, stop: int, data: bytes, at: int) -> int:
    """Write pieces [start, stop) from ``data[at:]``; where the next piece begins in it."""
    for address, nbytes in zip(pieces.addresses[start:stop].tolist(), pieces.nbytes[start:stop].tolist(), strict=True):
        ctypes.memmove(address, data[at : at + nbytes], nbytes)
        at += nbytes
    return at
