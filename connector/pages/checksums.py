"""The checksums behind the messages of one session or link: the choice of the function, and messages in place.

``kernels/checksum.py`` defines the functions and says why there are two. ``RankCaches.pack`` and ``unpack`` write and
compare the checksum of a message that lies in a slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.checksum import FITS, TRAILER_BYTES, ChecksumName, WireCheck, checksum_of_pieces
from kvferry.transport.channels import Pieces
from kvferry.transport.staging import empty_page_locked

Trailer = npt.NDArray[np.uint8]
"""The checksum of one message, uint8 [8]."""

NO_CHECKSUM = (
    "the decode engine reads the prefill engine's pages by itself, without messages that could carry a checksum"
)
"""Why a plane is not used where checksums are demanded."""


def chosen(ours: Sequence[ChecksumName], theirs: Sequence[str]) -> ChecksumName | None:
    """D's choice: the first of its functions that P has too; ``None`` where there is none."""
    return next((name for name in ours if name in theirs), None)


def described(plane: str, name: ChecksumName | None) -> str:
    """A plane as log lines name it."""
    return plane if name is None else f"{plane} with checksums ({name})"


def trailer_bytes(name: ChecksumName | None) -> int:
    """Bytes that a checksum takes of each slot."""
    return 0 if name is None else TRAILER_BYTES


def takes_pieces(name: ChecksumName | None) -> bool:
    """Whether messages may be sent from pages and received into pages: ``sum64`` on a host needs them in a slot."""
    return name is None or name == "xxh3"


def new_trailer() -> Trailer:
    """Memory for a checksum."""
    return np.zeros(TRAILER_BYTES, dtype=np.uint8)


class Verdict:
    """Whether the checksum of a message fits, found by the copy that unpacks the message. It must live until then."""

    def __init__(self, device: torch.device) -> None:
        nbytes = 8
        self._word = empty_page_locked(nbytes) if device.type == "cuda" else torch.empty(nbytes, dtype=torch.uint8)
        self._word.fill_(0xFF)  # neither answer: a copy that looked at nothing has found nothing

    def check(self, name: ChecksumName, tag: int) -> WireCheck:
        """The check whose result this is."""
        return WireCheck(name, tag, self._word.data_ptr())

    @property
    def fits(self) -> bool:
        """Only after the copy has ended."""
        return ctypes.c_int64.from_address(self._word.data_ptr()).value == FITS


def sealed_pieces(pieces: Callable[[], Pieces], tag: int, trailer: Trailer) -> Pieces:
    """P: a message in place, the pieces and behind them ``trailer``, which becomes the checksum of the bytes that the
    pieces hold now."""
    found = pieces()
    trailer[:] = _checksum(found, tag)
    return _followed_by(found, trailer)


class PlacedMessage:
    """D: a message that is received into pages, and the checksum that comes behind it. ``pieces`` returns the memory of
    the pages."""

    def __init__(self, pieces: Callable[[], Pieces]) -> None:
        self._pieces = pieces
        self._found: Pieces | None = None
        self._trailer = new_trailer()

    def into(self) -> Pieces:
        """The memory of the whole message."""
        self._found = self._pieces()
        return _followed_by(self._found, self._trailer)

    def fits(self, tag: int) -> bool:
        """Whether the bytes in the pages, all of which have arrived, fit the checksum."""
        return self._found is not None and bool((self._trailer == _checksum(self._found, tag)).all())


def _followed_by(pieces: Pieces, trailer: Trailer) -> Pieces:
    return Pieces(np.append(pieces.addresses, trailer.ctypes.data), np.append(pieces.nbytes, len(trailer)))


def _checksum(pieces: Pieces, tag: int) -> Trailer:
    value = checksum_of_pieces(*pieces, tag)
    return np.frombuffer(value.to_bytes(TRAILER_BYTES, "little"), dtype=np.uint8)
