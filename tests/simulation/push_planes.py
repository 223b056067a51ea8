"""Data planes over the simulated network on which P sends: ``sim_push`` packs and unpacks slots (as ``shm``), and
``sim_place`` sends and receives in place (as ``tcp``)."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from kvferry.transport.channels import DChannel, PChannel, Pieces, Received, SendChannel, Slot
from kvferry.transport.errors import TransportError
from kvferry.transport.planes.push import PushReceiver
from kvferry.transport.staging import SlotPool
from tests.simulation.memory import Use, pieces_of
from tests.simulation.network import Lane
from tests.simulation.plane_base import MOVE_SECONDS, End, PlaneHost, SimPlane

SLOT_BYTES, SLOTS, WINDOW = 64 << 10, 8, 2


class PushPlane(SimPlane):
    """Slots at both ends."""

    name: ClassVar[str] = "sim_push"
    in_place: ClassVar[bool] = False

    def __init__(self, host: PlaneHost) -> None:
        super().__init__(host)
        self.send_pool = SlotPool(SLOT_BYTES, SLOTS * SLOT_BYTES)
        self.recv_pool = SlotPool(SLOT_BYTES, SLOTS * SLOT_BYTES)
        self.starving: dict[Receiver, None] = {}  # ends with messages for which there was no slot

    def connect(self, offer: bytes, host: str) -> tuple[DChannel, bytes]:
        peer = self.peer(offer)
        channel = Receiver(self, peer)
        name = self.network.name()
        self.network.streams[name] = channel
        channel.name = name
        return channel, name

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
    """In place where the pieces of pages are long enough, else in slots."""

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

    @property
    def is_open(self) -> bool:
        return self.error is None and self in self.plane.ends

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
            self.plane.host.mark(self.plane)
            if self.is_open:
                self.lane.send("chunk", lambda: self.receiver.arrive(tag, data))

    def close(self) -> None:
        if self.shut():
            self.lane.send("end of stream", lambda: self.receiver.broke("the producer closed the channel"), sure=True)


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
        use = Use(None, pieces_of(pages, found))
        pages.reads.append(use)
        self._reading = tag, found, use
        timeline = self.plane.network.timeline
        half = len(found.nbytes) // 2
        first = _read(found, 0, half)
        timeline.after(MOVE_SECONDS * timeline.rng.random(), lambda: self._finish(use, tag, first, found, half))
        return True

    def _finish(self, use: Use, tag: int, first: bytes, found: Pieces, half: int) -> None:
        if self._reading is not None and self._reading[2] is use and self.plane.host.alive:
            self._end(first + _read(found, half, len(found.nbytes)))

    def _end(self, data: bytes, *, whole: bool = True) -> None:
        assert self._reading is not None
        tag, _, use = self._reading
        self._reading = None
        self.plane.host.pages.reads.remove(use)
        self.plane.host.mark(self.plane)
        if self.is_open:
            self.lane.send("chunk", lambda: self.receiver.arrive(tag, data, whole=whole))

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


def _read(pieces: Pieces, start: int, stop: int) -> bytes:
    ends = zip(pieces.addresses[start:stop].tolist(), pieces.nbytes[start:stop].tolist(), strict=True)
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in ends)


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
        if self.error is not None or self not in self.plane.ends:
            return
        self._queue.append((tag, data, whole))
        self.go_on()
        self.plane.host.mark(self.plane)

    def go_on(self) -> None:
        """Take the messages that wait."""
        self.plane.starving.pop(self, None)
        while self._queue:
            tag, data, whole = self._queue[0]
            counted = len(data) if whole else 0
            expected = self.expected.get(tag)
            if expected is None:  # forgotten, never announced, or doubled
                self._queue.popleft()
            elif expected.nbytes != len(data):
                self.fail(f"message {tag:#x} has {len(data)} bytes, expected {expected.nbytes}")
                return
            elif expected.into is not None and self.plane.in_place:
                self._queue.popleft()
                del self.expected[tag]
                self._place(tag, data, expected.into(), counted)
            else:
                slot = self.plane.recv_pool.take()
                if slot is None:
                    self.plane.starving[self] = None
                    return
                self._queue.popleft()
                del self.expected[tag]
                ctypes.memmove(slot.address, data, len(data))
                release = lambda slot=slot: self.plane.recv_pool.put(slot)  # noqa: E731
                self.arrived.append(Received(tag, slot.address, counted, release))

    def _place(self, tag: int, data: bytes, into: Pieces, counted: int) -> None:
        """Write the first half of a message into D's pages, and the second half some time later."""
        pages, timeline = self.plane.host.pages, self.plane.network.timeline
        use = self._placing[tag] = Use(None, pieces_of(pages, into))
        pages.writes.append(use)
        half = len(into.nbytes) // 2
        done = _write(into, 0, half, data, 0)
        place = partial(self._placed, tag, use, data, into, half, done, counted)
        timeline.after(MOVE_SECONDS * timeline.rng.random(), place)

    def _placed(self, tag: int, use: Use, data: bytes, into: Pieces, half: int, done: int, counted: int) -> None:
        if not self.plane.host.alive or self not in self.plane.ends or self.error is not None:
            return
        if self._placing.get(tag) is use:
            _write(into, half, len(into.nbytes), data, done)
            self._ended(tag)
        self.arrived.append(Received(tag, 0, counted, lambda: None, placed=True))
        self.plane.host.mark(self.plane)

    def _ended(self, tag: int) -> None:
        use = self._placing.pop(tag, None)
        if use is not None:
            self.plane.host.pages.writes.remove(use)

    def stop_writing(self, tag: int) -> None:
        expected = self.expected.get(tag)
        if expected is not None:
            expected.into = None
        self._ended(tag)

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
            lane.send("end of stream", lambda: sender.broke("the consumer closed the channel"), sure=True)


def _write(pieces: Pieces, start: int, stop: int, data: bytes, at: int) -> int:
    """Write pieces [start, stop) from ``data[at:]``; where the next piece begins in it."""
    for address, nbytes in zip(pieces.addresses[start:stop].tolist(), pieces.nbytes[start:stop].tolist(), strict=True):
        ctypes.memmove(address, data[at : at + nbytes], nbytes)
        at += nbytes
    return at
