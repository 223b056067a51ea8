"""Data planes: how the packed bytes of a hand-over move from P to D. One interface, chosen per pair of ranks.

P pushes. Every message is one staging slot of packed bytes under a 64-bit tag that D chose, and D announces the
messages it waits for in the order in which P sends them. All of a plane is called from one thread, which polls;
nothing here blocks, and nothing raises for what a dead peer did: a channel then carries ``error``.

    P: plane.offer() ─▶ handshake ─▶ D: channel, payload = plane.connect(offer, host)
    P: channel, reply = plane.accept(payload) ─▶ handshake ─▶ D: plane.finish(channel, reply)
    P: slot = channel.acquire(); pack into slot; channel.send(slot, nbytes, tag)
    D: channel.expect(tag, nbytes); for message in channel.poll(): unpack; message.release()

A loop that sleeps only when that is safe::

    while plane.progress():
        ...
    if plane.arm():  # nothing came in between
        poller.poll(timeout)
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

from kvferry.transport.errors import ProtocolError, TransportError

MAX_PAYLOAD_BYTES = 64 << 10
"""Bound on what a plane puts into the handshake."""

Int64s = npt.NDArray[np.int64]
ConfigureSocket = Callable[[zmq.Socket[bytes], bool], None]
"""Sets a ZMQ socket up before it binds (``True``) or connects (``False``): CURVE, where it is switched on."""


CPU = torch.device("cpu")


class Slot:
    """Staging memory of one message.

    ``address`` of the first byte, ``nbytes`` its capacity, ``tensor`` the same bytes as uint8 [nbytes].
    """

    __slots__ = ("address", "index", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, index: int) -> None:
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.nbytes = tensor.numel()
        self.index = index


class Pieces(NamedTuple):
    """Memory in pieces: piece i is the ``nbytes[i]`` bytes (more than 0) from ``addresses[i]`` on, int64 [n]."""

    addresses: Int64s
    nbytes: Int64s


class Received(msgspec.Struct, frozen=True):
    """A message that is there. Its bytes stay valid until ``release()``, which may be called once.

    ``placed``: they lie where ``expect`` was told to put them, and ``address`` means nothing. ``device``: whose memory.
    """

    tag: int
    address: int
    nbytes: int
    release: Callable[[], None]
    placed: bool = False
    device: torch.device = CPU


class _Channel(ABC):
    error: TransportError | None = None
    """Set once the peer is gone or broke the protocol, and never unset; what is in flight then never arrives."""

    def fail(self, reason: str) -> None:
        """Set ``error``, once."""
        if self.error is None:
            self.error = TransportError(reason)
            self._give_up()

    def _give_up(self) -> None:  # noqa: B027 (not every channel has something to let go of)
        """``error`` has just been set: let go of what waits for the peer."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent, does not block; the peer sees its ``error``."""


class SendChannel(_Channel):
    """P's end, to one D rank."""

    slot_bytes: int
    """Capacity of this channel's slots; may be less than the plane was asked for."""
    gathers: ClassVar[bool] = False
    """Whether ``send_pieces`` may be called."""

    @property
    def reading(self) -> int | None:
        """Tag of the message whose pieces are still being read, if any: they must not change until it is another."""
        return None

    @property
    def ready(self) -> bool:
        """Whether ``send_pieces`` would take a message now; ``False`` is back-pressure."""
        return False

    def send_pieces(self, pieces: Pieces, tag: int) -> None:
        """Send pieces, ``slot_bytes`` at most in all, from where they lie. Only when ``ready``."""
        raise NotImplementedError

    def let_go(self) -> None:
        """Read no pieces any more. What is left of a message that has begun is sent as zeros."""

    @abstractmethod
    def acquire(self) -> Slot | None:
        """A slot to pack into; ``None`` is back-pressure: try again after ``progress()`` did something."""

    @abstractmethod
    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        """Send the first ``nbytes`` (1..slot.nbytes) of an acquired slot.

        The slot goes back by itself once neither the peer nor the kernel needs it. On a channel with ``error`` set it
        goes back at once.
        """

    @abstractmethod
    def give_back(self, slot: Slot) -> None:
        """Return a slot that was acquired and will not be sent."""

    @abstractmethod
    def flush(self, tags: Iterable[int]) -> None:
        """The peer cancelled: end the receives that it has posted for these tags."""


class RecvChannel(_Channel):
    """D's end, from one P rank."""

    scatters: ClassVar[bool] = False
    """Whether ``expect`` may be told where the bytes belong."""

    @abstractmethod
    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        """Announce a message of exactly ``nbytes``; messages are announced in the order in which P sends them.

        ``into`` says, once the message begins to arrive, where its bytes belong; without it they go to a slot.
        """

    def let_go(self, tag: int) -> None:
        """Write nothing to the pieces of this message from now on. It is still received, to nowhere."""

    @abstractmethod
    def poll(self) -> list[Received]:
        """What has arrived since the last call, in any order. A flushed message has ``nbytes`` 0."""

    @abstractmethod
    def posted(self) -> set[int]:
        """Tags of receives that only a message can end; the others may be forgotten."""

    @abstractmethod
    def forget(self, tag: int) -> None:
        """An announced message will not come. If it does come all the same, its bytes are dropped."""


@dataclass(slots=True)
class Expected:
    """A message that was announced to D; ``into`` says where its bytes belong, None for a slot."""

    nbytes: int
    into: Callable[[], Pieces] | None


class ExpectingChannel(RecvChannel):
    """D's end, which knows by their tags the messages that are to come. ``arrived``: those that ``poll`` gives out."""

    def __init__(self) -> None:
        self.expected: dict[int, Expected] = {}
        self.arrived: list[Received] = []

    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        self.expected[tag] = Expected(nbytes, into)

    def poll(self) -> list[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def posted(self) -> set[int]:
        return set()  # whatever has not begun to arrive may be forgotten

    def forget(self, tag: int) -> None:
        self.expected.pop(tag, None)

    def release_arrived(self) -> None:
        """The channel closes: nobody will see these any more."""
        for message in self.poll():
            message.release()


class Unpushed(SendChannel):
    """P's end where D reads P's pages by itself: nothing to send."""

    slot_bytes = 1

    def acquire(self) -> Slot | None:
        raise AssertionError("nothing is pushed to a peer that reads")

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        raise AssertionError("nothing is pushed to a peer that reads")

    def give_back(self, slot: Slot) -> None:
        raise AssertionError("nothing is pushed to a peer that reads")

    def flush(self, tags: object) -> None:
        """Nothing was posted."""

    def close(self) -> None:
        """Nothing to give back."""


class ReadChannel(_Channel):
    """D's end where the plane copies P's pages to D's by itself (``Plane.peer_reads``): no messages, no work on P."""

    @abstractmethod
    def read(self, to: Int64s, of: Int64s, nbytes: Int64s) -> None:
        """Copy runs of ``nbytes[i]`` bytes from P's address ``of[i]`` to our address ``to[i]``; returns when done.

        Raises:
            TransportError: P is gone, or an address is not its.
        """


class MappedChannel(_Channel):
    """D's end where P's memory is mapped, so that kernels of D read it (``Plane.peer_reads``): no messages, no work on
    P. Closing it waits, elsewhere, for the copies that have been started."""

    ready = False
    """Whether the memory is mapped; ``error`` is set where it cannot be."""

    @abstractmethod
    def ours(self, address: int, nbytes: int) -> int:
        """Where P's ``nbytes`` from ``address`` on lie for us. Only when ``ready``.

        Raises:
            TransportError: P has not given us all of them.
        """


DChannel = RecvChannel | ReadChannel | MappedChannel


class Plane(ABC):
    """One data plane of one process."""

    name: ClassVar[str]
    peer_reads: ClassVar[bool] = False
    """Whether D reads P's pages by itself: ``connect`` then gives a ``ReadChannel`` or a ``MappedChannel``."""
    cannot_serve: str = ""
    """Why this process can be D over the plane, but not P; empty where it can."""

    @property
    def staging_bytes(self) -> int:
        """Staging memory that this plane has allocated by now, both directions together."""
        return 0

    @abstractmethod
    def offer(self) -> bytes:
        """P: what a D needs to connect, at most ``MAX_PAYLOAD_BYTES``. The same for every D."""

    @abstractmethod
    def connect(self, offer: bytes, host: str) -> tuple[DChannel, bytes]:
        """D: a channel from the P of this offer, and the payload that P's ``accept`` takes. ``host``: the numeric
        address at which P's control port was reached; P's data ports are at the same.

        Raises:
            PlaneUnavailableError: that P cannot be reached by this plane from here, and why, in one line.
            ProtocolError: the offer is malformed.
        """

    def slower_because(self, offer: bytes, *, reached: bool) -> str:
        """D: why another plane will be faster from the P of this offer, empty where none is. ``reached``: our GPU may
        reach P's; else it was tried and does not.

        Raises:
            ProtocolError: the offer is malformed.
        """
        return ""

    @abstractmethod
    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        """P: a channel to the D of this payload, and the reply that D's ``finish`` takes.

        Raises:
            ProtocolError: the payload is malformed.
            TransportError: no channel can be had to that D.
        """

    def finish(self, channel: DChannel, reply: bytes) -> None:
        """D: complete ``channel`` with P's reply. Raises ProtocolError where it is malformed."""
        if reply:
            raise ProtocolError(f"plane {self.name}: Attached carries {len(reply)} bytes, expected none")

    @abstractmethod
    def pollables(self) -> list[tuple[int | zmq.Socket[bytes], int]]:
        """File descriptors and sockets with their events, for ``zmq.Poller``. They change with the channels."""

    @property
    def active(self) -> bool:
        """Whether something may have to be moved or watched although none of ``pollables`` says so."""
        return True

    @abstractmethod
    def progress(self) -> bool:
        """Move what can be moved, without blocking; ``True`` if anything happened."""

    @abstractmethod
    def arm(self) -> bool:
        """``True``: it is safe to sleep on ``pollables()``. ``False``: call ``progress()`` again first."""

    @abstractmethod
    def close(self) -> None:
        """Close every channel and free the plane. Idempotent; takes up to a second where messages are in flight."""


_S = TypeVar("_S", bound=msgspec.Struct)
_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {}
_decoders_lock = threading.Lock()
"""msgspec looks into a struct at its first use, and crashes (0.22) where two threads do so at once, as those of ranks
that share a process do."""


def decode_payload(payload: bytes, kind: type[_S], what: str) -> _S:
    """The struct that a peer's plane put into the handshake.

    Raises:
        ProtocolError: it is too large or not of that form; the message starts with ``what``.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"{what}: {len(payload)} bytes, limit {MAX_PAYLOAD_BYTES}")
    try:
        decoded: _S = _decoder(kind).decode(payload)
        return decoded
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"{what}: malformed: {error}") from None


def _decoder(kind: type[msgspec.Struct]) -> msgspec.msgpack.Decoder[Any]:
    with _decoders_lock:
        if kind not in _decoders:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
        return _decoders[kind]
