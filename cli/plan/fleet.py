"""A fleet of P and D engines under a trace of requests, event by event. Pure: the same result for the same arguments.

A request goes to the P engine that should have computed it first, by the prefixes that each one holds. P computes one
prompt after the other. The request then goes to the D engine with the fewest requests. There it waits for a place, for
the links of P and of D, and for the bytes, and then takes part in D's steps. P holds the blocks under a lease until the
bytes have moved, at most ``lease_cap_seconds``: after that, D computes the prompt, and its other sequences wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from math import ceil, inf

from kvferry.cli.plan.trace import BLOCK_TOKENS, TracedRequest
from kvferry.transport.errors import ConfigError

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


class PrefixIndex:
    """By the hash of a block, the P engines that hold it, one bit each."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def add(self, block: int, engine: int) -> None:
        self._holders[block] = self._holders.get(block, 0) | 1 << engine

    def remove(self, block: int, engine: int) -> None:
        left = self._holders[block] & ~(1 << engine)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def prefixes(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The longest prefixes of a prompt: (number of blocks, engines that hold just so many or more), longest first.
        Only numbers at which the set of engines changes are there."""
        found: list[tuple[int, int]] = []
        engines = -1
        for length, block in enumerate(blocks, 1):
            left = self._holders.get(block, 0) & engines
            if not left:
                break
            if left == engines:
                found[-1] = length, left
            else:
                found.append((length, left))
            engines = left
        return found[::-1]


class PrefixCache:
    """The blocks of one P engine, of which the least recently used leave first. Blocks under a lease stay.

    ``capacity``: blocks in all; ``None``: no bound.
    """

    def __init__(self, engine: int, capacity: int | None, index: PrefixIndex) -> None:
        self._engine, self._capacity, self._index = engine, capacity, index
        self._leased: dict[int, int] = {}
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
        new = sum(1 for block in blocks if block not in self._leased)
        if self._capacity is not None and self.num_leased + new + private > self._capacity:
            return False
        for block in blocks:
            if block in self._leased:
                self._leased[block] += 1
                continue
            if block in self._unused:
                del self._unused[block]
            else:
                self._index.add(block, self._engine)
            self._leased[block] = 1
        self._private += private
        while self._capacity is not None and self.num_leased + len(self._unused) > self._capacity:
            block, _ = self._unused.popitem(last=False)
            self._index.remove(block, self._engine)
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
        self._index = PrefixIndex()
        blocks = None if model.p_cache_tokens is None else model.p_cache_tokens // BLOCK_TOKENS
        self._p = [_Prefiller(PrefixCache(number, blocks, self._index)) for number in range(num_p)]
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


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
