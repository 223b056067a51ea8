"""What the planes share whose P sends messages: pools of slots, P's window, D's announced messages, open channels."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvferry.transport.channels import Channel, Pieces, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import ProtocolError
from kvferry.transport.plane import Plane
from kvferry.transport.staging import SlotPool


class WindowedSender(SendChannel):
    """P's end. At most ``window`` slots of ``pool`` are out of it: ``acquired`` ones, and ``sent`` ones by index."""

    def __init__(self, pool: SlotPool, slot_bytes: int, window: int) -> None:
        self.slot_bytes, self.window = slot_bytes, window
        self.pool = pool
        self.acquired = 0
        self.sent: dict[int, Slot] = {}

    @property
    def open(self) -> bool:
        """Whether messages can leave."""
        return not self.closed and self.error is None

    @property
    def in_use(self) -> int:
        """The part of the window that is used."""
        return self.acquired + len(self.sent)

    def acquire(self) -> Slot | None:
        if not self.open or self.in_use >= self.window:
            return None
        slot = self.pool.take()
        self.acquired += slot is not None
        return slot

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if not self.open:  # the channel broke after ``acquire``
            self.give_back(slot)
            return
        self.acquired -= 1
        self.sent[slot.index] = slot
        self._transmit(slot, nbytes, tag)

    def give_back(self, slot: Slot) -> None:
        self.acquired -= 1
        self.pool.put(slot)

    def free(self, index: int) -> bool:
        """A sent slot is needed no more. Returns whether it was one."""
        if index not in self.sent:
            return False
        self.pool.put(self.sent.pop(index))
        return True

    def _give_up(self) -> None:
        for index in list(self.sent):
            self.free(index)

    @abstractmethod
    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        """Send the first ``nbytes`` of a slot. Where that fails, the channel fails."""


@dataclass(slots=True)
class Expected:
    """An announced message; ``into`` returns the memory where its bytes belong, ``None`` is a slot."""

    nbytes: int
    into: Callable[[], Pieces] | None


class PushReceiver(RecvChannel):
    """D's end: a table of the announced messages by tag, and a list of those that ``arrived``, for ``poll``."""

    plane_name: str
    """For errors."""

    def __init__(self) -> None:
        self.expected: dict[int, Expected] = {}
        self.arrived: list[Received] = []

    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        self.expected[tag] = Expected(nbytes, into)

    def check_size(self, tag: int, nbytes: int) -> Expected | None:
        """The announcement of a message that comes; ``None`` for one that was forgotten, or never announced. Raises
        ProtocolError: it was announced with another size."""
        expected = self.expected.get(tag)
        if expected is not None and expected.nbytes != nbytes:
            raise ProtocolError(f"{self.plane_name}: message {tag:#x} has {nbytes} bytes, expected {expected.nbytes}")
        return expected

    def poll(self) -> list[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def forget(self, tag: int) -> None:
        self.expected.pop(tag, None)

    def release_arrived(self) -> None:
        """Release the messages that ``poll`` has not returned: the channel closes."""
        for message in self.poll():
            message.release()


R = TypeVar("R", bound=PushReceiver)


class PushPlane(Plane):
    """A plane whose P sends from the slots of ``send_pool``, and whose D may receive into those of ``recv_pool``.

    Attributes:
        channels: the open ones of P and D, in the order in which they are served.
    """

    send_pool: SlotPool
    recv_pool: SlotPool

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.channels: dict[Channel, None] = {}
        self.closed = False

    @property
    def staging_bytes(self) -> int:
        return self.send_pool.allocated_bytes + self.recv_pool.allocated_bytes

    @property
    def active(self) -> bool:
        return bool(self.channels)

    def receivers(self, kind: type[R]) -> list[R]:
        """The open channels of D."""
        return [channel for channel in self.channels if isinstance(channel, kind)]

    def close(self) -> None:
        if not self.closed:
            for channel in list(self.channels):
                channel.close()
            self._close()
            self.closed = True

    @abstractmethod
    def _close(self) -> None:
        """All channels are closed: free the rest."""


def windows(wanted: tuple[int, int], staging_bytes: int, slot_bytes: int) -> tuple[int, int]:
    """P's window and D's, smaller where memory is short: a peer that stops must not hold every slot."""
    most = max(1, staging_bytes // slot_bytes - 1)
    return min(wanted[0], most), min(wanted[1], most)
