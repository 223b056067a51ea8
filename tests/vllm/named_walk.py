"""Random turns of events with both legs of a request sent at once: P's prompts leave while P computes them.

A case is one pair of engines and one walk, which a seed and a number draw. What the threads make of it differs from
run to run. ``run_walks.py`` runs as many cases as it is told, ``test_named_walk.py`` a few.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

from kvferry.connector.engine import worker_setup
from kvferry.connector.pages.copies import copies_on
from kvferry.connector.prefill_side.serve import EarlyRequests
from tests.handover.slow_copies import SlowCopies
from tests.support.engines import free_port
from tests.support.inside import early_of, scheduler_half
from tests.vllm.engine_group import PATIENT, EngineGroup
from tests.vllm.labelled import prompt
from tests.vllm.random_walk import LEASE_SECONDS, Walk
from tests.vllm.stepped import PREFILL, Engine, run, settle, transfer_thread_of

PLANES = ("cma", "shm", "tcp", "zmq", "ucx")
PROMPTS = 10
"""Texts that prompts are the beginnings of: fewer would all be in the prefix caches, more would never be."""
BUDGETS = (1, 1, 7, 16, 40, 128, 512)
"""Tokens that one step of P computes at most: chunked prefill, down to one token."""
CACHE_TOKENS = 640
"""Of D, and of P at most: so few that requests preempt each other, and use blocks again soon."""
LATE_SECONDS = 5e-3
"""How late copies of P read its blocks, where they do: steps of P are shorter."""
HANDOVER_SECONDS = 30.0
"""D may hold blocks for a prompt that P has preempted and cannot resume, because D waits for blocks before it releases
P's leases: this time ends it."""
HANDOVERS = 60
"""Requests of D in one walk, about."""
TURNS = 1000
UNDER_WAY = 10
"""Requests of D at a time, about."""
OUTCOMES = ("while P computed", "after P's lease", "load failed", "no load", "ended first")
"""What became of a request of D: it has loaded its prompt, or computed it, or its client or engine was gone."""


@dataclass(frozen=True)
class Case:
    """The forms of both engines. ``late_copies``: those of P read its blocks a moment after they were started, as a
    GPU's do. ``same_address``: a P that is restarted has the port, and ``same_id`` the engine id, of its former life.
    ``window``: of the last layer, which is another block table."""

    seed: int
    number: int
    plane: str
    checksum: bool
    encrypt: bool
    runner: str
    ahead: int
    drafts: int
    scheduling: str
    blocks: tuple[int, int]
    tp: tuple[int, int]
    layouts: tuple[str, str]
    window: int | None
    cache_tokens: int
    late_copies: bool
    same_address: bool
    same_id: bool

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value not in (False, None))


def draw(seed: int, number: int, planes: tuple[str, ...] = PLANES) -> Case:
    """The case of this number; a seed and a number always give the same case."""
    rng = random.Random(f"{seed} {number}")
    plane = planes[number % len(planes)]
    tp = rng.choice(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2)))
    return Case(
        seed,
        number,
        plane,
        checksum=plane != "cma" and rng.random() < 0.2,
        encrypt=plane == "tcp" and rng.random() < 0.2,
        runner=rng.choice(("v1", "v1", "v2", "v2 eager")),
        ahead=rng.choice((0, 0, 1, 2)),
        drafts=rng.choice((0, 0, 0, 3)),
        scheduling=rng.choice(("fcfs", "priority", "priority")),
        blocks=rng.choice(((16, 16), (16, 16), (32, 16), (16, 32), (16, 48))),
        tp=tp,
        layouts=(rng.choice(("HND", "NHD")), rng.choice(("HND", "NHD"))),
        window=rng.choice((None, None, None, None, 64)),
        cache_tokens=rng.choice((448, 480, CACHE_TOKENS)),
        late_copies=rng.random() < 0.5,
        same_address=tp[0] == 1 and rng.random() < 0.5,
        same_id=rng.random() < 0.5,
    )


class NamedWalk(Walk):
    """P and D of a case, and a router that sends both legs of each request at once. ``outcomes`` counts what became of
    D's requests, ``events`` what happened."""

    def __init__(self, case: Case, group: EngineGroup) -> None:
        self.case, self._group = case, group
        self._port = free_port() if case.same_address else 0
        self._lives = 0
        rng = random.Random(f"{case.seed} {case.number} walk")
        self._pace = random.Random(f"{case.seed} {case.number} pace")
        super().__init__(self._start("p"), self._start("d"), rng)
        self._place = self._address()
        self._later: list[Callable[[], None]] = []
        self._names = 0
        self._named: set[str] = set()  # requests of D
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    @property
    def handovers(self) -> int:
        """Requests of D whose P was named."""
        return self.outcomes.total() + len(self._named)

    # --- engines ------------------------------------------------------------------------------------------------

    def _start(self, side: str) -> Engine:
        case, number = self.case, "pd".index(side)
        block = case.blocks[number]
        self._lives += 1
        extra: dict[str, Any] = PATIENT | {
            "plane": case.plane, "checksum": case.checksum, "encrypt": case.encrypt, "slot_bytes": 64 << 10,
            "staging_bytes": 1 << 20, "lease_seconds": LEASE_SECONDS, "ask_hold_seconds": 0.3,
            "handover_timeout_seconds": HANDOVER_SECONDS,
            "side_channel_port": self._port if side == "p" else 0,
        }  # fmt: skip
        made: list[SlowCopies] = []

        def copies(device: Any, sms: int) -> SlowCopies:
            made.append(SlowCopies(LATE_SECONDS))
            return made[-1]

        cache_tokens = case.cache_tokens if side == "p" else CACHE_TOKENS
        if case.window:  # vLLM admits only requests that fit as a whole, and then a window takes as many blocks again
            cache_tokens = 4 * CACHE_TOKENS
        late = side == "p" and case.late_copies
        with mock.patch.object(worker_setup, "copies_on", copies if late else copies_on):
            engine = self._group.engine(
                number, extra, runner=case.runner, ahead=case.ahead, drafts=case.drafts, scheduling=case.scheduling,
                block=block, num_blocks=cache_tokens // block + 1, tp=case.tp[number],
                layout=case.layouts[number], window=case.window, max_batched=512,
                engine_id=f"{side}-{case.seed}-{case.number}" + ("" if case.same_id else f"-{self._lives}"),
            )  # fmt: skip
        if side == "p":
            self._copies = made
            for rank in range(engine.tp):
                self._count_early(early_of(transfer_thread_of(engine, rank)))
            engine.device = partial(self._compute, 0.3)
            engine.at_layer = lambda layer: self._compute(0.1)
        return engine

    def _count_early(self, early: EarlyRequests) -> None:
        vote = early.vote

        def counted(*args: Any, **options: Any) -> None:
            self.events["D was done before P's lease"] += 1
            vote(*args, **options)

        early.vote = counted  # type: ignore[method-assign]

    def _compute(self, odds: float) -> None:
        """P's device takes its time, and the transfer thread goes on meanwhile."""
        time.sleep(self._pace.choice((0.0005, 0.002)) if self._pace.random() < odds else 0)

    def _address(self) -> dict[str, Any]:
        """What a router knows of P from an answer."""
        address = self.p.workers[0].connector.get_handshake_metadata().address
        return {
            "remote_engine_id": self.p.config.kv_transfer_config.engine_id,
            "remote_host": address.host, "remote_port": address.port, "tp_size": self.p.tp,
        }  # fmt: skip

    def restart(self) -> None:
        """An engine ends, with all that it has, and another one takes its place."""
        side = self.rng.choice("ppd")
        former: Engine = getattr(self, side)
        self.given_up.update(name for name, answer in former.answers.items() if answer.finish is None)
        self.check_tokens(former)
        if side == "d":
            self.count_outcomes()
        former.close()
        self._group.engines.remove(former)
        setattr(self, side, self._start(side))
        self.events[f"{side.upper()} restarted"] += 1
        if side == "p" and self.rng.random() < 0.5:  # else the router does not know yet
            self._place = self._address()

    # --- requests -----------------------------------------------------------------------------------------------

    def ids(self) -> list[int]:
        """A prompt, often one that begins as another one."""
        return prompt(450, self.rng.randrange(PROMPTS))[: self.rng.choice((1, 15, 17, 60, 130, 200, 300, 400))]

    def ask(self) -> None:
        """A request whose legs leave at once, or a moment apart, or one of which gets lost."""
        if len(self.d.scheduler.requests) > UNDER_WAY:
            self.step()
            return
        self._names += 1
        if self.rng.random() < 0.2:
            self._place = self._address()
        rng, ids, name = self.rng, self.ids(), f"name-{self._names}"
        by_id = rng.random() < 0.3
        to_p, to_d = partial(self._to_p, ids, name, by_id), partial(self._to_d, ids, name, by_id)
        legs, turn = [to_p, to_d], rng.random()
        if turn < 0.02:
            legs = [to_d]
            self.events["P's leg never came"] += 1
        elif turn < 0.04:
            legs = [to_p]
            self.events["D's leg never came"] += 1
        elif turn < 0.08:
            legs.append(to_d)
            self.events["one name, two requests of D"] += 1
        elif turn < 0.11:
            legs.append(partial(self._to_p, self.ids(), name, by_id))
            self.events["one name, two prompts of P"] += 1
        elif turn < 0.14:
            legs[1] = partial(self._to_d, [*ids[:-1], 2 + ids[-1] % 280, 7][: rng.choice((len(ids), 512))], name, by_id)
            self.events["D's prompt is another one"] += 1
        rng.shuffle(legs)
        for leg in legs:
            if rng.random() < 0.6:
                leg()
            else:
                self._later.append(leg)

    def _to_p(self, ids: list[int], name: str, by_id: bool) -> None:
        params = PREFILL | ({} if by_id else {"transfer_id": name})
        self._lives += 1
        request_id = f"cmpl-{name}-0-{self._lives:08x}" if by_id else f"p-{name}-{self._lives}"
        self.p.add(ids, params, request_id=request_id, max_tokens=1, priority=self.rng.randrange(3))
        self.prompts[request_id] = ids
        if self.rng.random() < 0.9:
            self.passed.add(request_id)  # else a D gets P's answer too

    def _to_d(self, ids: list[int], name: str, by_id: bool) -> None:
        named = {"remote_request_id" if by_id else "transfer_id": name}
        params = {"do_remote_prefill": True, "do_remote_decode": False, **self._place, **named}
        self._lives += 1
        request_id = f"d-{name}-{self._lives}"
        self.d.add(
            ids, params, request_id=request_id, max_tokens=self.rng.choice((1, 3, 20)), priority=self.rng.randrange(3)
        )
        self.prompts[request_id] = ids
        self._named.add(request_id)

    def ask_beside(self) -> None:
        """A request without a hand-over, which takes blocks and fills the prefix cache."""
        engine, ids = self.rng.choice((self.p, self.d)), self.ids()
        self.prompts[engine.add(ids, max_tokens=self.rng.choice((1, 8)), priority=self.rng.randrange(3))] = ids

    def send_late(self) -> None:
        if self._later:
            self._later.pop(self.rng.randrange(len(self._later)))()

    # --- turns --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        before = len(self.given_up)
        super().abort()
        self.events["client left"] += len(self.given_up) - before

    def preempt(self) -> None:
        """Mostly a request of P whose prompt is computed in part, and another one takes its blocks."""
        if self.case.ahead and self.rng.random() < 0.5 and self.take_back():
            return
        for _ in range(4):  # until a copy reads blocks of a prompt that is computed, or none will
            self.p.scheduler.max_num_scheduled_tokens = self.rng.choice(BUDGETS)
            self.p.step()
            time.sleep(0.001)
            if any(rank.running for rank in self._copies):
                break
        computing = [
            r.request_id for r in self.p.scheduler.running if 0 < r.num_computed_tokens < r.num_prompt_tokens
        ]  # fmt: skip
        if not computing:
            super().preempt()
            return
        self.p.preempt(self.rng.choice(computing))
        self.events["P preempted a prompt that it computed"] += 1
        if self.rng.random() < 0.7 and self.p.free_blocks:
            other = prompt(min(500, self.p.free_blocks * self.p.block - 1), 100 + self.rng.randrange(50))
            self.prompts[self.p.add(other, priority=-1)] = other
            self.p.scheduler.max_num_scheduled_tokens = 512
        self.p.step()

    def take_back(self) -> bool:
        """P's device has computed a prompt, P's engine does not know yet and gives its blocks to another request. A D
        may read them meanwhile. Returns whether there was one."""
        for _ in range(4):
            self.p.scheduler.max_num_scheduled_tokens = self.rng.choice((40, 128, 512))
            self.p.step()
            computed = [
                r.request_id for r in self.p.scheduler.running
                if r.max_tokens == 1 and r.num_computed_tokens >= r.num_prompt_tokens
            ]  # fmt: skip
            if computed:
                break
        else:
            return False
        for _ in range(self.rng.choice((0, 2, 4))):
            self.d.step()
            self.pause()
        name = self.rng.choice(computed)
        if self.rng.random() < 0.5:
            self.p.preempt(name)
            self.events["P preempted a prompt that was computed"] += 1
        else:
            self.given_up.add(name)
            self.p.abort(name)
            self.events["P aborted a prompt that was computed"] += 1
        if self.p.free_blocks:
            other = prompt(min(500, self.p.free_blocks * self.p.block - 1), 100 + self.rng.randrange(50))
            self.prompts[self.p.add(other, priority=-1)] = other
            self.p.scheduler.max_num_scheduled_tokens = 512
        self.p.step()
        return True

    def step(self) -> None:
        self.p.scheduler.max_num_scheduled_tokens = self.rng.choice(BUDGETS)
        super().step()

    def go(self, turns: int = TURNS) -> None:
        moves = [
            self.ask, self.ask_p, self.ask_d, self.ask_beside, self.send_late, self.abort, self.preempt, self.step,
            self.pause,
        ]  # fmt: skip
        for move in self.rng.choices(moves, (30, 1, 1, 5, 20, 3, 18, 130, 15), k=turns):
            if self.handovers >= HANDOVERS:
                break
            move()
            if self.rng.random() < 1 / 600:
                self.restart()

    def over(self) -> bool:
        while self._later:
            self.send_late()
        self.p.scheduler.max_num_scheduled_tokens = self.rng.choice((40, 128, 512))
        if not self.p.scheduler.requests:  # whoever waits for a name now waits for a leg that never comes
            planner = scheduler_half(self.d)
            planner.clock = lambda: time.monotonic() + 2 * HANDOVER_SECONDS
        return super().over()

    def count_outcomes(self) -> None:
        """Of D's requests so far."""
        d = self.d
        failed = d.fallen_loads.union(*(worker.failed for worker in d.workers))
        for name in self._named:
            answer = d.answers[name]
            if answer.finish != "length":
                outcome = "ended first"
            elif name in failed:
                outcome = "load failed"
            elif name not in d.all_loads:
                outcome = "no load"
            else:
                outcome = "while P computed" if name in d.streamed_loads else "after P's lease"
            self.outcomes[outcome] += 1
        self._named.clear()

    def run(self, turns: int = TURNS) -> None:
        """The whole walk, and all that must hold at its end.

        Raises:
            AssertionError: it does not.
        """
        self.go(turns)
        run([self.p, self.d], self.over, seconds=300)
        settle(self.p, self.d)
        self.check_tokens(self.p)
        self.check_tokens(self.d)
        self.count_outcomes()
