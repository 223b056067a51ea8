"""The checksum of one message of KV bytes: 8 bytes, little endian, directly behind the bytes of the message.

Two functions, both 64 bits wide and both over the bytes in wire order, the tag of the message and their number:

``xxh3``   XXH3 with the tag as its seed, by the library xxhash. For two ranks in host memory. It reads memory at the
           speed of memcpy, which no function written in numpy does.
``sum64``  For every pair with a rank on a GPU. A kernel copies tiles of a message in any order, and XXH3 is defined
           byte after byte. ``sum64`` is a sum of one product for each 32-bit word, so that each program of a kernel
           adds the part of its own tiles, in the pass that copies them.

``sum64``: let x_i be the message as unsigned 32-bit words, the last one filled up with zeros. Then

    checksum = mix(sum of x_i * key(i) mod 2**64, xor seed(tag, nbytes))

``key(i)`` is a bijection of 32-bit numbers, applied to i + 1, that maps 0 to 0. So all keys differ and none is 0, and
an error d in one word, 0 < |d| < 2**32, changes the sum by d * key(i), which is never 0 modulo 2**64. Two words that
change places change it by (x_i - x_j) * (key(j) - key(i)), for the same reason never 0. Any other change passes with a
chance of about 2**-32 or less, as with a sum with random keys of 32 bits (Carter and Wegman, "Universal classes of hash
functions", 1979). ``mix`` and ``seed`` are bijections: equal bytes under two tags have two checksums. A multiple of
linear keys, as in Fletcher's and Adler's sums, would miss blocks of equal sums that change places.

Neither function protects from an attacker: whoever can write the bytes can write a checksum that fits.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

ChecksumName = Literal["xxh3", "sum64"]

TRAILER_BYTES = 8
"""Bytes of a checksum behind its message."""
FITS, DIFFERS = 0, 1
_MASK = (1 << 64) - 1


class WireCheck(NamedTuple):
    """What becomes of the checksum of a message."""

    name: ChecksumName
    tag: int
    verdict: int = 0
    """0: it is written behind the message. Else it is compared with the one there, and the int64 at this address, where
    the device of the pages must be able to store, becomes ``FITS`` or ``DIFFERS``."""


def checksums_on(device: torch.device) -> tuple[ChecksumName, ...]:
    """The functions for a rank whose caches lie on ``device``, the fastest first."""
    return ("xxh3", "sum64") if device.type == "cpu" else ("sum64",)


def mix(value: int) -> int:
    """The finalizer of MurmurHash3, a bijection of 64-bit numbers."""
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _MASK
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return value ^ value >> 33


def seed(tag: int, nbytes: int) -> int:
    """The seed of ``sum64`` for a message of ``nbytes`` under a 64-bit tag: below 2**64."""
    return mix(tag ^ mix(nbytes))


_FIRST = 64
_memory = memoryview((ctypes.c_char * ((1 << 56) - _FIRST)).from_address(_FIRST)).cast("B")
"""The whole address space. Byte 0 lies at address ``_FIRST``."""
BLOCK_WORDS = 1 << 15
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
    for block in range(-(-nbytes // (4 * BLOCK_WORDS))):
        part = data[4 * BLOCK_WORDS * block :][: 4 * BLOCK_WORDS]
        if len(part) % 8:
            part = np.concatenate([part, np.zeros(-len(part) % 8, dtype=np.uint8)])
        pairs = part.view(np.int64)
        even, odd = keys(block)
        count = len(pairs)
        # Signed numbers wrap as unsigned ones do, modulo 2**64.
        total += int(np.dot(pairs & _LOW, even[:count])) + int(np.dot(pairs >> np.int64(32) & _LOW, odd[:count]))
    return total & _MASK


@lru_cache(maxsize=128)
def keys(block: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The keys of a block's words: of those with an even and of those with an odd number."""
    first = block * BLOCK_WORDS + 1
    key = np.arange(first, first + BLOCK_WORDS, dtype=np.int64).astype(np.uint32)
    key ^= key >> np.uint32(16)
    key *= np.uint32(0x7FEB352D)
    key ^= key >> np.uint32(15)
    key *= np.uint32(0x846CA68B)
    key ^= key >> np.uint32(16)
    wide = key.astype(np.int64)
    return np.ascontiguousarray(wide[::2]), np.ascontiguousarray(wide[1::2])
