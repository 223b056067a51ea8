"""One engine of a soak in a process of its own: both halves, blocks that it gives away and takes back, and no model.

It does what vLLM does with a connector: it asks the scheduler half, gives a request blocks, posts the plan of each step
to the worker half, and frees blocks as the worker half reports. It looks at the bytes each time: a block that is free
holds ``FREE`` in each element until it is given away again, and a load that is reported as loaded has P's bytes.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from tests.support.inside import consumer_of, leases_of, producer_of, sends_of, sessions_of, thread_of
from tests.support.ranks import Rank, Timed, labels, left_in_tables, let_time_pass
from tests.support.remote import tell
from tests.support.turns import Usage

MAX_TOKENS = 320
FREE = -7
STEP_SECONDS = 0.002
"""The length of a step while the engine has requests; without them it looks at its results 20 times a second."""


def prompt_bytes(number: int, tokens: int, base: torch.Tensor) -> torch.Tensor:
    """[L, H, T, C] int32, the KV of prompt ``number``. ``base``: the labels of ``MAX_TOKENS``."""
    return base[:, :, :tokens] + number % 4093 * 524287


@dataclass(slots=True)
class Request:
    """A request of D. ``abort_at``: when its client goes; ``blocks``: none until they are given."""

    name: str
    number: int
    view: RequestView
    abort_at: float | None = None
    aborted: bool = False
    blocks: list[int] = field(default_factory=list)


def violation(text: str) -> None:
    tell({"event": "violation", "text": text})


class SoakEngine:
    """``leak``: the faults that are planted: "descriptor", "memory" of each load, the blocks of each tenth "lease"."""

    def __init__(self, name: str, plane: str, port: int, blocks: int, settings: dict[str, Any], leak: str) -> None:
        options = Timed(plane=plane, side_channel_port=port, **settings)
        self.rank = Rank(engine_id=name, blocks=blocks, settings=options)
        self.scheduler = SchedulerHalf(
            options, name, [BlockTable("full", self.rank.block_size)], tp_size=1, pp_size=1, produces=True,
            consumes=True,
        )  # fmt: skip
        self.scheduler.set_ranks([self.rank.address])
        self.base = labels(range(len(self.rank.layers)), self.rank.heads, MAX_TOKENS, self.rank.content)
        self.blocks, self.free = blocks, list(range(blocks))
        for cache in self.rank.caches.values():
            cache.fill_(FREE)
        self.held: dict[str, list[int]] = {}  # blocks of prompts under a lease
        self.requests: dict[str, Request] = {}
        self.counts: Counter[str] = Counter()
        self.usage = Usage(self.rank)
        self.leak = leak
        self.leaked: list[Any] = []
        self.ahead = 0.0  # the transfer thread's clock, in seconds
        tell({"event": "ready", "port": self.rank.address.port})

    # --- blocks ---------------------------------------------------------------------------------------------------

    def take(self, tokens: int) -> list[int] | None:
        count = -(-tokens // self.rank.block_size)
        if len(self.free) < count:
            return None
        taken, self.free = self.free[:count], self.free[count:]
        if any(bool((cache[taken] != FREE).any()) for cache in self.rank.caches.values()):
            violation(f"blocks {taken} were written while they were free")
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for cache in self.rank.caches.values():
            cache[blocks] = FREE
        self.free += blocks
        if len(self.free) > self.blocks:
            violation("blocks came back twice")

    def fill(self, blocks: Sequence[int], tokens: int, number: int) -> None:
        wanted, size = prompt_bytes(number, tokens, self.base), self.rank.block_size
        for layer, name in enumerate(self.rank.layers):
            for index, block in enumerate(blocks):
                part = wanted[layer, :, index * size : (index + 1) * size]
                self.rank.caches[name][block, :, : part.shape[1]] = part

    # --- orders ---------------------------------------------------------------------------------------------------

    def view(self, name: str, number: int, tokens: int, params: dict[str, Any], computed: int = 0) -> RequestView:
        return RequestView(name, params, [number % 30000 + n for n in range(tokens)], tokens, computed)

    def prefill(self, name: str, number: int, tokens: int) -> None:
        """Compute a prompt and lease its blocks; the parameters for D go out."""
        blocks = self.take(tokens)
        if blocks is None:
            return tell({"event": "prefilled", "name": name, "params": None})
        self.fill(blocks, tokens, number)
        view = self.view(name, number, tokens, {"do_remote_decode": True}, tokens)
        self.scheduler.on_new_request(view)
        self.scheduler.num_new_matched_tokens(view, 0)
        stays, params = self.scheduler.request_finished(view, [blocks], completed=True)
        assert stays, "the engine hands every prompt over"
        self.held[name] = blocks
        self.step()
        tell({"event": "prefilled", "name": name, "params": json.loads(json.dumps(params))})  # as routers do

    def load(self, name: str, number: int, tokens: int, params: dict[str, Any], abort_after: float | None) -> None:
        """Load a prompt. ``abort_after``: seconds until the client goes; below 0 before the request gets blocks."""
        self.request(name, number, tokens, params, abort_after)
        self.step()

    def request(self, name: str, number: int, tokens: int, params: dict[str, Any], abort_after: float | None) -> None:
        now = time.monotonic()
        request = Request(name, number, self.view(name, number, tokens, params))
        self.scheduler.on_new_request(request.view)
        count, beside = self.scheduler.num_new_matched_tokens(request.view, 0)
        gone = abort_after is not None and abort_after < 0
        blocks = None if gone or not count else self.take(tokens)
        if blocks is None:
            self.scheduler.request_finished(request.view, [[]], completed=False)
            outcome = "aborted before the load" if gone else "not loaded"
            return tell({"event": "loaded", "name": name, "outcome": outcome, "right": True})
        assert beside and count == tokens
        request.blocks = blocks
        request.abort_at = None if abort_after is None else now + abort_after
        self.requests[name] = request
        self.scheduler.after_alloc(request.view, [blocks], count)

    def abort_due(self, now: float) -> None:
        for request in self.requests.values():
            if not request.aborted and request.abort_at is not None and now >= request.abort_at:
                request.aborted = True
                self.scheduler.request_finished(request.view, [request.blocks], completed=False)

    # --- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step: what the scheduler half has planned, and what the worker half reports."""
        self.abort_due(time.monotonic())
        self.rank.worker.post(self.scheduler.take_plan())
        self.rank.worker.begin_step()
        results = self.rank.worker.take_results()
        self.scheduler.loads_finished(results.received, results.ends, self.rank.worker.take_estimates())
        self.scheduler.leases_ended(results.sent)
        for name in results.received:
            self.loaded(name, ok=name not in results.failed)
        for name in results.sent:
            self.lease_ended(name)

    def loaded(self, name: str, *, ok: bool) -> None:
        request = self.requests.pop(name, None)
        if request is None:
            return violation(f"load {name} is reported, which does not run")
        right = True
        if ok:
            tokens = request.view.num_prompt_tokens
            wanted = prompt_bytes(request.number, tokens, self.base)
            right = torch.equal(self.rank.read(request.blocks, tokens), wanted)
        if not request.aborted:
            self.scheduler.request_finished(request.view, [request.blocks], completed=True)
        self.give_back(request.blocks)
        outcome = "loaded" if ok else "aborted" if request.aborted else "failed"
        tell({"event": "loaded", "name": name, "outcome": outcome, "right": right})
        if "descriptor" in self.leak:
            self.leaked.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(4))
        if "memory" in self.leak:
            self.leaked.append(bytearray(os.urandom(1 << 10) * 4096))

    def lease_ended(self, name: str) -> None:
        blocks = self.held.pop(name, None)
        if blocks is None:
            return violation(f"the lease of {name} ends, which is not held")
        self.counts["leases"] += 1
        if "lease" not in self.leak or self.counts["leases"] % 10:
            self.give_back(blocks)

    # --- samples --------------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Tell what this process holds now."""
        thread: Any = thread_of(self.rank)
        producer, consumer = producer_of(thread), consumer_of(thread)
        held = {
            "leases": len(leases_of(producer)) + self.scheduler.leases_held,
            "kept": len(consumer.renewals.kept),
            "sessions": len(sessions_of(producer)),
            "links": len(consumer.links),
            "reads": len(sends_of(producer).live),
            "blocks": self.blocks - len(self.free),
            "requests": len(self.requests),
            "entries": sum(count for table, count in left_in_tables(self.rank).items() if table != "links"),
        }
        tell({"event": "sample", **self.usage.take(), **held})

    def pass_time(self, seconds: float) -> None:
        """Let it be so much later for the transfer thread."""
        self.ahead += seconds
        let_time_pass(self.rank, self.ahead)

    def idle(self) -> float:
        """A step; then seconds to wait for an order."""
        self.step()
        return STEP_SECONDS if self.requests or self.held else 0.05

    def close(self) -> None:
        self.rank.close()
