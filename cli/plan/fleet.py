"""A fleet of P and D engines under a trace of requests, event by event. Pure: the same result for the same arguments.

A request goes to the P engine that should have computed it first, by the prefixes that each one holds. P computes one
prompt after the other. The request then goes to the D engine with the fewest requests. There it waits for a place, for
the links of P and of D, and for the bytes, and then takes part in D's steps. P holds the blocks under a lease until the
bytes have moved, at most ``lease_cap_seconds``: after that, D computes the prompt, and its other sequences wait.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil, inf

import msgspec
import numpy as np

from kvferry.cli.plan.trace import BLOCK_TOKENS, TracedRequest
from kvferry.transport.errors import ConfigError

MAX_ENGINES = 1024
"""Bound on the engines of one side, where the fewest are sought."""

Handover = Callable[[int], tuple[float, float]]
"""Of a prompt of so many tokens: seconds for which it occupies the links of P and of D, and seconds beside them."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What the engines of a fleet can do. Times are seconds. ``d_sequences``: vLLM's ``--max-num-seqs`` of D.
    ``p_cache_tokens``, ``d_cache_tokens``: KV cache of one engine, as vLLM logs it at its start; ``None``: no bound."""

    prefill_tokens_per_second: float
    step_seconds: float
    step_seconds_per_sequence: float
    lease_cap_seconds: float
    d_sequences: int
    p_cache_tokens: int | None = None
    d_cache_tokens: int | None = None


@dataclass(slots=True)
class RequestRecord:
    """What became of a request. Times are seconds after the first request. ``reused``: tokens from P's prefix cache.
    ``expired``: its lease ended before the bytes had moved."""

    request: TracedRequest
    arrived: float
    p: int = -1
    d: int = -1
    prefill_began: float = inf
    prefill_ended: float = inf
    admitted: float = inf
    loaded: float = inf
    first_token: float = inf
    ended: float = inf
    reused: int = 0
    expired: bool = False

    @property
    def ttft(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.first_token - self.arrived

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first one; 0 where there is one token."""
        return (self.ended - self.first_token) / max(1, self.request.output_length - 1)


class PrefixCache:
    """The blocks of one P engine, of which the least recently used leave first. Blocks under a lease stay.

    ``capacity``: blocks in all; ``None``: no bound.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = inf if capacity is None else capacity
        self._leased: Counter[int] = Counter()
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._private = 0

    @property
    def num_leased(self) -> int:
        """Blocks that may not leave."""
        return len(self._leased) + self._private

    def matched(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks of a prompt are here."""
        for length, block in enumerate(blocks):
            if block not in self._leased and block not in self._unused:
                return length
        return len(blocks)

    def lease(self, blocks: Sequence[int], private: int) -> bool:
        """Hold the blocks of a prompt, and ``private`` blocks that no other prompt can share. ``False``, and nothing
        has changed, if so many blocks are leased that these find no room."""
        new = sum(block not in self._leased for block in blocks)
        if self.num_leased + new + private > self._capacity:
            return False
        for block in blocks:
            self._leased[block] += 1
            self._unused.pop(block, None)
        self._private += private
        while self.num_leased + len(self._unused) > self._capacity:
            self._unused.popitem(last=False)
        return True

    def release(self, blocks: Sequence[int], private: int) -> None:
        """End a lease. The blocks stay until others need the room; the end of a prompt leaves first."""
        for block in reversed(blocks):
            self._leased[block] -= 1
            if not self._leased[block]:
                del self._leased[block]
                self._unused[block] = None
        self._private -= private


class StepClock:
    """The steps of one D engine with continuous batching: when each sequence gets its tokens.

    A step gives one token to each sequence, and takes ``base + per_sequence x sequences`` seconds. Sequences join
    between steps. So nothing need be computed at each step: until one joins or ends, all steps are equal.
    """

    def __init__(self, base: float, per_sequence: float) -> None:
        self._base, self._per_sequence = base, per_sequence
        self._steps, self._since = 0, 0.0  # steps so far, and the end of the last of them
        self._ends: list[tuple[int, int]] = []  # (step, sequence)
        self._fresh: list[int] = []  # sequences whose first step begins at ``_since``
        self.first_tokens: dict[int, float] = {}
        """When a sequence got its first token."""

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def _step(self) -> float:
        return self._base + self._per_sequence * len(self._ends)

    @property
    def next_end(self) -> float:
        """When the next sequence ends, if none joins before."""
        return self._since + (self._ends[0][0] - self._steps) * self._step if self._ends else inf

    def join(self, sequence: int, tokens: int, now: float, stall: float = 0.0) -> None:
        """A sequence joins after the step that is under way, and gets ``tokens`` tokens. ``stall``: seconds of other
        work before the next step."""
        self._advance(now)
        self._since += stall
        heapq.heappush(self._ends, (self._steps + tokens, sequence))
        self._fresh.append(sequence)

    def ended(self, now: float) -> list[int]:
        """The sequences that end at ``now``, which is ``next_end``."""
        if self._ends:
            self._pass(self._ends[0][0] - self._steps, now)
        found = []
        while self._ends and self._ends[0][0] <= self._steps:
            found.append(heapq.heappop(self._ends)[1])
        return found

    def _advance(self, now: float) -> None:
        """To the end of the step that is under way at ``now``."""
        if not self._ends:
            self._since = max(self._since, now)
            return
        steps = min(max(0, ceil((now - self._since) / self._step)), self._ends[0][0] - self._steps)
        self._pass(steps, self._since + steps * self._step)

    def _pass(self, steps: int, end: float) -> None:
        if steps:
            self.first_tokens.update(dict.fromkeys(self._fresh, self._since + self._step))
            self._fresh.clear()
        self._steps += steps
        self._since = end


class FleetEvent(IntEnum):
    """What happens; at one time in this order."""

    STEP_ENDED = 0
    LOADED = 1
    LEASE_ENDED = 2
    PREFILLED = 3
    ARRIVED = 4


@dataclass(slots=True)
class _Prefiller:
    cache: PrefixCache
    queue: deque[tuple[int, float]] = field(default_factory=deque)  # (request, the seconds that it should take)
    queued_seconds: float = 0.0
    busy_until: float = 0.0
    running: int = -1
    link_free: float = 0.0


@dataclass(slots=True)
class _Decoder:
    clock: StepClock
    waiting: deque[int] = field(default_factory=deque)
    held: int = 0  # requests that have a place
    held_tokens: int = 0
    link_free: float = 0.0


class Fleet:
    """``run`` serves a trace with ``num_p`` P engines and ``num_d`` D engines."""

    def __init__(self, num_p: int, num_d: int, model: EngineModel, handover: Handover) -> None:
        """Raises ConfigError: no engine on one of the sides."""
        if num_p < 1 or num_d < 1:
            raise ConfigError(f"a fleet of {num_p} P and {num_d} D engines, expected at least one of each")
        self._model, self._handover = model, handover
        blocks = None if model.p_cache_tokens is None else model.p_cache_tokens // BLOCK_TOKENS
        self._p = [_Prefiller(PrefixCache(blocks)) for _ in range(num_p)]
        self._d = [_Decoder(StepClock(model.step_seconds, model.step_seconds_per_sequence)) for _ in range(num_d)]
        self._events: list[tuple[float, FleetEvent, int]] = []
        self._records: list[RequestRecord] = []
        self._leased: set[int] = set()

    def run(self, trace: Sequence[TracedRequest]) -> list[RequestRecord]:
        """Serve all requests, from the first to the end of the last. Raises ConfigError: a request does not fit into an
        engine's cache."""
        self._check(trace)
        begin = trace[0].timestamp
        self._records = [RequestRecord(request, (request.timestamp - begin) / 1e3) for request in trace]
        self._events = [(record.arrived, FleetEvent.ARRIVED, number) for number, record in enumerate(self._records)]
        heapq.heapify(self._events)
        act = (self._step_ended, self._loaded, self._lease_ended, self._prefilled, self._arrived)
        while self._events:
            now, event, number = heapq.heappop(self._events)
            act[event](number, now)
        return self._records

    def _check(self, trace: Sequence[TracedRequest]) -> None:
        for side, room, needed in (
            ("P", self._model.p_cache_tokens, lambda request: len(request.hash_ids) * BLOCK_TOKENS),
            ("D", self._model.d_cache_tokens, lambda request: request.input_length + request.output_length),
        ):
            most = max(map(needed, trace))
            if room is not None and most > room // BLOCK_TOKENS * BLOCK_TOKENS:
                raise ConfigError(
                    f"a request needs {most} tokens of {side}'s KV cache, which has {room}; "
                    f"give a larger --{side.lower()}-cache-tokens, or leave it out"
                )

    def _at(self, time: float, event: FleetEvent, number: int) -> None:
        heapq.heappush(self._events, (time, event, number))

    # --- P ------------------------------------------------------------------------------------------------------

    def _arrived(self, number: int, now: float) -> None:
        record = self._records[number]
        record.p, seconds = self._choose_p(record.request, now)
        engine = self._p[record.p]
        engine.queue.append((number, seconds))
        engine.queued_seconds += seconds
        self._prefill_next(record.p, now)

    def _choose_p(self, request: TracedRequest, now: float) -> tuple[int, float]:
        """The engine that should have computed the prompt first, and the seconds that it should take."""
        shared, best = _shareable(request), (inf, 0, 0.0)
        for number, engine in enumerate(self._p):
            takes = self._prefill_seconds(request, engine.cache.matched(shared))
            best = min(best, (max(engine.busy_until - now, 0.0) + engine.queued_seconds + takes, number, takes))
        return best[1], best[2]

    def _prefill_seconds(self, request: TracedRequest, blocks: int) -> float:
        return _to_compute(request, blocks) / self._model.prefill_tokens_per_second

    def _prefill_next(self, place: int, now: float) -> None:
        engine = self._p[place]
        if engine.running >= 0 or not engine.queue:
            return
        number, expected = engine.queue[0]
        record = self._records[number]
        shared = _shareable(record.request)
        matched = engine.cache.matched(shared)
        if not engine.cache.lease(shared, len(record.request.hash_ids) - len(shared)):
            return  # a lease that ends makes room
        engine.queue.popleft()
        engine.queued_seconds = engine.queued_seconds - expected if engine.queue else 0.0
        record.reused = record.request.input_length - _to_compute(record.request, matched)
        record.prefill_began = now
        engine.running = number
        engine.busy_until = now + self._prefill_seconds(record.request, matched)
        self._at(engine.busy_until, FleetEvent.PREFILLED, number)

    def _prefilled(self, number: int, now: float) -> None:
        record = self._records[number]
        record.prefill_ended = now
        self._p[record.p].running = -1
        self._leased.add(number)
        self._at(now + self._model.lease_cap_seconds, FleetEvent.LEASE_ENDED, number)
        record.d = min(range(len(self._d)), key=lambda d: self._d[d].held + len(self._d[d].waiting))
        self._d[record.d].waiting.append(number)
        self._admit(record.d, now)
        self._prefill_next(record.p, now)

    def _lease_ended(self, number: int, now: float) -> None:
        if number in self._leased:
            self._leased.remove(number)
            record = self._records[number]
            shared = _shareable(record.request)
            self._p[record.p].cache.release(shared, len(record.request.hash_ids) - len(shared))
            self._prefill_next(record.p, now)

    # --- D ------------------------------------------------------------------------------------------------------

    def _admit(self, place: int, now: float) -> None:
        """Give places to requests that wait, in order, and begin their hand-overs."""
        engine, model = self._d[place], self._model
        while engine.waiting and engine.held < model.d_sequences:
            number = engine.waiting[0]
            record = self._records[number]
            tokens = record.request.input_length + record.request.output_length
            if model.d_cache_tokens is not None and engine.held_tokens + tokens > model.d_cache_tokens:
                return
            engine.waiting.popleft()
            engine.held += 1
            engine.held_tokens += tokens
            record.admitted = now
            occupied, beside = self._handover(record.request.input_length)
            source = self._p[record.p]
            moved = max(now, source.link_free, engine.link_free) + occupied
            record.expired = moved + beside > record.prefill_ended + model.lease_cap_seconds
            if record.expired:  # D learns it when the lease ends, at the latest
                at = max(now, record.prefill_ended + model.lease_cap_seconds)
            else:
                source.link_free = engine.link_free = moved
                at = moved + beside
            self._at(at, FleetEvent.LOADED, number)

    def _loaded(self, number: int, now: float) -> None:
        record = self._records[number]
        if not record.expired:
            self._lease_ended(number, now)
        record.loaded = now
        stall = self._prefill_seconds(record.request, 0) if record.expired else 0.0
        clock = self._d[record.d].clock
        clock.join(number, record.request.output_length, now, stall)
        self._at(clock.next_end, FleetEvent.STEP_ENDED, record.d)

    def _step_ended(self, place: int, now: float) -> None:
        engine = self._d[place]
        if now < engine.clock.next_end:
            return  # a sequence has joined since, and its event comes later
        for number in engine.clock.ended(now):
            record = self._records[number]
            record.first_token = engine.clock.first_tokens.pop(number)
            record.ended = now
            engine.held -= 1
            engine.held_tokens -= record.request.input_length + record.request.output_length
        if len(engine.clock):
            self._at(engine.clock.next_end, FleetEvent.STEP_ENDED, place)
        self._admit(place, now)


def _shareable(request: TracedRequest) -> tuple[int, ...]:
    """The full blocks of a prompt; the last one of another prompt may differ behind its end."""
    return request.hash_ids[: request.input_length // BLOCK_TOKENS]


def _to_compute(request: TracedRequest, blocks: int) -> int:
    """Tokens that P computes if it has the first ``blocks``: one at least, for its logits."""
    return max(1, request.input_length - blocks * BLOCK_TOKENS)


# --- how a fleet fares, and the fewest engines that keep TTFT and TPOT within targets ---------------------------------


class Targets(msgspec.Struct, frozen=True):
    """At ``percentile`` of all requests, TTFT and TPOT are at most so many seconds."""

    ttft: float
    tpot: float
    percentile: float


class FleetReport(msgspec.Struct, frozen=True):
    """How a fleet fared. Times are seconds. ``percentile`` names the one of ``ttft`` and ``tpot``, beside the medians.
    Parts of the mean TTFT: ``p_queue``, ``prefill``, ``d_queue``, ``handover``, ``first_step``. ``reused_tokens``: the
    share of all prompt tokens that P had in its prefix cache. ``p_busy``: the share of the time in which P engines
    compute. ``expired_leases``: requests whose prompt D had to compute. ``seconds``: to the last token."""

    p_engines: int
    d_engines: int
    requests: int
    percentile: float
    ttft_p50: float
    ttft: float
    tpot_p50: float
    tpot: float
    p_queue: float
    prefill: float
    d_queue: float
    handover: float
    first_step: float
    reused_tokens: float
    p_busy: float
    expired_leases: int
    seconds: float

    def meets(self, targets: Targets) -> bool:
        return self.ttft <= targets.ttft and self.tpot <= targets.tpot


def fleet_report(records: Sequence[RequestRecord], num_p: int, num_d: int, percentile: float) -> FleetReport:
    """The summary of ``Fleet.run``. TPOT counts requests of two and more tokens."""
    tpot = [record.tpot for record in records if record.request.output_length > 1] or [0.0]
    ttft_p50, ttft_most = np.percentile([record.ttft for record in records], [50, percentile]).tolist()
    tpot_p50, tpot_most = np.percentile(tpot, [50, percentile]).tolist()
    times = np.array(
        [(r.arrived, r.prefill_began, r.prefill_ended, r.admitted, r.loaded, r.first_token, r.ended) for r in records]
    )
    p_queue, prefill, d_queue, handover, first_step = np.diff(times[:, :6], axis=1).mean(axis=0).tolist()
    end, prompt_tokens = float(times[:, 6].max()), sum(record.request.input_length for record in records)
    return FleetReport(
        num_p, num_d, len(records), percentile, ttft_p50, ttft_most, tpot_p50, tpot_most,
        p_queue, prefill, d_queue, handover, first_step,
        reused_tokens=sum(record.reused for record in records) / prompt_tokens,
        p_busy=float((times[:, 2] - times[:, 1]).sum()) / (num_p * end),
        expired_leases=sum(record.expired for record in records), seconds=end,
    )  # fmt: skip


class FleetPlanner:
    """Fleets of any size under one trace; each size is simulated once."""

    def __init__(
        self, trace: Sequence[TracedRequest], model: EngineModel, handover: Handover, percentile: float
    ) -> None:
        self._trace, self._model, self._handover, self._percentile = trace, model, handover, percentile
        self._reports: dict[tuple[int, int], FleetReport] = {}

    def report(self, num_p: int, num_d: int) -> FleetReport:
        """How a fleet of this size fares."""
        if (num_p, num_d) not in self._reports:
            records = Fleet(num_p, num_d, self._model, self._handover).run(self._trace)
            self._reports[num_p, num_d] = fleet_report(records, num_p, num_d, self._percentile)
        return self._reports[num_p, num_d]

    def fewest(self, targets: Targets) -> FleetReport:
        """The fewest P engines where D engines are many, and then the fewest D engines for so many P.

        More engines help the mean of a load, but not each request. So the answer is a size at which the targets are met
        while they are not with one engine less; a search over all sizes might find another. Raises ConfigError: no
        number of engines meets the targets.
        """
        many = min(MAX_ENGINES, len(self._trace))
        best = self.report(many, many)
        if not best.meets(targets):
            raise ConfigError(
                f"no fleet of up to {many} P and {many} D engines meets the targets: at percentile "
                f"{self._percentile:g} TTFT is {best.ttft:.3g} s and TPOT {best.tpot:.3g} s at best; allow more, or "
                "plan faster engines"
            )
        num_p = _least(lambda count: self.report(count, many).meets(targets), many)
        num_d = _least(lambda count: self.report(num_p, count).meets(targets), many)
        return self.report(num_p, num_d)


def _least(enough: Callable[[int], bool], most: int) -> int:
    """A number with ``enough`` whose predecessor has not; ``most`` has. Doubles first, because less is simulated so."""
    high = 1
    while high < most and not enough(high):
        high *= 2
    least = high // 2 + 1
    return least + bisect_left(range(least, min(high, most)), True, key=enough)
