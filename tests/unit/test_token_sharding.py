"""Shares of a prompt against sets of tokens, and against vLLM's own count of a rank's tokens where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.token_sharding import (
    ALL_TOKENS,
    TokenRuns,
    TokenShard,
    common_tokens,
    num_common_tokens,
    token_blocks,
)

shards = st.integers(1, 6).flatmap(
    lambda size: st.builds(TokenShard, st.just(size), st.integers(0, size - 1), st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
)
LONG = 1 << 12


def held(shard: TokenShard, tokens: int) -> list[int]:
    """Token by token, as vLLM's slot mapping says it."""
    return [t for t in range(tokens) if t // shard.interleave % shard.size == shard.rank]


def listed(places: TokenRuns) -> list[int]:
    found = [n for a, b in zip(places.starts, places.stops, strict=True) for n in range(a, b)]
    assert len(found) == places.num_tokens
    assert (places.starts[1:] > places.stops[:-1]).all()
    return found


@given(shards, st.integers(0, 200))
def test_tokens_are_counted(shard: TokenShard, tokens: int) -> None:
    assert shard.count(tokens) == len(held(shard, tokens))
    assert shard.whole == (shard.count(96 * 5) == 96 * 5)


@given(shards, shards)
@example(TokenShard(2, 0, 16), TokenShard(2, 1, 1))
@example(TokenShard(2, 0, 16), TokenShard(2, 1, 16))
def test_shares_meet_where_a_long_prompt_has_common_tokens(ours: TokenShard, theirs: TokenShard) -> None:
    assert ours.meets(theirs) == theirs.meets(ours) == bool(set(held(ours, LONG)) & set(held(theirs, LONG)))


@settings(max_examples=200)
@given(shards, shards, st.integers(0, 150), st.integers(0, 150))
@example(TokenShard(2, 0, 16), TokenShard(4, 2, 16), 0, 128)
@example(TokenShard(2, 0, 16), TokenShard(2, 0, 1), 5, 90)
@example(ALL_TOKENS, TokenShard(2, 1, 16), 20, 40)
@example(TokenShard(2, 1, 16), ALL_TOKENS, 3, 70)
def test_common_tokens_are_the_same_on_both_sides(
    ours: TokenShard, theirs: TokenShard, start: int, length: int
) -> None:
    stop = start + length
    both = sorted(set(held(ours, stop)) & set(held(theirs, stop)) & set(range(start, stop)))
    for mine, other in ((ours, theirs), (theirs, ours)):
        number = {token: place for place, token in enumerate(held(mine, stop))}
        places = common_tokens(mine, other, start, stop)
        assert listed(places) == [number[token] for token in both]
        assert num_common_tokens(mine, other, start, stop) == len(both)


def test_blocks_are_as_large_as_the_runs() -> None:
    ids, second, by_token = np.arange(10, 60), TokenShard(2, 1, 16), TokenShard(2, 0, 1)
    for ours, theirs, start, stop, block, size in (
        (ALL_TOKENS, second, 0, 320, 32, 16),
        (ALL_TOKENS, second, 0, 320, 48, 16),
        (ALL_TOKENS, second, 0, 320, 8, 8),
        (ALL_TOKENS, second, 5, 311, 16, 16),  # cut at either end
        (TokenShard(2, 0, 16), by_token, 0, 128, 16, 1),  # every second token of runs of 16
        (by_token, TokenShard(2, 0, 16), 0, 128, 16, 8),
    ):
        assert token_blocks(common_tokens(ours, theirs, start, stop), ids, block, 64 * block, 64).size == size
    whole = token_blocks(common_tokens(second, ALL_TOKENS, 40, 320), ids, 16, 1024, 64)
    assert whole.ids is ids and whole[1:] == (16, 1024, 16)
    places = common_tokens(ALL_TOKENS, TokenShard(4, 1, 4), 0, 256)
    assert token_blocks(places, ids, 16, 16 * 1152 + 128, 1152).stride % 128 == 0, "strides keep their alignment"


def test_vllm_counts_alike() -> None:
    utils = pytest.importorskip("vllm.v1.attention.backends.utils")
    torch = pytest.importorskip("torch")
    lengths = torch.arange(200, dtype=torch.int32)
    for size, interleave in ((2, 1), (2, 16), (4, 8), (3, 5)):
        for rank in range(size):
            theirs = utils.get_dcp_local_seq_lens(lengths, size, rank, interleave).tolist()
            assert theirs == [TokenShard(size, rank, interleave).count(n) for n in range(200)]
