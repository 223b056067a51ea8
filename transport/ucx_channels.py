"""The two ends of a UCX channel. What either has in the hands of UCX is a ``Transfer`` in the plane's list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvferry.connector.errors import TransportError
from kvferry.transport.expecting import ExpectingChannel
from kvferry.transport.plane import Pieces, SendChannel, Slot
from kvferry.transport.ucx_worker import Link, Request

if TYPE_CHECKING:
    from kvferry.transport.ucx_plane import UcxPlane


@dataclass(slots=True)
class Transfer:
    """A message in the hands of UCX, with the slot it occupies; ``channel`` is None for one to be dropped."""

    request: Request
    slot: Slot
    channel: UcxSendChannel | UcxRecvChannel | None
    tag: int
    nbytes: int
    retired: bool = False


class UcxSendChannel(SendChannel):
    """P's end."""

    peer: ClassVar[str] = "consumer"

    def __init__(self, plane: UcxPlane, link: Link, slot_bytes: int, farewell: int) -> None:
        self.slot_bytes = slot_bytes
        self.farewell = farewell
        self.link = link
        self.closed = False
        self.in_flight = 0
        self._plane = plane

    def acquire(self) -> Slot | None:
        if self.closed or self.error is not None or self.in_flight >= self._plane.window:
            return None
        slot = self._plane.send_pool.take()
        if slot is not None:  # else nothing moves, and the mover may sleep
            self.in_flight += 1
            self._plane.stir()
        return slot

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if self.closed or self.error is not None:
            self.give_back(slot)
            return
        try:
            request = self.link.send(self._plane.memory(slot, nbytes), tag)
        except TransportError as error:
            self.fail(str(error))
            self.give_back(slot)
            return
        self._plane.transfers.append(Transfer(request, slot, self, tag, nbytes))
        self._plane.stir()
        self._plane.pulse()

    def give_back(self, slot: Slot) -> None:
        self.in_flight -= 1
        self._plane.send_pool.put(slot)

    def flush(self, tags: Iterable[int]) -> None:
        pass  # D receives only what was sent

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._plane.hang_up(self)


class UcxRecvChannel(ExpectingChannel):
    """D's end."""

    peer: ClassVar[str] = "producer"

    def __init__(self, plane: UcxPlane, link: Link, farewell: int) -> None:
        super().__init__()
        self.farewell = farewell
        self.link = link
        self.closed = False
        self.receiving: set[int] = set()
        self._plane = plane

    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        if not self.closed:
            super().expect(tag, nbytes, into)
            self._plane.by_tag[tag] = self
            self._plane.stir()

    def posted(self) -> set[int]:
        return set(self.receiving)

    def forget(self, tag: int) -> None:
        if self.expected.pop(tag, None) is not None:
            self._plane.by_tag.pop(tag, None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for tag in list(self.expected):
                self.forget(tag)
            self.release_arrived()
            self._plane.hang_up(self)
