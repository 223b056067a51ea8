"""What a rank's KV cache covers, as ranks send it to their peers. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content bytes per (head, token), K and V together.
Pure data, no torch, no vLLM: these structs travel in the handshake.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.connector.geometry.token_sharding import ALL_TOKENS, UNSHARDED, TokenShard, TokenSharding
from kvferry.transport.errors import PRINTABLE

Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=1, le=1 << 31)]

MAX_REGIONS = 256
"""Bound on the regions of a rank. Models with attention and states have many block tables, each state has sections."""

MAX_REGION_LAYERS = 512
"""Bound on the layers of a region: to decode a name takes time, also where the geometry is refused afterwards."""

CacheKind = Literal["full", "mla", "sliding_window", "chunked_local", "state"]
KEEPS_ALL = ("full", "mla")
"""Kinds of which an engine keeps the blocks of all tokens until a request ends."""


class RegionGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One region of a rank's caches: layers with the same form in memory, under one block table."""

    kind: CacheKind  # A ``state`` region holds one state per block; the rows of the state take the place of tokens
    layers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_REGION_LAYERS)]
    """The engine's layer names in order."""
    part: Annotated[str, Meta(max_length=64, pattern=PRINTABLE)] = ""
    """Of each layer's cache, empty for the whole cache."""
    block_size: Size
    """Tokens of a manager block; under context parallelism the rank's own tokens, as all sizes in memory."""
    head_start: Count
    num_heads: Size  # From ``head_start`` on, of the ``total_heads`` global KV heads; MLA has one head in all
    total_heads: Size
    content_bytes: Size  # C
    dtype: Name  # Of the elements, by torch's name if it has one
    keys: Count | None = None
    """The first elements of each (head, token) that are K, the others are V; ``None`` if that is not known."""
    scales: Annotated[tuple[tuple[float, float], ...], Meta(max_length=MAX_REGION_LAYERS)] = ()
    """Of K and V, for each layer; empty if all scales are 1."""
    window: Count = 0  # Tokens of a sliding window or of a local chunk, 0 for none
    packing: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)] = ""
    """The backend's own order of the tokens of one (kernel block, head), or the order in the sections of a state."""
    tile_tokens: Size = 1
    """Packed tokens have no bytes of their own: only whole tiles move, between ranks with the same packing."""
    shard: TokenShard = ALL_TOKENS  # Which tokens of a prompt the rank holds
    rows: Size = 1  # Pieces of a token's content in memory (``CacheView.rows``); they stay apart on the wire
    draft: Annotated[str, Meta(max_length=64, pattern=PRINTABLE)] = ""
    """Which model that drafts has these layers; empty for the model itself. D reads them from a P with the same one. No
    token depends on their KV, as the model checks each draft."""


class RankGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's place in its engine, and its regions. ``head_counts`` and ``shardings`` are those of all stages: every
    rank of an engine must compute the same ranks that read and release. Decoding bounds each number;
    ``compatibility.check_geometry`` checks whether the numbers fit together."""

    tp_rank: Count
    tp_size: Size
    pp_rank: Count
    pp_size: Size
    head_counts: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=64)]
    """The ``total_heads`` of all regions, ascending."""
    shardings: Annotated[tuple[TokenSharding, ...], Meta(min_length=1, max_length=4)] = UNSHARDED
    regions: Annotated[tuple[RegionGeometry, ...], Meta(max_length=MAX_REGIONS)]  # A pipeline stage may hold none


Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
Stride = Annotated[int, Meta(ge=0, lt=1 << 48)]


class PageLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where one region's pages lie in the memory of its rank, in bytes. A peer needs this to read them. Block ids are
    manager block ids; each is ``blocks_per_page`` kernel blocks of ``block_size`` tokens."""

    bases: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_REGION_LAYERS)]
    num_pages: Size
    blocks_per_page: Size
    block_size: Size
    block_stride: Stride
    head_stride: Stride
    token_stride: Stride
    rows: Size = 1
    row_stride: Stride = 0
