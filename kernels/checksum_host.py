"""The checksums of ``checksum`` over host memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvferry.kernels.checksum import DIFFERS, FITS, TRAILER_BYTES, ChecksumName, WireCheck, mix, seed

_FIRST = 64
_memory = memoryview((ctypes.c_char * ((1 << 56) - _FIRST)).from_address(_FIRST)).cast("B")
"""The whole address space. Byte 0 lies at address ``_FIRST``."""
_BLOCK_WORDS = 1 << 15
"""32-bit words that are multiplied at a time: 128 KiB of the message, and 256 KiB of keys. A multiple of 2."""
_LOW = np.int64(0xFFFFFFFF)


def checksum(name: ChecksumName, address: int, nbytes: int, tag: int) -> int:
    """The checksum of the ``nbytes`` from ``address`` on, as a message under ``tag``: below 2**64."""
    if name == "xxh3":
        import xxhash  # here, because a rank on a GPU does not need it

        return xxhash.xxh3_64_intdigest(_memory[address - _FIRST : address - _FIRST + nbytes], tag)
    return mix(_sum(address, nbytes) ^ seed(tag, nbytes))


def checksum_of_pieces(addresses: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], tag: int) -> int:
    """``checksum`` by ``xxh3`` of a message that lies in pieces, piece i the ``nbytes[i]`` from ``addresses[i]`` on."""
    import xxhash

    hasher = xxhash.xxh3_64(seed=tag)
    update, memory = hasher.update, _memory
    starts = addresses - _FIRST
    for start, stop in zip(starts.tolist(), (starts + nbytes).tolist(), strict=True):
        update(memory[start:stop])
    return hasher.intdigest()


def write_trailer(check: WireCheck, address: int, nbytes: int) -> None:
    """Write the checksum of the message at ``address`` behind it."""
    value = checksum(check.name, address, nbytes, check.tag)
    ctypes.memmove(address + nbytes, value.to_bytes(TRAILER_BYTES, "little"), TRAILER_BYTES)


def trailer_fits(check: WireCheck, address: int, nbytes: int) -> bool:
    """Compare the checksum of the message at ``address`` with the one behind it, and set the verdict."""
    theirs = int.from_bytes(ctypes.string_at(address + nbytes, TRAILER_BYTES), "little")
    fits = checksum(check.name, address, nbytes, check.tag) == theirs
    ctypes.c_int64.from_address(check.verdict).value = FITS if fits else DIFFERS
    return fits


def _sum(address: int, nbytes: int) -> int:
    """The sum of the words of a message times their keys, modulo 2**64."""
    total = 0
    data = np.frombuffer(_memory[address - _FIRST : address - _FIRST + nbytes], dtype=np.uint8)
    for block in range(-(-nbytes // (4 * _BLOCK_WORDS))):
        part = data[4 * _BLOCK_WORDS * block :][: 4 * _BLOCK_WORDS]
        if len(part) % 8:
            part = np.concatenate([part, np.zeros(-len(part) % 8, dtype=np.uint8)])
        pairs = part.view(np.int64)
        even, odd = _keys(block)
        count = len(pairs)
        # Signed numbers wrap as unsigned ones do, modulo 2**64.
        total += int(np.dot(pairs & _LOW, even[:count])) + int(np.dot(pairs >> np.int64(32) & _LOW, odd[:count]))
    return total & ((1 << 64) - 1)


@lru_cache(maxsize=128)
def _keys(block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The keys of a block's words: of those with an even and of those with an odd number."""
    first = block * _BLOCK_WORDS + 1
    key = np.arange(first, first + _BLOCK_WORDS, dtype=np.int64).astype(np.uint32)
    key ^= key >> np.uint32(16)
    key *= np.uint32(0x7FEB352D)
    key ^= key >> np.uint32(15)
    key *= np.uint32(0x846CA68B)
    key ^= key >> np.uint32(16)
    wide = key.astype(np.int64)
    return np.ascontiguousarray(wide[::2]), np.ascontiguousarray(wide[1::2])
