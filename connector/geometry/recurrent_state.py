"""The state of a recurrent layer as sections, each of which is sharded over tensor-parallel ranks by itself. Pure.

A page of a state holds two dense arrays, back to back: the last inputs of the convolution, then the recurrent state;
some families have only one. The convolution runs over several projections side by side, and every rank holds its shard
of each: ``[its x | its B | its C]``. So ranks of different tensor-parallel sizes exchange sections, not whole pages: a
section has heads like any other cache, each of ``rows`` x ``content_bytes``. Axes ``[L, B, H, N, C]``, with the rows in
the place of N. All offsets and strides are in bytes. vLLM defines the order of the arrays, their content and their
sharding: ``MambaBase.bind_kv_cache``, the weight loaders of the layers, and ``MambaStateShapeCalculator``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.connector.geometry.rank_geometry import RegionGeometry

CHANNEL_UNITS = 2**8 * 3**2 * 5 * 7
"""Bound on the heads of a projection whose channels are sharded one by one. One channel per head would give plans of
thousands of heads. The number has many divisors, so that the heads divide by every tensor-parallel size in use."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """One dense array of a state page as a rank holds it. ``dtype``: torch's name. ``item``: bytes of an element."""

    shape: tuple[int, ...]
    dtype: str
    item: int


@dataclass(frozen=True, slots=True)
class Section:
    """A part of every page. Byte c of (head, row) lies at byte ``offset + head * head_stride + row * row_stride + c``
    of the page."""

    name: str  # Of no other section of the page
    total_heads: int  # Different heads of all ranks
    heads: int  # Of one rank
    rows: int  # Of a head
    content_bytes: int  # Of a row
    offset: int
    head_stride: int
    row_stride: int
    dtype: str  # By torch's name
    packing: str  # The order of the content; P and D must have the same one (``RegionGeometry``)

    @property
    def end(self) -> int:
        """The byte of a page that follows the last byte of the section."""
        last = (self.heads - 1) * self.head_stride + (self.rows - 1) * self.row_stride
        return self.offset + last + self.content_bytes

    def region(self, layers: tuple[str, ...], head_start: int, num_heads: int) -> RegionGeometry:
        """The region of a rank that has these heads of the section, in these layers."""
        return RegionGeometry(
            kind="state", layers=layers, part=self.name, block_size=self.rows, head_start=head_start,
            num_heads=num_heads, total_heads=self.total_heads, content_bytes=self.content_bytes, dtype=self.dtype,
            packing=self.packing, tile_tokens=self.rows,
        )  # fmt: skip


class _Projection(NamedTuple):
    """One of the projections that lie side by side in a convolution."""

    name: str
    total_heads: int
    heads: int  # Of them on one rank
    channels: int  # Of a head


def whole_page(nbytes: int, total_heads: int, packing: str) -> Section:
    """The only section of a page that cannot be divided: its ``nbytes`` bytes are one head; all ranks have
    ``total_heads`` different pages. Its up to 1024 rows mean nothing: they let a message carry less than a page."""
    rows = math.gcd(nbytes, 1024)
    row = nbytes // rows
    return Section("", total_heads, 1, rows, row, 0, nbytes, row, "int8", packing)


def sections(
    family: str, arrays: Sequence[StateArray], tp_size: int, *, dim_first: bool,
    group_counts: frozenset[int] = frozenset(), order: str = "",
) -> tuple[Section, ...]:  # fmt: skip
    """The sections of a page, in the order of their bytes. Empty where KVFerry does not know how ranks shard the page:
    the family or the form of its arrays is unknown, or their sizes fit no or more than one sharding. Then the page must
    stay whole (``whole_page``).

    Args:
        family: the name of vLLM's ``MambaAttentionBackendEnum``.
        arrays: the arrays of one rank, in their order in the page. The convolution is ``[inputs, channels]``, or
            ``[channels, inputs]`` with ``dim_first``. The recurrent state is ``[heads, head size, state size]``, or
            ``[channels, state size]`` for Mamba1.
        tp_size: tensor-parallel ranks of the engine.
        dim_first: whether the convolution keeps the inputs of a channel together (vLLM's layout ``DS``).
        group_counts: the numbers of groups that Mamba2's B and C may have in the whole model. A rank with one group may
            hold a copy of the model's only group, or a group of its own; the shapes are the same.
        order: the name of a platform's own order of the content; a part of ``Section.packing``.
    """
    if tuple(len(array.shape) for array in arrays) != _FAMILIES.get(family):
        return ()
    conv = None if family == "LINEAR" else arrays[0]
    state = None if family == "SHORT_CONV" else arrays[-1]
    found: list[Section] = []
    offset = 0
    if conv is not None:
        channels = conv.shape[0 if dim_first else 1]
        projections = _projections(family, channels, state, tp_size, group_counts)
        if not projections or any(part.heads < 1 or part.channels < 1 for part in projections):
            return ()
        found += _of_convolution(conv, projections, dim_first, order)
        offset = math.prod(conv.shape) * conv.item
    if state is not None:
        found.append(_of_state(state, offset, tp_size, order))
    return tuple(found) if all(section.heads for section in found) else ()


_FAMILIES = {"MAMBA1": (2, 2), "MAMBA2": (2, 3), "GDN_ATTN": (2, 3), "SHORT_CONV": (2,), "LINEAR": (3,)}
"""The known families, with the number of dimensions of each of their arrays. A family with other arrays (replay rings)
keeps more than these two, in an order that is not known here."""


def _units(channels: int, tp_size: int) -> tuple[int, int]:
    """Heads for ``channels`` channels of a rank that are sharded one by one: (heads of all ranks, heads of one rank).
    The second is 0 where the first does not divide by ``tp_size``."""
    total = math.gcd(channels * tp_size, CHANNEL_UNITS)
    return (total, total // tp_size) if total % tp_size == 0 else (total, 0)


def _projections(
    family: str, channels: int, state: StateArray | None, tp_size: int, group_counts: frozenset[int]
) -> list[_Projection]:
    """The projections of the convolution, in the order of its channels; empty where their channels do not add up to
    ``channels``, or where the number of groups is ambiguous. Mamba1 and short convolutions have one projection. Mamba2
    has ``x | B | C``: x has the heads of the state, B and C have ``state_size`` channels per group. Gated delta nets
    have ``q | k | v``: v has the heads of the state, q and k have ``state_size`` channels per head."""
    if family in ("MAMBA1", "SHORT_CONV"):
        total, heads = _units(channels, tp_size)
        return [_Projection("conv.x", total, heads, channels // heads if heads else 0)]
    assert state is not None
    heads, head_size, state_size = state.shape  # of x in Mamba2, of v in gated delta nets
    rest, odd = divmod(channels - heads * head_size, 2)
    held, uneven = divmod(rest, state_size)  # groups, or heads of q and of k
    if odd or uneven or held < 1:
        return []
    wide = _Projection("conv.x" if family == "MAMBA2" else "conv.v", heads * tp_size, heads, head_size)
    if family == "GDN_ATTN":
        return [*(_Projection(name, held * tp_size, held, state_size) for name in ("conv.q", "conv.k")), wide]
    groups = held * tp_size
    if held == 1 and tp_size > 1:
        fitting = group_counts & {1, tp_size}
        if len(fitting) != 1:
            return []
        (groups,) = fitting
    return [wide, *(_Projection(name, groups, held, state_size) for name in ("conv.b", "conv.c"))]


def _of_convolution(
    conv: StateArray, projections: Sequence[_Projection], dim_first: bool, order: str
) -> Iterator[Section]:
    """The section of each projection. A row is one input of all channels of a head (vLLM's layout ``SD``), or with
    ``dim_first`` all inputs of one channel."""
    taps, width = reversed(conv.shape) if dim_first else conv.shape
    first = 0
    for part in projections:
        content = (taps if dim_first else part.channels) * conv.item
        yield Section(
            name=part.name, total_heads=part.total_heads, heads=part.heads, rows=part.channels if dim_first else taps,
            content_bytes=content, offset=first * conv.item * (taps if dim_first else 1),
            head_stride=part.channels * content if dim_first else content,
            row_stride=content if dim_first else width * conv.item, dtype=conv.dtype,
            packing=f"{'DS' if dim_first else 'SD'} of {taps} inputs{order}",
        )  # fmt: skip
        first += part.heads * part.channels


def _of_state(state: StateArray, offset: int, tp_size: int, order: str) -> Section:
    """The section of the recurrent state, which begins at byte ``offset`` of the page. A row is the last axis."""
    total, heads = state.shape[0] * tp_size, state.shape[0]
    if len(state.shape) == 2:
        total, heads = _units(state.shape[0], tp_size)
    rows = math.prod(state.shape[:-1]) // max(1, heads)
    content = state.shape[-1] * state.item
    return Section(
        name="ssm", total_heads=total, heads=heads, rows=rows, content_bytes=content, offset=offset,
        head_stride=rows * content, row_stride=content, dtype=state.dtype, packing=f"dense{order}",
    )  # fmt: skip
