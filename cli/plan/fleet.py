"""A fleet of P and D engines under a trace of requests, event by event. Pure: the same result for the same arguments.

A request goes to the P engine that should have computed it first, by the prefixes that each one holds. P computes one
prompt after the other. The request then goes to the D engine with the fewest requests. There it waits for a place, for
the links of P and of D, and for the bytes, and then takes part in D's steps. P holds the blocks under a lease until the
bytes have moved, at most ``lease_cap_seconds``: after that, D computes the prompt, and its other sequences wait.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from kvferry.cli.plan.prefix_cache import PrefixCache, PrefixIndex
from kvferry.cli.plan.step_clock import StepClock
from kvferry.cli.plan.trace import BLOCK_TOKENS, TracedRequest
from kvferry.transport.errors import ConfigError

Handover = Callable[[int], tuple[float, float]]
"""Of a prompt of so many tokens: seconds for which it occupies the links of P and of D, and seconds beside them."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What the engines of a fleet can do. Times are seconds.

    ``p_cache_tokens``, ``d_cache_tokens``: KV cache of one engine, as vLLM logs it at its start; ``None``: no bound.
    ``d_sequences``: vLLM's ``--max-num-seqs`` of D.
    """

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


class FleetEvent(IntEnum):
    """What happens; at one time in this order."""

    STEP_ENDED = 0
    LOADED = 1
    LEASE_ENDED = 2
    PREFILLED = 3
    ARRIVED = 4


class _Prefiller:
    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.queue: deque[tuple[int, float]] = deque()  # (request, the seconds that it was expected to take)
        self.queued_seconds = 0.0
        self.busy_until = 0.0
        self.running = -1
        self.link_free = 0.0


class _Decoder:
    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.waiting: deque[int] = deque()
        self.held = 0  # requests that have a place
        self.held_tokens = 0
        self.link_free = 0.0


class Fleet:
    """``run`` serves a trace with ``num_p`` P engines and ``num_d`` D engines."""

    def __init__(self, num_p: int, num_d: int, model: EngineModel, handover: Handover) -> None:
        """
        Raises:
            ConfigError: no engine on one of the sides.
        """
        if num_p < 1 or num_d < 1:
            raise ConfigError(f"a fleet of {num_p} P and {num_d} D engines, expected at least one of each")
        self._model, self._handover = model, handover
        self._index = PrefixIndex()
        blocks = None if model.p_cache_tokens is None else model.p_cache_tokens // BLOCK_TOKENS
        self._p = [_Prefiller(PrefixCache(number, blocks, self._index)) for number in range(num_p)]
        self._d = [_Decoder(StepClock(model.step_seconds, model.step_seconds_per_sequence)) for _ in range(num_d)]
        self._events: list[tuple[float, FleetEvent, int]] = []
        self._records: list[RequestRecord] = []
        self._leased: set[int] = set()

    def run(self, trace: Sequence[TracedRequest]) -> list[RequestRecord]:
        """Serve all requests, from the first to the end of the last.

        Raises:
            ConfigError: a request does not fit into an engine's cache.
        """
        self._check(trace)
        begin = trace[0].timestamp
        self._records = [RequestRecord(request, (request.timestamp - begin) / 1e3) for request in trace]
        self._events = [(record.arrived, FleetEvent.ARRIVED, number) for number, record in enumerate(self._records)]
        heapq.heapify(self._events)
        act = {
            FleetEvent.STEP_ENDED: self._step_ended,
            FleetEvent.LOADED: self._loaded,
            FleetEvent.LEASE_ENDED: self._lease_ended,
            FleetEvent.PREFILLED: self._prefilled,
            FleetEvent.ARRIVED: self._arrived,
        }
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
        waits = [max(engine.busy_until - now, 0.0) + engine.queued_seconds for engine in self._p]
        shared = _shareable(request)
        best, chosen, seconds = inf, 0, 0.0
        for length, engines in [*self._index.prefixes(shared), (0, -1)]:
            among = range(len(waits)) if engines < 0 else _bits(engines)
            engine = min(among, key=waits.__getitem__)
            takes = self._prefill_seconds(request, length)
            if waits[engine] + takes < best:
                best, chosen, seconds = waits[engine] + takes, engine, takes
        return chosen, seconds

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
        heapq.heappush(self._events, (engine.busy_until, FleetEvent.PREFILLED, number))

    def _prefilled(self, number: int, now: float) -> None:
        record = self._records[number]
        record.prefill_ended = now
        self._p[record.p].running = -1
        self._leased.add(number)
        heapq.heappush(self._events, (now + self._model.lease_cap_seconds, FleetEvent.LEASE_ENDED, number))
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
            heapq.heappush(self._events, (at, FleetEvent.LOADED, number))

    def _loaded(self, number: int, now: float) -> None:
        record = self._records[number]
        if not record.expired:
            self._lease_ended(number, now)
        record.loaded = now
        stall = self._prefill_seconds(record.request, 0) if record.expired else 0.0
        clock = self._d[record.d].clock
        clock.join(number, record.request.output_length, now, stall)
        heapq.heappush(self._events, (clock.next_end, FleetEvent.STEP_ENDED, record.d))

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
            heapq.heappush(self._events, (engine.clock.next_end, FleetEvent.STEP_ENDED, place))
        self._admit(place, now)


def _shareable(request: TracedRequest) -> tuple[int, ...]:
    """The full blocks of a prompt; the last one of another prompt may differ behind its end."""
    return request.hash_ids[: request.input_length // BLOCK_TOKENS]


def _to_compute(request: TracedRequest, blocks: int) -> int:
    """Tokens that P computes if it has the first ``blocks``: one at least, for its logits."""
    return max(1, request.input_length - blocks * BLOCK_TOKENS)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
