"""What the planes share whose D reads P's memory by itself, on one host: processes, and the memory that D may read.

P says what D may read in a file without a name. P keeps it open, and D opens it through P's process, so that no other
process can say it in P's place. D reads the process at the other end of its control connection and no other one, see
``transport/peer_process.py``.

P can neither see nor stop a read of its pages, so a read proves nothing about P's blocks; a grant that is still current
after the read proves it.
"""

from __future__ import annotations

import fcntl
import os
import select
from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated, ClassVar, Generic, TypeVar

import msgspec
from msgspec import Meta

from kvferry.transport.channels import DChannel, PullChannel, PulledChannel
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.host import host_id, process_namespace
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import Plane, decode_payload

MAX_FILE_BYTES = 1 << 20
MAX_RANGES = 16384
SECRET_BYTES = 16

Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
Range = tuple[Address, Address]
"""Address, and number of bytes."""
Ranges = Annotated[tuple[Range, ...], Meta(max_length=MAX_RANGES)]
Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class PullOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pid``: P's number in the process namespace ``pids``."""

    host_id: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=1, le=1 << 30)]
    pids: Annotated[int, Meta(ge=0, lt=1 << 62)]


class MemoryFileAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's reply in the handshake: the descriptor of the file in P's process."""

    fd: Annotated[int, Meta(ge=0, le=1 << 30)]


class ProcessChannel(PullChannel):
    """D's end. A pidfd shows the end of P's process. ``ranges``: P's KV caches, once ``finish`` has read P's file."""

    process: PeerProcess

    def __init__(self, name: str, process: PeerProcess) -> None:
        self.process = process
        self.ranges: tuple[Range, ...] = ()
        self._name = name

    def translate(self, address: int, nbytes: int) -> int:
        if not any(base <= address and address + nbytes <= base + size for base, size in self.ranges):
            raise TransportError(
                f"{self._name}: {nbytes} bytes at {address:#x} are in no KV cache that the prefill engine has published"
            )
        return address

    def watch(self) -> bool:
        """Whether P's process has just ended; sets ``error``."""
        if not self.process.ended:
            return False
        self.fail(f"{self._name}: the prefill rank died, or has ended the session")
        return True


C = TypeVar("C", bound=ProcessChannel)
M = TypeVar("M", bound=msgspec.Struct)


class PullPlane(Plane, Generic[C, M]):
    """A plane whose D reads P's process on the same host.

    A plane adds the content of P's file (``publish``), D's channel (``join``, ``begin``), and how it reads.
    """

    pulls: ClassVar[bool] = True
    same_host: ClassVar[bool] = True
    offers: ClassVar[type[PullOffer]] = PullOffer
    """The struct of the plane's offers."""
    memory: type[M]
    """The struct of the content of P's file."""
    elsewhere: ClassVar[type[PlaneUnavailableError]] = PlaneUnavailableError
    """The error for a P on another host."""

    def __init__(self) -> None:
        if not hasattr(os, "pidfd_open"):
            raise PlaneUnavailableError("this system has no pidfd_open")
        self._file = -1
        self._channels: list[C] = []

    def publish(self, content: M) -> None:
        """P: write the file, which nothing changes any more. Raises PlaneUnavailableError: it would be too large."""
        data = msgspec.msgpack.encode(content)
        if len(data) > MAX_FILE_BYTES:
            raise PlaneUnavailableError(
                f"the KV cache lies in too many pieces: {len(data)} bytes, limit {MAX_FILE_BYTES}"
            )
        self._file = os.memfd_create(f"kvferry-{self.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(self._file, data)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)

    @abstractmethod
    def join(self, process: PeerProcess) -> C:
        """D: a new channel."""

    @abstractmethod
    def begin(self, channel: C, memory: M) -> None:
        """D: the caller of ``finish`` has checked that the channel's process is P, and P's file says ``memory``. Raises
        PlaneUnavailableError: D cannot read it."""

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(PullOffer(host_id(), os.getpid(), process_namespace()))

    def connect(self, offer: bytes, host: str) -> tuple[C, bytes]:
        theirs = decode_payload(offer, self.offers, f"{self.name} offer")
        if not theirs.host_id or theirs.host_id != host_id():
            raise self.elsewhere("the prefill engine is on another host or in another network namespace")
        process, payload = self.process_of(theirs)
        channel = self.join(process)
        self._channels.append(channel)
        return channel, payload

    def process_of(self, offer: PullOffer) -> tuple[PeerProcess, bytes]:
        """D: the P of this offer, on this host, and the payload for its ``accept``. Raises PlaneUnavailableError: D
        cannot read it."""
        if offer.pids != process_namespace():
            raise self.elsewhere("the prefill engine runs in another process namespace")
        try:
            return PeerProcess(offer.pid), b""
        except OSError as error:
            raise self.elsewhere(f"the prefill engine's process cannot be found: {error.strerror}") from None

    def accept(self, payload: bytes) -> tuple[PulledChannel, bytes]:
        if self._file < 0:
            raise TransportError(f"{self.name}: {self.cannot_serve}")
        channel = self.channel_to(payload)
        try:
            channel.lend(self._file)
        except TransportError:
            channel.close()
            raise
        return channel, msgspec.msgpack.encode(MemoryFileAddress(self._file))

    def channel_to(self, payload: bytes) -> PulledChannel:
        """P: the channel to the D of this payload. Raises TransportError: no channel to that D is possible."""
        return PulledChannel()

    def finish(self, channel: DChannel, reply: bytes) -> None:
        found = next(each for each in self._channels if each is channel)
        self.begin(found, self._read_file(found.process, reply))

    def _read_file(self, process: PeerProcess, reply: bytes) -> M:
        address = decode_payload(reply, MemoryFileAddress, f"{self.name} reply")
        try:
            fd = process.open_file(address.fd)
            try:
                content = os.pread(fd, MAX_FILE_BYTES + 1, 0)
            finally:
                os.close(fd)
        except PermissionError:
            raise self.elsewhere("the prefill engine runs as another user, or may not be traced") from None
        except OSError as error:
            raise self.elsewhere(
                f"the prefill engine's description of its memory cannot be read: {error.strerror}"
            ) from None
        return decode_payload(content, self.memory, f"{self.name} memory", MAX_FILE_BYTES)

    def pollables(self) -> list[tuple[int, int]]:
        channels = self._channels
        return [(each.process.fd, select.POLLIN) for each in channels if each.error is None and each.process.fd >= 0]

    def watch(self) -> bool:
        """D: whether the process of any channel has just ended."""
        return any([channel.watch() for channel in self._live()])

    def _live(self) -> list[C]:
        self._channels = [channel for channel in self._channels if channel.process.fd >= 0]
        return [channel for channel in self._channels if channel.error is None]

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def joined(ranges: Iterable[tuple[int, int]]) -> tuple[Range, ...]:
    """Ranges in order of their addresses, where those that touch or overlap are one. Raises PlaneUnavailableError:
    there are more than ``MAX_RANGES``."""
    found: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        if found and address <= sum(found[-1]):
            base, size = found[-1]
            found[-1] = base, max(size, address + nbytes - base)
        else:
            found.append((address, nbytes))
    if len(found) > MAX_RANGES:
        raise PlaneUnavailableError(f"the KV cache lies in {len(found)} pieces, limit {MAX_RANGES}")
    return tuple(found)
