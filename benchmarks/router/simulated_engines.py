"""Prefill and decode engines in virtual time, with the router's own choice of engines: for ``where_to_prefill.py``.

An engine takes steps. A step gives a token to each sequence that it decodes and computes up to ``chunk`` tokens of the
prompts that wait, first come first served; it takes ``step + per_sequence x sequences + tokens / rate`` seconds. Blocks
of prompts stay in a prefix cache, of which the least recently used leave first. A hand-over takes what ``kvferry plan``
says, and one link of an engine moves one after the other.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import ceil, inf
from statistics import mean

from benchmarks.router.loads import BLOCK_TOKENS as TRACED
from benchmarks.router.loads import TracedRequest
from kvferry.router.engines import Engine, EnginePool, Role, Seat
from kvferry.router.prefill_choice import PrefillChoice
from kvferry.router.prefix_affinity import BLOCK_TOKENS, MAX_BLOCKS, PrefixAffinity, PromptPrefix

HTTP_SECONDS = 0.0005
"""Of a request to an engine, and of its answer."""
Handover = Callable[[int], tuple[float, float]]
"""Of a prompt of so many tokens: seconds for which it occupies the links of P and of D, and seconds beside them."""
Then = Callable[[], None]
Life = Generator[float | Callable[[Then], None], None, None]
"""Of a request: it yields the seconds until it goes on, or what is called with how to go on."""
assert TRACED == 2 * BLOCK_TOKENS


@dataclass(frozen=True)
class Speed:
    """Of an engine. Seconds, tokens per second, and tokens of KV cache."""

    step: float = 0.012
    per_sequence: float = 0.0001
    rate: float = 20_000.0
    chunk: int = 8192
    cache_tokens: int = 400_000


class Clock:
    """What happens, in order of time."""

    def __init__(self) -> None:
        self.now, self._events, self._numbers = 0.0, list[tuple[float, int, Then]](), count()

    def after(self, seconds: float, then: Then) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def until_next(self) -> float:
        """Seconds."""
        return self._events[0][0] - self.now if self._events else inf

    def go_on(self, life: Life) -> None:
        wait = next(life, None)
        if isinstance(wait, float):
            self.after(wait, partial(self.go_on, life))
        elif wait is not None:
            wait(partial(self.go_on, life))

    def run(self) -> None:
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()


class PrefixCache:
    """The blocks of one engine, ``capacity`` in all, of which the least recently used leave first. Blocks under a lease
    stay."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
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


class SimulatedEngine:
    """``gaps``: seconds of steps, and the tokens of sequences that took so long."""

    def __init__(self, clock: Clock, speed: Speed) -> None:
        self.cache, self.link_free = PrefixCache(speed.cache_tokens // TRACED), -inf
        self.gaps: list[tuple[float, int]] = []
        self._clock, self._speed = clock, speed
        self._prompts: list[tuple[list[int], Then]] = []  # each with a list of its tokens that are left
        self._sequences: list[tuple[int, int, Then]] = []  # (the step that is its last, a number, what follows)
        self._numbers, self._steps, self._busy = count(), 0, False

    def prefill(self, tokens: int, then: Then) -> None:
        self._prompts.append(([tokens], then))
        self._take_steps()

    def decode(self, tokens: int, then: Then) -> None:
        """From the end of a step on."""
        heapq.heappush(self._sequences, (self._steps + tokens, next(self._numbers), then))
        self._take_steps()

    def _take_steps(self) -> None:
        """One; or, where no prompt waits, as many equal ones as end before anything else can happen."""
        if self._busy or not (self._prompts or self._sequences):
            return
        room = self._speed.chunk
        for left, _ in self._prompts:
            taken = min(left[0], room)
            left[0], room = left[0] - taken, room - taken
        tokens = self._speed.chunk - room
        each = self._speed.step + self._speed.per_sequence * len(self._sequences) + tokens / self._speed.rate
        steps = 1
        if not tokens:
            steps = min(self._sequences[0][0] - self._steps, max(1, ceil(min(1e9, self._clock.until_next() / each))))
        self._busy = True
        self._clock.after(steps * each, partial(self._end, steps, each))

    def _end(self, steps: int, each: float) -> None:
        self.gaps.append((each, steps * len(self._sequences)))
        self._steps += steps
        over = [then for left, then in self._prompts if not left[0]]
        self._prompts = [prompt for prompt in self._prompts if prompt[0][0]]
        while self._sequences and self._sequences[0][0] <= self._steps:
            over.append(heapq.heappop(self._sequences)[2])
        for then in over:
            then()
        self._busy = False
        self._take_steps()

    def hold(self, request: TracedRequest) -> tuple[int, Then]:
        """The tokens of the prompt that are not in the cache yet; from now on its blocks are, until the call."""
        shared = shared_blocks(request)
        missing = max(1, request.input_length - TRACED * self.cache.matched(shared))
        private = len(request.hash_ids) - len(shared)
        held = self.cache.lease(shared, private)
        return missing, partial(self.cache.release, shared, private) if held else lambda: None


class Simulation:
    """``policy``: "always", "never" (D prefills), "decide", or "aggregated": as many engines, which all prefill and
    decode. ``speeds``: of a P, and of a D."""

    def __init__(self, policy: str, p: int, d: int, speeds: tuple[Speed, Speed], handover: Handover) -> None:
        p, d = (0, p + d) if policy == "aggregated" else (p, d)
        urls = [f"http://p{number}:1" for number in range(p)], [f"http://d{number}:1" for number in range(d)]
        self._policy, self._handover, self._clock = policy, handover, Clock()
        self._pool, self._affinity = EnginePool(*urls), PrefixAffinity()
        self._choice = PrefillChoice(self._pool)
        self._engines = {
            url: SimulatedEngine(self._clock, speed) for of, speed in zip(urls, speeds, strict=True) for url in of
        }
        self._first, self._whole, self._left = list[float](), list[float](), 0

    def run(self, trace: Sequence[TracedRequest]) -> dict[str, float]:
        """Means, in ms; ``left_to_d``: the share of prompts that D prefilled."""
        for request in trace:
            self._clock.after(request.timestamp / 1e3, partial(self._clock.go_on, self._life(request)))
        self._clock.run()
        gaps = sorted(gap for engine in self._engines.values() for gap in engine.gaps)
        tokens = sum(number for _, number in gaps)
        rest, p99 = 0.99 * tokens, 0.0
        for seconds, number in gaps:
            rest, p99 = rest - number, p99 if rest <= 0 else seconds
        return {
            "ttft_ms": round(mean(self._first) * 1e3, 2),
            "gap_ms": round(sum(seconds * number for seconds, number in gaps) / max(1, tokens) * 1e3, 3),
            "gap_p99_ms": round(p99 * 1e3, 2),
            "answer_ms": round(mean(self._whole) * 1e3, 1),
            "left_to_d": round(self._left / len(trace), 3),
        }

    def _choose(self, prefix: PromptPrefix) -> tuple[tuple[Engine, float] | None, Engine | None]:
        """As ``Legs.choose``: the P and what it has to compute, and the D that is to prefill."""
        now = self._clock.now
        known = {engine.url for engine in self._pool.of(Role.PREFILL)}
        best = self._pool.best_prefill(prefix.tokens, now, *self._affinity.find(prefix, known))
        if self._policy == "decide" and best is not None:
            return best, self._choice.decode_engine(prefix, *best, now)
        if self._policy == "aggregated":  # the router's rule for a D that has the prompt
            least = min(engine.load for engine in self._pool)
            near = {engine.url for engine in self._pool if engine.load <= least + 1}
            return None, self._pool.get(self._choice.on_d.find(prefix, near)[0] or "")
        return best if self._policy == "always" else None, None

    def _life(self, request: TracedRequest) -> Life:
        """As ``Router.answer``."""
        clock, choice, arrived = self._clock, self._choice, self._clock.now
        halves = (part for block in shared_blocks(request) for part in (2 * block, 2 * block + 1))
        prefix = PromptPrefix(float(request.input_length), tuple(halves)[:MAX_BLOCKS])
        best, chosen = self._choose(prefix)
        alone = best is None or chosen is not None
        if best is not None and not alone:
            seat = Seat(*best, self._pool)
            p, computed = self._engines[seat.engine.url], seat.engine.load
            self._affinity.note(prefix, seat.engine.url)
            missing, end_lease = p.hold(request)
            yield HTTP_SECONDS
            yield partial(p.prefill, missing)
            yield HTTP_SECONDS
            seat.release()
            choice.prefilled(seat.engine, computed, clock.now - arrived, clock.now)
        asked, seat_of_d = clock.now, self._pool.take_decode(clock.now, chosen=chosen)
        assert seat_of_d is not None
        tokens = choice.asked(seat_of_d.engine, prefix, asked, alone=alone)
        d = self._engines[seat_of_d.engine.url]
        missing, end = d.hold(request)
        if not alone:
            moving, beside = self._handover(-(-missing // 64) * 64)
            p.link_free = d.link_free = max(asked, p.link_free, d.link_free) + moving
            yield d.link_free - asked + beside
            end_lease()
            missing = 1
        self._left += alone
        yield HTTP_SECONDS
        yield partial(d.prefill, missing)
        choice.began(seat_of_d.engine, tokens, clock.now - asked, clock.now, alone=alone)
        self._first.append(clock.now - arrived)
        yield partial(d.decode, max(1, request.output_length - 1))
        self._whole.append(clock.now - arrived)
        seat_of_d.release()
        end()


def shared_blocks(request: TracedRequest) -> tuple[int, ...]:
    """Its full blocks."""
    return request.hash_ids[: request.input_length // TRACED]
