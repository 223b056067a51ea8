"""What P says of the memory that D may read: a file without a name that P keeps open, and that D opens through P's
process. So no other process can say it in P's place."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import decode_payload

MAX_FILE_BYTES = 1 << 20
MAX_RANGES = 16384

Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
Range = tuple[Address, Address]
"""Address, and number of bytes."""
Ranges = Annotated[tuple[Range, ...], Meta(max_length=MAX_RANGES)]
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_S = TypeVar("_S", bound=msgspec.Struct)


class MemoryFileAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's reply in the handshake: the descriptor of the file in P's process."""

    fd: Annotated[int, Meta(ge=0, le=1 << 30)]


def write_memory_file(name: str, content: msgspec.Struct) -> int:
    """P: a new file with ``content``, which nothing changes any more. Returns its descriptor.

    Raises:
        PlaneUnavailableError: it would be too large.
    """
    data = msgspec.msgpack.encode(content)
    if len(data) > MAX_FILE_BYTES:
        raise PlaneUnavailableError(f"the KV cache lies in too many pieces: {len(data)} bytes, limit {MAX_FILE_BYTES}")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_memory_file(process: PeerProcess, reply: bytes, kind: type[_S], what: str) -> _S:
    """D: the file of P's reply, from P's process. The caller has checked that this process is P.

    Raises:
        PlaneUnavailableError: this process may not look into P's process, or P has ended.
        ProtocolError: the reply or the file is malformed; the message starts with ``what``.
    """
    address = decode_payload(reply, MemoryFileAddress, f"{what} reply")
    try:
        fd = process.open_file(address.fd)
        try:
            content = os.pread(fd, MAX_FILE_BYTES + 1, 0)
        finally:
            os.close(fd)
    except PermissionError:
        raise PlaneUnavailableError("P runs as another user, or may not be traced") from None
    except OSError as error:
        raise PlaneUnavailableError(f"P's description of its memory cannot be read: {error.strerror}") from None
    return decode_payload(content, kind, f"{what} memory", MAX_FILE_BYTES)


def joined(ranges: Iterable[tuple[int, int]]) -> tuple[Range, ...]:
    """Ranges in order of their addresses, where those that touch or overlap are one.

    Raises:
        PlaneUnavailableError: there are more than ``MAX_RANGES``.
    """
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


def check_within(ranges: Sequence[Range], address: int, nbytes: int, plane: str) -> None:
    """Check that P's file gives D the ``nbytes`` at P's ``address``.

    Raises:
        TransportError: it does not.
    """
    if not any(base <= address and address + nbytes <= base + size for base, size in ranges):
        raise TransportError(f"{plane}: {nbytes} bytes at {address:#x} are in no KV cache that P has published")
