"""A fleet under load, faults and churn. The seed decides everything: a run with the same seed is the same run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from kvferry.connector.wire.step_plan import LookupResult
from tests.simulation.engines import Engine, Prompt, Request, view
from tests.simulation.memory import BLOCK_TOKENS, Form
from tests.simulation.network import Odds
from tests.simulation.world import World

HEADS, BLOCKS = 2, 160
PLANES = (
    ("sim_pull", "sim_place"), ("sim_pull",), ("sim_place",), ("sim_push", "sim_pull"), ("sim_pull", "sim_push"),
)  # fmt: skip
EVERYTHING = ("sim_pull", "sim_place", "sim_push")
SLOW_SECONDS = 300e-6
STREAMED = 0.25
"""The share of hand-overs during which P computes the prompt, where it computes no other one so."""
NAMED = 0.4
"""The share of these for which D knows P and a name of the prompt, but no token. P may have others in its queue."""


ODDS = Odds(lost=1e-3, doubled=1e-3, late=1e-3, overtaken=3e-3)


class Fleet:
    """``count`` hand-overs from ``p`` to ``d`` engines, ``rate`` of them in a second. One engine in eight has two
    ranks."""

    def __init__(self, seed: int, count: int, p: int = 100, d: int = 100, rate: float = 200.0) -> None:
        self.count, self.begun = count, 0
        self._transfer_ids: dict[str, str] = {}  # the last one by P
        self.world = World(seed)
        self.timeline, self.network = self.world.timeline, self.world.network
        self.rng: Random = self.timeline.rng
        self.p, self.d = [f"p{n}" for n in range(p)], [f"d{n}" for n in range(d)]
        self._interval = 1 / (rate * min(p, d))
        for n, name in enumerate(self.p):
            self.world.engine(name, self._form(n), EVERYTHING, slow=SLOW_SECONDS * (n % 4 > 0))
        for n, name in enumerate(self.d):
            self.world.engine(name, self._form(n + 6), PLANES[n % 5], slow=SLOW_SECONDS * (n % 4 > 0))
        self.network.odds = ODDS

    @staticmethod
    def _form(n: int) -> Form:
        return Form(2 if n % 8 == 7 else 1, HEADS, BLOCKS)

    def run(self, progress: Callable[[Fleet], None] = lambda fleet: None) -> None:
        """All hand-overs, then quiet time. Raises Violation where a promise was broken."""
        try:
            with self.world.explained():
                for handovers, act in (
                    (700, self._kill), (300, self._cut), (500, self._stand_still), (700, self._cancel_burst),
                    (100, self._break_plane), (300, self._fail_copies),
                ):  # fmt: skip
                    self._repeat(handovers * self._interval, act)
                self._hand_over()
                while self.begun < self.count:
                    self.world.run(1.0)
                    progress(self)
                self.world.settle()
        finally:
            self.world.close()

    @property
    def digest(self) -> int:
        """When and where each packet arrived, as a number: equal in equal runs."""
        return self.network.digest

    def _repeat(self, seconds: float, act: Callable[[], None]) -> None:
        """``act`` happens about every ``seconds`` while there are hand-overs to begin."""

        def go() -> None:
            if self.begun < self.count:
                act()
                self.timeline.after(2 * seconds * self.rng.random(), go)

        self.timeline.after(seconds, go)

    # --- hand-overs -----------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """A hand-over begins, and soon another one."""
        if self.begun >= self.count:
            return
        self.timeline.after(2 * self._interval * self.rng.random(), self._hand_over)
        rng, engines = self.rng, self.world.engines
        p, d = engines[rng.choice(self.p)], engines[rng.choice(self.d)]
        if not p.alive or not d.alive:
            return
        tokens = 330 if rng.random() < 0.06 else rng.choice((5, 16, 16, 30, 48))  # 330 need more than one message
        if rng.random() < STREAMED and self._stream(p, d):
            return
        late: tuple[float | None, ...] = ()
        if rng.random() < 0.03:
            late = tuple(None if rng.random() < 0.1 else 0.05 * rng.random() for _ in p.nodes)
        prompt = p.prefill(tokens, late)
        if prompt is None:
            self.network.counts["P had no free block"] += 1
            return
        self.begun += 1
        self.network.counts[f"TP {p.form.tp_size} to {d.form.tp_size}"] += 1
        dice = rng.random()
        if dice < 0.01:
            self.network.counts["D never came"] += 1
        elif dice < 0.03:
            self.network.counts["two samples"] += 1
            for n in range(2):
                self._come(d, prompt, f"{n}_{prompt.name}", siblings=True, after=0.002 * n)
        elif dice < 0.05:
            self.network.counts["second consumer"] += 1
            self._come(d, prompt, prompt.name)
            self._come(engines[rng.choice(self.d)], prompt, prompt.name, after=0.004 * rng.random())
        elif dice < 0.10:
            self.network.counts["two P engines named"] += 1
            other = engines[rng.choice(self.p)]
            also = other.prefill(tokens, number=prompt.number) if other.alive and other is not p else None
            self._come(d, prompt, prompt.name, others=() if also is None else (also,))
        else:
            self._come(d, prompt, prompt.name)

    def _stream(self, p: Engine, d: Engine) -> bool:
        """A hand-over of a prompt that P computes meanwhile. Whether it has begun. D may be early or late."""
        tokens = self.rng.choice((5, 48, 48, 330))
        step_tokens = max(self.rng.choice((1, 7, 16, 40)), tokens // 8)
        if self.rng.random() < NAMED:
            self._by_name(p, d, tokens, step_tokens)
            return True
        prompt = p.compute(tokens, step_tokens)
        if prompt is None:
            return False
        self.begun += 1
        self.network.counts["while P computed"] += 1
        request = d.keep(prompt, prompt.name)
        wait = 0.004 * self.rng.random()
        self.timeline.after(wait, lambda: self._load(d, request, 0, inside=False, step_tokens=step_tokens))
        if self.rng.random() < 0.05:
            self.timeline.after(0.02 * self.rng.random(), lambda: d.abort(request))
        return True

    def _by_name(self, p: Engine, d: Engine, tokens: int, step_tokens: int) -> None:
        """Both legs at once. Either may come first; one of them may not come, and a router may give a name twice."""
        rng, after = self.rng, self.timeline.after
        number = self.network.new_prompt()
        name, dice = f"{d.name}-n{number}", rng.random()
        again = self._transfer_ids.get(p.name) if rng.random() < 0.05 else None
        transfer_id = self._transfer_ids[p.name] = again or f"tx{number}"
        self.begun += 1
        self.network.counts["found by name"] += 1
        if dice >= 0.02:
            after(0.004 * rng.random(), lambda: p.queue(number, tokens, step_tokens, transfer_id))
        if dice >= 0.98:
            return
        requests: list[Request] = []

        def found(request: Request, result: LookupResult) -> None:
            requests.append(request)
            self.network.counts["found while P computed" if result.streams else "found when P had computed"] += 1
            inside = not result.streams and rng.random() < 0.5
            self._load(d, request, 0, inside=inside, step_tokens=result.step_tokens)

        def abort() -> None:
            d.abort_search(name, "aborted before P told of the prompt")
            for request in requests:
                d.abort(request)

        def ask() -> None:
            if d.alive:
                d.search(view(name, number, tokens), p, transfer_id, found, ended=rng.random() < 0.02)

        after(0.004 * rng.random(), ask)
        if rng.random() < 0.05:
            after(0.02 * rng.random(), abort)

    def _come(
        self,
        d: Engine,
        prompt: Prompt,
        name: str,
        *,
        siblings: bool = False,
        after: float = 0.0,
        others: Sequence[Prompt] = (),
    ) -> None:
        """A request comes to D."""
        rng = self.rng
        if after:
            self.timeline.after(after, lambda: self._come(d, prompt, name, siblings=siblings))
        if after or not d.alive:
            return
        request = d.keep(prompt, name, siblings=siblings, others=others)
        wait = 0.0005 if rng.random() < 0.98 else 4.0 * rng.random()
        start = 0 if rng.random() < 0.9 else rng.randrange(prompt.num_tokens)
        if rng.random() < 0.1:
            start = start // BLOCK_TOKENS * BLOCK_TOKENS
        inside = rng.random() < 0.15
        self.timeline.after(wait, lambda: self._load(d, request, start, inside=inside))
        if rng.random() < 0.03:
            self.timeline.after(0.004 * rng.random(), lambda: d.abort(request))

    def _load(self, d: Engine, request: Request, start: int, *, inside: bool, step_tokens: int = 0) -> None:
        def load() -> bool:
            waits = d.alive and request.phase == "kept"
            return not waits or d.load(request, start, now=inside, step_tokens=step_tokens)

        if not load():
            self.network.counts["D had no free block"] += 1
            d.wait(load)

    # --- faults ---------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        rng = self.rng
        name = rng.choice(self.p + self.d)
        engine = self.world.engines[name]
        if not engine.alive:
            return
        how = rng.random()
        what = f"{name[0].upper()} "
        if how < 0.2:
            engine.close()
            what += "shut down"
        else:
            engine.kill(silently=how > 0.7)
            what += "lost with its host" if how > 0.7 else "killed"
        self.network.faults[what] += 1
        again = 0.05 if rng.random() < 0.3 else 3 * rng.random()
        self.timeline.after(again, lambda: self.world.restart(name))

    def _cut(self) -> None:
        a, b = (self.rng.choice(self.world.engines[self.rng.choice(names)].nodes) for names in (self.p, self.d))
        if a.alive and b.alive:
            self.network.cut(a, b, self.rng.choice((0.01, 0.5, 3.0, 8.0)) * self.rng.random())

    def _break_plane(self) -> None:
        self.rng.choice(self.world.engines[self.rng.choice(self.p + self.d)].nodes).break_plane(self.rng.random())

    def _fail_copies(self) -> None:
        """For a while, half of those of one process."""
        copies = self.rng.choice(self.world.engines[self.rng.choice(self.p + self.d)].nodes).copies
        copies.failing = 0.5
        self.network.faults["copies failed"] += 1
        self.timeline.after(0.1 * self.rng.random(), lambda: setattr(copies, "failing", 0.0))

    def _stand_still(self) -> None:
        node = self.rng.choice(self.world.engines[self.rng.choice(self.p + self.d)].nodes)
        seconds = self.rng.choice((0.02, 0.02, 0.5, 2.0, 6.0)) * self.rng.random()
        self.network.fault("process stopped", f"{node.name} for {seconds:.3f} s")
        node.stand_still(seconds)

    def _cancel_burst(self) -> None:
        d = self.world.engines[self.rng.choice(self.d)]
        if d.alive:
            self.network.faults["burst of cancels"] += 1
            for request in [*d.kept, *d.requests.values()]:
                d.abort(request)
            for name in list(d.searches):
                d.abort_search(name, "aborted before P told of the prompt")
