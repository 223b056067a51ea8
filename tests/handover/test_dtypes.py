"""Dtypes and fp8 scales through the real handshake: what is refused, by whom and how, and what is converted."""

from __future__ import annotations

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import CacheDtype
from tests.handover.opening import OURS, THEIRS, TOKENS, begin
from tests.handover.rank_group import RankGroup
from tests.support.ranks import Rank, wait

CONVERTS = Settings(convert_dtype=True)
LAYERS = [f"model.layers.{n}.attn" for n in range(4)]


def fp8(dtype: str = "fp8", **scales: tuple[float, float]) -> CacheDtype:
    """Caches of vLLM's: bytes, 64 to a head and token, the first 40 of them K."""
    return CacheDtype(dtype, 40, {layer: scales.get(f"layer_{n}", (0.5, 0.125)) for n, layer in enumerate(LAYERS)})


def hand_over(p: Rank, d: Rank) -> None:
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"}, [p, d])


@pytest.mark.parametrize(
    ("theirs", "ours", "settings", "named"),
    [
        (
            {"content": 16, "cache_dtype": CacheDtype("float16")},
            {"content": 16, "cache_dtype": CacheDtype("bfloat16")},
            Settings(),
            "dtype of layer 'model.layers.0.attn' (convert_dtype is off) differs, ours is bfloat16, the peer's is "
            "float16",
        ),
        (
            {"cache_dtype": fp8()}, {"cache_dtype": fp8("fp8_e5m2")}, Settings(),
            "dtype of layer 'model.layers.0.attn' (convert_dtype is off) differs, ours is float8_e5m2, the peer's is "
            "float8_e4m3fn",
        ),
        (
            {"cache_dtype": fp8(layer_2=(0.75, 0.125))}, {"cache_dtype": fp8()}, Settings(),
            "scales of K and V of layer 'model.layers.2.attn' (convert_dtype is off) differs, ours is 0.5 and 0.125, "
            "the peer's is 0.75 and 0.125",
        ),
        (
            {"cache_dtype": fp8(), "packing": "tiles"}, {"cache_dtype": fp8("fp8_e5m2"), "packing": "tiles"}, CONVERTS,
            "dtype of layer 'model.layers.0.attn' (blocks whose tokens are packed are not converted) differs",
        ),
    ],
    ids=["dtype", "fp8 dtype", "scales", "packed"],
)  # fmt: skip
def test_numbers_that_differ_are_refused_by_name(
    group: RankGroup, theirs: dict[str, object], ours: dict[str, object], settings: Settings, named: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    p, d = group.rank(**theirs), group.rank(engine_id="engine-d", settings=settings, **ours)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        hand_over(p, d)
    assert d.failed == {"req-d"}
    of_d = [record.getMessage() for record in caplog.records if record.name == "vllm.kvferry.link"]
    of_p = [record.getMessage() for record in caplog.records if record.name == "vllm.kvferry.sessions"]
    assert len(of_d) == len(of_p) == 1 and "\n" not in of_d[0] + of_p[0]
    assert named in of_d[0]
    assert named.split(" differs", maxsplit=1)[0] in of_p[0], "P's operator reads it, too"


@pytest.mark.parametrize("settings", [Settings(), CONVERTS], ids=["off", "on"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn"])
def test_the_same_numbers_by_any_name_are_copied(group: RankGroup, name: str, settings: Settings) -> None:
    p = group.rank(cache_dtype=fp8())
    d = group.rank(engine_id="engine-d", cache_dtype=fp8(name), settings=settings, layout="NHD")
    p.fill(THEIRS, TOKENS)
    hand_over(p, d)
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS)), "bit for bit, NaN as well"
    assert d.plane == "cma"


def test_other_scales_of_the_same_dtype_are_converted(group: RankGroup, caplog: pytest.LogCaptureFixture) -> None:
    """Layer 1 has other scales on D; those of the others agree, and so do their numbers."""
    p = group.rank(cache_dtype=fp8())
    d = group.rank(engine_id="engine-d", cache_dtype=fp8(layer_1=(1.0, 0.5)), settings=CONVERTS)
    finite = (torch.arange(1 << 8, dtype=torch.int32) % 127).to(torch.uint8)  # 0x7f would be NaN
    for n, name in enumerate(p.layers):
        stored = p.caches[name].view(torch.uint8)
        stored.copy_(finite[(torch.arange(stored.numel()) * 7 + n) % 256].view(stored.shape))
    with caplog.at_level("INFO", "vllm.kvferry"):
        hand_over(p, d)
    assert not d.failed and d.plane == "shm"
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "is converted, float8_e4m3fn to float8_e4m3fn" in line]
    assert [line for line in lines if "data plane to" in line and "cma: it copies bytes, and dtypes differ" in line]
    theirs, ours = (rank.read(ids, TOKENS).view(torch.uint8) for rank, ids in ((p, THEIRS), (d, OURS)))
    assert torch.equal(ours[[0, 2, 3]], theirs[[0, 2, 3]])
    numbers = theirs[1].view(torch.float8_e4m3fn).float()
    numbers[..., :40] *= 0.5
    numbers[..., 40:] *= 0.125 / 0.5
    assert torch.equal(ours[1], numbers.to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_plane_that_copies_bytes_is_not_had_by_asking_for_it(
    group: RankGroup, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(convert_dtype=True, plane="cma")
    p = group.rank(cache_dtype=fp8())
    d = group.rank(engine_id="engine-d", cache_dtype=fp8("fp8_e5m2"), settings=settings)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        hand_over(p, d)
    assert d.failed == {"req-d"}
    assert wait(lambda: "no data plane in common: cma: it copies bytes, and dtypes differ" in caplog.text)
