"""What a rank's KV cache covers, as ranks send it to their peers. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content bytes per (head, token), K and V together.
Pure data, no torch, no vLLM: these structs travel in the handshake.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.connector.geometry.token_sharding import ALL_TOKENS, UNSHARDED, TokenShard, TokenSharding

PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
"""No line ends and no control characters: KVFerry logs the strings that peers send."""
Name = Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE)]
Count = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=1, le=1 << 31)]

PackingName = Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]

MAX_REGIONS = 256
"""Bound on the regions of a rank. Models with attention and states have many block tables, each state has sections."""

MAX_REGION_LAYERS = 512
"""Bound on the layers of a region: to decode a name takes time, also where the geometry is refused afterwards."""

CacheKind = Literal["full", "mla", "sliding_window", "chunked_local", "state"]


class RegionGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One region of a rank's caches: layers with the same form in memory, under one block table.

    ``layers`` are the engine's layer names in order; ``part`` names the part of each layer's cache, empty for the whole
    cache. ``head_start``/``num_heads`` are the interval of the ``total_heads`` global KV heads that the rank holds; MLA
    has one head in all. ``block_size`` counts the tokens of a manager block (block ids are manager block ids);
    ``content_bytes`` is C; ``window`` counts the tokens of a sliding window or of a local chunk, 0 for none.
    A region of kind ``state`` holds one state per block; the rows of the state take the place of tokens.

    ``shard`` defines which tokens of a prompt the rank holds: all tokens, except under context parallelism. There,
    ``block_size`` and all sizes in memory count only the rank's own tokens.

    ``packing`` names the backend's own order of the tokens of one (kernel block, head), as in vLLM's CPU attention, or
    the order in the sections of a state. It is empty where tokens lie one after the other. Packed tokens have no bytes
    of their own: only whole tiles of ``tile_tokens`` tokens can move, between ranks with the same packing.

    ``rows``: the number of pieces of a token's content in memory (``CacheView.rows``); they stay apart on the wire.

    ``dtype`` is the type of the elements, by torch's name if it has one. The first ``keys`` elements of each
    (head, token) are K, the others V; ``None`` if ``keys`` is not known. ``scales`` has one pair, of K and V, for each
    layer; it is empty if all scales are 1.
    """

    kind: CacheKind
    layers: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_REGION_LAYERS)]
    part: Annotated[str, Meta(max_length=64, pattern=PRINTABLE)] = ""
    block_size: Size
    head_start: Count
    num_heads: Size
    total_heads: Size
    content_bytes: Size
    dtype: Name
    keys: Count | None = None
    scales: Annotated[tuple[tuple[float, float], ...], Meta(max_length=MAX_REGION_LAYERS)] = ()
    window: Count = 0
    packing: PackingName = ""
    tile_tokens: Size = 1
    shard: TokenShard = ALL_TOKENS
    rows: Size = 1


class RankGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's place in its engine, and its regions; a pipeline stage may hold none.

    ``head_counts`` are the ``total_heads`` of all regions of the engine, ascending, other stages included: every rank
    of an engine must compute the same ranks that read and release. ``shardings``, the engine's token shardings, are
    complete for the same reason. Decoding bounds each number. ``compatibility.check_geometry`` checks whether the
    numbers fit together; the peer receives its error.
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
    """Where one region's pages lie in the memory of its rank, in bytes. A peer needs this to read them.

    Block ids are manager block ids; each is ``blocks_per_page`` kernel blocks of ``block_size`` tokens.
    """

    bases: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=MAX_REGION_LAYERS)]
    num_pages: Size
    blocks_per_page: Size
    block_size: Size
    block_stride: Stride
    head_stride: Stride
    token_stride: Stride
    rows: Size = 1
    row_stride: Stride = 0
