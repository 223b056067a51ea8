"""A board in shared memory: what one process says, any process of its user on the host reads without asking.

Each note lies in a slot of its own, behind a counter that is odd while the note is not to be trusted. A reader that
finds the counter unchanged after it has used what the note stands for knows that the note was true all the while::

    P: place = board.post(key, text)              D: note = reader.find(key)
    P: board.retract(place); what it named ends   D: ... reads what it names ...; note.stands

A note names what it is of by 16 random bytes, which also say where to look for it. The board has no name: readers open
the writer's descriptor through ``/proc``, and the kernel lets in only who may look into its memory.
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
"""A note of more bytes, less the header, is not posted; memory is taken when a slot is first used."""
PROBES = 8
"""Slots in which a note may lie, from the one that its key names on."""
KEY_BYTES = 16
_HEADER = struct.Struct(f"<q{KEY_BYTES}sI")
_FIRST = SLOT_BYTES  # the board begins with a slot that holds its secret


class BoardAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a board is to be found."""

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
        """Put a note up; where it is, or None where there is no room for it."""
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
        """Take a note down: from here on no reader is told that it stands. Idempotent."""
        if at in self._taken:  # a second step of the counter would put it up again
            self._counters[at // 8] += 1
            self._taken.remove(at)

    def close(self) -> None:
        """All notes are retracted. Idempotent."""
        for at in list(self._taken):
            self.withdraw(at)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class PostedGrant:
    """What a reader found: ``text``."""

    __slots__ = ("_at", "_counter", "_counters", "text")

    def __init__(self, counters: np.ndarray, at: int, counter: int, text: bytes) -> None:
        self._counters, self._at, self._counter, self.text = counters, at, counter, text

    @property
    def is_current(self) -> bool:
        """Whether it has been up without a break since it was found."""
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
        """The note of that key, if it is up."""
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
