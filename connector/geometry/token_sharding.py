"""Which tokens of a prompt a rank holds where ranks shard them, and which tokens two ranks have in common. Pure.

Under context parallelism a block table is the same on all ranks of a group, and each keeps every n-th run of tokens. A
rank numbers only its own tokens: a block of N stands for N x ``size`` tokens of the prompt. Tokens that two ranks have
in common lie in the same order on both and on the wire, so neither side needs the token numbers of the other.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.transport.errors import GeometryError

Int64s = npt.NDArray[np.int64]

MAX_SHARES = 4096  # Bound on the ranks that shard tokens; a peer sends its own count


class TokenSharding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, order=True):
    """How the ranks of an engine shard tokens: ``size`` neighbouring tensor-parallel ranks in turn, ``interleave``
    tokens each, by default none. As in vLLM, rank r is number ``r % size``."""

    size: Annotated[int, Meta(ge=1, le=MAX_SHARES)] = 1
    interleave: Annotated[int, Meta(ge=1, le=1 << 31)] = 1

    def shard(self, tp_rank: int) -> TokenShard:
        """The shard of a tensor-parallel rank."""
        return TokenShard(self.size, tp_rank % self.size, self.interleave)


UNSHARDED = (TokenSharding(),)  # The shardings of an engine whose ranks all hold every token


class TokenShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One rank's part of a prompt: token t where ``t // interleave % size == rank``, by default all of them. The rule
    of vLLM's decode context parallelism (``cp_kv_cache_interleave_size``)."""

    size: Annotated[int, Meta(ge=1, le=MAX_SHARES)] = 1
    rank: Annotated[int, Meta(ge=0, lt=MAX_SHARES)] = 0
    interleave: Annotated[int, Meta(ge=1, le=1 << 31)] = 1

    @property
    def sharding(self) -> TokenSharding:
        """The sharding of all the ranks of the group."""
        return TokenSharding(self.size, self.interleave)

    @property
    def whole(self) -> bool:
        """Whether the shard has all tokens."""
        return self.size == 1

    def count(self, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` the rank holds, which is also its own number for the next one."""
        if self.size == 1:
            return num_tokens
        rounds, rest = divmod(num_tokens, self.interleave * self.size)
        return rounds * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def meets(self, other: TokenShard) -> bool:
        """Whether a long enough prompt has tokens in both. Each is a run of residues, modulo its round: some pair of
        them is equal modulo what the rounds have in common."""
        common = math.gcd(self.interleave * self.size, other.interleave * other.size)
        low = self.rank * self.interleave - (other.rank + 1) * other.interleave + 1
        return (low + self.interleave + other.interleave - 2) // common * common >= low

    def check(self) -> None:
        """Raises GeometryError if the rank is outside the group."""
        if self.rank >= self.size:
            raise GeometryError(f"rank {self.rank} of {self.size} that share tokens out, expected one below that")


ALL_TOKENS = TokenShard()


class TokenRuns(NamedTuple):
    """Tokens in a rank's own numbering: ``num_tokens`` in runs ``[starts[i], stops[i])`` that ascend and do not touch.
    No tokens are one empty run."""

    num_tokens: int
    starts: Int64s
    stops: Int64s

    @property
    def dense(self) -> bool:
        """Whether the tokens lie one after the other."""
        return len(self.starts) == 1


class TokenBlocks(NamedTuple):
    """Tokens as ``kernels.paged_copy.Pages`` takes them: place ``token`` + i of blocks ``ids`` of ``size`` tokens,
    ``stride`` bytes from id to id."""

    ids: Int64s
    size: int
    stride: int
    token: int


def common_tokens(ours: TokenShard, theirs: TokenShard, start: int, stop: int) -> TokenRuns:
    """The tokens of ``[start, stop)`` that both ranks hold, as places in ours. Ascending, as on the other side."""
    if _all_in_common(ours, theirs):
        first, last = ours.count(start), max(ours.count(start), ours.count(stop))
        return TokenRuns(last - first, np.array([first]), np.array([last]))
    return _common(ours, theirs, start, stop)


def _all_in_common(ours: TokenShard, theirs: TokenShard) -> bool:
    """Whether the other rank holds all of our tokens."""
    return theirs.size == 1 or ours == theirs


@lru_cache(maxsize=128)
def _common(ours: TokenShard, theirs: TokenShard, start: int, stop: int) -> TokenRuns:
    """A rank holds all ``unit`` tokens of a unit or none; the runs are whole units, except where the ends clip them."""
    sizes = [shard.interleave for shard in (ours, theirs) if not shard.whole]
    unit = math.gcd(*sizes)
    edges = np.arange(start // unit, -(-stop // unit), dtype=np.int64) * unit
    held = np.ones(len(edges), dtype=np.bool_)
    for shard in (ours, theirs):
        held &= edges // shard.interleave % shard.size == shard.rank
    edges = edges[held]
    begins, ends = np.maximum(edges, start), np.minimum(edges + unit, stop)
    if not len(edges):
        none = np.array([ours.count(start)])
        return TokenRuns(0, none, none)
    # Tokens of one unit lie together in either numbering.
    local = edges if ours.whole else edges // (ours.interleave * ours.size) * ours.interleave + edges % ours.interleave
    starts, stops = local + begins - edges, local + ends - edges
    apart = starts[1:] != stops[:-1]
    first, last = np.concatenate([[True], apart]), np.concatenate([apart, [True]])
    return TokenRuns(int((ends - begins).sum()), starts[first], stops[last])


def num_common_tokens(ours: TokenShard, theirs: TokenShard, start: int, stop: int) -> int:
    """How many tokens of ``[start, stop)`` both ranks hold."""
    if ours.size == theirs.size == 1:  # as in most engines: a hand-over counts many times
        return max(0, stop - start)
    if _all_in_common(ours, theirs):
        return max(0, ours.count(stop) - ours.count(start))
    return _common(ours, theirs, start, stop).num_tokens


def token_blocks(places: TokenRuns, ids: Int64s, block_size: int, block_stride: int, token_stride: int) -> TokenBlocks:
    """Tokens at ``places``, in blocks as large as their runs allow: a paged copy takes every token of its blocks, so a
    block divides the places where runs begin and end, and ``block_size``. ``places``: in this rank's numbering.
    ``ids``: blocks of ``block_size`` tokens that cover them. Strides in bytes, from id to id, from token to token."""
    if places.dense:
        return TokenBlocks(ids, block_size, block_stride, int(places.starts[0]))
    size = math.gcd(block_size, int(np.gcd.reduce(places.starts[1:])), int(np.gcd.reduce(places.stops[:-1])))
    low, high = places.starts // size, -(-places.stops // size)
    counts = high - low
    before = np.concatenate([[0], np.cumsum(counts)[:-1]])
    pieces = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(low - before, counts)
    block, within = np.divmod(pieces, block_size // size)
    stride = math.gcd(block_stride, size * token_stride)
    small = ids[block] * (block_stride // stride) + within * (size * token_stride // stride)
    return TokenBlocks(small, size, stride, int(places.starts[0]) % size)


def common_blocks(
    ours: TokenShard, theirs: TokenShard, start: int, stop: int, ids: Int64s, block_size: int, block_stride: int,
    token_stride: int,
) -> tuple[int, TokenBlocks]:  # fmt: skip
    """The number of tokens of ``[start, stop)`` that both ranks hold, and ``token_blocks`` of them."""
    if ours.size == theirs.size == 1:
        return max(0, stop - start), TokenBlocks(ids, block_size, block_stride, start)
    if _all_in_common(ours, theirs):
        first = ours.count(start)
        return max(0, ours.count(stop) - first), TokenBlocks(ids, block_size, block_stride, first)
    places = _common(ours, theirs, start, stop)
    return places.num_tokens, token_blocks(places, ids, block_size, block_stride, token_stride)
