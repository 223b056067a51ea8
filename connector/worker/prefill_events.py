"""When the device has computed parts of a prompt: events before its first step, after groups of layers, after steps.

The engine's thread calls in here, and waits for nothing. In host memory its work is done when it says so; on a GPU a
thread of ``Copies`` waits for the device. A layer of which the engine says nothing, and a step that runs as one CUDA
graph, are ready at the end of the step.

In host memory the engine's thread is the device. Between the operations of two layers it needs the interpreter, which
it shares with the transfer thread. So where the engine says that a layer begins, the transfer thread is woken then, for
the layers before: the operation that follows is long, and holds no interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.pages.computed_steps import ComputedStep, PromptBlocks
from kvferry.connector.pages.copies import Copies
from kvferry.connector.wire.step_plan import StepPlan

LAYER_GROUPS = 8
"""An event of a step has an eighth of its layers at most, and half of those that are left: the bytes of the last group
alone leave after the step, where a message holds no more layers. Each event wakes a thread of P."""


class PrefillEvents:
    """The steps of one life of a rank that compute prompts for hand-overs."""

    def __init__(
        self,
        copies: Copies,
        geometry: RankGeometry,
        advanced: Callable[[], None],
        over: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``advanced``, ``over``, ``clock``: as ``ComputedStep`` takes them. Any thread may call the first two."""
        self._copies, self._advanced, self._over, self._clock = copies, advanced, over, clock
        self._in_host_memory = copies.device.type == "cpu"
        self._waits = self._advances = False  # whether ``advanced`` waits for a layer to begin, and whether it is due
        self._places: dict[str, list[tuple[int, int]]] = {}  # a layer's cache may have several parts
        for number, region in enumerate(geometry.regions):
            for layer, name in enumerate(region.layers):
                self._places.setdefault(name, []).append((number, layer))
        self._layers = sum(map(len, self._places.values()))
        self._group = -(-self._layers // LAYER_GROUPS)
        self._blocks: dict[bytes, PromptBlocks] = {}
        self._step: ComputedStep | None = None
        self._told = 0  # layers of the step for which an event was recorded
        self.busy = False
        """Whether ``begin_step`` has something to do, also for a plan without chunks."""

    @property
    def under_way(self) -> bool:
        """Whether ``end_step`` has something to do."""
        return self._step is not None

    def take_back(self, plan: StepPlan) -> None:
        """The engine takes the blocks of ``plan.stops`` back. Must come before the device gets work on these blocks.
        Idempotent."""
        for stop in plan.stops:
            blocks = self._blocks.pop(stop.token, None)
            if blocks is not None:
                blocks.lose()

    def begin_step(self, plan: StepPlan) -> ComputedStep | None:
        """A step is about to begin. Returns what the transfer thread must know of it; ``None`` where it computes no
        such prompt."""
        self.take_back(plan)
        self.end_step()  # the engine may not have said so
        for lease in plan.leases:
            self._blocks.pop(lease.token, None)
        self.busy = bool(plan.prefill_chunks or self._blocks)
        if not plan.prefill_chunks:
            return None
        blocks, found = [], False
        for chunk in plan.prefill_chunks:
            if chunk.restarts and (former := self._blocks.pop(chunk.token, None)) is not None:
                former.lose()
            found |= chunk.token not in self._blocks and chunk.ready > 0
            blocks.append(self._blocks.setdefault(chunk.token, PromptBlocks()))
        self._step, self._told = ComputedStep(tuple(blocks), self._layers, self._advance, self._over, self._clock), 0
        if found:  # else what is ready when the step begins was ready when the one before had ended
            self._copies.after_engine(self._step.has_begun)
        return self._step

    def _advance(self) -> None:
        if self._waits:
            self._advances = True
        else:
            self._advanced()

    def layer_begins(self) -> None:
        """The engine is about to compute the operation of a layer that writes or reads its cache."""
        self._waits = self._in_host_memory
        self._advance_now()

    def _advance_now(self) -> None:
        if self._advances:
            self._advances = False
            self._advanced()

    def layer_computed(self, name: str) -> None:
        """The engine has given the device all work of this step that writes the cache of a layer."""
        step = self._step
        if step is None or name not in self._places:  # a layer that uses the cache of another one
            return
        step.layers += self._places[name]
        layers = len(step.layers)
        if layers - self._told >= min(self._group, (self._layers - self._told + 1) // 2):
            self._told = layers
            self._copies.after_engine(partial(step.has_computed, self._told))

    def fail_step(self) -> None:
        """The engine has given up the step: what the device has not computed by now, it never will. Idempotent."""
        step, self._step = self._step, None
        if step is not None:
            for blocks in step.blocks:
                blocks.lose()

    def end_step(self) -> None:
        """The engine has given the device all work of the step. Idempotent."""
        step, self._step = self._step, None
        if step is not None:
            self._copies.after_engine(step.has_ended)
        self._waits = False
        self._advance_now()
