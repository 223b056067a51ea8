"""A board in shared memory: P posts grants, and any process of P's user on the host reads them without a message.

Each posted grant lies in a slot of its own, behind a counter. The counter is a seqlock: it is odd while the grant must
not be used. D finds a grant, reads the pages that it names, and then checks the counter. Where the counter has not
changed, the grant was valid during the whole read::

    P: place = board.post(key, text)              D: grant = reader.find(key)
    P: board.withdraw(place), then free pages     D: read the pages of the grant, then check grant.is_current

The key of a grant is 16 random bytes, which also determine the slots where it may lie. The board has no name: readers
open the writer's descriptor through ``/proc``, and the kernel admits only processes that may look into P's memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.host import open_peer_file

SLOTS = 512
SLOT_BYTES = 16 << 10
"""A grant with more bytes than this, less the header, is not posted. Memory is allocated when a slot is first used."""
PROBES = 8
"""Number of slots in which a grant may lie; its key determines the first of them."""
KEY_BYTES = 16
_HEADER = struct.Struct(f"<q{KEY_BYTES}sI")
_FIRST = SLOT_BYTES  # the board begins with a slot that holds its secret


class BoardAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The address of a board: the writer's process and descriptor, and the secret that the board begins with."""

    pid: Annotated[int, Meta(ge=1, le=1 << 30)]
    fd: Annotated[int, Meta(ge=0, le=1 << 30)]
    secret: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


def _slots(key: bytes) -> list[int]:
    first = int.from_bytes(key[:8], "little")
    return [_FIRST + (first + n) % SLOTS * SLOT_BYTES for n in range(PROBES)]


class GrantBoard:
    """The writer's end."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("kvferry-board", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, _FIRST + SLOTS * SLOT_BYTES)
        self._memory = mmap.mmap(self._fd, 0)
        self._counters = np.frombuffer(self._memory, dtype=np.int64)
        self._taken: set[int] = set()
        self.place = BoardAddress(os.getpid(), self._fd, secrets.token_bytes(KEY_BYTES))
        self._memory[:KEY_BYTES] = self.place.secret

    def post(self, key: bytes, text: bytes) -> int | None:
        """Post a grant. Returns its place, or None where there is no room for it."""
        at = next((slot for slot in _slots(key) if slot not in self._taken), None)
        if at is None or len(text) > SLOT_BYTES - _HEADER.size:
            return None
        self._taken.add(at)
        counter = int(self._counters[at // 8])
        counter += 1 - counter % 2  # odd: being written
        self._counters[at // 8] = counter
        _HEADER.pack_into(self._memory, at, counter, key, len(text))
        self._memory[at + _HEADER.size : at + _HEADER.size + len(text)] = text
        self._counters[at // 8] = counter + 1
        return at

    def withdraw(self, at: int) -> None:
        """Withdraw a grant: from now on ``is_current`` is false for every reader. Idempotent."""
        if at in self._taken:  # a second step of the counter would post it again
            self._counters[at // 8] += 1
            self._taken.remove(at)

    def close(self) -> None:
        """Withdraw all grants. Idempotent."""
        for at in list(self._taken):
            self.withdraw(at)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
    """A reader's end.

    Raises:
        PlaneUnavailableError: the board is another user's, in another process namespace, or gone.
    """

    def __init__(self, place: BoardAddress) -> None:
        try:
            fd = open_peer_file(place.pid, place.fd)
        except OSError as error:
            raise PlaneUnavailableError(f"P's board cannot be read: {error.strerror}") from None
        try:
            if os.fstat(fd).st_size != _FIRST + SLOTS * SLOT_BYTES:
                raise PlaneUnavailableError("P's board is none of ours")
            self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        if not secrets.compare_digest(self._memory[:KEY_BYTES], place.secret):
            raise PlaneUnavailableError("P's board is another one")
        self._counters = np.frombuffer(self._memory, dtype=np.int64)

    def find(self, key: bytes) -> PostedGrant | None:
        """The grant of that key, if it is posted."""
        for at in _slots(key):
            counter = int(self._counters[at // 8])
            _, found, nbytes = _HEADER.unpack_from(self._memory, at)
            if counter % 2 or found != key or nbytes > SLOT_BYTES - _HEADER.size:
                continue
            note = PostedGrant(
                self._counters, at // 8, counter, self._memory[at + _HEADER.size : at + _HEADER.size + nbytes]
            )
            if note.is_current:
                return note
        return None
