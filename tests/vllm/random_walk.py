"""Random turns of events under vLLM's real scheduler: two engines, and the requests under way between them.

Every forward checks all KV that it reads, so one stale or misplaced block fails the walk.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable

from vllm.v1.request import RequestStatus

from tests.vllm.labelled import prompt
from tests.vllm.stepped import PREFILL, Engine, let_time_pass
from tests.vllm.stepped_model import next_token

LEASE_SECONDS = 1.5
"""So short that some leases end in the walk."""


class Walk:
    """P, D, and the requests under way between them. ``rng`` decides all."""

    def __init__(self, p: Engine, d: Engine, rng: random.Random) -> None:
        self.p, self.d, self.rng = p, d, rng
        self.prompts: dict[str, list[int]] = {}
        self.passed: set[str] = set()
        self.given_up: set[str] = set()

    def ask_p(self) -> None:
        """A prompt, often one that shares a prefix with another, goes to P."""
        ids = prompt(450, self.rng.randrange(4))[: self.rng.choice((1, 15, 16, 17, 60, 160, 300, 400))]
        name = self.p.add(ids, PREFILL, max_tokens=self.rng.choice((1, 1, 1, 4)), priority=self.rng.randrange(3))
        self.prompts[name] = ids

    def waiting(self) -> list[str]:
        """What P finished and nobody passed on."""
        return [n for n, answer in self.p.answers.items() if n not in self.passed and answer.params is not None]

    def ask_d(self) -> None:
        """What P finished goes to D: once, as two samples, or with parameters that are of no use."""
        ready = self.waiting()
        if not ready:
            return
        name = self.rng.choice(ready)
        self.passed.add(name)
        ids, params = self.prompts[name], copy.deepcopy(self.p.answers[name].params)
        turn = self.rng.random()
        if turn < 0.1:
            assert params is not None
            params["kvferry"]["token"] = "00" * 16
        elif turn < 0.15:
            params = {"do_remote_prefill": True}
        elif turn < 0.2:
            ids = [*ids, 5]
        elif turn < 0.25:
            self.d.add([0], params, rejected=True)
            return
        elif turn < 0.3:
            return  # P's lease ends by itself
        tokens = self.rng.choice((1, 3, 20))
        names = [f"{number}_{name}" for number in range(2)] if turn > 0.85 else [f"d-{name}"]
        for child in names:
            logprobs = 1 if self.rng.random() < 0.1 else None
            self.d.add(
                ids, params, request_id=child, max_tokens=tokens, prompt_logprobs=logprobs,
                priority=self.rng.randrange(3),
            )  # fmt: skip
            self.prompts[child] = ids

    def abort(self) -> None:
        engine = self.rng.choice((self.p, self.d))
        names = [name for name, answer in engine.answers.items() if answer.finish is None and name in self.prompts]
        if names:
            name = self.rng.choice(names)
            self.given_up.add(name)
            engine.abort(name)

    def preempt(self) -> None:
        engine = self.rng.choice((self.p, self.d))
        running = [r.request_id for r in engine.scheduler.running if r.status is RequestStatus.RUNNING]
        if running:
            engine.preempt(self.rng.choice(running))

    def step(self) -> None:
        engine = self.rng.choice((self.p, self.d))
        for _ in range(self.rng.randrange(1, 4)):
            engine.step()

    def pause(self) -> None:
        time.sleep(self.rng.choice((0, 0.001, 0.02)))

    def go(self, turns: int) -> None:
        moves: list[Callable[[], None]] = [self.ask_p, self.ask_d, self.abort, self.preempt, self.step, self.pause]
        for move in self.rng.choices(moves, (3, 5, 1, 1, 12, 4), k=turns):
            move()

    def over(self) -> bool:
        """Whether all has come to its end; what P finishes late is passed on as well. Leases that nobody asked for end
        as if their time had come."""
        while self.waiting():
            self.ask_d()
        if not self.d.scheduler.requests:
            let_time_pass(self.p, 2 * LEASE_SECONDS)
        return self.p.idle and self.d.idle

    def check_tokens(self, engine: Engine) -> None:
        """All answers are complete, but those that were given up, and say what the model says."""
        for name, answer in engine.answers.items():
            ids = list(self.prompts.get(name, ()))
            assert not ids or name in self.given_up or answer.finish == "length", name
            for token in answer.tokens:
                assert token == next_token(ids), name
                ids.append(token)
