"""A digest of a model's weights, which needs no setting: of some bytes of each tensor, by its name in the checkpoint.

It depends neither on paths, nor on the number of files, nor on parallel sizes. A fine-tune changes it, also one of some
layers only. Of the experts of a layer the first one counts. The output layer, which no KV depends on, does not count.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

SAMPLE_BYTES = 1024
"""Of each tensor, in its middle."""
MAX_HEADER_BYTES = 100_000_000
"""The bound that the format safetensors sets."""
_LEFT_OUT = re.compile(r"\.experts\.[1-9]|lm_head\.")
_OTHER_EXPERTS = re.compile(rb"\.experts\.[1-9][^}]*}")
"""Of their entries in a header all but the beginning: there are tens of thousands, which take long to decode."""


class WeightsDigest:
    """The digest of the tensors that were put into it, in any order. A tensor that is put again replaces the former."""

    def __init__(self) -> None:
        self._tensors: dict[str, int] = {}
        self._sum = 0

    def put(self, name: str, size: int, sample: bytes) -> None:
        """``size``: bytes of the tensor. ``sample``: those of ``sampled``."""
        tensor = hashlib.blake2b(b"%d %s " % (size, name.encode()) + sample, digest_size=8)
        number = int.from_bytes(tensor.digest(), "big")
        self._sum ^= number ^ self._tensors.get(name, 0)
        self._tensors[name] = number

    def __str__(self) -> str:
        """16 hexadecimal digits; empty where nothing was put into it."""
        return f"{self._sum:016x}" if self._tensors else ""


def counts(name: str) -> bool:
    """Whether a tensor of this name counts."""
    return _LEFT_OUT.search(name) is None


def sampled(size: int) -> tuple[int, int]:
    """Which bytes of a tensor of ``size`` bytes, row by row, are its sample: the first one, and their number."""
    count = min(SAMPLE_BYTES, size)
    return (size - count) // 2, count


def checkpoint_digest(files: Iterable[Path]) -> WeightsDigest:
    """Of a checkpoint in the format safetensors. Raises OSError: a file cannot be read; ValueError: it has another
    format."""
    digest = WeightsDigest()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                raise ValueError(f"{file}: no header of safetensors")
            header: dict[str, Any] = msgspec.json.decode(_OTHER_EXPERTS.sub(b'":0', opened.read(length)))
            for name, entry in header.items():
                if entry and counts(name) and name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    at, count = sampled(end - begin)
                    digest.put(name, end - begin, os.pread(opened.fileno(), count, 8 + length + begin + at))
    return digest
