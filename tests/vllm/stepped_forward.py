"""The made-up forward of one step on one rank, layer by layer as vLLM runs it: a layer's KV of the tokens that the step
computes is written, then the connector is asked for the layer, then its attention reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tests.vllm.labelled import labels
from tests.vllm.stepped_model import Turn
from tests.vllm.stepped_rank import Worker


@dataclass
class Origins:
    """Where the KV below the first computed token came from, at the request's first forward."""

    ours: int
    theirs: int


class Owner(Protocol):
    """What a forward uses of its engine."""

    origin: int
    origins: dict[str, Origins]
    window: int | None
    device: Callable[[], None]
    at_layer: Callable[[int], None]
    wrong: list[tuple[str, set[int], str]]

    def block_tables(self, request_id: str) -> tuple[list[int], ...]: ...


class Forward:
    """One step of one rank: ``update`` and ``attend`` for each layer, then ``finish``."""

    def __init__(self, engine: Owner, worker: Worker, turns: dict[str, Turn]) -> None:
        self._engine, self._worker, self._turns = engine, worker, turns
        self._tables = {request_id: engine.block_tables(request_id) for request_id in turns}
        self._found: dict[str, list[torch.Tensor]] = {request_id: [] for request_id in turns}
        self._layers: list[int] = []
        engine.device()

    def update(self, layer: int) -> None:
        """Write what the step computes."""
        for request_id, turn in self._turns.items():
            self._worker.write(self._tables[request_id], turn.start, turn.ids[turn.start :], [layer])

    def attend(self, layer: int) -> None:
        """Look at all KV that the step reads."""
        self._engine.at_layer(layer)
        self._layers.append(layer)
        for request_id, turn in self._turns.items():
            held = self._worker.held(turn.start)
            self._found[request_id].append(self._worker.kv(self._tables[request_id], 0, len(held), [layer])[0])

    def finish(self) -> None:
        """From wrong KV comes wrong KV."""
        engine, worker = self._engine, self._worker
        order = [self._layers.index(layer) for layer in range(len(self._layers))]
        for request_id, turn in self._turns.items():
            tables, held = self._tables[request_id], worker.held(turn.start)
            found = torch.stack([self._found[request_id][place] for place in order])
            differs = (found >> 1) != (labels(worker.heads, 0, turn.ids[: turn.start], 0)[:, :, held] >> 1)
            if engine.window is not None:
                differs[-1, :, : max(0, turn.start - engine.window + 1)] = False
            wrong = differs.any(dim=3).any(dim=1).any(dim=0).nonzero().flatten().tolist()
            if wrong:
                text = f"{request_id}: wrong KV at positions {[held[n] for n in wrong]} of {turn.start}"
                engine.wrong.append((request_id, set(tables[0]), text))
                worker.write(tables, turn.start, [token + 1 for token in turn.ids[turn.start :]])
            ours = int(((found[0] & 1) == engine.origin).all(dim=2).all(dim=0).sum())
            engine.origins.setdefault(request_id, Origins(ours, len(held) - ours))
