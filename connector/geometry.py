"""What a rank's KV cache covers, as peers tell it to each other. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content bytes per (head, token), K and V together.
Pure data, no torch, no vLLM: these structs travel in the handshake.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
"""No line ends and no control characters: what peers send ends up in log lines."""
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=1, le=1 << 31)]

PackingName = Annotated[str, Meta(max_length=64, pattern=PRINTABLE)]

GroupKind = Literal["full", "mla", "sliding_window", "chunked_local", "state"]


class GroupGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One layer group (one block table) on one rank.

    ``layers`` are the engine's layer names in order; ``head_start``/``num_heads`` the interval of global KV heads
    that the rank holds; ``block_size`` the tokens of a manager block (block ids are manager block ids);
    ``content_bytes`` C; ``window`` tokens of a sliding window, 0 for none.

    ``packing`` names an order of its own in which a backend keeps the tokens of one (kernel block, head), as vLLM's CPU
    attention does; empty where they lie one after the other. Then tokens have no bytes of their own: only whole tiles
    of ``tile_tokens`` tokens can be carried, between ranks that pack alike.
    """

    kind: GroupKind
    layers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]
    block_size: Size
    head_start: Count
    num_heads: Size
    content_bytes: Size
    dtype: Name
    window: Count = 0
    packing: PackingName = ""
    tile_tokens: Size = 1


class RankGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's place in its engine, and the layer groups that it holds layers of; a pipeline stage may hold none.

    Decoding bounds each number; whether they fit together is for ``plan.check_geometry``, whose refusal is answered.
    """

    tp_rank: Count
    tp_size: Size
    pp_rank: Count
    pp_size: Size
    total_num_kv_heads: Size
    is_mla: bool
    groups: Annotated[tuple[GroupGeometry, ...], Meta(max_length=64)]


Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
Stride = Annotated[int, Meta(ge=0, lt=1 << 48)]


class PageLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where one layer group's pages lie in the memory of its rank, in bytes: what a peer that reads them must know.

    Block ids are manager block ids; each is ``blocks_per_page`` kernel blocks of ``block_size`` tokens.
    """

    bases: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=4096)]
    num_pages: Size
    blocks_per_page: Size
    block_size: Size
    block_stride: Stride
    head_stride: Stride
    token_stride: Stride
