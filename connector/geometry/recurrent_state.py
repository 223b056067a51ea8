"""The state of a recurrent layer as sections, each of which is sharded over tensor-parallel ranks by itself. Pure.

A rank keeps one page per state: a convolution's last inputs, then the recurrent state, back to back, in a dense array
each; some families have only one of the two. The convolution runs over several projections side by side, and every rank
has its shard of each: ``[its x | its B | its C]``. So a page as a whole belongs to one tensor-parallel size, and a
section of it is heads like any others, of rows x C content bytes. Axes ``[L, B, H, N, C]``, rows in the place of N.

vLLM defines the order of the arrays, their content and their sharding: ``MambaBase.bind_kv_cache``, the layers'
weight loaders, and ``MambaStateShapeCalculator``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CHANNEL_UNITS = 2**8 * 3**2 * 5 * 7
"""Where channels are sharded one by one, this many at most count as heads: the size of a shard then divides for every
tensor-parallel size in use, and a plan need not look at thousands of heads."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a state page as a rank holds it; ``item`` bytes per element."""

    shape: tuple[int, ...]
    dtype: str
    item: int


@dataclass(frozen=True, slots=True)
class Section:
    """A part of every page: byte c of (head, row) lies at ``offset + head * head_stride + row * row_stride + c`` of it.

    ``total_heads`` counts the heads of all ranks, ``heads`` the heads of one rank. A head has
    ``rows`` rows of ``content_bytes``.
    ``packing``: the order that must agree on a peer beside these sizes, see ``RegionGeometry``.
    """

    name: str
    total_heads: int
    heads: int
    rows: int
    content_bytes: int
    offset: int
    head_stride: int
    row_stride: int
    dtype: str
    packing: str

    @property
    def end(self) -> int:
        """The first byte of a page behind it."""
        last = (self.heads - 1) * self.head_stride + (self.rows - 1) * self.row_stride
        return self.offset + last + self.content_bytes


@dataclass(frozen=True, slots=True)
class _Projection:
    """Side by side with others in a convolution: ``heads`` of ``channels`` each on a rank."""

    name: str
    total_heads: int
    heads: int
    channels: int


def whole_page(nbytes: int, total_heads: int, packing: str) -> Section:
    """A page of ``nbytes`` as its only section: one head, of ``total_heads`` different ones on all ranks. Its rows mean
    nothing; they let a message hold less than all of it."""
    rows = math.gcd(nbytes, 1024)
    row = nbytes // rows
    return Section("", total_heads, 1, rows, row, 0, nbytes, row, "int8", packing)


def sections(
    family: str,
    arrays: Sequence[StateArray],
    tp_size: int,
    *,
    dim_first: bool,
    group_counts: frozenset[int] = frozenset(),
    order: str = "",
) -> tuple[Section, ...]:
    """The sections of a page. None where its sharding is not known: the page must then stay whole.

    Args:
        family: the name of vLLM's ``MambaAttentionBackendEnum``.
        arrays: the arrays of one rank, in their order in the page: ``[inputs, channels]`` of the convolution, or the
            reverse where ``dim_first``; the recurrent state with heads, or channels, first.
        tp_size: ranks that share a state.
        group_counts: how many groups Mamba2's B and C may have in the whole model. Ranks beyond a single group hold
            copies of it, which their shapes do not tell from groups of their own.
        order: names an order of the content that is a platform's own.
    """
    dims = tuple(len(array.shape) for array in arrays)
    if (family, dims) not in _FAMILIES:
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


_FAMILIES = {
    ("MAMBA1", (2, 2)),
    ("MAMBA2", (2, 3)),
    ("GDN_ATTN", (2, 3)),
    ("SHORT_CONV", (2,)),
    ("LINEAR", (3,)),
}
"""Families and the dimensions of their arrays. Others of the same name (replay rings) hold more, shared in ways of
their own."""


def _units(channels: int, tp_size: int) -> tuple[int, int]:
    """Channels that are sharded one by one, as heads: (all ranks', one rank's); none where they do not divide."""
    total = math.gcd(channels * tp_size, CHANNEL_UNITS)
    return (total, total // tp_size) if total % tp_size == 0 else (total, 0)


def _projections(
    family: str, channels: int, state: StateArray | None, tp_size: int, group_counts: frozenset[int]
) -> list[_Projection]:
    """What the convolution's channels are, in order; none where they do not add up."""
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
    taps, width = reversed(conv.shape) if dim_first else conv.shape
    first = 0
    for part in projections:
        content = (taps if dim_first else part.channels) * conv.item
        yield Section(
            name=part.name,
            total_heads=part.total_heads,
            heads=part.heads,
            rows=part.channels if dim_first else taps,
            content_bytes=content,
            offset=first * conv.item * (taps if dim_first else 1),
            head_stride=part.channels * content if dim_first else content,
            row_stride=content if dim_first else width * conv.item,
            dtype=conv.dtype,
            packing=f"{'DS' if dim_first else 'SD'} of {taps} inputs{order}",
        )
        first += part.heads * part.channels


def _of_state(state: StateArray, offset: int, tp_size: int, order: str) -> Section:
    total, heads = state.shape[0] * tp_size, state.shape[0]
    if len(state.shape) == 2:
        total, heads = _units(state.shape[0], tp_size)
    rows = math.prod(state.shape[:-1]) // max(1, heads)
    content = state.shape[-1] * state.item
    return Section(
        name="ssm",
        total_heads=total,
        heads=heads,
        rows=rows,
        content_bytes=content,
        offset=offset,
        head_stride=rows * content,
        row_stride=content,
        dtype=state.dtype,
        packing=f"dense{order}",
    )
