"""What a rank's KV cache covers, as peers tell it to each other. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content bytes per (head, token), K and V together.
Pure data, no torch, no vLLM: these structs travel in the handshake.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.connector.geometry.token_sharding import ALL_TOKENS, UNSHARDED, TokenShard, TokenSharding

PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
"""No line ends and no control characters: what peers send ends up in log lines."""
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=1, le=1 << 31)]

PackingName = Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]

MAX_REGIONS = 256
"""Models that mix attention and states have many block tables, and each state several sections."""

CacheKind = Literal["full", "mla", "sliding_window", "chunked_local", "state"]


class RegionGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One region of a rank's caches: layers that lie in memory alike, under one block table.

    ``layers`` are the engine's layer names in order; ``part`` says which part of each layer's cache this is, empty for
    all of it. ``head_start``/``num_heads`` are the interval of the ``total_heads`` global KV heads that the rank holds;
    one head in all for MLA. ``block_size`` counts the tokens of a manager block (block ids are manager block ids);
    ``content_bytes`` is C; ``window`` counts the tokens of a sliding window or of a local chunk, 0 for none.
    A region of kind ``state`` holds one state per block, whose rows take the place of tokens.

    ``shard`` says which tokens of a prompt the rank holds, all but for context parallelism. Then ``block_size`` and all
    that is said of memory counts the rank's own tokens, as if there were no others.

    ``packing`` names an order of its own in which a backend keeps the tokens of one (kernel block, head), as vLLM's CPU
    attention does, or the sections of a state; empty where tokens lie one after the other. Where it is not, tokens have
    no bytes of their own: only whole tiles of ``tile_tokens`` tokens can be carried, between ranks that pack alike.

    ``rows``: how many pieces a token's content is cut into in memory (``CacheView.rows``); the wire keeps them apart.

    ``dtype`` says what elements are, by torch's name where it has one. ``keys`` of each (head, token)'s elements are K,
    those after them V; ``None`` where that is not known. ``scales`` of K and V stand for each layer; none where all
    are 1.
    """

    kind: CacheKind
    layers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]
    part: Annotated[str, Meta(max_length=64, pattern=PRINTABLE)] = ""
    block_size: Size
    head_start: Count
    num_heads: Size
    total_heads: Size
    content_bytes: Size
    dtype: Name
    keys: Count | None = None
    scales: Annotated[tuple[tuple[float, float], ...], Meta(max_length=4096)] = ()
    window: Count = 0
    packing: PackingName = ""
    tile_tokens: Size = 1
    shard: TokenShard = ALL_TOKENS
    rows: Size = 1


class RankGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's place in its engine, and its regions; a pipeline stage may hold none.

    ``head_counts`` are the ``total_heads`` of all regions of the engine, ascending, also of other stages': every rank
    of an engine must come to the same ranks that read and release. So with ``shardings``, how they share tokens out.
    Decoding bounds each number; whether they fit together is for ``agreement.check_geometry``, whose refusal is told.
    """

    tp_rank: Count
    tp_size: Size
    pp_rank: Count
    pp_size: Size
    head_counts: Annotated[tuple[Size, ...], Meta(min_length=1, max_length=64)]
    shardings: Annotated[tuple[TokenSharding, ...], Meta(min_length=1, max_length=4)] = UNSHARDED
    regions: Annotated[tuple[RegionGeometry, ...], Meta(max_length=MAX_REGIONS)]


Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
Stride = Annotated[int, Meta(ge=0, lt=1 << 48)]


class PageLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Where one region's pages lie in the memory of its rank, in bytes: what a peer that reads them must know.

    Block ids are manager block ids; each is ``blocks_per_page`` kernel blocks of ``block_size`` tokens.
    """

    bases: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=4096)]
    num_pages: Size
    blocks_per_page: Size
    block_size: Size
    block_stride: Stride
    head_stride: Stride
    token_stride: Stride
    rows: Size = 1
    row_stride: Stride = 0
