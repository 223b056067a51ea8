"""Shares of a prompt against sets of tokens, and against vLLM's own count of a rank's tokens where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.context import WHOLE, Blocks, Places, Share, blocks, common, num_common
from kvferry.connector.errors import GeometryError

shares = st.integers(1, 6).flatmap(
    lambda size: st.builds(Share, st.just(size), st.integers(0, size - 1), st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
)
LONG = 1 << 12


def held(share: Share, tokens: int) -> list[int]:
    """Token by token, as vLLM's slot mapping says it."""
    return [t for t in range(tokens) if t // share.interleave % share.size == share.rank]


def listed(places: Places) -> list[int]:
    found = [n for a, b in zip(places.starts.tolist(), places.stops.tolist(), strict=True) for n in range(a, b)]
    assert len(found) == places.num_tokens
    assert (places.starts[1:] > places.stops[:-1]).all()
    return found


@given(shares, st.integers(0, 200))
def test_tokens_are_counted(share: Share, tokens: int) -> None:
    assert share.count(tokens) == len(held(share, tokens))
    assert share.whole == (share.count(96 * 5) == 96 * 5)


@given(shares, shares)
@example(Share(2, 0, 16), Share(2, 1, 1))
@example(Share(2, 0, 16), Share(2, 1, 16))
def test_shares_meet_where_a_long_prompt_has_common_tokens(ours: Share, theirs: Share) -> None:
    assert ours.meets(theirs) == theirs.meets(ours) == bool(set(held(ours, LONG)) & set(held(theirs, LONG)))


@settings(max_examples=500)
@given(shares, shares, st.integers(0, 150), st.integers(0, 150))
@example(Share(2, 0, 16), Share(4, 2, 16), 0, 128)
@example(Share(2, 0, 16), Share(2, 0, 1), 5, 90)
@example(WHOLE, Share(2, 1, 16), 20, 40)
@example(Share(2, 1, 16), WHOLE, 3, 70)
def test_common_tokens_are_the_same_on_both_sides(ours: Share, theirs: Share, start: int, length: int) -> None:
    stop = start + length
    both = sorted(set(held(ours, stop)) & set(held(theirs, stop)) & set(range(start, stop)))
    for mine, other in ((ours, theirs), (theirs, ours)):
        number = {token: place for place, token in enumerate(held(mine, stop))}
        places = common(mine, other, start, stop)
        assert listed(places) == [number[token] for token in both]
        assert num_common(mine, other, start, stop) == len(both)


def addresses(of: Blocks, tokens: int, token_stride: int) -> list[int]:
    """Where ``Pages`` says that tokens lie."""
    at = [divmod(of.token + n, of.size) for n in range(tokens)]
    return [int(of.ids[block]) * of.stride + within * token_stride for block, within in at]


@settings(max_examples=500)
@given(
    shares, shares, st.integers(0, 60), st.integers(1, 100), st.sampled_from([1, 2, 4, 6, 16, 48]),
    st.integers(1, 5), st.integers(0, 9), st.randoms(use_true_random=False),
)  # fmt: skip
def test_blocks_lead_to_the_same_bytes(ours, theirs, start, length, size, token_stride, gap, rng) -> None:
    places = common(ours, theirs, start, start + length)
    ids = np.array(rng.sample(range(1000), -(-(start + length) // size)))
    stride = size * token_stride + gap
    found = blocks(places, ids, size, stride, token_stride)
    right = [int(ids[n // size]) * stride + n % size * token_stride for n in listed(places)]
    assert addresses(found, places.num_tokens, token_stride) == right
    assert size % found.size == 0


def test_blocks_are_as_large_as_the_runs() -> None:
    ids = np.arange(10, 60)
    every_second = common(WHOLE, Share(2, 1, 16), 0, 320)
    assert [blocks(every_second, ids, size, 64 * size, 64).size for size in (16, 32, 48, 8)] == [16, 16, 16, 8]
    assert blocks(common(WHOLE, Share(2, 1, 16), 5, 311), ids, 16, 1024, 64).size == 16, "cut at either end"
    whole = blocks(common(Share(2, 1, 16), WHOLE, 40, 320), ids, 16, 1024, 64)
    assert whole.ids is ids and whole[1:] == (16, 1024, 16)
    merged = common(Share(2, 0, 16), Share(2, 0, 1), 0, 128)  # every second token of runs of 16
    assert blocks(merged, ids, 16, 1024, 64).size == 1
    assert blocks(common(Share(2, 0, 1), Share(2, 0, 16), 0, 128), ids, 16, 1024, 64).size == 8


def test_strides_keep_their_alignment() -> None:
    found = blocks(common(WHOLE, Share(4, 1, 4), 0, 256), np.arange(16), 16, 16 * 1152 + 128, 1152)
    assert found.stride % 128 == 0


def test_no_common_tokens_are_an_empty_run() -> None:
    places = common(Share(2, 0, 16), Share(2, 1, 16), 0, 320)
    assert listed(places) == [] and places.dense
    assert blocks(places, np.arange(20), 16, 1024, 64).size == 16


def test_a_rank_outside_its_group_is_refused() -> None:
    Share(2, 1).check()
    with pytest.raises(GeometryError, match="rank 2 of 2"):
        Share(2, 2).check()


@given(shares, st.integers(1, 4), st.integers(0, 200))
def test_a_token_lies_where_vllm_writes_it(share: Share, ratio: int, token: int) -> None:
    """The arithmetic of ``_compute_slot_mappings_kernel`` (vllm/v1/worker/gpu/block_table.py, 0.32)."""
    block_size = ratio * share.interleave
    virtual_block, offset = divmod(token, block_size * share.size)
    is_local = offset // share.interleave % share.size == share.rank
    rounds, remainder = offset // (share.interleave * share.size), offset % share.interleave
    local_position = virtual_block * block_size + rounds * share.interleave + remainder
    assert is_local == (common(share, WHOLE, token, token + 1).num_tokens == 1)
    if is_local:
        assert listed(common(share, WHOLE, token, token + 1)) == [local_position] == [share.count(token)]


def test_vllm_counts_alike() -> None:
    utils = pytest.importorskip("vllm.v1.attention.backends.utils")
    torch = pytest.importorskip("torch")
    lengths = torch.arange(200, dtype=torch.int32)
    for size, interleave in ((2, 1), (2, 16), (4, 8), (3, 5)):
        for rank in range(size):
            theirs = utils.get_dcp_local_seq_lens(lengths, size, rank, interleave).tolist()
            assert theirs == [Share(size, rank, interleave).count(n) for n in range(200)]
