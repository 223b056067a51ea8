"""Dtypes and fp8 scales through the real handshake: what is refused, by whom and how, and what is converted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.connector.geometry.engine_types import CacheDtype
from tests.handover.scenario import OURS, THEIRS, TOKENS, RankGroup, another_works, begin, ended
from tests.support.ranks import wait

OFF, CONVERTS = {"convert_dtype": False}, {"convert_dtype": True}
LAYERS = [f"model.layers.{n}.attn" for n in range(4)]
Lines = pytest.LogCaptureFixture


def fp8(dtype: str = "fp8", **scales: tuple[float, float]) -> dict[str, Any]:
    """Caches of vLLM's: bytes, 64 to a head and token, the first 40 of them K."""
    of_layers = {layer: scales.get(f"layer_{n}", (0.5, 0.125)) for n, layer in enumerate(LAYERS)}
    return {"cache_dtype": CacheDtype(dtype, 40, of_layers)}


TILES = {"packing": "tiles"}


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        (
            {"cache_dtype": CacheDtype("float16")}, {"cache_dtype": CacheDtype("bfloat16")},
            "dtype of layer 'model.layers.0.attn' (convert_dtype is off) differs, ours is bfloat16, the peer's is "
            "float16",
        ),
        (
            fp8(), fp8("fp8_e5m2"),
            "dtype of layer 'model.layers.0.attn' (convert_dtype is off) differs, ours is float8_e5m2, the peer's is "
            "float8_e4m3fn",
        ),
        (
            fp8(layer_2=(0.75, 0.125)), fp8(),
            "scales of K and V of layer 'model.layers.2.attn' (convert_dtype is off) differs, ours is 0.5 and 0.125, "
            "the peer's is 0.75 and 0.125",
        ),
        (
            fp8() | TILES, fp8("fp8_e5m2") | TILES | CONVERTS,
            "dtype of layer 'model.layers.0.attn' (blocks whose tokens are packed are not converted) differs",
        ),
    ],
    ids=["dtype", "fp8 dtype", "scales", "packed"],
)  # fmt: skip
def test_numbers_that_differ_are_refused_by_name(
    group: RankGroup, theirs: dict[str, Any], ours: dict[str, Any], named: str, caplog: Lines
) -> None:
    p, d = group.pair(of_p=theirs, of_d=ours)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert not ended(p, d)
    of_d, of_p = (
        [record.getMessage() for record in caplog.records if record.name == f"vllm.kvferry.{name}"]
        for name in ("link", "session")
    )
    assert len(of_d) == len(of_p) == 1 and "\n" not in of_d[0] + of_p[0]
    assert named in of_d[0]
    assert named.split(" differs", maxsplit=1)[0] in of_p[0], "P's operator reads it, too"


@pytest.mark.parametrize("settings", [OFF, CONVERTS], ids=["off", "on"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn"])
def test_the_same_numbers_by_any_name_are_copied(group: RankGroup, name: str, settings: dict[str, Any]) -> None:
    p, d = group.pair(of_p=fp8(), of_d={**fp8(name), **settings, "layout": "NHD"})
    another_works(p, d)
    assert d.plane == "cma"


def test_other_scales_of_the_same_dtype_are_converted(group: RankGroup, caplog: Lines) -> None:
    """Layer 1 has other scales on D; those of the others agree, and so do their numbers."""
    p, d = group.pair(of_p=fp8(), of_d=fp8(layer_1=(1.0, 0.5)) | CONVERTS)
    finite = (torch.arange(1 << 8, dtype=torch.int32) % 127).to(torch.uint8)  # 0x7f would be NaN
    for n, name in enumerate(p.layers):
        stored = p.caches[name].view(torch.uint8)
        stored.copy_(finite[(torch.arange(stored.numel()) * 7 + n) % 256].view(stored.shape))
    with caplog.at_level("INFO", "vllm.kvferry"):
        begin(p, d)
        assert wait(lambda: d.received == {"req-d"}, [p, d])
    assert not d.failed and d.plane == "shm"
    assert [line for line in caplog.messages if "is converted, float8_e4m3fn to float8_e4m3fn" in line]
    assert [line for line in caplog.messages if "data plane to" in line and "cma: it copies bytes, and dtypes" in line]
    theirs, ours = (rank.read(ids, TOKENS).view(torch.uint8) for rank, ids in ((p, THEIRS), (d, OURS)))
    assert torch.equal(ours[[0, 2, 3]], theirs[[0, 2, 3]])
    numbers = theirs[1].view(torch.float8_e4m3fn).float()
    numbers[..., :40] *= 0.5
    numbers[..., 40:] *= 0.125 / 0.5
    assert torch.equal(ours[1], numbers.to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_plane_that_copies_bytes_is_not_had_by_asking_for_it(group: RankGroup, caplog: Lines) -> None:
    p, d = group.pair(of_p=fp8(), of_d={**fp8("fp8_e5m2"), **CONVERTS, "plane": "cma"})
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert not ended(p, d)
    assert wait(lambda: "no data plane in common: cma: it copies bytes, and dtypes differ" in caplog.text)
