"""What one layer's KV cache looks like, and where layers lie in an allocation. Axes ``[L, B, H, N, C]``. Pure.

L layers, B blocks, H KV heads (or slots that a backend packs them into), N states in a block (one per token, unless
compressed), C content bytes of one (head, state), K and V together.

Names and fields are those of vLLM's ``kv_cache_interface``. A spec is asked for attributes, never for its class, so
vLLM's own objects pass too.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch

from kvferry.transport.errors import GeometryError, did_you_mean

L, B, H, N, C = range(5)
Shape = tuple[int, int, int, int, int]


class KVCacheLayout(enum.Enum):
    """The physical order of the five axes, outermost first: the layouts that vLLM 0.32 names. Value: stride order."""

    LBHNC = (L, B, H, N, C)
    LBNHC = (L, B, N, H, C)
    LHBNC = (L, H, B, N, C)
    BLHNC = (B, L, H, N, C)
    BLNHC = (B, L, N, H, C)
    BHLNC = (B, H, L, N, C)

    @property
    def stride_order(self) -> tuple[int, ...]:
        return self.value


@dataclass(frozen=True, slots=True)
class MultipleOf:
    """A kernel takes any block size that is a multiple of ``base`` tokens."""

    base: int  # Tokens


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer's cache."""

    block_size: int  # Tokens of a manager block
    num_kv_heads: int  # Of this rank
    head_size: int  # Elements of a key
    dtype: torch.dtype  # Of the elements
    head_size_v: int | None = None  # Elements of a value, by default as of a key; MLA has none: 0
    page_size_padded: int | None = None  # Bytes of a page with padding at its end
    num_head_slots: int | None = None  # H, where a backend packs heads in its own way
    state_content_bytes: int | None = None  # C, likewise
    tokens_per_state: int | Fraction = 1  # Tokens that a stored state stands for, a fraction where one has several
    block_stride_alignment: int | None = None  # Bytes
    encoder_only: bool = False  # The layer keeps no cache

    @property
    def num_heads(self) -> int:
        """H."""
        return self.num_kv_heads if self.num_head_slots is None else self.num_head_slots

    @property
    def state_content_size_bytes(self) -> int:
        """C."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        value = self.head_size if self.head_size_v is None else self.head_size_v
        return (self.head_size + value) * self.dtype.itemsize

    @property
    def page_size_bytes(self) -> int:
        """Of one layer's part of a manager block, with padding. Raises GeometryError: that is less than the content."""
        content = self.num_heads * self.get_num_kernel_states(self.block_size) * self.state_content_size_bytes
        padded = content if self.page_size_padded is None else self.page_size_padded
        if padded < content:
            raise GeometryError(f"page_size_padded {padded} is less than the page's {content} bytes")
        return padded

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        """N of a kernel block of that many tokens."""
        return int(kernel_block_size // self.tokens_per_state)

    def get_block_stride_alignment(self) -> int:
        """Bytes, of which the distance of two blocks is a multiple."""
        return self.block_stride_alignment or 1

    def copy_with_new_block_size(self, block_size: int) -> AttentionSpec:
        """The same with blocks of ``block_size`` tokens."""
        return replace(self, block_size=block_size)


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    """The specs of a group whose layers share a block table but not one size, by layer name."""

    block_size: int
    kv_cache_specs: Mapping[str, Any]


@dataclass
class KVCacheTensor:
    """Layers of one shape; the page of layer l and block b is at ``offset + l * layer_stride + b * block_stride``."""

    size: int  # Bytes of the allocation, which all tensors of a config share
    layers: list[str]
    layer_stride: int  # Bytes, as those below
    block_stride: int
    offset: int = 0


@dataclass
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: list[str]  # Changed where a layer joins
    kv_cache_spec: Any  # ``AttentionSpec``, ``UniformTypeKVCacheSpecs``, or the engine's own


@dataclass
class KVCacheConfig:
    """Groups of layers, and their places in one allocation. Groups may overlay: a block belongs to one at a time."""

    num_blocks: int  # Of the allocation
    kv_cache_tensors: list[KVCacheTensor] = field(default_factory=list)  # The places
    kv_cache_groups: list[KVCacheGroupSpec] = field(default_factory=list)  # The groups


def is_attention(spec: object) -> bool:
    """Whether the spec is an attention layer's; not so a Mamba layer's."""
    return hasattr(spec, "num_kv_heads")


def is_encoder_only(spec: object) -> bool:
    """Whether the layer keeps no cache. vLLM's spec of that kind differs from others by its class alone."""
    named = any(base.__name__ == "EncoderOnlyAttentionSpec" for base in type(spec).__mro__)
    return named or bool(getattr(spec, "encoder_only", False))


def layer_spec(group_spec: Any, layer_name: str) -> Any:
    """The spec of one layer of a group."""
    specs = getattr(group_spec, "kv_cache_specs", None)
    if specs is None:
        return group_spec
    if layer_name not in specs:
        raise GeometryError(f"layer {layer_name!r} has no spec in its group{did_you_mean(layer_name, specs)}")
    return specs[layer_name]


def stride_order_of(layout: Any) -> tuple[int, ...]:
    """Of the enum's member (ours, vLLM's), its name, or a permutation of the axes. Raises GeometryError: neither."""
    if isinstance(layout, str):
        known = KVCacheLayout.__members__
        if layout not in known:
            close = did_you_mean(layout, known)
            raise GeometryError(f"layout {layout!r} is unknown{close}; known are {', '.join(known)}")
        return known[layout].stride_order
    order = tuple(getattr(layout, "stride_order", layout))
    if sorted(order) != [L, B, H, N, C]:
        raise GeometryError(f"stride order {order} is no permutation of the axes 0..4 (L, B, H, N, C)")
    return order


def kernel_shape(spec: Any, num_blocks: int, num_layers: int, kernel_block_size: int | None = None) -> Shape:
    """``[L, B, H, N, C]`` with C in bytes, B and N of kernel blocks. Raises GeometryError: no whole kernel blocks."""
    tokens = spec.block_size if kernel_block_size is None else kernel_block_size
    if tokens < 1 or spec.block_size % tokens:
        raise GeometryError(f"kernel blocks of {tokens} tokens do not divide a manager block of {spec.block_size}")
    blocks = num_blocks * (spec.block_size // tokens)
    return num_layers, blocks, spec.num_heads, spec.get_num_kernel_states(tokens), spec.state_content_size_bytes


def layout_strides(
    shape: Shape, stride_order: Sequence[int], *, page_bytes: int | None = None, layer_stride: int | None = None,
    block_stride: int | None = None,
) -> Shape:  # fmt: skip
    """Byte strides over ``[L, B, H, N, C]``; ``stride_order`` has the outermost axis first. Dense but for L and B where
    given, and for pages padded to ``page_bytes``. Raises GeometryError: padded pages that this order has not whole."""
    order = tuple(stride_order)
    page_end = max(order.index(L), order.index(B)) + 1
    if page_bytes is not None and math.prod(shape[axis] for axis in order[:page_end]) != shape[L] * shape[B]:
        raise GeometryError(
            f"pages padded to {page_bytes} bytes need L and B outside of all other axes, "
            f"got stride order {order} with shape {list(shape)}"
        )
    given = {L: layer_stride, B: block_stride}
    strides, reach = [0] * 5, 1
    for place in reversed(range(5)):
        axis = order[place]
        if page_bytes is not None and place == page_end - 1:
            reach = max(reach, page_bytes)
        strides[axis] = given.get(axis) or reach
        reach = strides[axis] * shape[axis]
    return strides[0], strides[1], strides[2], strides[3], strides[4]


def get_kv_cache_config_from_groups(
    kv_cache_groups: Iterable[KVCacheGroupSpec], num_blocks: int, layout: Any
) -> KVCacheConfig:
    """Place the layers of every group in one allocation, from byte 0: with B outermost, a block holds the pages of all
    layers of a group; else each layer has a region. Raises GeometryError: no blocks, or sizes that the layout lacks."""
    groups, order = list(kv_cache_groups), stride_order_of(layout)
    if num_blocks < 1:
        raise GeometryError(f"num_blocks {num_blocks}, expected at least 1")
    by_layer = [{name: layer_spec(g.kv_cache_spec, name) for name in g.layer_names} for g in groups]
    block_outermost = order[0] == B
    sizes = sorted({spec.page_size_bytes for specs in by_layer for spec in specs.values()})
    if len(sizes) > 1 and ({order[0], order[1]} != {L, B} or (len(groups) > 1 and order[0] == L)):
        raise GeometryError(
            f"pages of several sizes ({', '.join(map(str, sizes))} bytes) cannot be laid out in stride order "
            f"{order}; take BLHNC or BLNHC"
        )
    block_bytes = max((sum(map(_padded_page, specs.values())) for specs in by_layer), default=0)
    if block_outermost:
        pages = max((sum(spec.page_size_bytes for spec in specs.values()) for specs in by_layer), default=0)
        aligned = math.lcm(*(_alignment(spec) for specs in by_layer for spec in specs.values()))
        block_bytes = -(-pages // aligned) * aligned
    tensors: list[KVCacheTensor] = []
    for specs in by_layer:
        alike: defaultdict[Any, list[str]] = defaultdict(list)
        for name, spec in specs.items():
            alike[spec].append(name)
        offset = 0
        for spec, names in alike.items():
            block_stride = block_bytes if block_outermost else None
            if block_stride is None and _padded_page(spec) != spec.page_size_bytes:
                if {order[0], order[1]} != {L, B}:
                    raise GeometryError(f"stride order {order} cannot align pages, expected L and B outermost")
                block_stride = _padded_page(spec)
            shape = kernel_shape(spec, num_blocks, len(names))
            padded = getattr(spec, "page_size_padded", None)
            layer_stride, block_stride, *_ = layout_strides(shape, order, page_bytes=padded, block_stride=block_stride)
            tensors.append(KVCacheTensor(block_bytes * num_blocks, names, layer_stride, block_stride, offset))
            offset += len(names) * (spec.page_size_bytes if block_outermost else layer_stride)
    return KVCacheConfig(num_blocks, tensors, groups)


def _alignment(spec: Any) -> int:
    ask = getattr(spec, "get_block_stride_alignment", None)
    return int(ask()) if ask is not None else 1


def _padded_page(spec: Any) -> int:
    aligned = _alignment(spec)
    return -(-int(spec.page_size_bytes) // aligned) * aligned
