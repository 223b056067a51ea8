"""How the forward of one step waits for the loads that it computes with. Used by the engine's thread alone.

Where the engine calls ``layer`` before it uses the cache of a layer, the forward waits for the portion of each copy
with this layer: a device waits for an event of the copy, the thread in host memory for its bytes. Else it waits for all
copies before it begins. A copy is cut only if the last forward with loads has called ``layer``; for which layers, and
in which order, is the *layer order* of the next one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from kvferry.connector.geometry.portions import num_layers_of, portion_of
from kvferry.connector.pages.copies import Copies
from kvferry.connector.step_loads.step_outcome import StepOutcome
from kvferry.transport.channels import Copy

logger = logging.getLogger("vllm.kvferry.layer_waits")


class LayerWaits:
    """The waits of one step. ``begin``, then ``layer`` for each layer if the engine calls it, then ``finish``."""

    def __init__(
        self, outcome: StepOutcome, copies: Copies, block: Callable[[Sequence[tuple[Copy, int]]], object]
    ) -> None:
        """``block``: block until portions of copies, each with its number, have ended; used for copies that are not on
        the stream of ``copies``."""
        self._outcome, self._copies, self._block = outcome, copies, block
        self._order = {layer: place for place, layer in enumerate(outcome.layer_order)}
        self.called: dict[str, None] = {}
        self._under_way: list[Copy] = []
        # How many layers of the order each of the engine's streams has waited for. A stream that another one starts has
        # waited for what that one had waited for, which is at least what the forward began with.
        self._covered: dict[int, float] = {}
        self._at_first = math.inf

    def begin(self, *, by_layer: bool) -> None:
        """Wait for what the forward needs at its beginning. ``by_layer``: the engine calls ``layer`` before it uses the
        cache of a layer, for each layer for which it has done so before."""
        self._under_way = self._outcome.under_way
        if self._under_way:
            self._at_first = self._wait(0 if by_layer else len(self._order))

    def layer(self, name: str) -> None:
        """The forward comes to a layer. A layer that the order does not name may share the cache of any other one."""
        self.called[name] = None
        place = self._order.get(name, len(self._order))
        if place >= self._covered.get(self._copies.engine_stream, self._at_first):
            self._wait(place)

    def finish(self) -> tuple[str, ...]:
        """The forward has been launched, in host memory it has ended. Later work on the device waits for all copies.
        Returns the layers for which ``layer`` was called, in order."""
        skipped = [name for name, place in self._order.items() if place >= self._at_first and name not in self.called]
        if skipped:
            logger.error(
                "kvferry: the loads of a step fail: its forward has not waited for %s, as the last one has",
                ", ".join(skipped[:4]),
            )
            self._outcome.spoil()
        if self._at_first != math.inf and any(copy.on_stream for copy in self._under_way):
            self._copies.make_engine_wait()
        return tuple(self.called)

    def _wait(self, place: int) -> float:
        """Wait for the layers up to ``place`` of the order, or for all. Returns how many layers are waited for now."""
        covered, whole = math.inf, False
        blocking: list[tuple[Copy, int]] = []
        for copy in self._under_way:
            count, layers = copy.portions, len(self._order)
            portion = portion_of(place, layers, count) if place < layers else count - 1
            if portion < count - 1:
                covered = min(covered, num_layers_of(portion + 1, layers, count))
            if not copy.on_stream:
                blocking.append((copy, portion))
            elif copy.events:
                self._copies.make_engine_wait(copy.events[portion])
            else:
                whole = True
        if whole:
            self._copies.make_engine_wait()
        if blocking:
            self._block(blocking)
        self._covered[self._copies.engine_stream] = covered
        return covered
