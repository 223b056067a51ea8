"""Mutations of valid inputs: of bytes, and of the values that MessagePack and JSON carry. Pure, by a seed.

They follow no coverage: msgspec decodes in C, which atheris, a generator that does, cannot see.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

INTERESTING = [0, 1, 2, 15, 16, 127, 128, 255, 256, 4095, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
               1 << 32, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1, -128, -(1 << 31),
               -(1 << 63)]  # fmt: skip
TEXTS = ["", "a", "\0", "\n", "\u2028", "\ud800", "é" * 300, "%s%n", "x" * 5000, "../" * 20, "127.0.0.1", "::1", "type"]
OTHERS: list[Any] = [float("nan"), float("inf"), -0.0, 1e308, 0.5, None, None, [], {"": 1}, {"type": -1}, True, False]
LARGE_IN = 4000
"""One input of so many is large: up to a MiB, or nested deeply."""
HEADS = bytes(range(0xC0, 0xE0)) + b"\x80\x8f\x90\x9f\xa0\xbf\x7f"
"""MessagePack's heads: nil, booleans, bin, ext, floats, integers, str, array and map with counts, short ones."""
COUNTS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\x00\x10\x00\x00", b"\xff\xff", b"\0\1")


class Mutator:
    """Makes inputs from a corpus. The same seed and corpus give the same inputs."""

    def __init__(self, rng: random.Random, corpus: Sequence[bytes], codec: str = "msgpack") -> None:
        """``codec``: "msgpack", "json", or "" where the bytes have no such structure."""
        self._rng, self._corpus = rng, list(corpus)
        self._codec: Any = msgspec.json if codec == "json" else msgspec.msgpack
        self._values: list[Any] = []
        for item in corpus if codec else ():
            with suppress(msgspec.MsgspecError):
                self._values.append(self._codec.decode(item))

    def next(self) -> bytes:
        """One input; seldom a valid one."""
        rng = self._rng
        if rng.random() < 1 / LARGE_IN:
            return self._large()
        if not self._values or rng.random() < 0.5:
            return self._bytes(rng.choice(self._corpus))
        value = rng.choice(self._values)
        for _ in range(rng.choice((1, 2))):
            value = self._changed(value)
        try:
            return bytes(self._codec.encode(value))
        except (ValueError, OverflowError, TypeError, msgspec.MsgspecError):  # what it has no form for
            return b""

    def _bytes(self, changed: bytes) -> bytes:
        rng, data = self._rng, bytearray(changed)
        for _ in range(1 + int(rng.random() * 3)):
            at = int(rng.random() * (len(data) + 1))
            kind = int(rng.random() * 8)
            if kind == 0 and data:
                data[at % len(data)] ^= 1 << int(rng.random() * 8)
            elif kind == 1 and data:
                data[at % len(data)] = int(rng.random() * 256)
            elif kind == 2:
                del data[at : at + 1 + int(rng.random() * 8)]
            elif kind == 3:
                data[at:at] = rng.randbytes(1 + int(rng.random() * 8))
            elif kind == 4:
                data[at : at + 1] = bytes((rng.choice(HEADS),))
            elif kind == 5:
                data[at : at + 4] = rng.choice(COUNTS)
            elif kind == 6:
                other = rng.choice(self._corpus)
                begin = int(rng.random() * (len(other) + 1))
                data[at : at + int(rng.random() * 64)] = other[begin : begin + int(rng.random() * 64)]
            else:
                del data[at:]
        return bytes(data)

    def _large(self) -> bytes:
        """Long, or nested deeply: what costs a decoder most."""
        rng = self._rng
        piece = rng.choice([b"\x91", b"\x81\xa1a", b"\x90", b"\xc0", b"[", b'{"a":', b"\0", b"\xff", b"\xa1a\x01"])
        head = rng.choice([b"", b"\xdd\x00\x10\x00\x00", b"\xdf\x00\x08\x00\x00", b"\xdb\x00\x0f\xff\x00"])
        return self._bytes(rng.choice(self._corpus))[:200] + head + piece * ((1 << rng.randrange(10, 21)) // len(piece))

    def _changed(self, value: Any) -> Any:
        """A copy with one change, on the way down to a random node."""
        rng, kind = self._rng, self._rng.random()
        if isinstance(value, dict) and value and rng.random() < 0.9:
            changed = dict(value)
            key = rng.choice(list(changed))
            if kind < 0.08:
                del changed[key]
            elif kind < 0.14:
                changed[rng.choice(TEXTS)] = self._value()
            else:
                changed[key] = self._changed(changed[key])
            return changed
        if isinstance(value, list) and value and rng.random() < 0.9:
            items, at = list(value), rng.randrange(len(value))
            if kind < 0.1:
                del items[at]
            elif kind < 0.2:
                items.insert(at, self._value())
            elif kind < 0.25:
                items = (items * rng.choice((2, 10, 70)))[:5000]
            else:
                items[at] = self._changed(items[at])
            return items
        if isinstance(value, bytes) and kind < 0.7:
            return self._bytes(value) if rng.random() < 0.7 else rng.randbytes(len(value))
        if isinstance(value, int) and kind < 0.3:
            return value + rng.choice((-1, 1, 7, 1 << 20))
        return self._value()

    def _value(self) -> Any:
        rng = self._rng
        sizes = (0, 1, 16, 32, 33, 300)
        return rng.choice(rng.choice((INTERESTING, INTERESTING, TEXTS, OTHERS, [rng.randbytes(rng.choice(sizes))])))
