"""Recurrent states as vLLM shards them: sizes by its calculators, contents by its weight loaders, places by its layers.

What a rank must hold is never computed from what is tested here: the whole model's state is random bits, and the loader
that gives a rank its rows of a convolution's weights gives it the same rows of the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import _make_fused_conv1d_weight_loader
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Calculator
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Bits = list[torch.Tensor]
"""The arrays of one state as integers: ``[channels, taps]`` of a convolution, ``[heads, …]`` of a recurrent state."""


@dataclass(frozen=True)
class Family:
    """``wide``, ``narrow``: (heads, head size) of x and of B and C, or of v and of q and k; all ranks together.

    ``inputs``: what a convolution keeps. ``replicated``: every rank holds all of it. ``ring``: with vLLM's replay ring.
    """

    name: str
    backend: str
    wide: tuple[int, int]
    narrow: tuple[int, int] = (0, 0)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    inputs: int = 3
    replicated: bool = False
    ring: bool = False

    def shapes(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """A rank's, from vLLM's calculators."""
        (heads, size), (narrow, narrow_size) = self.wide, self.narrow
        tp, kernel = 1 if self.replicated else tp, self.inputs + 1
        found: dict[str, Any] = {
            "MAMBA1": lambda: Calculator.mamba1_state_shape(tp, heads * size, narrow_size, kernel),
            "MAMBA2": lambda: Calculator.mamba2_state_shape(tp, heads * size, narrow, heads, size, narrow_size, kernel),
            "GDN_ATTN": lambda: Calculator.gated_delta_net_state_shape(tp, narrow, heads, narrow_size, size, kernel),
            "SHORT_CONV": lambda: Calculator.short_conv_state_shape(tp, heads * size, kernel),
            "LINEAR": lambda: Calculator.linear_attention_state_shape(heads, tp, size),
        }
        if self.name == "kda":
            return Calculator.kda_state_shape(tp, heads, size, conv_kernel_size=kernel)
        shapes = tuple(found[self.backend]())
        if self.ring:
            return Calculator.append_replayssm_ring(shapes, narrow, tp, 4, MambaBackendEnum.TRITON)
        return shapes

    def spec(self, tp: int) -> MambaSpec:
        shapes = self.shapes(tp)
        backend = MambaAttentionBackendEnum[self.backend]
        dtypes = (*self.dtypes, torch.bfloat16, torch.float32, torch.bfloat16)[: len(shapes)]
        return MambaSpec(64, shapes=shapes, dtypes=dtypes, mamba_type=backend, tp_replicated=self.replicated)

    @property
    def groups(self) -> int:
        """The model's own of Mamba2."""
        return self.narrow[0]

    def _projections(self) -> list[int]:
        """Channels of each in the whole model, in the order of the convolution."""
        wide, narrow = self.wide[0] * self.wide[1], self.narrow[0] * self.narrow[1]
        return {
            "MAMBA2": [wide, narrow, narrow],
            "GDN_ATTN": [narrow, narrow, wide],
        }.get(self.backend, [wide])

    def whole(self, draw: torch.Generator) -> Bits:
        """A state of the whole model, without copies for any rank."""
        found: Bits = []
        for shape, dtype in zip(self.shapes(1), self.dtypes, strict=False):
            is_conv = not found and self.backend != "LINEAR"
            size = (sum(self._projections()), self.inputs) if is_conv else shape
            found.append(torch.randint(-(1 << 31), 1 << 31, size, generator=draw).to(BITS[dtype.itemsize]))
        return found

    def rank(self, whole: Bits, rank: int, tp: int) -> Bits:
        """What a rank holds of it, by the rules that its weights are loaded by."""
        if self.replicated:
            return whole
        found = []
        for number, array in enumerate(whole):
            if number == 0 and self.backend != "LINEAR":
                found.append(self._conv_rank(array, rank, tp))
            else:
                found.append(array.chunk(tp)[rank])
        return found

    def _conv_rank(self, channels: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
        parts = self._projections()
        if self.backend == "MAMBA2":
            extra = Calculator.extra_groups_for_head_shards(self.groups, tp)
            size = self.narrow[1]
            shared = ((self.groups + extra) * size, extra * size, extra > 0)
            param = torch.zeros((parts[0] + 2 * shared[0]) // tp, self.inputs, dtype=channels.dtype)
            mamba_v2_sharded_weight_loader([(parts[0], 0, False), shared, shared], tp, rank)(param, channels)
            return param
        param = torch.zeros(len(channels) // tp, self.inputs, dtype=channels.dtype)
        if self.name == "kda":
            load = _make_fused_conv1d_weight_loader(parts, tp, rank)
            for shard, piece in enumerate(channels.split(parts)):
                load(param.unsqueeze(1), piece, shard)
            return param
        mamba_v2_sharded_weight_loader([(size, 0, False) for size in parts], tp, rank)(param, channels)
        return param


FAMILIES = {
    family.name: family
    for family in (
        Family("mamba2", "MAMBA2", (8, 4), (4, 6)),
        Family("mamba2 of one group", "MAMBA2", (8, 4), (1, 6)),
        Family("mamba2 of one dtype", "MAMBA2", (4, 16), (4, 16), (torch.float32, torch.float32)),
        Family("gdn", "GDN_ATTN", (8, 6), (4, 10)),
        Family("kda", "GDN_ATTN", (4, 8), (4, 8), (torch.float32, torch.float32)),
        Family("mamba1", "MAMBA1", (1, 2048), (0, 5)),
        Family("short conv", "SHORT_CONV", (1, 24)),
        Family("replicated", "SHORT_CONV", (1, 24), replicated=True),
        Family("linear", "LINEAR", (4, 6)),
    )
}


def states(family: Family, tp: int, cache: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
    """vLLM's views of a cache ``[B, 1, 1, bytes]``: arrays ``[B, …]``, and whether each is a convolution's."""
    layer = SimpleNamespace(get_state_shape=lambda: family.shapes(tp), get_state_dtype=lambda: family.dtypes)
    MambaBase.bind_kv_cache(layer, cache)
    for number, array in enumerate(layer.kv_cache):
        yield array, number == 0 and family.backend != "LINEAR"


def write(family: Family, tp: int, cache: torch.Tensor, block: int, held: Bits) -> None:
    """A rank's arrays into a block, in the order of vLLM's setting."""
    for (array, is_conv), bits in zip(states(family, tp, cache), held, strict=True):
        oriented = bits.T if is_conv and get_conv_state_layout() == "SD" else bits
        array[block] = oriented.contiguous().view(array.dtype)
