"""The interface of a data plane: how the KV bytes of a hand-over move from P to D. Each pair of ranks uses one plane.

A plane PUSHES or PULLS (``Plane.pulls``); ``transport/channels.py`` describes both kinds of channels.

    P: plane.offer() ─▶ handshake ─▶ D: channel, payload = plane.connect(offer, host)
    P: channel, reply = plane.accept(payload) ─▶ handshake ─▶ D: plane.finish(channel, reply)

    PUSH                                                        PULL
    P: slot = channel.acquire(); pack; channel.send(...)        P: nothing
    D: channel.expect(tag, nbytes)                              D: when channel.ready: addresses by channel.translate
    D: channel.poll(): unpack; message.release()                D: copy = channel.read(request); poll copy.done

In a PUSH channel every message is one staging slot of packed bytes under a 64-bit tag that D chose, and D announces
messages in the order in which P sends them. One thread uses all planes of a process and polls them; no method blocks.

A loop that sleeps only when that is safe::

    while plane.progress():
        ...
    if plane.arm():  # nothing arrived in between
        poller.poll(timeout)

``transport/registry.py`` lists the planes and makes them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import msgspec
import torch

from kvferry.transport.channels import CPU, DChannel, PChannel
from kvferry.transport.errors import ProtocolError

MAX_PAYLOAD_BYTES = 64 << 10
"""Bound on the bytes that a plane puts into the handshake."""


@dataclass(frozen=True)
class PlaneMemory:
    """The memory that the planes of a process carry: ``ranges``, address and bytes of each, on ``device`` (with its
    index). ``synchronize`` blocks until the copies there are done."""

    device: torch.device
    ranges: Sequence[tuple[int, int]] = ()
    synchronize: Callable[[], None] = lambda: None


HOST = PlaneMemory(CPU)


@dataclass(frozen=True)
class PlaneContext:
    """The arguments of every plane's constructor.

    Args:
        host: the one local address to listen on.
        slot_bytes: size of a staging slot, which bounds a message. Peers with different sizes use the smaller one.
        staging_bytes: bound on the staging memory, for each direction.
        memory: the memory to carry.
        encrypt: bytes that leave the host must be encrypted; only planes that can do so are made then.
        others: the planes that this rank has, and those that it will try to make after this one.
    """

    host: str
    slot_bytes: int
    staging_bytes: int
    memory: PlaneMemory = HOST
    encrypt: bool = False
    others: frozenset[str] = frozenset()


class Plane(ABC):
    """One data plane of one process.

    Raises:
        PlaneUnavailableError: (the constructor) this machine cannot use the plane; the message gives the reason in one
            line.
    """

    name: ClassVar[str]
    pulls: ClassVar[bool] = False
    """Whether D reads P's pages by itself: ``connect`` then returns a ``PullChannel``, ``accept`` a ``PulledChannel``;
    else a ``RecvChannel`` and a ``SendChannel``."""
    same_host: ClassVar[bool] = False
    """Whether it joins processes of one host only. P then offers it only to a D that connects from this host: an offer
    may name processes, files and addresses."""
    cannot_serve: str = ""
    """Why this process can be D over the plane, but not P; empty where it can be both."""

    @abstractmethod
    def __init__(self, context: PlaneContext) -> None: ...

    @classmethod  # noqa: B027
    def check_host(cls, host: str) -> None:
        """Refuse at once what this machine lacks, before there is memory to carry. ``host``: ``PlaneContext.host``.
        Loads no library and starts no thread, for the process may fork. Raises PlaneUnavailableError."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory that this plane has allocated so far, both directions together."""
        return 0

    def lanes_to(self, host: str) -> str:
        """Which way the bytes take to a peer at a numeric address, for logs; empty where the plane's name says it."""
        return ""

    @abstractmethod
    def offer(self) -> bytes:
        """P: the data that a D needs to connect, at most ``MAX_PAYLOAD_BYTES``, made for one session with one D."""

    @abstractmethod
    def connect(self, offer: bytes, host: str) -> tuple[DChannel, bytes]:
        """D: a channel from the P of this offer, and the payload for P's ``accept``. ``host``: the numeric address of
        P's control port and of its data ports.

        Raises:
            PlaneUnavailableError: this plane does not reach that P from here; the message gives the reason in one line.
            ProtocolError: the offer is malformed.
        """

    def slower_because(self, offer: bytes, *, reached: bool) -> str:
        """D: why another plane will be faster from the P of this offer; empty where no other plane is faster.
        ``reached``: our GPU may reach P's memory; ``False``: a plane has tried and failed.

        Raises:
            ProtocolError: the offer is malformed.
        """
        return ""

    @abstractmethod
    def accept(self, payload: bytes) -> tuple[PChannel, bytes]:
        """P: a channel to the D of this payload, and the reply for D's ``finish``.

        Raises:
            ProtocolError: the payload is malformed.
            TransportError: no channel to that D is possible.
        """

    def finish(self, channel: DChannel, reply: bytes) -> None:
        """D: complete ``channel`` with P's reply. The caller has checked that ``channel.process``, if any, is P.

        Raises:
            PlaneUnavailableError: this plane does not reach that P from here; the message gives the reason in one line.
            ProtocolError: the reply is malformed.
        """
        if reply:
            raise ProtocolError(f"plane {self.name}: Attached carries {len(reply)} bytes, expected none")

    @abstractmethod
    def pollables(self) -> list[tuple[int, int]]:
        """File descriptors with their events, for ``select.poll``. They change with the channels."""

    @property
    def active(self) -> bool:
        """Whether ``progress`` may have work although no pollable is ready."""
        return True

    @abstractmethod
    def progress(self) -> bool:
        """Do the work that is possible without blocking, some milliseconds at most; ``True`` if there was any."""

    @abstractmethod
    def arm(self) -> bool:
        """``True``: it is safe to sleep on ``pollables()``. ``False``: call ``progress()`` again first."""

    @abstractmethod
    def close(self) -> None:
        """Close every channel and free the plane. Idempotent; takes up to a second where messages are in flight. No
        copy writes D's pages afterwards."""


_S = TypeVar("_S", bound=msgspec.Struct)
_decoders: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]] = {}
_decoders_lock = threading.Lock()
"""msgspec inspects a struct at its first use, and crashes (0.22) where two threads do so at once."""


def decode_payload(payload: bytes, kind: type[_S], what: str, limit: int = MAX_PAYLOAD_BYTES) -> _S:
    """Decode the struct that a peer's plane put into the handshake.

    Raises:
        ProtocolError: the payload has more than ``limit`` bytes or is not a ``kind``; the message starts with ``what``.
    """
    if len(payload) > limit:
        raise ProtocolError(f"{what}: {len(payload)} bytes, limit {limit}")
    with _decoders_lock:
        if kind not in _decoders:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        decoded: _S = _decoders[kind].decode(payload)
        return decoded
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"{what}: malformed: {error}") from None
