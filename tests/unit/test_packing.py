"""Packed blocks in parts: whatever two ranks agree on by name moves between blocks of different sizes.

Orders are made of the axes token tile, token in tile, channel group and channel in group, in every sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.packing import PackedPart, split_packed
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.token_sharding import TokenBlocks
from kvferry.connector.geometry.view import CacheView
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.copies import Copies
from kvferry.transport.errors import IncompatiblePeerError
from tests.unit.labelled_model import plan_all

ITEM = 4
GEOMETRY = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(3,), regions=())
HEADS, BLOCKS = 3, 6
SEQUENCES = list(itertools.permutations(range(4)))
BY_TOKEN, TRANSPOSED = (0, 1, 2, 3), (2, 3, 0, 1)


def places(tokens: int, channels: int, tile: int, region: int, sequence: tuple[int, ...]) -> np.ndarray:
    """[N, D]: where each element lies, if the axes are stored in this sequence."""
    sizes = (tokens // tile, tile, channels // region, region)
    memory = np.arange(tokens * channels).reshape([sizes[axis] for axis in sequence])
    return memory.transpose(np.argsort(sequence)).reshape(tokens, channels)


def both(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.stack([keys, values + keys.size])


class Packed:
    """A cache of one layer, [B, H, N, 2 * D] int32, and how its blocks are packed."""

    def __init__(self, order: np.ndarray) -> None:
        _, self.tokens, self.channels = order.shape
        self.order = order
        content = 2 * self.channels
        self.memory = np.full((BLOCKS, HEADS, self.tokens * content), -1, dtype=np.int32)
        self.whole = CacheView(
            layers=("a",), bases=(self.memory.ctypes.data,), num_blocks=BLOCKS, num_heads=HEADS, block_size=self.tokens,
            content_bytes=content * ITEM, block_stride=HEADS * self.tokens * content * ITEM,
            head_stride=self.tokens * content * ITEM, token_stride=content * ITEM, blocks_per_page=1, dtype="int32",
            device="cpu",
        )  # fmt: skip
        self.parts = split_packed(self.whole, order)[1:]

    def elements(self, ids: list[int], heads: int, tokens: int) -> Iterator[tuple[tuple[int, int, int], Any]]:
        """(kind, head, token), and the index of its channels in memory."""
        for kind, head, token in itertools.product(range(2), range(heads), range(tokens)):
            yield (kind, head, token), (ids[token // self.tokens], head, self.order[kind, token % self.tokens])

    def box(self, part: PackedPart, ids: list[int], head: int, count: int) -> tuple[RankCaches, PageBox]:
        table = TokenBlocks(np.array(ids, dtype=np.int64), part.view.block_size, part.view.block_stride, 0)
        caches = RankCaches(GEOMETRY, (part.view,), Copies())
        return caches, PageBox(0, 0, 1, head, HEADS - 1, 0, count, table)


def label(kind: int, head: int, token: int, channels: int) -> np.ndarray:
    return ((kind * 64 + head) * 4096 + token) * 1024 + np.arange(channels)


def agree(of: PackedPart, to: PackedPart) -> bool:
    """What two ranks compare in the handshake."""
    return (of.packing, of.tile_tokens, of.view.rows) == (to.packing, to.tile_tokens, to.view.rows)


def handed_over(p: Packed, d: Packed, tokens: int) -> int:
    """Hand over all but P's first head, over the wire, in whole tiles. How many (kind, head, token) differ."""
    p_ids, d_ids = ([4, 1, 5, 0, 2][: -(-tokens // side.tokens)] for side in (p, d))
    for element, at in p.elements(p_ids, HEADS, tokens):
        p.memory[at] = label(*element, p.channels)
    for of, to in zip(p.parts, d.parts, strict=True):
        count = -(-tokens // of.tile_tokens) * of.tile_tokens
        (source, there), (target, here) = p.box(of, p_ids, 1, count), d.box(to, d_ids, 0, count)
        wire = np.empty(source.nbytes(there), dtype=np.uint8)
        assert wire.nbytes == target.nbytes(here)
        source.pack(wire.ctypes.data, there)
        target.unpack(wire.ctypes.data, here)
    return sum(
        not np.array_equal(d.memory[at], label(kind, head + 1, token, d.channels))
        for (kind, head, token), at in d.elements(d_ids, HEADS - 1, tokens)
    )


@given(
    sequence=st.tuples(st.sampled_from(SEQUENCES), st.sampled_from(SEQUENCES)),
    other=st.sampled_from([None, *SEQUENCES]),
    tiles=st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])),
    region=st.sampled_from([1, 2, 4]),
    sizes=st.tuples(st.sampled_from([4, 8, 12, 16]), st.sampled_from([4, 8, 12, 16])),
    tokens=st.integers(1, 20),
)
def test_what_agrees_by_name_arrives(sequence, other, tiles, region, sizes, tokens) -> None:
    """P and D pack alike, but for their block sizes; or D in another sequence. Never are names equal and bytes not."""
    of_d = sequence if other is None else (other, sequence[1])
    p, d = (
        Packed(both(*(places(size, 8, tile, region, part) for tile, part in zip(tiles, parts, strict=True))))
        for size, parts in zip(sizes, (sequence, of_d), strict=True)
    )
    if all(map(agree, p.parts, d.parts)):
        assert handed_over(p, d, tokens) == 0
    else:
        assert other is not None or sizes[0] != sizes[1]


@pytest.mark.parametrize(
    ("sequence", "tile", "region", "tile_tokens", "rows"),
    [
        (BY_TOKEN, 1, 1, 1, 1),
        (TRANSPOSED, 1, 1, 1, 8),
        ((0, 2, 1, 3), 4, 2, 4, 1),
        ((2, 0, 3, 1), 2, 4, 2, 2),
        ((0, 2, 3, 1), 4, 1, 4, 1),
    ],
)
def test_tiles_are_as_small_as_the_order_allows(sequence, tile, region, tile_tokens, rows) -> None:
    """Keys one after the other, keys transposed, tiles of keys in pairs, pairs of values, tiles transposed."""
    packed = [Packed(both(*[places(size, 8, tile, region, sequence)] * 2)) for size in (8, 16)]
    for part in (*packed[0].parts, *packed[1].parts):
        assert (part.tile_tokens, part.view.rows) == (tile_tokens, rows)
    assert [part.part for part in packed[0].parts] == ["k", "v"]
    assert all(map(agree, packed[0].parts, packed[1].parts))
    assert (packed[0].parts[0].packing == "") == (tile_tokens == 1)
    assert handed_over(packed[0], packed[1], 19) == 0


def test_an_order_that_depends_on_the_block_is_one_tile() -> None:
    backwards = places(8, 4, 1, 1, BY_TOKEN)[::-1]
    shifted = np.roll(np.arange(32), 1).reshape(8, 4)
    for order in (backwards, shifted):
        packed = Packed(both(order, order))
        assert [part.tile_tokens for part in packed.parts] == [8, 8]
        assert handed_over(packed, Packed(both(order, order)), 13) == 0
        larger = Packed(both(*[places(16, 4, 1, 1, BY_TOKEN)] * 2))
        assert not any(map(agree, packed.parts, larger.parts))


def test_names_tell_orders_apart() -> None:
    forms = [(8, 4, 2, (0, 2, 1, 3)), (8, 4, 4, (0, 2, 1, 3)), (8, 4, 2, (0, 3, 1, 2)), (16, 4, 2, (0, 2, 1, 3))]
    orders = [both(*[places(size, 8, tile, region, sequence)] * 2) for size, tile, region, sequence in forms]
    whole, keys, _ = zip(*(split_packed(Packed(order).whole, order) for order in orders), strict=True)
    assert len({part.packing for part in keys}) == 3 and keys[0].packing == keys[3].packing
    assert all(part.packing.startswith("tiles of 4 tokens x 8 channels, order ") for part in keys)
    assert len({part.packing for part in whole}) == 4 and [part.tile_tokens for part in whole] == [8, 8, 8, 16]
    assert whole[0].packing.startswith("blocks of 8 tokens x 8 channels, order ")


def of_layers(*layers: str, block_size: int = 16, order: str = "o", divided: bool = True) -> list[RegionGeometry]:
    """The regions of a packed cache: whole, and in parts."""
    form: dict[str, Any] = {
        "kind": "full", "layers": layers, "block_size": block_size, "head_start": 0, "num_heads": 1, "total_heads": 1,
        "dtype": "int32",
    }  # fmt: skip
    whole = RegionGeometry(content_bytes=64, packing=f"{block_size}{order}", tile_tokens=block_size, **form)
    parts = [RegionGeometry(part=part, content_bytes=32, packing=order, tile_tokens=4, **form) for part in "kv"]
    return [whole, *parts] if divided else [whole]


def rank(regions: list[RegionGeometry], pp_rank: int = 0, pp_size: int = 1) -> RankGeometry:
    return RankGeometry(
        tp_rank=0, tp_size=1, pp_rank=pp_rank, pp_size=pp_size, head_counts=(1,), regions=tuple(regions)
    )


def read(d: RankGeometry, *ps: RankGeometry, tokens: int = 20) -> list[tuple[str, int, int]]:
    """(part, layer in it, tokens) of all that D reads."""
    for p in ps:
        compatible(d, p)
        compatible(p, d, consumer=False)
    plans = plan_all(d, {(p.pp_rank, 0): p for p in ps}, [(0, tokens)] * len(d.regions))
    return [(d.regions[item.region].part, item.layer, item.span.num_tokens) for plan in plans.values() for item in plan]


def test_blocks_of_one_size_are_read_whole_and_others_in_parts() -> None:
    d = rank(of_layers("a", "b"))
    assert read(d, rank(of_layers("a", "b"))) == [("", 0, 32)]
    assert read(d, rank(of_layers("b", "a"))) == [("", 0, 32), ("", 1, 32)]
    assert read(d, rank(of_layers("a", "b", block_size=32))) == [("k", 0, 20), ("v", 0, 20)]
    assert read(rank(of_layers("a", "b", divided=False)), rank(of_layers("a", "b"))) == [("", 0, 32)]
    assert read(d, rank(of_layers("a", "b", divided=False))) == [("", 0, 32)]


def test_stages_may_be_read_differently() -> None:
    d = rank([*of_layers("a", "b"), *of_layers("c")])
    stages = [
        rank([*of_layers("a"), *of_layers("c", block_size=8)], 0, 2),
        rank(of_layers("b", block_size=32), 1, 2),
    ]
    assert read(d, *stages) == [("", 0, 32), ("k", 0, 20), ("v", 0, 20), ("k", 1, 20), ("v", 1, 20)]
    with pytest.raises(IncompatiblePeerError, match=r"'b' needed"):
        read(d, stages[0], rank(of_layers("d", block_size=32), 1, 2))
    with pytest.raises(IncompatiblePeerError, match=r"'a' on more than one stage"):
        read(d, stages[0], rank([*of_layers("b", "a", block_size=32)], 1, 2))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (of_layers("a", block_size=32, divided=False), "packing of layer 'a' differs, ours is 16o, the peer's is 32o"),
        (of_layers("a", order="x"), r"packing of layer 'a' \(k\) differs, ours is o, the peer's is x"),
        (of_layers("a", block_size=32, order="x"), r"packing of layer 'a' \(k\) differs, ours is o, the peer's is x"),
        (of_layers("a", block_size=32)[:2], r"packing of layer 'a' differs, ours is whole \(16o\), k \(o\), v \(o\)"),
    ],
)
def test_what_fits_neither_way_is_refused_by_name(theirs: list[RegionGeometry], message: str) -> None:
    with pytest.raises(IncompatiblePeerError, match=message):
        compatible(rank(of_layers("a")), rank(theirs))


def test_what_is_not_understood_stays_whole() -> None:
    plain = places(8, 4, 1, 1, BY_TOKEN)
    good = both(plain, plain)
    interleaved = np.stack([2 * plain, 2 * plain + 1])
    missing = good.copy()
    missing[0, 0, 0] = missing[0, 0, 1]
    unknown = good.copy()
    unknown[1, 7, 3] = -1
    for order in (interleaved, missing, unknown, good[::-1], good[:1], both(plain[:4], plain[:4])):
        assert split_packed(Packed(good).whole, order) == ()
    apart = replace(Packed(good).whole, token_stride=HEADS * 8 * ITEM, head_stride=8 * ITEM)
    assert split_packed(apart, good) == (), "NHD: a block's tokens of one head do not lie together"
    assert [part.part for part in split_packed(Packed(good).whole, good)] == ["", "k", "v"]
