"""The prompts that P's engine computes while they are read: which bytes lie in their blocks, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.prefill_side.prompts import Prompt, PromptPart, Prompts, PromptState
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PrefillChunk, unpack_ids
from kvferry.transport.errors import GeometryError


class _StepInFlight(msgspec.Struct, eq=False):
    step: ComputedStep
    parts: list[tuple[Prompt, PromptPart]]
    seen: tuple[bool, int, bool] = (False, 0, False)
    """What of the step has been handled."""


class PrefillSteps:
    """The steps that the device has not ended, the oldest first. Used by the transfer thread only."""

    def __init__(self, caches: RankCaches) -> None:
        self._caches = caches
        self.flights: list[_StepInFlight] = []

    def plan(
        self, chunks: tuple[PrefillChunk, ...], step: ComputedStep, prompts: Prompts, now: float
    ) -> Iterator[Prompt]:
        """A step begins that computes these chunks; yields their prompts.

        Raises:
            GeometryError: a block id is out of range.
        """
        parts, wrong = [], None
        for chunk, blocks in zip(chunks, step.blocks, strict=True):
            prompt = prompts.table.get(chunk.token)
            if prompt is None or prompt.state is not PromptState.OPEN:
                continue
            if prompt.preempted and not chunk.restarts:  # which blocks hold the tokens before is not known
                continue
            try:
                new = [self._caches.kernel_ids(region, unpack_ids(ids)) for region, ids in enumerate(chunk.block_ids)]
            except GeometryError as error:
                prompt.blocks = blocks
                prompts.preempt(prompt, now)
                wrong = error
                continue
            prompt.place(blocks, new, chunk.block_ids)
            part = PromptPart(chunk.ready, chunk.stop, blocks)
            prompt.parts.append(part)
            parts.append((prompt, part))
            yield prompt
        self.flights.append(_StepInFlight(step, parts))
        if wrong is not None:
            raise wrong

    @property
    def has_news(self) -> bool:
        """Whether a step has advanced since ``look``."""
        return any(flight.seen != flight.step.progress for flight in self.flights)

    def look(self) -> Iterator[tuple[Prompt, bool, bool]]:
        """The prompts of which the device has computed more since the last call; for each, whether all of it lies in
        the blocks, which was not so before, and whether that is so in ``NEARLY_SECONDS``."""
        for flight in list(self.flights):
            step, seen = flight.step, flight.step.progress
            if seen == flight.seen:
                continue
            begun, computed, ended = seen
            layers = step.layers[flight.seen[1] : computed]
            flight.seen = seen
            if ended:
                self.flights.remove(flight)
            for prompt, part in flight.parts:
                part.layers.update(layers)
                was_whole = prompt.whole
                if prompt.advance(part, part.stop if ended else part.ready if begun else 0):
                    nearly = bool(layers) and not ended and step.nearly and part.stop >= prompt.num_tokens
                    yield prompt, prompt.whole and not was_whole, nearly
                if ended and part in prompt.parts:
                    prompt.parts.remove(part)


def boxes(prompt: Prompt, caches: RankCaches, ask: messages.Ask, first: int = 0) -> Iterator[PageBox | None]:
    """The chunks of a read in wire order, from chunk number ``first`` on, made one by one because a long read has many.
    ``None`` in place of a chunk: its bytes do not lie in the blocks yet. Ends with an error where the lease does not
    hold all blocks.

    Raises:
        GeometryError: that error.
    """
    number = 0
    for span in ask.spans:
        ours = caches.geometry.regions[span.region]
        cut = caches.span_cut(span, ask.chunk_bytes, ours)
        if number + len(cut) <= first:
            number += len(cut)
            continue
        end = span.token + span.num_tokens
        while prompt.state is PromptState.OPEN and not _allocated(prompt, caches, span.region, end):
            yield None
        ids = prompt.ids[span.region]
        caches.check_held(span.region, ids, span.token, end)
        whole = caches.box(span, span.region, span.layer, span.head, ids, ours.shard)
        # Where ranks shard the tokens, a chunk counts only those that both sides hold.
        dense = ours.shard.whole and span.shard.whole
        for chunk, box in zip(cut, caches.cut(whole, span, ask.chunk_bytes, ours), strict=True):
            if number >= first:
                stop = span.token + chunk.token + chunk.num_tokens if dense else end
                while not holds(prompt, span.region, span.layer + chunk.layer, chunk.num_layers, stop):
                    yield None
                yield box
            number += 1


def _allocated(prompt: Prompt, caches: RankCaches, region: int, stop: int) -> bool:
    """Whether the engine has allocated the blocks of all tokens before ``stop``."""
    blocks = len(prompt.ids[region]) * caches.views[region].block_size
    return caches.geometry.regions[region].shard.count(stop) <= blocks


def holds(prompt: Prompt, region: int, layer: int, num_layers: int, stop: int) -> bool:
    """Whether the KV of all tokens before ``stop`` lies in the blocks, for ``num_layers`` layers of a region from
    number ``layer`` on."""
    if prompt.state is not PromptState.OPEN:
        return prompt.granted
    stop = min(stop, prompt.num_tokens)
    if stop <= prompt.computed:
        return True
    wanted = [(region, number) for number in range(layer, layer + num_layers)]
    return any(part.stop >= stop and part.layers.issuperset(wanted) for part in prompt.parts)
