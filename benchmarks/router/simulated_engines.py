"""Prefill and decode engines in virtual time, with the router's own choice of engines: for ``where_to_prefill.py``.

An engine takes steps. A step gives a token to each sequence that it decodes and computes up to ``chunk`` tokens of the
prompts that wait, first come first served; it takes ``step + per_sequence x sequences + tokens / rate`` seconds. Blocks
of prompts stay in a prefix cache, of which the least recently used leave first. A hand-over takes what ``kvferry plan``
says, and one link of an engine moves one after the other.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil, inf
from statistics import mean

from kvferry.cli.plan.fleet import Handover, PrefixCache
from kvferry.cli.plan.trace import BLOCK_TOKENS as TRACED
from kvferry.cli.plan.trace import TracedRequest
from kvferry.router.engines import Engine, EnginePool, Role, Seat
from kvferry.router.prefill_choice import PrefillChoice
from kvferry.router.prefix_affinity import BLOCK_TOKENS, MAX_BLOCKS, PrefixAffinity, PromptPrefix

HTTP_SECONDS = 0.0005
"""Of a request to an engine, and of its answer."""
Then = Callable[[float], None]
"""What happens at a time."""


@dataclass(frozen=True)
class Speed:
    """Of an engine. Seconds, tokens per second, and tokens of KV cache."""

    step: float = 0.012
    per_sequence: float = 0.0001
    rate: float = 20_000.0
    chunk: int = 8192
    cache_tokens: int = 400_000


@dataclass(eq=False)
class _Prefill:
    left: int
    then: Then


class Clock:
    """What happens, in order of time."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Then]] = []
        self._numbers = count()

    def at(self, time: float, then: Then) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), then))

    def run(self) -> None:
        while self._events:
            now, _, then = heapq.heappop(self._events)
            then(now)


class SimulatedEngine:
    """``gaps``: seconds of steps, and the tokens of sequences that took so long."""

    def __init__(self, clock: Clock, speed: Speed) -> None:
        self.cache = PrefixCache(speed.cache_tokens // TRACED)
        self.link_free = -inf
        self.gaps: list[tuple[float, int]] = []
        self._clock, self._speed = clock, speed
        self._prompts: deque[_Prefill] = deque()
        self._sequences: list[tuple[int, int, Then]] = []  # (the step that is its last, a number, what follows)
        self._numbers = count()
        self._steps = self._taking = self._version = 0
        self._began = self._each = 0.0
        self._computing: list[tuple[_Prefill, int]] = []

    def prefill(self, tokens: int, then: Then, now: float) -> None:
        self._prompts.append(_Prefill(tokens, then))
        self._go_on(now)

    def decode(self, tokens: int, then: Then, now: float) -> None:
        """From the next step on."""
        last = self._steps + min(self._taking, self._under_way(now)) + tokens
        heapq.heappush(self._sequences, (last, next(self._numbers), then))
        self._go_on(now)

    def _under_way(self, now: float) -> int:
        """Steps until the one ends that is under way."""
        return max(1, ceil((now - self._began) / self._each - 1e-9)) if self._taking else 0

    def _go_on(self, now: float) -> None:
        """Take the next step, or as many as are equal; end those at the step that is under way."""
        if self._taking:
            if (taking := self._under_way(now)) < self._taking:
                self._taking = taking
                self._plan_end()
            return
        room, sequences, self._computing = self._speed.chunk, len(self._sequences), []
        for prompt in self._prompts:
            if room:
                self._computing.append((prompt, min(prompt.left, room)))
                room -= self._computing[-1][1]
        tokens = self._speed.chunk - room
        if not sequences and not tokens:
            return
        self._taking = 1 if tokens else self._sequences[0][0] - self._steps
        self._each = self._speed.step + self._speed.per_sequence * sequences + tokens / self._speed.rate
        self._began = now
        self._plan_end()

    def _plan_end(self) -> None:
        self._version += 1
        self._clock.at(self._began + self._taking * self._each, partial(self._end, self._version))

    def _end(self, version: int, now: float) -> None:
        if version != self._version:
            return
        self.gaps.append((self._each, self._taking * len(self._sequences)))
        self._steps += self._taking
        self._taking = 0
        ended = []
        while self._sequences and self._sequences[0][0] <= self._steps:
            ended.append(heapq.heappop(self._sequences))
        for prompt, tokens in self._computing:
            prompt.left -= tokens
        done = [prompt for prompt, _ in self._computing if not prompt.left]
        for prompt in done:
            self._prompts.remove(prompt)
        self._computing = []
        for then in [*(then for _, _, then in ended), *(prompt.then for prompt in done)]:
            then(now)
        if not self._taking:
            self._go_on(now)


@dataclass
class Outcome:
    """Seconds: to the first token, of whole answers. ``left``: prompts that D prefilled. ``gaps``: as of engines."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    left: int = 0

    def figures(self) -> dict[str, float]:
        gaps, tokens = sorted(self.gaps), sum(number for _, number in self.gaps)
        rest, p99 = 0.99 * tokens, 0.0
        for seconds, number in gaps:
            rest, p99 = rest - number, p99 if rest <= 0 else seconds
        return {
            "ttft_ms": round(mean(self.first) * 1e3, 2),
            "gap_ms": round(sum(seconds * number for seconds, number in gaps) / max(1, tokens) * 1e3, 3),
            "gap_p99_ms": round(p99 * 1e3, 2),
            "answer_ms": round(mean(self.whole) * 1e3, 1),
            "left_to_d": round(self.left / len(self.first), 3),
        }


class Simulation:
    """``policy``: "always", "never" (D prefills), "decide", or "aggregated": as many engines, which all prefill and
    decode. ``streamed``: the router sees first bytes."""

    def __init__(self, policy: str, pairs: int, speed: Speed, handover: Handover, *, streamed: bool = True) -> None:
        self._policy, self._handover, self._streamed = policy, handover, streamed
        p = [] if policy == "aggregated" else [f"http://p{number}:1" for number in range(pairs)]
        d = [f"http://d{number}:1" for number in range(2 * pairs - len(p))]
        self._pool, self._clock = EnginePool(p, d), Clock()
        self._affinity, self._choice = PrefixAffinity(), PrefillChoice(self._pool)
        self._engines = {url: SimulatedEngine(self._clock, speed) for url in (*p, *d)}
        self.outcome = Outcome()

    def run(self, trace: Sequence[TracedRequest]) -> Outcome:
        for request in trace:
            self._clock.at(request.timestamp / 1e3, partial(self._arrive, request))
        self._clock.run()
        self.outcome.gaps = [gap for engine in self._engines.values() for gap in engine.gaps]
        return self.outcome

    def _arrive(self, request: TracedRequest, now: float) -> None:
        """As ``Router.answer``."""
        halves = (part for block in _shared(request) for part in (2 * block, 2 * block + 1))
        prefix = PromptPrefix(float(request.input_length), tuple(halves)[:MAX_BLOCKS])
        known = {engine.url for engine in self._pool.of(Role.PREFILL)}
        best = self._pool.best_prefill(prefix.tokens, now, *self._affinity.find(prefix, known))
        chosen = None
        if self._policy == "decide" and best is not None:
            chosen = self._choice.decode_engine(prefix, *best, now)
        if self._policy == "aggregated":  # the router's rule for a D that has the prompt
            loads = [engine.load for engine in self._pool]
            near = {engine.url for engine in self._pool if engine.load <= min(loads) + 1}
            chosen = self._pool.get(self._choice.on_d.find(prefix, near)[0] or "")
        if chosen is not None or self._policy in ("never", "aggregated") or best is None:
            self._leave_to_d(request, prefix, chosen, now)
        else:
            self._hand_over(request, prefix, best, now)

    def _leave_to_d(self, request: TracedRequest, prefix: PromptPrefix, chosen: Engine | None, arrived: float) -> None:
        seat = self._pool.take_decode(arrived, chosen=chosen)
        assert seat is not None
        tokens = self._choice.asked(seat.engine, prefix, arrived, alone=True)
        engine, self.outcome.left = self._engines[seat.engine.url], self.outcome.left + 1
        missing = _begin(engine, request)

        def computed(now: float) -> None:
            if self._streamed:
                self._choice.began(seat.engine, tokens, now - arrived, now, alone=True)
            self._decode(request, seat, arrived, now)

        self._clock.at(arrived + HTTP_SECONDS, lambda now: engine.prefill(missing, computed, now))

    def _hand_over(
        self, request: TracedRequest, prefix: PromptPrefix, best: tuple[Engine, float], arrived: float
    ) -> None:
        seat = Seat(*best, self._pool)
        p, tokens = self._engines[seat.engine.url], seat.engine.load
        self._affinity.note(prefix, seat.engine.url)
        missing = _begin(p, request)

        def answered(now: float) -> None:
            seat.release()
            self._choice.prefilled(seat.engine, tokens, now - arrived, now)
            self._load(request, prefix, p, arrived, now)

        def computed(now: float) -> None:
            self._clock.at(now + HTTP_SECONDS, answered)

        self._clock.at(arrived + HTTP_SECONDS, lambda now: p.prefill(missing, computed, now))

    def _load(
        self, request: TracedRequest, prefix: PromptPrefix, p: SimulatedEngine, arrived: float, asked: float
    ) -> None:
        seat = self._pool.take_decode(asked)
        assert seat is not None
        tokens = self._choice.asked(seat.engine, prefix, asked, alone=False)
        d = self._engines[seat.engine.url]
        moving, beside = self._handover(-(-_begin(d, request) // 64) * 64)
        p.link_free = d.link_free = max(asked, p.link_free, d.link_free) + moving

        def loaded(now: float) -> None:
            _end(p, request)
            d.prefill(1, began, now)

        def began(now: float) -> None:
            if self._streamed:
                self._choice.began(seat.engine, tokens, now - asked, now, alone=False)
            self._decode(request, seat, arrived, now)

        self._clock.at(d.link_free + beside + HTTP_SECONDS, loaded)

    def _decode(self, request: TracedRequest, seat: Seat, arrived: float, began: float) -> None:
        """The first token is there."""
        self.outcome.first.append(began - arrived)
        engine = self._engines[seat.engine.url]

        def ended(now: float) -> None:
            self.outcome.whole.append(now - arrived)
            seat.release()
            _end(engine, request)

        engine.decode(max(1, request.output_length - 1), ended, began)


def _shared(request: TracedRequest) -> tuple[int, ...]:
    """Its full blocks."""
    return request.hash_ids[: request.input_length // TRACED]


def _begin(engine: SimulatedEngine, request: TracedRequest) -> int:
    """Hold the prompt's blocks, and the tokens that are not there yet."""
    shared = _shared(request)
    missing = max(1, request.input_length - TRACED * engine.cache.matched(shared))
    engine.cache.lease(shared, len(request.hash_ids) - len(shared))
    return missing


def _end(engine: SimulatedEngine, request: TracedRequest) -> None:
    shared = _shared(request)
    engine.cache.release(shared, len(request.hash_ids) - len(shared))


assert TRACED == 2 * BLOCK_TOKENS
