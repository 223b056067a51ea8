"""Caches in the processes of ``gpu_planes.py``, and digests of what lies in them. Axes [L, B, H, N, C]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gpu_cases import Form, Ids

from kvferry.kernels.paged_copy import Pages

_WORD = (1 << 64) - 1


class Cache:
    """A cache of one form: per layer uint8 ``[B * block bytes]``."""

    def __init__(self, form: Form, num_blocks: int, memory: Sequence[torch.Tensor]) -> None:
        self.form, self.num_blocks, self.memory = form, num_blocks, memory
        self.bases = np.array([layer.data_ptr() for layer in memory], dtype=np.int64)

    @classmethod
    def own(cls, form: Form, num_blocks: int, device: torch.device) -> Cache:
        """With one allocation per layer, as vLLM makes them."""
        size = num_blocks * form.block_bytes
        return cls(form, num_blocks, [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(form.layers)])

    @classmethod
    def carved(cls, form: Form, num_blocks: int, arena: torch.Tensor) -> Cache:
        """At the start of one allocation, layer after layer."""
        size = num_blocks * form.block_bytes
        return cls(form, num_blocks, arena[: form.layers * size].split(size))

    def stored(self, layer: int) -> torch.Tensor:
        """bfloat16 as it lies: ``[B, N, H, C]`` or ``[B, H, N, C]``."""
        form = self.form
        inner = (form.block, form.heads) if form.order == "NHD" else (form.heads, form.block)
        return self.memory[layer].view(torch.bfloat16).view(self.num_blocks, *inner, form.content // 2)

    def tensor(self, layer: int) -> torch.Tensor:
        """bfloat16 ``[B, H, N, C]``, strided, as engines register it."""
        stored = self.stored(layer)
        return stored.permute(0, 2, 1, 3) if self.form.order == "NHD" else stored

    def fill(self, generator: torch.Generator) -> None:
        for layer in self.memory:
            noise(layer, generator)

    def pages(self, block_ids: Ids, bases: Ids | None = None) -> Pages:
        """As one side of a copy; ``bases`` where the cache is another process's."""
        form = self.form
        row, column = form.block * form.content, form.content
        if form.order == "NHD":
            row, column = form.content, form.heads * form.content
        return Pages(
            bases=self.bases if bases is None else bases,
            block_ids=block_ids,
            block_size=form.block,
            block_stride=form.block_bytes,
            head_stride=row,
            token_stride=column,
        )

    def pieces(self, tables: Sequence[Ids], bases: Ids | None = None) -> Ids:
        """int64 [L * blocks], where each block of each layer lies."""
        of = self.bases if bases is None else bases
        return np.asarray(of[:, None] + np.concatenate(tables)[None, :] * self.form.block_bytes).reshape(-1)

    def digest(self, tables: Sequence[Ids], tokens: int) -> str:
        """Of the prompts in these blocks, ``[L][H][T][C]`` each, whatever the form."""
        found = Digest()
        for ids in tables:
            index = torch.from_numpy(ids).to(self.memory[0].device)
            for layer in range(self.form.layers):
                prompt = self.tensor(layer)[index].permute(1, 0, 2, 3).flatten(1, 2)[:, :tokens]
                found.add(prompt.contiguous().view(-1))
        return found.text


class Digest:
    """A sum of all words, each times an odd number that belongs to its place, modulo 2^64; runs on the device."""

    def __init__(self) -> None:
        self._sum = 0
        self._weights: torch.Tensor | None = None

    def add(self, data: torch.Tensor) -> None:
        words = data.view(torch.int64)
        if self._weights is None or len(self._weights) != len(words):
            mixed = torch.arange(1, len(words) + 1, device=words.device) * -7046029254386353131
            mixed ^= mixed >> 29
            self._weights = mixed * -4658895280553007687 | 1
        self._sum = (self._sum * 6364136223846793005 + int((words * self._weights).sum())) & _WORD

    @property
    def text(self) -> str:
        return f"{self._sum:016x}"


def digest(memory: torch.Tensor, step: int = 128 << 20) -> str:
    """Of contiguous bytes."""
    found = Digest()
    for part in memory.split(step):
        found.add(part)
    return found.text


def noise(memory: torch.Tensor, generator: torch.Generator) -> None:
    """Random bytes, all but the top bit of each word of 8."""
    memory.view(torch.int64).random_(generator=generator)
