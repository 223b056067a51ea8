"""Random turns of events under vLLM's real scheduler: whatever happens, tokens and KV are right and nothing is left.

Every forward checks all KV that it reads, so one stale or misplaced block fails the walk.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from labelled import prompt
from stepped import PREFILL, Engine, let_time_pass, run, settle
from stepped_model import next_token
from stepped_rank import RUNNERS
from vllm.v1.request import RequestStatus
from yard import Lines, Yard

pytestmark = pytest.mark.vllm
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


@pytest.mark.parametrize("seed", range(12))
def test_walk(yard: Yard, lines: Lines, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    runner = RUNNERS[seed % 3]
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    extra: dict[str, object] = {
        "slot_bytes": 64 << 10,
        "staging_bytes": 1 << 20,
        "lease_seconds": LEASE_SECONDS,
        "ask_hold_seconds": 0.3,
    }
    extra["plane"] = ("auto", "shm", "zmq")[seed // 4]
    common: dict[str, Any] = {
        "runner": runner,
        "ahead": seed // 3 % 3,
        "max_batched": rng.choice((64, 256)),
        "extra": extra,
    }
    common |= {"drafts": rng.choice((0, 0, 3)), "scheduling": rng.choice(("fcfs", "priority"))}
    p = yard.engine(0, tp=1 + (seed % 4 == 1), **common)
    d = yard.engine(1, tp=1 + (seed % 4 == 2), **common)
    walk = Walk(p, d, rng)
    walk.go(250)
    run([p, d], walk.over, seconds=150)
    settle(p, d)
    walk.check_tokens(p)
    walk.check_tokens(d)
    assert not lines("unexpected error")
    assert d.loads, "some were loaded"
