"""Messages on a TCP channel: ``HEADER``, bytes that lie in pieces of memory, and a last byte, ``COMPLETE``."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.transport.plane import Pieces, Slot
from kvferry.transport.planes.vectors import Vector

HEADER = struct.Struct("<QQ")
"""Tag, bytes that follow, without the last one."""
COMPLETE: npt.NDArray[np.uint8] = np.ones(1, dtype=np.uint8)
"""Behind a message: all of it is what it was to be. Zero where P let go of its pages before they were sent: what it
says of that comes by another socket, and may come later."""


class Outgoing:
    """A message that P sends. ``slot`` is given back afterwards; ``paged``: it is read from pages.

    Args:
        pieces: its bytes, which stay in place until it was sent or ``let_go``.
        slot: where they are, unless they are in pages.
    """

    __slots__ = ("_header", "paged", "slot", "tag", "vector")

    def __init__(self, tag: int, pieces: Pieces, slot: Slot | None) -> None:
        self.tag, self.slot, self.paged = tag, slot, slot is None
        self._header = np.frombuffer(HEADER.pack(tag, int(pieces.nbytes.sum())), dtype=np.uint8)
        self.vector = Vector(together(self._of_header(HEADER.size), pieces, byte(COMPLETE)))

    def let_go(self, instead: Callable[[int], Pieces]) -> None:
        """Read no page any more: what is unsent of it comes from ``instead``, which is told how many bytes that is and
        has zeros, as the last one then is to be."""
        self.paged = False
        head = max(0, HEADER.size - self.vector.done)
        rest = instead(self.vector.left - head)
        self.vector = Vector(together(self._of_header(head), rest) if head else rest)

    def _of_header(self, nbytes: int) -> Pieces:
        """The last bytes of the header."""
        return Pieces(np.array([self._header.ctypes.data + HEADER.size - nbytes]), np.array([nbytes]))


@dataclass(slots=True)
class Arriving:
    """A message whose bytes come in. ``slot`` where it goes to one; ``told``: the bytes that are reported, 0 for a
    message that had no place, None where nothing is."""

    tag: int
    vector: Vector
    slot: Slot | None
    told: int | None


def together(*parts: Pieces) -> Pieces:
    """One after the other."""
    return Pieces(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def byte(of: npt.NDArray[np.uint8]) -> Pieces:
    """The one byte of an array."""
    return Pieces(np.array([of.ctypes.data]), np.array([1]))
