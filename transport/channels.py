"""The channels of a data plane: one channel joins one rank of P with one rank of D. There are two kinds of pairs.

PUSH: P packs bytes into staging slots and sends them as messages; D unpacks the messages.

    SendChannel (P)  acquire ─▶ pack into the slot ─▶ send         ═══▶  RecvChannel (D)  expect ─▶ poll ─▶ release

PULL: D copies from P's memory by itself; P does no work and sends no message.

    PulledChannel (P)  nothing but ``close`` and ``error``         ◀═══  PullChannel (D)  read ─▶ a Copy under way

One thread uses all channels of a process. No method blocks, and none raises because a peer died or broke the protocol:
the channel then carries ``error``.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.transport.cuda import Event
from kvferry.transport.errors import TransportError
from kvferry.transport.peer_process import PeerProcess

Int64s = npt.NDArray[np.int64]

CPU = torch.device("cpu")


class Slot:
    """Staging memory of one message: ``nbytes`` from ``address`` on, ``tensor`` is uint8 [nbytes]."""

    __slots__ = ("address", "index", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor, self.index = tensor, index
        self.address, self.nbytes = tensor.data_ptr(), tensor.numel()


class Pieces(NamedTuple):
    """Scattered memory: piece i is the ``nbytes[i]`` bytes (more than 0) from ``addresses[i]`` on, int64 [n]."""

    addresses: Int64s
    nbytes: Int64s


class ByteRanges(NamedTuple):
    """A copy in ranges: range i is ``nbytes[i]`` bytes from address ``src[i]`` to address ``dst[i]``, int64 [n]."""

    dst: Int64s
    src: Int64s
    nbytes: Int64s

    def split(self, nbytes: int) -> tuple[ByteRanges, ByteRanges | None]:
        """The first ranges, about ``nbytes`` together and at least one range, and the rest; ``None`` for no rest."""
        if int(self.nbytes.sum()) <= nbytes:
            return self, None
        count = max(1, int(np.searchsorted(np.cumsum(self.nbytes), nbytes, side="right")))
        first, rest = (ByteRanges(*(column[part] for column in self)) for part in (slice(count), slice(count, None)))
        return first, rest if len(rest.nbytes) else None


class Channel(ABC):  # noqa: B024 (its kinds have what is abstract)
    """One end of a channel."""

    error: TransportError | None = None
    """Set once the peer is gone or broke the protocol, and never unset; messages in flight then never arrive."""
    closed: bool = False
    encrypted: bool = False
    """Whether the bytes that leave the host are encrypted. At D's end it is known after ``Plane.finish``."""

    def fail(self, reason: str) -> None:
        """Set ``error``, unless it is set already."""
        if self.error is None:
            self.error = TransportError(reason)
            self._give_up()

    def _give_up(self) -> None:  # noqa: B027 (a channel may hold nothing for its peer)
        """``error`` was set: free the resources that wait for the peer."""

    def close(self) -> None:
        """Free all resources. Idempotent, does not block; the peer's channel gets an ``error``."""
        if not self.closed:
            self.closed = True
            self._close()

    def _close(self) -> None:  # noqa: B027 (P holds nothing for a channel that pulls)
        """``close`` was called for the first time: free all resources."""


# --- PUSH -----------------------------------------------------------------------------------------------------------


class SendChannel(Channel):
    """P's end of a PUSH channel, to one rank of D. One with ``sends_in_place`` overrides ``send_pieces``, ``reading``
    and ``stop_reading``; the defaults suit every channel whose slots lie in host memory."""

    pulls: ClassVar[Literal[False]] = False
    slot_bytes: int
    """Capacity of this channel's slots; may be less than the plane's ``slot_bytes``."""
    sends_in_place: bool = False
    """Whether ``send_pieces`` reads the pieces where they lie. Where it does not, it copies them into a slot; then P
    packs each message into a slot itself, and calls none of the three."""

    @abstractmethod
    def acquire(self) -> Slot | None:
        """A slot to pack into. ``None`` is back-pressure: try again after ``progress()`` returned ``True``."""

    @abstractmethod
    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        """Send the first ``nbytes`` (1..slot.nbytes) of an acquired slot under a 64-bit tag. The slot becomes free by
        itself once neither the peer nor the kernel needs it; on a channel with ``error`` at once."""

    @abstractmethod
    def give_back(self, slot: Slot) -> None:
        """Return an acquired slot unsent."""

    def send_pieces(self, pieces: Callable[[], Pieces], tag: int) -> bool:
        """Send the memory that ``pieces`` returns, at most ``slot_bytes`` in all, as one message. ``False`` is
        back-pressure, and ``pieces`` was not called. In place, the memory must not change while ``reading`` is the tag.
        """
        slot = self.acquire()
        if slot is None:
            return False
        total = 0
        try:
            for source, nbytes in zip(*(column.tolist() for column in pieces()), strict=True):
                ctypes.memmove(slot.address + total, source, nbytes)
                total += nbytes
        except BaseException:
            self.give_back(slot)
            raise
        self.send(slot, total, tag)
        return True

    @property
    def reading(self) -> int | None:
        """The tag of the message whose pieces the channel still reads in place, if any."""
        return None

    def stop_reading(self) -> None:
        """Read no pieces any more. The channel completes a message that has begun with zeros, and D receives it as one
        of 0 bytes: what P has to say of the read comes over another connection, maybe later."""


class Received(msgspec.Struct, frozen=True):
    """A message that has arrived. Its bytes on ``device`` stay valid until ``release()``, which may be called once.
    ``placed``: they lie where ``into`` of ``RecvChannel.expect`` placed them, and ``address`` means nothing."""

    tag: int
    address: int
    nbytes: int
    release: Callable[[], None]
    placed: bool = False
    device: torch.device = CPU


class RecvChannel(Channel):
    """D's end of a PUSH channel, from one rank of P."""

    pulls: ClassVar[Literal[False]] = False
    few_bytes: int = 1 << 31
    """D asks for messages of at most so many bytes, though slots be larger, unless P computes many more at a time."""

    @abstractmethod
    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        """Announce a message of exactly ``nbytes``, in the order in which P sends. ``into`` returns the memory where
        the bytes belong: a channel that can write there calls it when the message begins to arrive, and the message is
        then ``placed``; every other channel uses a slot."""

    @abstractmethod
    def poll(self) -> list[Received]:
        """The messages that arrived since the last call, in any order. One that P has stopped may have ``nbytes`` 0."""

    @abstractmethod
    def forget(self, tag: int) -> None:
        """Write nothing to the memory of ``into`` from now on. Where the message comes, the channel drops it."""


# --- PULL -----------------------------------------------------------------------------------------------------------


class Copy:
    """A copy under way. Poll ``done``.

    ``done``: the copy touches no memory any more. ``error``: why the bytes are not in place; empty if they are.
    ``peer_lost``: the copy failed because the peer, or its memory, is gone. ``moved``: bytes that are in place so far,
    for copies that take long; 0 where the plane does not count. ``on_stream``: the copy is part of the stream of
    copies of the rank's device, so that the engine's device can wait for it; a plane's own copies are not.
    ``ended_at``: when it was seen to end, by ``time.monotonic``; 0 where nobody noted it.
    ``event``: its end on the device, where it is ``on_stream`` and known.
    """

    __slots__ = ("done", "ended_at", "error", "event", "moved", "on_stream", "peer_lost")

    def __init__(self, *, done: bool = False, on_stream: bool = False) -> None:
        self.done, self.on_stream = done, on_stream
        self.error, self.peer_lost = "", False
        self.moved, self.ended_at = 0, 0.0
        self.event: Event | None = None


class PageRead(ABC):
    """One read of P's pages into D's pages. A plane uses one of two forms of the read: byte ranges, or a launch."""

    @abstractmethod
    def byte_ranges(self) -> ByteRanges:
        """The read as ranges of bytes: ``src`` are addresses as ``PullChannel.translate`` returned them, ``dst`` are
        addresses of this process. For planes that copy by themselves, such as system calls or one-sided RDMA READs.
        """

    @abstractmethod
    def launch(self) -> Copy:
        """Let D's kernels copy everything in one pass. For planes that map P's memory: D's device must be able to load
        from the addresses that ``PullChannel.translate`` returned."""


class PullChannel(Channel):
    """D's end of a PULL channel, from one rank of P. The plane's ``progress`` completes the copies."""

    pulls: ClassVar[Literal[True]] = True
    process: PeerProcess | None = None
    """P's process, where the channel reads a process of this host. D checks at the handshake that it is at the other
    end of its control connection, and before a load counts that it has not ended: what was read by its number was then
    read from P."""
    ready: bool = True
    """Whether ``translate`` and ``read`` may be called; a plane that needs time sets it later, or sets ``error``:
    ``PeerUnreachableError`` where our GPU does not reach P's memory by any plane."""

    def translate(self, address: int, nbytes: int) -> int:
        """The address under which ``read`` finds P's ``nbytes`` at P's ``address``, by default P's own. D asks once for
        the pages of each layer.

        Raises:
            TransportError: P does not offer this memory to D.
        """
        return address

    @abstractmethod
    def read(self, request: PageRead) -> Copy:
        """Begin to copy P's pages into D's; returns the copy under way. Several may be under way."""

    def cancel(self, copy: Copy) -> None:
        """End the copy soon, if possible. Either way ``copy.done`` is set once nothing writes D's pages. ``close``
        implies it for all copies of the channel."""


class PulledChannel(Channel):
    """P's end of a PULL channel, to one rank of D."""

    pulls: ClassVar[Literal[True]] = True

    def lend(self, fd: int) -> None:
        """Let D open the file that P has open as ``fd``. Raises TransportError: D is gone."""


DChannel = RecvChannel | PullChannel
PChannel = SendChannel | PulledChannel
