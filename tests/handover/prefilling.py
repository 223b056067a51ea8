"""An engine P that computes a prompt step by step, as its ranks see it: plans, and bytes that appear layer by layer."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvferry.connector.wire.step_plan import LeaseGrant, Prefill, PrefillChunk, PrefillStop, StepPlan, pack_ids
from kvferry.connector.worker.prefill_events import PrefillEvents
from tests.support.ranks import Rank, load_plan, peer

GARBAGE = -7


class PrefillingEngine:
    """One prompt that ranks of P compute. The test says when what is computed. Another ``salt`` is another prompt."""

    def __init__(
        self, ranks: Sequence[Rank], blocks: Sequence[int], tokens: int, request_id: str = "req-p", salt: int = 0
    ) -> None:
        self.ranks, self.blocks, self.tokens, self.request_id = ranks, list(blocks), tokens, request_id
        self.salt = salt
        self.token = secrets.token_bytes(16)
        self.planned = 0  # blocks that the ranks know

    def post(self, plan: StepPlan) -> None:
        for rank in self.ranks:
            rank.worker.post(plan)

    @property
    def _events(self) -> Iterable[PrefillEvents]:
        for rank in self.ranks:
            assert rank.worker.prefills is not None
            yield rank.worker.prefills

    def begin(self, found: int = 0, step_tokens: int = 0, *, streams: bool = True) -> None:
        """The first step is scheduled."""
        names = (self.request_id,)
        prefill = Prefill(self.request_id, self.token, self.tokens, "", names, b"p", found, step_tokens, streams)
        self.post(StepPlan(prefills=(prefill,)))

    def plan(self, start: int, stop: int, *, restarts: bool = False, ready: int | None = None) -> None:
        """A step begins that computes tokens ``[start, stop)``. ``ready``: as in ``PrefillChunk``, ``start`` if
        ``None``."""
        self.planned = 0 if restarts else self.planned
        needed = -(-stop // self.ranks[0].block_size)
        new = self.blocks[self.planned : needed]
        self.planned = max(self.planned, needed)
        ready = start if ready is None else ready
        self.post(StepPlan(prefill_chunks=(PrefillChunk(self.token, start, stop, (pack_ids(new),), restarts, ready),)))

    def write(self, start: int, stop: int, layers: Iterable[int] | None = None) -> None:
        """The bytes of these tokens come into the blocks."""
        for rank in self.ranks:
            wanted = rank.wanted(self.tokens) + self.salt
            for number in range(len(rank.layers)) if layers is None else layers:
                cache = rank.caches[rank.layers[number]]
                for token in range(start, stop):
                    block, place = divmod(token, rank.block_size)
                    cache[self.blocks[block], :, place] = wanted[number, :, token]

    def hook(self, layers: Iterable[int]) -> None:
        """The engine says that these layers are computed."""
        for rank, events in zip(self.ranks, self._events, strict=True):
            for number in layers:
                events.layer_computed(rank.layers[number])

    def end(self) -> None:
        """The step has ended."""
        for events in self._events:
            events.end_step()

    def step(self, start: int, stop: int, *, restarts: bool = False) -> None:
        """A whole step."""
        self.plan(start, stop, restarts=restarts)
        self.write(start, stop)
        self.end()

    def finish(self, start: int = 0, *, restarts: bool = False) -> None:
        """A step with all tokens from ``start`` on, and the lease."""
        self.step(start, self.tokens, restarts=restarts)
        self.grant()

    def take_back(self, blocks: Sequence[int] | None = None, *, ended: bool = False) -> None:
        """The engine takes the blocks back, and other requests write into them at once. ``blocks``: those in which the
        prompt begins anew."""
        self.post(StepPlan(stops=(PrefillStop(self.token, ended),)))
        for rank in self.ranks:
            for cache in rank.caches.values():
                cache[self.blocks] = GARBAGE
        self.blocks = self.blocks if blocks is None else list(blocks)

    def grant(self) -> None:
        """The prompt is computed, and its lease begins."""
        lease = LeaseGrant(self.request_id, self.token, self.tokens, (pack_ids(self.blocks),))
        self.post(StepPlan(leases=(lease,)))

    def load(
        self, d: Rank, blocks: Sequence[int], request_id: str = "req-d", *, found: int = 0, step: int = 0
    ) -> None:  # fmt: skip
        """D loads the prompt, in windows of ``step`` tokens."""
        plan = load_plan(request_id, self.token, peer(self.ranks), blocks, 0, self.tokens)
        loads = tuple(replace(load, found=found, step_tokens=step) for load in plan.loads)
        d.worker.post(replace(plan, loads=loads))
