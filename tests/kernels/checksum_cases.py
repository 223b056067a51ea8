"""An oracle of ``sum64``, word by word in Python's numbers, by the text of ``kernels/checksum.py`` alone."""

from __future__ import annotations

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1


def key(number: int) -> int:
    value = number + 1
    value = (value ^ value >> 16) * 0x7FEB352D & MASK32
    value = (value ^ value >> 15) * 0x846CA68B & MASK32
    return value ^ value >> 16


def mixed(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & MASK64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & MASK64
    return value ^ value >> 33


def sum64(message: bytes, tag: int) -> int:
    words = [int.from_bytes(message[at : at + 4], "little") for at in range(0, len(message), 4)]
    total = sum(word * key(number) for number, word in enumerate(words)) & MASK64
    return mixed(total ^ mixed(tag ^ mixed(len(message))))


SIZES = [(1, 1, 1, 1), (1, 1, 1, 13), (2, 3, 5, 6), (2, 2, 7, 20), (3, 2, 40, 512), (2, 1, 33, 24), (1, 2, 130, 2)]
"""Layers, heads, tokens and content bytes of messages: rows of every alignment, one tile and several."""
