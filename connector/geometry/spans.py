"""Spans that a peer requests: the checks before they are served, and their division into messages. Pure.

A span is a box in (layer, head, token) space of one of P's regions (``Span``). A chunk is one message, a box
inside a span, on the wire contiguous ``[layers][heads][tokens][C]``; both sides cut in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from kvferry.connector.geometry.rank_geometry import Count, RankGeometry, RegionGeometry, Size
from kvferry.connector.geometry.token_sharding import ALL_TOKENS, TokenShard, common_tokens, num_common_tokens
from kvferry.transport.errors import GeometryError

MAX_CHUNKS = 1 << 20
"""Bound on the messages that one span is cut into; a peer names the span and the size of a message."""

MAX_SPANS = 4096  # Bound on the spans of one read. P checks all of them before it answers, which takes some 10 ms.

MAX_LISTED_RUNS = 1 << 14  # Runs of tokens of one layer that are kept for the next layer

TAPER_BYTES, TAPERED = 32 << 20, 3
"""If the last of several messages of a span would be at least ``TAPERED`` times ``TAPER_BYTES``, its last
``TAPER_BYTES`` are a message of their own: no bytes move while D unpacks the last message. The first one is not cut:
the link would wait for the second, as each message costs both sides 0.2 ms of steps, in which NVLink moves 75 MB."""

MAX_RANGES = 256  # Bound on the token ranges of one read; a read needs one range for each kind of region


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A box of one of P's regions, in P's own numbering: layers, heads, tokens, each (first, count). Token numbers
    count in the prompt. The span contains the tokens that P holds and that are in ``shard``, D's shard. Where the ranks
    of either side shard tokens, these are fewer than ``num_tokens``."""

    region: Count
    layer: Count
    num_layers: Size
    head: Count
    num_heads: Size
    token: Count
    num_tokens: Size
    shard: TokenShard = ALL_TOKENS


class Chunk(NamedTuple):
    """A part of a span, with all of its heads. ``layer`` and ``token`` count from the span's first ones, and only
    tokens that both sides hold."""

    layer: int
    num_layers: int
    token: int
    num_tokens: int


_new_chunk: Callable[[tuple[int, int, int, int]], Chunk] = partial(tuple.__new__, Chunk)


def check_span(span: Span, geometry: RankGeometry, num_tokens: int) -> None:
    """Check that a span from a peer lies inside our rank and a prompt of ``num_tokens``. Raises GeometryError."""
    if span.region >= len(geometry.regions):
        raise GeometryError(f"span of region {span.region}, there are {len(geometry.regions)} regions")
    region = geometry.regions[span.region]
    span.shard.check()
    for axis, first, count, bound in (
        ("layers", span.layer, span.num_layers, len(region.layers)),
        ("heads", span.head, span.num_heads, region.num_heads),
        ("tokens", span.token, span.num_tokens, whole_tiles(num_tokens, region)),
    ):
        if first < 0 or count < 1 or first + count > bound:
            raise GeometryError(f"span of {axis} {first}..{first + count} is outside 0..{bound} of group {span.region}")
    if span.token % region.tile_tokens or span.num_tokens % region.tile_tokens:
        raise GeometryError(
            f"span of tokens {span.token}..{span.token + span.num_tokens} cuts through tiles of {region.tile_tokens} "
            f"tokens, which group {span.region} packs ({region.packing})"
        )


def span_tokens(span: Span, shard: TokenShard) -> int:
    """Tokens of a span that both sides hold. ``shard`` is P's."""
    return num_common_tokens(shard, span.shard, span.token, span.token + span.num_tokens)


def whole_tiles(num_tokens: int, region: RegionGeometry) -> int:
    """Tokens of the tiles that hold the first ``num_tokens``; the same number where the region is not packed."""
    return -(-num_tokens // region.tile_tokens) * region.tile_tokens


def check_spans(spans: Sequence[Span], geometry: RankGeometry, num_tokens: int) -> None:
    """``check_span`` for each; together they have no more elements than the rank holds. Raises GeometryError."""
    asked: dict[int, int] = {}
    ranges = {(span.token, span.num_tokens) for span in spans}
    if len(ranges) > MAX_RANGES:
        raise GeometryError(f"spans of {len(ranges)} different ranges of tokens, limit {MAX_RANGES}")
    for span in spans:
        check_span(span, geometry, num_tokens)
        held = span_tokens(span, geometry.regions[span.region].shard)
        if not held:
            raise GeometryError(f"span of tokens {span.token}..{span.token + span.num_tokens}, of which we hold none")
        asked[span.region] = asked.get(span.region, 0) + span.num_layers * span.num_heads * held
    for index, elements in asked.items():
        region = geometry.regions[index]
        bound = len(region.layers) * region.num_heads * region.shard.count(whole_tiles(num_tokens, region))
        if elements > bound:
            raise GeometryError(f"spans of group {index} ask for {elements} (layer, head, token) elements of {bound}")


class SpanCut(msgspec.Struct, frozen=True):
    """The cut of a span into chunks. ``len`` is their number, which is computed without them; iteration makes them one
    after the other, so a long read costs no memory."""

    num_layers: int
    step: int  # Whole layers of a chunk, with all tokens
    first: int  # The number of the span's first token in the prompt
    num_tokens: int
    most: int  # Tokens of a chunk, where one layer has more: then a chunk is a run of tokens of one layer
    align: int  # The multiple at which runs end
    token_bytes: int

    @property
    def _tapers(self) -> bool:
        """Whether the last chunk may be cut once more. Then chunks are so large that they are few."""
        return self.most * self.token_bytes >= TAPERED * TAPER_BYTES

    def __len__(self) -> int:
        if self._tapers:
            return sum(1 for _ in self)
        if self.num_tokens <= self.most:
            return (self.num_layers + self.step - 1) // self.step
        return self.num_layers * _num_runs(self.first, self.num_tokens, self.most, self.align)

    def __iter__(self) -> Iterator[Chunk]:
        cut = self._even()
        return iter(_tapered(list(cut), self.token_bytes, self.first, self.align)) if self._tapers else cut

    def _even(self) -> Iterator[Chunk]:
        if self.num_tokens <= self.most:
            for layer in range(0, self.num_layers, self.step):
                yield Chunk(layer, min(self.step, self.num_layers - layer), 0, self.num_tokens)
            return
        runs: Iterable[tuple[int, int]] = ()
        for layer in range(self.num_layers):
            if not isinstance(runs, list):
                runs = _token_runs(self.first, self.num_tokens, self.most, self.align)
                if self.num_tokens <= MAX_LISTED_RUNS * self.most // 2:
                    runs = list(runs)
            # Ten thousand chunks for a long prompt: tuple.__new__ takes half the time of calling Chunk.
            yield from (_new_chunk((layer, 1, *run)) for run in runs)


def cut_span(
    span: Span, content_bytes: int, chunk_bytes: int, token_align: int = 1, shard: TokenShard = ALL_TOKENS
) -> SpanCut:
    """Cut a span into messages of at most ``chunk_bytes``; the same on both sides. ``shard`` is P's. As many whole
    layers with all tokens as fit; where one layer does not fit, runs of its tokens, with cuts at multiples of
    ``token_align`` (counted from the start of the prompt, as blocks are) wherever one is within reach. The last chunk
    is smaller, see ``TAPER_BYTES``. Raises GeometryError: one token of the span does not fit into ``chunk_bytes``, or
    more than ``MAX_CHUNKS`` result."""
    first, num_tokens = span.token, span.num_tokens
    if not (shard.whole and span.shard.whole):
        places = common_tokens(shard, span.shard, span.token, span.token + span.num_tokens)
        first, num_tokens = int(places.starts[0]), places.num_tokens
        token_align = token_align if places.dense else 1
    token_bytes = span.num_heads * content_bytes
    most = chunk_bytes // token_bytes
    if most < 1:
        raise GeometryError(
            f"one token of {span.num_heads} heads x {content_bytes} bytes does not fit into a message of "
            f"{chunk_bytes} bytes; raise slot_bytes to {token_bytes} or more"
        )
    step = max(1, most // num_tokens)
    cut = SpanCut(span.num_layers, step, first, num_tokens, most, max(1, token_align), token_bytes)
    # Alignment shortens a run by less than half on average.
    runs = 1 if num_tokens <= most else -(-2 * num_tokens // most)
    if -(-span.num_layers // step) * runs > MAX_CHUNKS:
        raise GeometryError(
            f"span of {span.num_layers} layers x {num_tokens} tokens makes more than {MAX_CHUNKS} messages "
            f"of {chunk_bytes} bytes"
        )
    return cut


def _tapered(cut: list[Chunk], token_bytes: int, first: int, align: int) -> list[Chunk]:
    """The chunks, with a small message cut from the last one; ``first`` is the number of token 0."""
    layer, layers, token, tokens = cut[-1]
    layer_bytes = tokens * token_bytes
    if len(cut) == 1 or layers * layer_bytes < TAPERED * TAPER_BYTES:
        return cut
    if layers > 1:
        kept = layers - max(1, TAPER_BYTES // layer_bytes)
        cut[-1:] = Chunk(layer, kept, token, tokens), Chunk(layer + kept, layers - kept, token, tokens)
    else:
        kept = (first + token + tokens - TAPER_BYTES // token_bytes) // align * align - first - token
        if 0 < kept < tokens:
            cut[-1:] = Chunk(layer, 1, token, kept), Chunk(layer, 1, token + kept, tokens - kept)
    return cut


def _token_runs(first: int, total: int, most: int, align: int) -> Iterator[tuple[int, int]]:
    token = 0
    while token < total:
        stop = min(token + most, total)
        if stop < total:
            aligned = (first + stop) // align * align - first
            stop = aligned if aligned > token else stop
        yield token, stop - token
        token = stop


def _num_runs(first: int, total: int, most: int, align: int) -> int:
    """The number of ``_token_runs``. The last run begins where at most ``most`` tokens are left; the others begin at
    the first token, at each multiple of ``align``, and every ``most`` tokens behind one."""
    begin, end = first, first + total - most  # the runs that begin in here are followed by another one
    if end <= begin:
        return 1
    if most >= align:
        aligned = (begin + most) // align * align
        stride = most // align * align
        return 2 + max(0, -(-(end - aligned) // stride))
    boundary = -(-begin // align) * align
    runs = -(-(min(end, boundary) - begin) // most)
    if end > boundary:
        blocks, rest = divmod(end - boundary, align)
        runs += blocks * -(-align // most) - (-rest // most)
    return runs + 1
