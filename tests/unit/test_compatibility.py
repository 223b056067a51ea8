"""Which ranks fit each other, and which geometries contradict themselves."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from kvferry.connector.geometry.compatibility import check_geometry, compatible, draft_layers
from kvferry.connector.geometry.dtypes import converted_pairs
from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.transport.errors import GeometryError, IncompatiblePeerError
from tests.unit.labelled_model import MODEL, OURS, Model, edit


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Model(MODEL.kinds, 4, False).rank((0, 2), (0, 1), 16), "total_heads of layer .* differs, ours is 8, .* is 4"),
        (edit(OURS, 0, content_bytes=16), r"content_bytes of layer 'layers\.0' differs, ours is 8, the peer's is 16"),
        (edit(OURS, 0, dtype="float8_e4m3fn"), "dtype of layer .* ours is bfloat16, the peer's is float8_e4m3fn"),
        (edit(OURS, 1, window=128), r"window of layer 'layers\.1' differs, ours is 64, the peer's is 128"),
        (edit(OURS, 1, kind="state"), "kind of layer .* ours is sliding_window, the peer's is state"),
        (edit(OURS, 0, rows=2), r"rows of layer 'layers\.0' differs, ours is 1, the peer's is 2"),
        (
            edit(OURS, 0, part="k", packing="pairs"),
            r"packing of layer 'layers\.0' differs, ours is whole \(not packed\), the peer's is k \(pairs\)",
        ),
        (edit(OURS, 0, layers=("layers.0", "other")), r"layers differs, ours is 'layers\.2' needed"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(theirs: RankGeometry, message: str) -> None:
    with pytest.raises((IncompatiblePeerError, GeometryError), match=rf"^[^\n]*({message})[^\n]*$"):
        compatible(OURS, theirs)


def test_p_states_a_mismatch_from_its_own_side() -> None:
    with pytest.raises(IncompatiblePeerError, match="ours is 8, the peer's is 16"):
        compatible(OURS, edit(OURS, 0, content_bytes=16), consumer=False)
    few = edit(OURS, 0, layers=("layers.0",))
    compatible(OURS, few, consumer=False)  # D needs fewer layers than P has
    with pytest.raises(IncompatiblePeerError, match=r"the peer's is 'layers\.2' needed"):
        compatible(few, OURS, consumer=False)


def test_layers_and_block_sizes_may_differ_and_one_side_may_keep_what_has_left_the_window() -> None:
    compatible(OURS, MODEL.rank((2, 3), (1, 3), 48, random.Random(1)))
    compatible(OURS, edit(OURS, 1, kind="full", window=0))
    compatible(edit(OURS, 1, kind="full", window=0), OURS)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (edit(OURS, tp_rank=2), "tp_rank 2 of tp_size 2"),
        (edit(OURS, 0, block_size=1 << 30), "blocks of 1073741824 tokens, limit 1048576"),
        (edit(OURS, tp_size=1 << 31), "tp_rank 0 of tp_size"),
        (edit(OURS, 0, head_start=4), r"holds heads 4\.\.8, expected 0\.\.4 of 8"),
        (edit(OURS, 0, layers=("layers.0", "layers.1")), r"layer 'layers\.1' is listed twice"),
        (
            edit(OURS, head_counts=(1, 4)),
            r"layer 'layers\.0': 8 heads in all, which is not one of the head counts 1, 4",
        ),
        (edit(edit(OURS, 0, total_heads=1 << 31), head_counts=(1 << 31,)), "total_num_kv_heads"),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(geometry: RankGeometry, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        check_geometry(geometry)


def with_head(draft: str, layer: str = "layers.3") -> RankGeometry:
    """A rank whose model that drafts has one layer."""
    head = replace(OURS.regions[0], layers=(layer,), draft=draft)
    return replace(OURS, regions=(*OURS.regions, head))


def test_layers_that_draft_may_be_missing_at_p() -> None:
    for theirs in (OURS, with_head("eagle 2"), with_head("eagle 1", "layers.4")):
        compatible(with_head("eagle 1"), theirs)
        compatible(theirs, with_head("eagle 1"), consumer=False)
    compatible(OURS, with_head("eagle 1"))
    other = edit(with_head("eagle 2"), 2, dtype="float32", content_bytes=16)
    compatible(with_head("eagle 1"), other)
    assert not converted_pairs(with_head("eagle 1"), other), "nothing is read of it"


def test_a_layer_that_drafts_is_no_layer_of_the_model() -> None:
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.3' needed"):
        compatible(with_head(""), with_head("eagle 1"))
    with pytest.raises(IncompatiblePeerError, match=r"dtype of layer 'layers\.3' .* ours is bfloat16"):
        compatible(with_head("eagle 1"), edit(with_head("eagle 1"), 2, dtype="float8_e4m3fn"))
    with pytest.raises(IncompatiblePeerError, match=r"packing of layer 'layers\.3'"):
        compatible(with_head("eagle 1"), edit(with_head("eagle 1"), 2, part="k", packing="pairs"))


def test_a_packed_cache_that_drafts_is_read_whole_or_in_parts_or_not_at_all() -> None:
    whole = with_head("eagle 1")
    parts = [replace(whole.regions[2], part=part, packing="tiles") for part in "kv"]
    d = replace(whole, regions=(*whole.regions, *parts))
    assert draft_layers(d, [(0, 0, 2), (1, 0, 1)]) == [(2, 0)]
    assert draft_layers(d, [(0, 0, 2), (3, 0, 1), (4, 0, 1)]) == draft_layers(d, [(2, 0, 1)]) == []
