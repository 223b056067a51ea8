"""A board in shared memory: P posts grants, and any process of P's user on the host reads them without a message.

Each posted grant lies in a slot of its own, behind a counter. The counter is a seqlock: it is odd while the grant must
not be used. Where it is the same after D's read, the grant was valid during the whole read::

    P: place = board.post(key, text)              D: grant = reader.find(key)
    P: board.withdraw(place), then free pages     D: read the pages of the grant, then check grant.is_current

The key of a grant is 16 random bytes, which also determine the slots where it may lie. The board has no name: D opens
the writer's descriptor through ``/proc``, and the kernel admits only processes that may look into P's memory.

A processor may show D the writer's stores in another order than they were made in: aarch64 does. So a grant carries a
digest of its counter, key and text, and D takes no grant whose digest does not fit what it has copied. The counter then
only has to say that a grant was withdrawn; between its store and the engine's next use of the pages lie the locks and
system calls that carry P's report to the engine's scheduler.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.peer_process import PeerProcess

SLOTS = 512
SLOT_BYTES = 128 << 10
"""A grant with more bytes than this, less the header, is not posted: it has 4 bytes for each block, so this is a prompt
of 500,000 tokens in blocks of 16. Memory is allocated for the pages of a slot that a grant has filled, and kept."""
PROBES = 8
"""Number of slots in which a grant may lie; its key determines the first of them."""
KEY_BYTES = 16
_DIGEST_BYTES = 16
HEADER = struct.Struct(f"<q{KEY_BYTES}s{_DIGEST_BYTES}sI")
"""Counter, key, digest, bytes of the text."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10
"""The last one is F_SEAL_FUTURE_WRITE, of Linux 5.1: who has the descriptor can only read."""
FIRST = SLOT_BYTES  # the board begins with a slot that holds its secret


class BoardAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of a board: the descriptor in P's process, and the secret that the board begins with."""

    fd: Annotated[int, Meta(ge=0, le=1 << 30)]
    secret: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


def digest_of(counter: int, key: bytes, text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST_BYTES, salt=key, person=counter.to_bytes(16, "little")).digest()


def slots_of(key: bytes) -> list[int]:
    first = int.from_bytes(key[:8], "little")
    return [FIRST + (first + n) % SLOTS * SLOT_BYTES for n in range(PROBES)]


class GrantBoard:
    """The writer's end. Any thread may use it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("kvferry-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, FIRST + SLOTS * SLOT_BYTES)
        self.memory = mmap.mmap(self.fd, 0)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.counters = np.frombuffer(self.memory, dtype=np.int64)
        self.posted: set[int] = set()
        self._lock = threading.Lock()
        self.place = BoardAddress(self.fd, secrets.token_bytes(KEY_BYTES))
        self.memory[:KEY_BYTES] = self.place.secret

    def post(self, key: bytes, text: bytes) -> int | None:
        """Post a grant. Returns its place, or None where there is no room for it, or after ``close``."""
        with self._lock:
            if self.fd < 0 or len(text) > SLOT_BYTES - HEADER.size:
                return None
            at = next((at for at in slots_of(key) if at not in self.posted), None)
            if at is None:
                return None
            self.posted.add(at)
            counter = int(self.counters[at // 8])
            counter += 1 - counter % 2  # odd: being written
            self.counters[at // 8] = counter
            digest = digest_of(counter + 1, key, text)
            HEADER.pack_into(self.memory, at, counter, key, digest, len(text))
            self.memory[at + HEADER.size : at + HEADER.size + len(text)] = text
            self.counters[at // 8] = counter + 1
            return at

    def withdraw(self, at: int) -> None:
        """Withdraw a grant: from now on ``is_current`` is false for every reader. Idempotent."""
        with self._lock:
            if at in self.posted:  # a second step of the counter would post it again
                self.counters[at // 8] += 1
                self.posted.remove(at)

    def close(self) -> None:
        """Withdraw all grants, and post none from now on. Idempotent."""
        with self._lock:
            for at in self.posted:
                self.counters[at // 8] += 1
            self.posted.clear()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


class PostedGrant:
    """A grant that a reader found on the board. ``text`` is its content."""

    __slots__ = ("_at", "_counter", "_counters", "text")

    def __init__(self, counters: np.ndarray, at: int, counter: int, text: bytes) -> None:
        self._counters, self._at, self._counter, self.text = counters, at, counter, text

    @property
    def is_current(self) -> bool:
        """Whether the grant has been posted without a break since it was found."""
        return int(self._counters[self._at]) == self._counter


class BoardReader:
    """D's end.

    Args:
        process: P's process.
        place: the board's address there.

    Raises:
        PlaneUnavailableError: D may not look into P's process, P has ended, or the file is no board.
    """

    def __init__(self, process: PeerProcess, place: BoardAddress) -> None:
        try:
            fd = process.open_file(place.fd)
        except OSError as error:
            raise PlaneUnavailableError(f"the prefill engine's board cannot be read: {error.strerror}") from None
        try:
            self.memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ) if _is_board(fd) else None
        finally:
            os.close(fd)
        if self.memory is None or not secrets.compare_digest(self.memory[:KEY_BYTES], place.secret):
            raise PlaneUnavailableError("the prefill engine's board is another file")
        self.counters = np.frombuffer(self.memory, dtype=np.int64)

    def find(self, key: bytes) -> PostedGrant | None:
        """The grant of that key, if it is posted."""
        memory, counters = self.memory, self.counters
        assert memory is not None
        first = int.from_bytes(key[:8], "little")
        for probe in range(PROBES):  # written out, see ``slots_of``: a hand-over waits for each call here
            at = FIRST + (first + probe) % SLOTS * SLOT_BYTES
            counter = int(counters[at // 8])
            _, found, digest, nbytes = HEADER.unpack_from(memory, at)
            if counter % 2 or counter < 0 or found != key or nbytes > SLOT_BYTES - HEADER.size:
                continue  # below 0: no writer of ours counts so far
            text = memory[at + HEADER.size : at + HEADER.size + nbytes]
            if int(counters[at // 8]) == counter and digest_of(counter, key, text) == digest:
                return PostedGrant(counters, at // 8, counter, text)
        return None


def _is_board(fd: int) -> bool:
    """Whether the file has the size of a board, and cannot shrink: a read behind its end would end this process."""
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    except OSError:  # no memfd
        return False
    return bool(sealed) and os.fstat(fd).st_size == FIRST + SLOTS * SLOT_BYTES
