"""The prompts that P's engine computes while they are read: which bytes lie in their blocks, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.prefill_side.lease import (
    Lease,
    LeaseEvent,
    LeaseEventKind,
    LeasePhase,
    PromptPart,
)
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PrefillChunk, unpack_ids
from kvferry.transport.errors import GeometryError

_K = LeaseEventKind


class _StepInFlight(msgspec.Struct, eq=False):
    """A step and its parts of prompts. ``seen``: what of the step has been handled."""

    step: ComputedStep
    parts: list[tuple[Lease, PromptPart]]
    seen: tuple[bool, int, bool] = (False, 0, False)


class PrefillSteps:
    """The steps that the device has not ended, the oldest first. The caller gives each event to its lease before it
    takes the next one. Used by the transfer thread only."""

    def __init__(self, caches: RankCaches) -> None:
        self._caches = caches
        self.flights: list[_StepInFlight] = []

    def plan(
        self, chunks: tuple[PrefillChunk, ...], step: ComputedStep, leases: Mapping[bytes, Lease]
    ) -> Iterator[tuple[Lease, LeaseEvent]]:
        """A step begins that computes these chunks.

        Raises:
            GeometryError: a block id is out of range.
        """
        parts, wrong = [], None
        for chunk, blocks in zip(chunks, step.blocks, strict=True):
            lease = leases.get(chunk.token)
            if lease is None or lease.begun:
                continue
            try:
                new = [self._caches.kernel_ids(region, unpack_ids(ids)) for region, ids in enumerate(chunk.block_ids)]
            except GeometryError as error:
                # Which blocks hold the tokens is not known any more: reads wait for the lease.
                yield lease, LeaseEvent(_K.PREEMPTED)
                wrong = error
                continue
            if blocks is not lease.blocks:
                lease.blocks, lease.parts, lease.ids, lease.block_ids = blocks, [], new, chunk.block_ids
            else:
                lease.block_ids = tuple(map(bytes.__add__, lease.block_ids, chunk.block_ids))
                lease.ids = [np.concatenate(pair) for pair in zip(lease.ids, new, strict=True)]
            yield lease, LeaseEvent(_K.RESTARTED if chunk.restarts else _K.STEP_PLANNED)
            part = PromptPart(chunk.ready, chunk.stop, lease.lifetime.state.life)
            lease.parts.append(part)
            parts.append((lease, part))
        self.flights.append(_StepInFlight(step, parts))
        if wrong is not None:
            raise wrong

    @property
    def has_news(self) -> bool:
        """Whether a step has advanced since ``look``."""
        return any(flight.seen != flight.step.progress for flight in self.flights)

    def look(self) -> Iterator[tuple[Lease, LeaseEvent]]:
        """What the device has computed since the last call."""
        for flight in list(self.flights):
            step, seen = flight.step, flight.step.progress
            if seen == flight.seen:
                continue
            begun, computed, ended = seen
            layers = step.layers[flight.seen[1] : computed]
            flight.seen = seen
            if ended:
                self.flights.remove(flight)
            for lease, part in flight.parts:
                part.layers.update(layers)
                tokens = part.stop if ended else part.ready if begun else 0
                total = lease.grant.num_tokens
                nearly = bool(layers) and not ended and step.nearly and part.stop >= total and lease.intact
                whole = tokens >= total
                yield lease, LeaseEvent(_K.ADVANCED, life=part.life, tokens=tokens, whole=whole, nearly=nearly)
                if ended and part in lease.parts:
                    lease.parts.remove(part)


def boxes(lease: Lease, caches: RankCaches, ask: messages.Ask, first: int = 0) -> Iterator[PageBox | None]:
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
        while not (lease.begun or _allocated(lease, caches, span.region, end)):
            yield None
        ids = lease.ids[span.region]
        caches.check_held(span.region, ids, span.token, end)
        whole = caches.box(span, span.region, span.layer, span.head, ids, ours.shard)
        # Where ranks shard the tokens, a chunk counts only those that both sides hold.
        dense = ours.shard.whole and span.shard.whole
        for chunk, box in zip(cut, caches.cut(whole, span, ask.chunk_bytes, ours), strict=True):
            if number >= first:
                stop = span.token + chunk.token + chunk.num_tokens if dense else end
                while not holds(lease, span.region, span.layer + chunk.layer, chunk.num_layers, stop):
                    yield None
                yield box
            number += 1


def _allocated(lease: Lease, caches: RankCaches, region: int, stop: int) -> bool:
    """Whether the engine has allocated the blocks of all tokens before ``stop``."""
    blocks = len(lease.ids[region]) * caches.views[region].block_size
    return caches.geometry.regions[region].shard.count(stop) <= blocks


def holds(lease: Lease, region: int, layer: int, num_layers: int, stop: int) -> bool:
    """Whether the KV of all tokens before ``stop`` lies in the blocks, for ``num_layers`` layers of a region from
    number ``layer`` on."""
    state = lease.lifetime.state
    if state.phase not in (LeasePhase.COMPUTING, LeasePhase.LENT):
        return state.phase is LeasePhase.GRANTED
    stop = min(stop, lease.grant.num_tokens)
    if stop <= state.computed:
        return True
    wanted = [(region, number) for number in range(layer, layer + num_layers)]
    return any(part.stop >= stop and part.layers.issuperset(wanted) for part in lease.parts)
