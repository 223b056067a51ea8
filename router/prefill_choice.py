"""Whether P or D prefills a prompt, by the times that their answers have taken. Pure: no I/O, no clock.

Where P prefills, the first token comes after P's queue, the prefill and the hand-over. Where D prefills, there is no
hand-over, but all that D decodes waits meanwhile. D prefills a prompt if its first token then comes earlier by a larger
share than that by which D's answers come later. That share is D's requests per second times the seconds of the prefill:
of n answers a second, each S seconds long, D decodes n x S at once (Little's law), and each loses prefill / S.

Nothing is configured. A prompt of which too little is known is handed over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from statistics import median
from weakref import WeakKeyDictionary

from kvferry.router.engines import Engine, EnginePool, Role
from kvferry.router.prefix_affinity import PrefixAffinity, PromptPrefix

ENOUGH = 8
"""Times of an engine that are needed to predict one."""
KEPT = 17
"""So many times are kept of each size of prompts; sizes are powers of two, and bodies are bounded."""
OLD_SECONDS = 600.0
"""Times that are older do not count: then prompts are handed over, and measured anew."""
ALIKE = 16.0
"""Sizes that differ by less show D's time for a token badly, because its steps for other sequences differ as much."""
DRAW_SECONDS = 1.0
"""A line is drawn anew no more often."""
ASKED = 16
"""The last requests to a D, of which their rate is taken."""
FASTEST = 8.0
"""A D that seems so much faster than P has not computed what the router believes: images, or a cached prompt."""
FIRST_HANDOVER = (1.1e-3, 25e-6)
"""Seconds of a hand-over, and of each token, until a first byte of a stream was seen: what ``kvferry plan`` says of
128 KiB a token over ``tcp``."""
Line = tuple[float, float]
"""Seconds of a prompt of no tokens, and of each token."""


class TimeLine:
    """Seconds by tokens: a line through the medians of all sizes, by Theil's and Sen's estimator with pairs weighed by
    their distance. Up to half of the times of a size may be wrong."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[tuple[float, float, float]]] = {}
        self._line: Line | None = None
        self._drawn = -inf

    def add(self, tokens: float, seconds: float, now: float) -> None:
        """A prompt of so many tokens took so long."""
        size = int(tokens).bit_length()
        self._seen.setdefault(size, deque(maxlen=KEPT)).append((now, tokens, seconds))

    def get(self, now: float, slope: float | None = None) -> Line | None:
        """None: too little was seen lately. ``slope``: seconds of each token, where all sizes seen are much alike."""
        if now - self._drawn >= DRAW_SECONDS:
            self._line, self._drawn = self._draw(now, slope), now
        return self._line

    def _draw(self, now: float, slope: float | None) -> Line | None:
        lately = [[one[1:] for one in seen if now - one[0] <= OLD_SECONDS] for seen in self._seen.values()]
        if sum(map(len, lately)) < ENOUGH:
            return None
        points = sorted((median(tokens for tokens, _ in of), median(times for _, times in of)) for of in lately if of)
        if slope is not None and points[-1][0] < ALIKE * points[0][0]:
            return max(0.0, median(seconds - slope * tokens for tokens, seconds in points)), slope
        pairs = [(later[0] - one[0], later[1] - one[1]) for one, later in combinations(points, 2)]
        slopes = sorted((seconds / tokens, tokens) for tokens, seconds in pairs)
        left, each = sum(tokens for _, tokens in slopes) / 2, points[0][1] / max(1.0, points[0][0])
        for of_pair, tokens in slopes:
            if left > 0:
                left, each = left - tokens, max(0.0, of_pair)
        return max(0.0, median(seconds - each * tokens for tokens, seconds in points)), each


@dataclass
class _Known:
    """Of one engine; of a P only ``computing``."""

    computing: TimeLine = field(default_factory=TimeLine)  # A prompt, from its request to the first byte of the answer
    loading: TimeLine = field(default_factory=TimeLine)  # A prompt that P has computed, from P's answer on
    busy_until: float = -inf  # When it should have computed the prompts that were left to it
    asked: deque[float] = field(default_factory=lambda: deque(maxlen=ASKED))  # When it got its last requests

    def requests_per_second(self, now: float) -> float:
        return len(self.asked) / (now - self.asked[0]) if self.asked and now > self.asked[0] else 0.0


class PrefillChoice:
    """Chooses for each prompt, and learns from the answers to all of them. ``on_d``: the D that had a prefix last."""

    def __init__(self, engines: EnginePool) -> None:
        self.on_d = PrefixAffinity()
        self._engines = engines
        self._known: WeakKeyDictionary[Engine, _Known] = WeakKeyDictionary()
        self._of_p: Line = (0.0, 0.0)  # what is believed of a D that has computed nothing yet

    def decode_engine(self, prompt: PromptPrefix, p: Engine, p_tokens: float, now: float) -> Engine | None:
        """The D that is to prefill the prompt; None: this P is, which has ``p_tokens`` of it to compute."""
        least_loaded = self._engines.best_decode(now)
        of_p = self._of(p).computing.get(now)
        if least_loaded is None or of_p is None:
            return None
        self._of_p = of_p
        step = of_p[0]  # D's is not known, but much as long as P's
        first, each = self._of(least_loaded).loading.get(now) or (FIRST_HANDOVER[0] + step, FIRST_HANDOVER[1])
        loading = first + each * self.missing(least_loaded, prompt)
        handed_over = of_p[0] + of_p[1] * (p.load + p_tokens) + loading
        near = {engine.url for engine in self._engines.usable(Role.DECODE, now) if engine.load <= least_loaded.load + 1}
        best: Engine | None = None
        least = handed_over
        for url in near & {least_loaded.url, self.on_d.find(prompt, near)[0]}:
            engine = self._engines.get(url)
            if engine is not None and (cost := self._cost(engine, prompt, now)) < least:
                best, least = engine, cost
        return best

    def _cost(self, d: Engine, prompt: PromptPrefix, now: float) -> float:
        """Seconds to the first token where D prefills, longer by the share that D's answers lose."""
        known, (first, each) = self._of(d), self._computing(d, now)
        prefill = each * self.missing(d, prompt)
        wait = max(0.0, known.busy_until - now)
        return (wait + first + prefill) * (1 + known.requests_per_second(now) * prefill)

    def missing(self, d: Engine, prompt: PromptPrefix) -> float:
        """Tokens of the prompt that D does not have."""
        return max(1.0, prompt.tokens - self.on_d.find(prompt, {d.url})[1])

    def _computing(self, d: Engine, now: float) -> Line:
        return self._of(d).computing.get(now, self._of_p[1]) or self._of_p

    def _of(self, engine: Engine) -> _Known:
        return self._known.setdefault(engine, _Known())

    # --- what is seen

    def prefilled(self, p: Engine, tokens: float, seconds: float, now: float) -> None:
        """P has answered, so long after it had so many tokens to compute."""
        self._of(p).computing.add(tokens, seconds, now)

    def asked(self, d: Engine, prompt: PromptPrefix, now: float, *, alone: bool) -> float:
        """D is asked, and prefills the prompt if it is ``alone``; the tokens to say at its first byte: 0 where it
        computes others before."""
        tokens = self.missing(d, prompt)
        self.on_d.note(prompt, d.url)
        known = self._of(d)
        known.asked.append(now)
        if not alone:
            return tokens
        before = max(0.0, known.busy_until - now)
        known.busy_until = now + before + self._computing(d, now)[1] * tokens
        return 0.0 if before else tokens

    def began(self, d: Engine, tokens: float, seconds: float, now: float, *, alone: bool) -> None:
        """The first byte of D's stream has come, so long after D was asked, or was asked and P had answered."""
        known, (first, each) = self._of(d), self._of_p
        if not alone:
            known.loading.add(tokens, seconds, now)
        elif tokens and FASTEST * seconds >= first + each * tokens:
            known.computing.add(tokens, seconds, now)
