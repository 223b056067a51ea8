"""Loads inside a step in portions of layers, between ranks: all bytes arrive, in the order of the forward, and no copy
writes over what the step has written."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import span_read
from kvferry.connector.geometry import portions
from kvferry.transport.planes import cma
from kvferry.transport.planes.cma import CmaChannel
from tests.handover.opening import OURS, THEIRS
from tests.handover.rank_group import RankGroup
from tests.handover.slow_copies import install
from tests.handover.test_packed import PACKED, divided, fill_divided, fill_transposed, read_divided, read_transposed
from tests.support.inside import leases_of, thread_of
from tests.support.ranks import Rank, grant, load_plan, peer, standing, wait

CMA = Settings(plane="cma")
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


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Portions:
    monkeypatch.setattr(portions, "HOST_PORTION_BYTES", 1)
    return Portions(monkeypatch)


def begin(p: Rank, d: Rank, name: str, tokens: int) -> None:
    """D begins a step that computes with ``tokens``, and asks for each layer."""
    token = grant([p], f"{name}-p", THEIRS, 112)
    thread = thread_of(p)
    assert thread is not None and wait(lambda: token in leases_of(thread))
    d.worker.post(load_plan(f"{name}-d", token, peer([p]), OURS, 0, tokens, now=True))
    d.worker.begin_step(by_layer=True)


def forward(d: Rank) -> None:
    for layer in d.layers:
        assert d.worker.step_hold.layer_waits is not None
        d.worker.step_hold.layer_waits.layer(layer)
    d.worker.finish_forward()


def ranks(group: RankGroup, **options: Any) -> tuple[Rank, Rank]:
    options = {"settings": CMA, "layers": LAYERS} | options
    return group.rank(engine_id="engine-p", **options), group.rank(engine_id="engine-d", **options)


def learn(p: Rank, d: Rank) -> None:
    """D's first step with a load, which is not cut."""
    begin(p, d, "first", 7)
    forward(d)
    assert standing(d) == {"first-d"} and d.worker.step_hold.layer_order == tuple(d.layers)
    assert wait(lambda: "first-p" in p.sent, [p, d])
    for cache in d.caches.values():
        cache.fill_(-1)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("tokens", [1, 16, 20, 100])
def test_every_portion_arrives(group: RankGroup, held: Portions, tokens: int, layout: str) -> None:
    p, d = ranks(group, layout=layout)
    p.fill(THEIRS, 112)
    learn(p, d)
    begin(p, d, "req", tokens)
    copy = held.copies[-1]
    assert copy.portions == portions.MAX_PORTIONS and not copy.done
    found, wanted = d.read(OURS, tokens), d.wanted(tokens)
    arrived = [bool(torch.equal(found[layer], wanted[layer])) for layer in range(LAYERS)]
    assert arrived == [True, True, False, False, False], "the first portion of five layers in four"
    held.gate.set()
    forward(d)
    assert copy.done and standing(d) == {"req-d"}
    assert torch.equal(d.read(OURS, tokens), d.wanted(tokens))


@pytest.mark.parametrize("tokens", [5, 16, 20, 77])
def test_the_step_s_own_token_is_not_written_over(group: RankGroup, held: Portions, tokens: int) -> None:
    """Packed tokens have no bytes of their own: the last tile of the load has the place of the token that the step
    computes, and the step writes it before it asks for the layer."""
    p, d = ranks(group, packing=PACKED)
    fill_transposed(p, THEIRS, 112)
    learn(p, d)
    begin(p, d, "req", tokens)
    last = torch.arange(LAYERS * len(d.heads) * d.content, dtype=torch.int32).view(LAYERS, len(d.heads), d.content) + 1
    block, slot = divmod(tokens, d.block_size)
    for number, name in enumerate(d.layers):
        tiles = d.caches[name].view(len(d.caches[name]), len(d.heads), d.content, d.block_size)
        tiles[OURS[block], :, :, slot] = -last[number]
    held.gate.set()
    forward(d)
    assert standing(d) == {"req-d"}
    found = read_transposed(d, OURS, tokens + 1)
    assert torch.equal(found[:, :, :tokens], d.wanted(tokens))
    assert torch.equal(found[:, :, tokens], -last)
    assert held.copies[-1].portions == portions.MAX_PORTIONS


def test_it_would_be_written_over(group: RankGroup, held: Portions, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where the last tile comes with its layer: the overlap is real."""
    monkeypatch.setattr(span_read, "split_tile", lambda item, tile_tokens: (item, item))
    with pytest.raises(AssertionError, match="equal"):
        test_the_step_s_own_token_is_not_written_over(group, held, 20)


def test_blocks_of_other_sizes_whose_order_is_known(group: RankGroup, held: Portions) -> None:
    """Keys and values are regions of their own, each with its layers in all portions."""
    settings = {"settings": CMA, "layers": LAYERS, "packing": PACKED, "content": 16}
    p = group.rank(engine_id="engine-p", block_size=16, places=lambda layer: divided(16, 16), **settings)
    d = group.rank(engine_id="engine-d", block_size=32, places=lambda layer: divided(32, 16), **settings)
    fill_divided(p, THEIRS, 112)
    learn(p, d)
    begin(p, d, "req", 77)
    assert held.copies[-1].portions == portions.MAX_PORTIONS
    held.gate.set()
    forward(d)
    assert standing(d) == {"req-d"}
    assert torch.equal(read_divided(d, OURS, 77), d.wanted(77))


def test_as_kernels_copy(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each portion is launched by itself, with an event."""
    monkeypatch.setattr(portions, "HOST_PORTION_BYTES", 1)
    copies = install(monkeypatch)
    monkeypatch.setattr(CmaChannel, "read", lambda channel, request: request.launch())
    p, d = ranks(group)
    p.fill(THEIRS, 112)
    begin(p, d, "first", 7)
    forward(d)
    assert standing(d) == {"first-d"}
    copies[1].held.clear()
    begin(p, d, "req", 100)
    for number, layer in enumerate(d.layers):
        assert d.worker.step_hold.layer_waits is not None
        d.worker.step_hold.layer_waits.layer(layer)
        assert all(event.wait(60) for event in copies[1].held)
        assert torch.equal(d.read(OURS, 100)[number], d.wanted(100)[number])
    assert len(copies[1].held) == portions.MAX_PORTIONS
    d.worker.finish_forward()
    assert len(copies[1].held) == portions.MAX_PORTIONS + 1 and standing(d) == {"req-d"}


def test_a_load_of_few_bytes_is_not_cut(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Portions(monkeypatch)
    p, d = ranks(group)
    p.fill(THEIRS, 112)
    learn(p, d)
    begin(p, d, "req", 100)
    assert held.copies[-1].portions == 1 and held.copies[-1].done
    forward(d)
    assert standing(d) == {"req-d"} and torch.equal(d.read(OURS, 100), d.wanted(100))


def test_portions_end_where_their_bytes_end(group: RankGroup, held: Portions) -> None:
    """``ends`` are what ``moved`` is after the last range of each portion: a turn never copies half of one."""
    p, d = ranks(group)
    p.fill(THEIRS, 112)
    learn(p, d)
    seen: list[int] = []
    held.gate.set()
    begin(p, d, "req", 100)
    copy = held.copies[-1]
    forward(d)
    seen.append(copy.moved)
    assert standing(d) == {"req-d"} and seen == [copy.ends[-1]]
    per_layer = 100 * d.content * 4 * len(d.heads)
    assert list(np.diff([0, *copy.ends]) // per_layer) == [2, 1, 1, 1]
