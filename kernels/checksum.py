"""The checksum of one message of KV bytes: 8 bytes, little endian, directly behind the bytes of the message.

Two functions, both 64 bits wide and both over the bytes in wire order, the tag of the message and their number:

``xxh3``   XXH3 with the tag as its seed, by the library xxhash. For two ranks in host memory. It reads memory at the
           speed of memcpy, which no function written in numpy does.
``sum64``  For every pair with a rank on a GPU. A kernel copies tiles of a message in any order, and XXH3 is defined
           byte after byte. ``sum64`` is a sum of one product for each 32-bit word, so that each program of a kernel
           adds the part of its own tiles, in the pass that copies them.

``sum64``: let x_i be the message as unsigned 32-bit words, the last one filled up with zeros. Then

    checksum = mix(sum of x_i * key(i) mod 2**64, xor seed(tag, nbytes))

``key(i)`` is a bijection of 32-bit numbers, applied to i + 1, that maps 0 to 0. So all keys differ and none is 0. An
error d in one word, 0 < |d| < 2**32, changes the sum by d * key(i). The keys are 32 bits wide and the sum is 64 bits,
so this is never 0 modulo 2**64: a change inside one word is always found. Two words that change places change the sum
by (x_i - x_j) * (key(j) - key(i)), for the same reason never 0. Any other change passes with a chance of about
2**-32 or less, as a sum with random keys of 32 bits does (Carter and Wegman, "Universal classes of hash functions",
1979; the multilinear family). ``mix`` and ``seed`` are bijections in the sum and in the tag: equal bytes under two tags
have two checksums. A multiple of linear keys, as in Fletcher's and Adler's sums, would miss blocks of equal sums that
change places. A CRC can be combined from parts too, but takes many more instructions for a word on a GPU.

Neither function protects from an attacker: whoever can write the bytes can write a checksum that fits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

ChecksumName = Literal["xxh3", "sum64"]

TRAILER_BYTES = 8
"""Bytes of a checksum behind its message."""
FITS, DIFFERS = 0, 1
_MASK = (1 << 64) - 1


class WireCheck(NamedTuple):
    """What becomes of the checksum of a message under ``tag``, by the function ``name``.

    ``verdict`` 0: it is written behind the message. Else it is compared with the checksum there, and the int64 at
    address ``verdict`` becomes ``FITS``, or ``DIFFERS``. The device of the pages must be able to store there.
    """

    name: ChecksumName
    tag: int
    verdict: int = 0


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
