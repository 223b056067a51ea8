"""Caches whose backend packs the tokens of a block in an order of its own: whole tiles are carried, or nothing is.

Where the order is known, keys and values are divided into small tiles, and blocks of other sizes take them.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.read_plan import plan_reads
from kvferry.connector.geometry.spans import Span, check_span, check_spans
from kvferry.transport.errors import GeometryError, IncompatiblePeerError
from tests.handover.rank_group import RankGroup
from tests.support.ranks import Rank, grant, load_plan, peer, wait

PACKED = "transposed"
DIVISION = 8
"""Tokens in a tile of keys, below."""


def divided(tokens: int, content: int) -> np.ndarray:
    """[2, N, D]: keys in tiles of some tokens, the tokens of a tile innermost; values in halves, each of all tokens.

    Those of the larger blocks are long enough to be sent from where they lie.
    """
    channels = content // 2
    keys = np.arange(tokens * channels).reshape(-1, channels, DIVISION).swapaxes(1, 2).reshape(tokens, channels)
    halves = np.arange(tokens * channels).reshape(2, tokens, channels // 2)
    values = tokens * channels + halves.swapaxes(0, 1).reshape(tokens, channels)
    return np.stack([keys, values])


def elements(rank: Rank) -> torch.Tensor:
    """[N, C]: where each element of a token lies in its (block, head), as ``divided`` packs them."""
    keys, values = torch.from_numpy(divided(rank.block_size, rank.content))
    return torch.cat([keys, values], dim=1)


def fill_divided(rank: Rank, blocks: list[int], tokens: int) -> None:
    wanted, places = rank.wanted(tokens), elements(rank)
    for number, name in enumerate(rank.layers):
        flat = rank.caches[name].view(len(rank.caches[name]), len(rank.heads), -1)
        for token in range(tokens):
            flat[blocks[token // rank.block_size], :, places[token % rank.block_size]] = wanted[number, :, token]


def read_divided(rank: Rank, blocks: list[int], tokens: int) -> torch.Tensor:
    """[L, H, T, C] of a prompt."""
    stacked = torch.stack([rank.caches[name] for name in rank.layers])[:, torch.tensor(blocks)]
    found = stacked.flatten(-2)[..., elements(rank)]  # [L, n, H, N, C]
    flat = found.permute(0, 2, 1, 3, 4).reshape(len(rank.layers), len(rank.heads), -1, rank.content)
    return flat[:, :, :tokens]


def fill_transposed(rank: Rank, blocks: list[int], tokens: int) -> None:
    """Labels as vLLM's CPU attention keeps keys: [C, N] inside a (block, head); the rest of the last tile stays -1."""
    wanted = rank.wanted(tokens)
    for number, name in enumerate(rank.layers):
        tiles = rank.caches[name].view(len(rank.caches[name]), len(rank.heads), rank.content, rank.block_size)
        for token in range(tokens):
            tiles[blocks[token // rank.block_size], :, :, token % rank.block_size] = wanted[number, :, token]


def read_transposed(rank: Rank, blocks: list[int], tokens: int) -> torch.Tensor:
    """[L, H, T, C] of a prompt."""
    stacked = torch.stack([rank.caches[name] for name in rank.layers])[:, torch.tensor(blocks)]
    tiles = stacked.view(*stacked.shape[:3], rank.content, rank.block_size)  # [L, n, H, C, N]
    flat = tiles.permute(0, 2, 1, 4, 3).reshape(len(rank.layers), len(rank.heads), -1, rank.content)
    return flat[:, :, :tokens]


@pytest.mark.parametrize("slot_bytes", [64 << 10, 4 << 20])
@pytest.mark.parametrize("tokens", [1, 15, 16, 20, 77])
def test_all_tokens_arrive_whatever_the_order_inside_a_block(group: RankGroup, tokens: int, slot_bytes: int) -> None:
    settings = Settings(slot_bytes=slot_bytes, staging_bytes=16 << 20)
    p = group.rank(packing=PACKED, settings=settings, content=64)
    d = group.rank(packing=PACKED, settings=settings, content=64, engine_id="engine-d")
    blocks, ours = [3, 9, 1, 30, 7][: -(-tokens // 16)], [2, 4, 31, 0, 5][: -(-tokens // 16)]
    fill_transposed(p, blocks, tokens)
    token = grant([p], "req-p", blocks, tokens)
    d.worker.post(load_plan("req-d", token, peer([p]), ours, 0, tokens))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d]) and not d.failed
    assert torch.equal(read_transposed(d, ours, tokens), d.wanted(tokens))


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp", "zmq"])
@pytest.mark.parametrize(("sizes", "heads"), [((16, 32), 2), ((32, 16), 1), ((32, 48), 2), ((16, 16), 2)], ids=str)
def test_blocks_of_other_sizes_take_divided_ones(
    group: RankGroup, sizes: tuple[int, int], heads: int, plane: str
) -> None:
    """From one rank to each of two, so that heads are sliced too; P's last block is partial, and D's another."""
    settings = Settings(slot_bytes=64 << 10, staging_bytes=16 << 20, plane=plane)
    common = {"packing": PACKED, "settings": settings, "content": 64}
    p = group.rank(block_size=sizes[0], places=lambda layer: divided(sizes[0], 64), **common)
    ds = [
        group.rank(
            block_size=sizes[1], places=lambda layer: divided(sizes[1], 64), engine_id="engine-d",
            tp_rank=number, tp_size=heads, **common,
        )
        for number in range(heads)
    ]  # fmt: skip
    assert [region.part for region in p.context.caches.geometry.regions] == ["", "k", "v"]
    tokens = 77
    blocks, ours = [3, 9, 1, 30, 7][: -(-tokens // sizes[0])], [2, 4, 31, 0, 5][: -(-tokens // sizes[1])]
    fill_divided(p, blocks, tokens)
    token = grant([p], "req-p", blocks, tokens)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer([p]), ours, 0, tokens))
    assert wait(lambda: all(d.received == {"req-d"} for d in ds) and p.sent == {"req-p"}, [p, *ds])
    for d in ds:
        assert not d.failed and torch.equal(read_divided(d, ours, tokens), d.wanted(tokens))


def test_without_the_name_of_the_packing_the_same_bytes_are_wrong(group: RankGroup) -> None:
    """What the guard is for: token slices of packed tiles are not the tokens."""
    p, d = group.rank(), group.rank(engine_id="engine-d")
    fill_transposed(p, [3, 9], 20)
    token = grant([p], "req-p", [3, 9], 20)
    d.worker.post(load_plan("req-d", token, peer([p]), [2, 4], 0, 20))
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed
    assert not torch.equal(read_transposed(d, [2, 4], 20), d.wanted(20))


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"block_size": 32}, "tile_tokens"),
        ({"packing": "pairs"}, "packing"),
        ({"packing": ""}, "packing"),
        ({"places": lambda layer: divided(16, 16)}, "packing"),
    ],
)
def test_ranks_that_pack_otherwise_refuse_each_other(group: RankGroup, form: dict[str, object], field: str) -> None:
    p = group.rank(packing=PACKED)
    d = group.rank(**({"packing": PACKED, "engine_id": "engine-d"} | form))
    p.fill([1, 2], 20)
    token = grant([p], "req-p", [1, 2], 20)
    d.worker.post(load_plan("req-d", token, peer([p]), [1, 2], 0, 20))
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    assert all((d.caches[name] == -1).all() for name in d.layers)
    ours, theirs = (rank.context.caches.geometry for rank in (d, p))
    with pytest.raises(IncompatiblePeerError, match=f"{field} of layer"):
        compatible(ours, theirs)


def test_spans_of_packed_groups_are_whole_tiles(group: RankGroup) -> None:
    geometry = group.rank(packing=PACKED).context.caches.geometry
    (planned,) = plan_reads(geometry, geometry, [(17, 37)])
    assert (planned.span.token, planned.span.num_tokens) == (16, 32)
    check_spans([planned.span], geometry, 37)
    whole = Span(0, 0, 4, 0, 4, 0, 48)
    check_spans([whole], geometry, 37)
    for token, count, words in ((0, 37, "cuts through"), (5, 16, "cuts through"), (0, 64, "outside")):
        with pytest.raises(GeometryError, match=words):
            check_span(msgspec.structs.replace(whole, token=token, num_tokens=count), geometry, 37)
    with pytest.raises(GeometryError, match="elements"):
        check_spans([whole, whole], geometry, 37)
