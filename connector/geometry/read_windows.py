"""The order of a read whose prompt P still computes: what P computes first is read first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.geometry.spans import MAX_RANGES, MAX_SPANS
from kvferry.connector.geometry.token_sharding import num_common_tokens

MAX_WINDOWS = 64
"""Bound on the windows of a read: P's first step may have been short, and each message takes 0.2 ms of both sides."""
STREAM_PARTS = 8
"""Messages of one window at least, where they can be small enough: the layers that P has computed leave while it
computes the others (``prefill_events.LAYER_GROUPS``)."""


def in_windows(
    planned: Sequence[PlannedSpan], remote: RankGeometry, found: int, step_tokens: int
) -> tuple[PlannedSpan, ...]:
    """A plan (``plan_reads``) with the same layers, heads and tokens, in the order in which P computes the tokens.

    The spans are cut at the tokens ``found``, ``found + step_tokens``, ``found + 2 * step_tokens``, and so on. The
    parts of the first window come first. A region that is packed in tiles is cut between tiles. Where there would be
    more than ``MAX_WINDOWS`` windows, ``MAX_SPANS`` spans or ``MAX_RANGES`` ranges of tokens, windows are longer.

    Args:
        planned: the plan of one P rank, at most ``MAX_SPANS`` spans.
        remote: P's rank.
        found: tokens that P had before it began to compute.
        step_tokens: tokens that P computes in one step, more than 0.
    """
    if not planned:
        return ()
    first = min(item.span.token for item in planned)
    stop = max(item.span.token + item.span.num_tokens for item in planned)
    ranges = {(item.span.token, item.span.num_tokens) for item in planned}
    most = min(MAX_WINDOWS, MAX_SPANS // len(planned), MAX_RANGES // len(ranges)) - 1  # beside the tokens found
    if most < 1:
        return tuple(planned)
    steps = -(-max(0, stop - max(first, found)) // step_tokens)
    width = step_tokens * max(1, -(-steps // most))
    bounds = [first, *(bound for bound in range(found, stop, width) if bound > first), stop]
    ordered: list[PlannedSpan] = []
    for start, end in pairwise(bounds):
        ordered += (part for item in planned if (part := _within(item, remote, start, end, last=end == stop)))
    return tuple(ordered)


def part_bytes(planned: Sequence[PlannedSpan], remote: RankGeometry) -> int:
    """Bytes of a message that holds one of ``STREAM_PARTS`` parts of the layers of a span, for the largest span."""
    return max(
        -(-item.span.num_layers // STREAM_PARTS)
        * item.span.num_heads
        * item.span.num_tokens
        * remote.regions[item.span.region].content_bytes
        for item in planned
    )


def _within(item: PlannedSpan, remote: RankGeometry, start: int, end: int, *, last: bool) -> PlannedSpan | None:
    """The part of a span in tokens ``[start, end)``, or ``None``."""
    span, tile = item.span, remote.regions[item.span.region].tile_tokens
    low = max(span.token, start // tile * tile)
    high = min(span.token + span.num_tokens, end if last else end // tile * tile)
    if low >= high or not num_common_tokens(item.shard, span.shard, low, high):
        return None
    whole = low == span.token and high == span.token + span.num_tokens
    return item if whole else item._replace(span=replace(span, token=low, num_tokens=high - low))
