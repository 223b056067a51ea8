"""The two ends of a UCX channel. Each message that UCX sends or receives is a ``UcxTransfer`` in the plane's list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvferry.transport.channels import ExpectingChannel, Pieces, SendChannel, Slot
from kvferry.transport.errors import TransportError
from kvferry.transport.planes.ucx_worker import UcxEndpoint, UcxRequest, UcxWorker

if TYPE_CHECKING:
    from kvferry.transport.planes.ucx import UcxPlane


@dataclass(slots=True)
class UcxTransfer:
    """A message that UCX sends or receives, with its slot; ``channel`` is None for a message to be dropped."""

    request: UcxRequest
    slot: Slot
    channel: UcxSendChannel | UcxRecvChannel | None
    tag: int
    nbytes: int
    retired: bool = False


class UcxSendChannel(SendChannel):
    """P's end."""

    peer: ClassVar[str] = "consumer"

    def __init__(self, plane: UcxPlane, link: UcxEndpoint, slot_bytes: int, close_message: int) -> None:
        self.slot_bytes = slot_bytes
        self.close_message = close_message
        self.link = link
        self.closed = False
        self.in_flight = 0
        self._plane = plane

    def acquire(self) -> Slot | None:
        if self.closed or self.error is not None or self.in_flight >= self._plane.window:
            return None
        slot = self._plane.send_pool.take()
        if slot is not None:  # else nothing moves, and the transfer thread may sleep
            self.in_flight += 1
            self._plane.note_activity()
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
        self._plane.transfers.append(UcxTransfer(request, slot, self, tag, nbytes))
        self._plane.note_activity()
        self._plane.progress_once()

    def give_back(self, slot: Slot) -> None:
        self.in_flight -= 1
        self._plane.send_pool.put(slot)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._plane.send_close(self)


class UcxRecvChannel(ExpectingChannel):
    """D's end. ``worker`` serves it; ``link`` is ``None`` until P has replied with its address."""

    peer: ClassVar[str] = "producer"

    def __init__(self, plane: UcxPlane, worker: UcxWorker, close_message: int) -> None:
        super().__init__()
        self.close_message = close_message
        self.worker = worker
        self.link: UcxEndpoint | None = None
        self.closed = False
        self.receiving: set[int] = set()
        self._plane = plane

    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        if not self.closed:
            super().expect(tag, nbytes, into)
            self._plane.by_tag[tag] = self
            self._plane.note_activity()

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
            self._plane.send_close(self)
