"""Caches whose backend packs the tokens of a block in an order of its own: whole tiles are carried, or nothing is.

Where the order is known, keys and values are divided into small tiles, and blocks of other sizes take them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.read_plan import plan_reads
from kvferry.connector.geometry.spans import Span, check_span, check_spans
from kvferry.transport.errors import GeometryError, IncompatiblePeerError
from tests.handover.scenario import SMALL, RankGroup, begin, is_wiped
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


def places(rank: Rank, order: str) -> torch.Tensor:
    """[N, C]: where each element of a token lies in its (block, head). As ``divided``, or as vLLM's CPU attention keeps
    keys: [C, N]."""
    if order == "divided":
        return torch.cat([torch.from_numpy(part) for part in divided(rank.block_size, rank.content)], dim=1)
    return torch.arange(rank.block_size * rank.content).view(rank.content, rank.block_size).T


def fill_packed(rank: Rank, blocks: list[int], tokens: int, order: str = PACKED) -> None:
    """The labels of a prompt; the rest of the last tile stays -1."""
    wanted, where, token = rank.wanted(tokens), places(rank, order), torch.arange(tokens)
    block, slots = torch.tensor(blocks)[token // rank.block_size], where[token % rank.block_size]
    for number, name in enumerate(rank.layers):
        flat = rank.caches[name].view(len(rank.caches[name]), len(rank.heads), -1)
        flat[block[:, None], :, slots] = wanted[number].permute(1, 2, 0)  # [T, C, H]


def read_packed(rank: Rank, blocks: list[int], tokens: int, order: str = PACKED) -> torch.Tensor:
    """[L, H, T, C] of a prompt."""
    stacked = torch.stack([rank.caches[name] for name in rank.layers])[:, torch.tensor(blocks)]
    found = stacked.flatten(-2)[..., places(rank, order)]  # [L, n, H, N, C]
    flat = found.permute(0, 2, 1, 3, 4).reshape(len(rank.layers), len(rank.heads), -1, rank.content)
    return flat[:, :, :tokens]


@pytest.mark.parametrize("slot_bytes", [64 << 10, 4 << 20])
@pytest.mark.parametrize("tokens", [1, 15, 16, 20, 77])
def test_all_tokens_arrive_whatever_the_order_inside_a_block(group: RankGroup, tokens: int, slot_bytes: int) -> None:
    form: dict[str, Any] = {"packing": PACKED, "content": 64, "slot_bytes": slot_bytes, "staging_bytes": 16 << 20}
    p, d = group.rank(**form), group.rank(engine_id="engine-d", **form)
    blocks, ours = ([3, 9, 1, 30, 7][: -(-tokens // 16)], [2, 4, 31, 0, 5][: -(-tokens // 16)])
    fill_packed(p, blocks, tokens)
    begin(p, d, tokens=tokens, theirs=blocks, ours=ours)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d]) and not d.failed
    assert torch.equal(read_packed(d, ours, tokens), d.wanted(tokens))


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp", "zmq"])
@pytest.mark.parametrize(("sizes", "heads"), [((16, 32), 2), ((32, 16), 1), ((32, 48), 2), ((16, 16), 2)], ids=str)
def test_blocks_of_other_sizes_take_divided_ones(
    group: RankGroup, sizes: tuple[int, int], heads: int, plane: str
) -> None:
    """From one rank to each of two, so that heads are sliced too; P's last block is partial, and D's another."""
    p, *ds = (
        group.rank(
            packing=PACKED, content=64, plane=plane, block_size=size, places=lambda layer, size=size: divided(size, 64),
            tp_rank=rank, tp_size=of, **SMALL,
        )
        for size, rank, of in ((sizes[0], 0, 1), *((sizes[1], rank, heads) for rank in range(heads)))
    )  # fmt: skip
    assert [region.part for region in p.context.caches.geometry.regions] == ["", "k", "v"]
    tokens = 77
    blocks, ours = [3, 9, 1, 30, 7][: -(-tokens // sizes[0])], [2, 4, 31, 0, 5][: -(-tokens // sizes[1])]
    fill_packed(p, blocks, tokens, "divided")
    token = grant([p], "req-p", blocks, tokens)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer([p]), ours, 0, tokens))
    assert wait(lambda: all(d.received == {"req-d"} for d in ds) and p.sent == {"req-p"}, [p, *ds])
    for d in ds:
        assert not d.failed and torch.equal(read_packed(d, ours, tokens, "divided"), d.wanted(tokens))


@pytest.mark.parametrize(
    ("form", "field"),
    [
        ({"block_size": 32}, "tile_tokens"),
        ({"packing": "pairs"}, "packing"),
        ({"packing": ""}, "packing"),
        ({"places": lambda layer: divided(16, 16)}, "packing"),
    ],
)
def test_ranks_that_pack_otherwise_refuse_each_other(group: RankGroup, form: dict[str, Any], field: str) -> None:
    p, d = group.rank(packing=PACKED), group.rank(**({"packing": PACKED, "engine_id": "engine-d"} | form))
    begin(p, d, tokens=20, theirs=[1, 2], ours=[1, 2])
    assert wait(lambda: d.failed == {"req-d"}, [p, d]) and is_wiped(d, -1)
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
