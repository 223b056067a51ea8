"""Messages on a TCP channel: ``HEADER``, bytes that lie in pieces of memory, and a last byte, ``COMPLETE``."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.transport.channels import Pieces, Slot
from kvferry.transport.planes.vectors import Vector

HEADER = struct.Struct("<QQ")
"""The tag, and the number of bytes that follow without the last byte."""
COMPLETE: npt.NDArray[np.uint8] = np.ones(1, dtype=np.uint8)
"""The last byte of a message whose bytes are all P's. Zero where P stopped reading its pages before they were sent: P's
control message about that goes over another socket, and may arrive later."""


class Outgoing:
    """A message that P sends. ``slot`` becomes free afterwards; ``paged``: its bytes are read from pages.

    Args:
        pieces: its bytes, which stay in place until the message was sent or ``stop_reading`` was called.
        slot: the slot that holds them, unless they are in pages.
    """

    __slots__ = ("_header", "paged", "slot", "tag", "vector")

    def __init__(self, tag: int, pieces: Pieces, slot: Slot | None) -> None:
        self.tag, self.slot, self.paged = tag, slot, slot is None
        self._header = np.frombuffer(HEADER.pack(tag, int(pieces.nbytes.sum())), dtype=np.uint8)
        self.vector = Vector(together(self._of_header(HEADER.size), pieces, byte(COMPLETE)))

    def stop_reading(self, instead: Callable[[int], Pieces]) -> None:
        """Read no page any more: the unsent rest becomes ``instead(number of bytes)``, zeros, and the last byte 0."""
        self.paged = False
        head = max(0, HEADER.size - self.vector.done)
        rest = instead(self.vector.left - head)
        self.vector = Vector(together(self._of_header(head), rest) if head else rest)

    def _of_header(self, nbytes: int) -> Pieces:
        """The last bytes of the header."""
        return Pieces(np.array([self._header.ctypes.data + HEADER.size - nbytes]), np.array([nbytes]))


@dataclass(slots=True)
class Arriving:
    """A message whose bytes come in. ``slot`` where it goes to one; ``reported``: the bytes that ``poll`` reports, 0
    for a message that had no place; ``None``: ``poll`` does not report the message."""

    tag: int
    vector: Vector
    slot: Slot | None
    reported: int | None


def together(*parts: Pieces) -> Pieces:
    """The pieces of all ``parts``, one after the other."""
    return Pieces(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def byte(of: npt.NDArray[np.uint8]) -> Pieces:
    """The one byte of an array, as pieces."""
    return Pieces(np.array([of.ctypes.data]), np.array([1]))
