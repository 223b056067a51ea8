"""When the device has computed parts of a prompt: events before a step, after groups of its layers, and at its end.

The engine's thread calls in here, and waits for nothing. In host memory its work is done when it says so; on a GPU a
thread of ``Copies`` waits for the device. A layer of which the engine says nothing, and a step that runs as one CUDA
graph, are ready at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.protocol.step_plan import StepPlan
from kvferry.connector.transfer.computed_steps import ComputedStep, PromptBlocks
from kvferry.connector.transfer.copies import Copies

LAYER_GROUPS = 8
"""Events of one step beside those at its begin and its end. Each one wakes a thread of P, and the bytes of the last
group alone leave after the step: an eighth of it."""


class PrefillEvents:
    """The steps of one life of a rank that compute prompts for hand-overs."""

    def __init__(self, copies: Copies, geometry: RankGeometry, wake: Callable[[], None]) -> None:
        """``wake``: has the transfer thread look at the steps. Any thread may call it."""
        self._copies, self._wake = copies, wake
        self._places: dict[str, list[tuple[int, int]]] = {}  # a layer's cache may have several parts
        for number, region in enumerate(geometry.regions):
            for layer, name in enumerate(region.layers):
                self._places.setdefault(name, []).append((number, layer))
        self._group = -(-sum(map(len, self._places.values())) // LAYER_GROUPS)
        self._blocks: dict[bytes, PromptBlocks] = {}
        self._step: ComputedStep | None = None
        self._told = 0  # layers of the step for which an event was recorded
        self.busy = False
        """Whether ``begin_step`` has something to do, also for a plan without chunks."""

    def take_back(self, plan: StepPlan) -> None:
        """The engine takes the blocks of ``plan.stops`` back. Must come before the device gets work on these blocks.
        Idempotent."""
        for stop in plan.stops:
            blocks = self._blocks.pop(stop.token, None)
            if blocks is not None:
                blocks.lost = True

    def begin_step(self, plan: StepPlan) -> ComputedStep | None:
        """A step is about to begin. Returns what the transfer thread must know of it; ``None`` where it computes no
        such prompt."""
        self.take_back(plan)
        self.end_step()  # the engine may not have said so
        for lease in plan.leases:
            self._blocks.pop(lease.token, None)
        self.busy = bool(plan.chunks or self._blocks)
        if not plan.chunks:
            return None
        blocks = []
        for chunk in plan.chunks:
            if chunk.restarts and (former := self._blocks.pop(chunk.token, None)) is not None:
                former.lost = True
            blocks.append(self._blocks.setdefault(chunk.token, PromptBlocks()))
        self._step, self._told = ComputedStep(tuple(blocks), self._wake), 0
        self._copies.after_engine(self._step.has_begun)
        return self._step

    def layer_computed(self, name: str) -> None:
        """The engine has given the device all work of this step that writes the cache of a layer."""
        step = self._step
        if step is None or name not in self._places:  # a layer that uses the cache of another one
            return
        step.layers += self._places[name]
        if len(step.layers) - self._told >= self._group:
            self._told = len(step.layers)
            self._copies.after_engine(partial(step.has_computed, self._told))

    def end_step(self) -> None:
        """The engine has given the device all work of the step. Idempotent."""
        step, self._step = self._step, None
        if step is not None:
            self._copies.after_engine(step.has_ended)
