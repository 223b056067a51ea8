"""Loads inside a step in portions of layers, between ranks: all bytes arrive, in the order of the forward, and no copy
writes over what the step has written."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.connector.geometry import portions
from kvferry.transport.planes import cma
from kvferry.transport.planes.cma import CmaChannel
from tests.handover.scenario import OURS, THEIRS, Pair, RankGroup, wipe
from tests.handover.slow_copies import install
from tests.handover.test_packed import PACKED, fill_packed, read_packed
from tests.support.inside import leases_of
from tests.support.ranks import Rank, grant, load_plan, peer, standing, wait

LAYERS = 5


class Portions:
    """D's copies by ``cma``: each portion after the first one comes when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.copies: list[Any] = []
        turn = cma.CmaCopy.turn

        def held(copy: Any) -> None:
            if copy not in self.copies:
                self.copies.append(copy)
            if not copy.ends or copy.moved < copy.ends[0] or self.gate.wait(1e-3):
                turn(copy)

        monkeypatch.setattr(cma.CmaCopy, "turn", held)

    @property
    def last(self) -> Any:
        return self.copies[-1]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Portions:
    monkeypatch.setattr(portions, "HOST_PORTION_BYTES", 1)
    return Portions(monkeypatch)


def begin(p: Rank, d: Rank, name: str, tokens: int) -> None:
    """D begins a step that computes with ``tokens``, and asks for each layer."""
    token = grant([p], f"{name}-p", THEIRS, 112)
    assert wait(lambda: token in leases_of(p))
    d.worker.post(load_plan(f"{name}-d", token, peer([p]), OURS, 0, tokens, now=True))
    d.worker.begin_step(by_layer=True)


def forward(d: Rank, name: str = "req") -> None:
    for layer in d.layers:
        reach(d, layer)
    d.worker.finish_forward()
    assert standing(d) == {f"{name}-d"}


def reach(d: Rank, layer: str) -> None:
    waits = d.worker.step_hold.layer_waits
    assert waits is not None
    waits.layer(layer)


def ranks(group: RankGroup, of_d: Any = None, **options: Any) -> Pair:
    """P, which has 112 tokens, and D after its first step with a load, which is not cut."""
    p, d = group.pair(of_d, **{"plane": "cma", "layers": LAYERS, **options})
    if "places" in options:
        fill_packed(p, THEIRS, 112, "divided")
    elif "packing" in options:
        fill_packed(p, THEIRS, 112)
    else:
        p.fill(THEIRS, 112)
    begin(p, d, "first", 7)
    forward(d, "first")
    assert d.worker.step_hold.layer_order == tuple(d.layers) and wait(lambda: "first-p" in p.sent, [p, d])
    wipe(d, -1)
    return p, d


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("tokens", [1, 16, 20, 100])
def test_every_portion_arrives(group: RankGroup, held: Portions, tokens: int, layout: str) -> None:
    """``ends`` are what ``moved`` is after the last range of each portion: a turn never copies half of one."""
    p, d = ranks(group, layout=layout)
    begin(p, d, "req", tokens)
    copy = held.last
    assert copy.portions == portions.MAX_PORTIONS and not copy.done
    found, wanted = d.read(OURS, tokens), d.wanted(tokens)
    arrived = [bool(torch.equal(found[layer], wanted[layer])) for layer in range(LAYERS)]
    assert arrived == [True, True, False, False, False], "the first portion of five layers in four"
    held.gate.set()
    forward(d)
    assert copy.done and torch.equal(d.read(OURS, tokens), d.wanted(tokens)) and copy.moved == copy.ends[-1]
    if tokens == 100:
        assert list(np.diff([0, *copy.ends]) // (tokens * d.content * 4 * len(d.heads))) == [2, 1, 1, 1]


@pytest.mark.parametrize("tokens", [5, 16, 20, 77])
def test_the_step_s_own_token_is_not_written_over(group: RankGroup, held: Portions, tokens: int) -> None:
    """Packed tokens have no bytes of their own: the last tile of the load has the place of the token that the step
    computes, and the step writes it before it asks for the layer."""
    p, d = ranks(group, packing=PACKED)
    begin(p, d, "req", tokens)
    last = torch.arange(LAYERS * len(d.heads) * d.content, dtype=torch.int32).view(LAYERS, len(d.heads), d.content) + 1
    block, slot = divmod(tokens, d.block_size)
    for number, name in enumerate(d.layers):
        tiles = d.caches[name].view(len(d.caches[name]), len(d.heads), d.content, d.block_size)
        tiles[OURS[block], :, :, slot] = -last[number]
    held.gate.set()
    forward(d)
    found = read_packed(d, OURS, tokens + 1)
    assert torch.equal(found[:, :, :tokens], d.wanted(tokens)) and torch.equal(found[:, :, tokens], -last)
    assert held.last.portions == portions.MAX_PORTIONS


def test_as_kernels_copy(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion is launched by itself, with an event."""
    monkeypatch.setattr(portions, "HOST_PORTION_BYTES", 1)
    copies = install(monkeypatch)
    monkeypatch.setattr(CmaChannel, "read", lambda channel, request: request.launch())
    p, d = ranks(group)
    copies[1].held.clear()
    begin(p, d, "req", 100)
    for number, layer in enumerate(d.layers):
        reach(d, layer)
        assert all(event.wait(60) for event in copies[1].held)
        assert torch.equal(d.read(OURS, 100)[number], d.wanted(100)[number])
    assert len(copies[1].held) == portions.MAX_PORTIONS
    d.worker.finish_forward()
    assert len(copies[1].held) == portions.MAX_PORTIONS + 1 and standing(d) == {"req-d"}
