"""A read of P's pages in portions, by kernels: every layer is in place when the event of its portion has passed. With
``cpu`` the same read on host memory, where no GPU is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.span_read import Side, SpanRead, cut_read
from kvferry.connector.engine.worker_setup import bind_caches
from kvferry.connector.geometry import portions
from kvferry.connector.geometry.byte_ranges import pages_of
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.geometry.read_plan import PlannedSpan, plan_reads
from kvferry.connector.pages.caches import RankCaches
from kvferry.connector.pages.copies import WaitPolicy

LAYERS, HEADS, BLOCKS, CONTENT, TOKENS = 10, 4, 80, 256, 2000
NAMES = [f"layers.{number}" for number in range(LAYERS)]
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
LONG = 100_000_000
"""Cycles; 50 ms on any GPU."""


@dataclass
class RankSide:
    """A rank's caches: [B, H, N, C] of each layer, and their description."""

    tensors: dict[str, torch.Tensor]
    caches: RankCaches
    ids: torch.Tensor

    def prompt(self, layer: int) -> torch.Tensor:
        """[H, T, C] of the prompt."""
        found = self.tensors[NAMES[layer]][self.ids.to(self.tensors[NAMES[layer]].device)]
        return found.permute(1, 0, 2, 3).reshape(HEADS, -1, CONTENT)[:, :TOKENS]


def side(device: str, block: int, seed: int) -> RankSide:
    generator = torch.Generator().manual_seed(seed)
    shape = (BLOCKS * 32 // block, HEADS, block, CONTENT)
    tensors = {name: torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator).to(device) for name in NAMES}
    info = RankInfo("engine", 0, 1, 0, 1, {"architectures": "Random"})
    group = LayerGroup("full", tuple(NAMES), block, HEADS)
    caches, _ = bind_caches(Settings(), info, [group], tensors, None, None)
    return RankSide(tensors, caches, torch.randperm(shape[0], generator=generator)[: -(-TOKENS // block)])


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1], NAMES[3:] + NAMES[:2]], ids=["plain", "reversed", "one silent"])
@pytest.mark.parametrize("device", DEVICES)
def test_each_layer_is_there_when_its_portion_is(
    device: str, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portions, "HOST_PORTION_BYTES", 1)
    monkeypatch.setattr(portions, "GPU_PORTION_BYTES", 1)
    p, d = side(device, 16, 1), side(device, 32, 2)
    planned = plan_reads(d.caches.geometry, p.caches.geometry, [(0, TOKENS)])
    (layout,) = p.caches.page_layouts()

    def sides(item: PlannedSpan) -> Side:
        box = d.caches.box(item.span, item.region, item.layer, item.head, d.ids.numpy(), item.shard)
        return box, pages_of(layout, p.ids.numpy(), item.span, item.shard)

    found = cut_read(d.caches, planned, [sides(item) for item in planned], sides, order)
    assert len(found) == portions.MAX_PORTIONS
    if device == "cpu":
        copy = SpanRead(d.caches, found, alone=False).launch()
        assert copy.done and all(torch.equal(d.prompt(layer), p.prompt(layer)) for layer in range(LAYERS))
        return
    slow = d.caches.copies.start
    monkeypatch.setattr(
        d.caches.copies,
        "start",
        lambda first, wait=WaitPolicy.NONE, more=(): slow(
            first, wait, [partial(_after_a_while, each) for each in more]
        ),
    )
    for layer in range(LAYERS):  # CUDA loads a kernel with its first launch, which then waits for the device
        torch.equal(d.prompt(layer).clone(), p.prompt(layer))
    torch.cuda.synchronize()
    copy = SpanRead(d.caches, found, alone=False).launch()
    assert len(copy.events) == portions.MAX_PORTIONS
    engine = torch.cuda.Stream(device)
    with torch.cuda.stream(engine):
        for portion, event in enumerate(copy.events):
            d.caches.copies.make_engine_wait(event)
            there = [
                name for name in NAMES
                if (portions.portion_of(order.index(name), len(order), len(found)) if name in order else 0) <= portion
            ]  # fmt: skip
            seen = {name: d.prompt(NAMES.index(name)).clone() for name in there}
            if portion < len(found) - 1:
                assert not copy.done, "this thread does not wait"
            engine.synchronize()
            for name, content in seen.items():
                assert torch.equal(content, p.prompt(NAMES.index(name))), f"{name} after portion {portion}"
    d.caches.copies.synchronize()


def _after_a_while(launch: partial[None]) -> None:
    torch.cuda._sleep(LONG)
    launch()


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_blocks_of_some_tokens_of_one_layer_are_cleared(device: str) -> None:
    d = side(device, 32, 3)
    before = {name: tensor.cpu().clone() for name, tensor in d.tensors.items()}
    d.caches.clear(0, 4, d.ids.numpy(), 33, 129)  # those that begin at tokens 64, 96 and 128
    d.caches.copies.synchronize()
    before[NAMES[4]][d.ids[2:5]] = 0
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in d.tensors.items())
