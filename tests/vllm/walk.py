"""Hand-overs at random under vLLM's real scheduler, until there are enough: no token may be wrong, nothing may be left.

    python tests/vllm/walk.py [--count N] [--seed S] [--planes cma ...] [--processes N] [--json FILE]
    python tests/vllm/walk.py --seed S --case N [--planes cma ...] [--fault NAME]
    make walk COUNT=10000 SEED=...

Real worker halves and scheduler halves below vLLM's scheduler, over real data planes; only the model is made up. A case
is a P, a D and one walk of some 60 hand-overs, which a seed and a number draw. Both legs of a request are sent at once:
P's prompts leave while P computes them; in some cases of ``test_walk.py`` one leg follows the other. A case that fails
is printed with the command that repeats it; what its threads do in which order may differ. ``--fault`` plants a fault,
which must be seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".typing"))
if __name__ == "__main__":  # vLLM reads this when it is imported, and engines of other tests must not inherit it
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from benchmarks.harness import report  # noqa: E402
from kvferry.connector.pages.copies import copies_on  # noqa: E402
from kvferry.connector.worker import worker_setup  # noqa: E402
from tests.handover.slow_copies import SlowCopies  # noqa: E402
from tests.support.engines import free_port  # noqa: E402
from tests.support.inside import on_early_release, scheduler_half  # noqa: E402
from tests.support.streaming_faults import FAULTS  # noqa: E402
from tests.vllm.labelled import prompt  # noqa: E402
from tests.vllm.stepped import PATIENT, PREFILL, ROOM, Engine, EngineGroup, Lines, run, settle, tiny_model  # noqa: E402

PLANES = ("cma", "shm", "tcp", "zmq", "ucx")
PROMPTS = 10
"""Texts that prompts are the beginnings of: fewer would all be in the prefix caches, more would never be."""
BUDGETS = (1, 1, 7, 16, 40, 128, 512)
"""Tokens that one step of P computes at most: chunked prefill, down to one token."""
CACHE_TOKENS = 640
"""Of D, and of P at most: so few that requests preempt each other, and use blocks again soon."""
LATE_SECONDS = 5e-3
"""How late copies of P read its blocks, where they do: steps of P are shorter."""
LEASE_SECONDS = 1.5
"""So short that some leases end in the walk."""
HANDOVER_SECONDS = 30.0
"""D may hold blocks for a prompt that P has preempted and cannot resume, because D waits for blocks before it releases
P's leases: this time ends it."""
HANDOVERS = 60
"""Requests of D in one walk, about."""
TURNS = 1000
UNDER_WAY = 10
"""Requests of D at a time, about."""
MOVES = {
    "ask": 30, "ask_p": 1, "ask_d": 1, "ask_beside": 5, "send_late": 20, "abort": 3, "preempt": 18, "step": 130,
    "pause": 15,
}  # fmt: skip
ONE_BY_ONE = {"ask_p": 3, "ask_d": 5, "abort": 1, "preempt": 1, "step": 12, "pause": 4}
"""How often each move comes, where the legs are sent at once, and where D's follows P's."""


@dataclass(frozen=True)
class Case:
    """The forms of both engines. ``late_copies``: those of P read its blocks a moment after they were started, as a
    GPU's do. ``same_address``: a P that is restarted has the port, and ``same_id`` the engine id, of its former life.
    ``window``: of the last layer, which is another block table. ``one_process``: of engines of
    one rank. ``at_once``: both legs of a request."""

    seed: int
    number: int
    plane: str
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
    one_process: bool
    at_once: bool = True

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
        one_process=rng.random() < 0.5,
    )


def one_by_one(seed: int, number: int) -> Case:
    """A case whose legs follow one another."""
    case = draw(seed, number, ("auto", "shm", "zmq"))
    runner = ("v1", "v2", "v2 eager")[number // 3 % 3]
    return replace(case, runner=runner, late_copies=False, at_once=False, cache_tokens=CACHE_TOKENS)


class Walk:
    """P and D of a case, the requests under way between them, and a router. ``outcomes`` counts what became of D's
    requests that were sent at once, ``events`` what happened."""

    def __init__(self, case: Case, group: EngineGroup) -> None:
        self.case, self._group = case, group
        self._port = free_port() if case.same_address else 0
        self._lives = self._names = 0
        self.rng = random.Random(f"{case.seed} {case.number} walk")
        self._pace = random.Random(f"{case.seed} {case.number} pace")
        self.p, self.d = self._start("p"), self._start("d")
        self._place = self.p.named()
        self.prompts: dict[str, list[int]] = {}
        self.passed: set[str] = set()
        self.given_up: set[str] = set()
        self._later: list[Callable[[], None]] = []
        self._at_once: set[str] = set()  # requests of D
        self.outcomes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()

    # --- engines ------------------------------------------------------------------------------------------------

    def _start(self, side: str) -> Engine:
        case, number = self.case, "pd".index(side)
        block = case.blocks[number]
        self._lives += 1
        extra: dict[str, Any] = PATIENT | ROOM | {
            "plane": case.plane, "encrypt": case.encrypt, "lease_seconds": LEASE_SECONDS,
            "handover_timeout_seconds": HANDOVER_SECONDS,
            "side_channel_port": self._port if side == "p" else 0,
        }  # fmt: skip
        made: list[SlowCopies] = []

        def copies(device: Any) -> SlowCopies:
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
                one_process=case.one_process,
            )  # fmt: skip
        if side == "p":
            self._copies = made
            for rank in range(engine.tp):
                on_early_release(engine.threads[rank], self._count_early)
            if case.at_once:
                engine.device = partial(self._compute, 0.3)
                engine.at_layer = lambda layer: self._compute(0.1)
        return engine

    def _count_early(self) -> None:
        self.events["D was done before P's lease"] += 1

    def _compute(self, odds: float) -> None:
        """P's device takes its time, and the transfer thread goes on meanwhile."""
        time.sleep(self._pace.choice((0.0005, 0.002)) if self._pace.random() < odds else 0)

    def restart(self) -> None:
        """An engine ends, with all that it has, and another one takes its place."""
        side = self.rng.choice("ppd")
        former: Engine = getattr(self, side)
        self.given_up.update(name for name, answer in former.answers.items() if answer.finish is None)
        self.check_answers(former)
        if side == "d":
            self.count_outcomes()
        former.close()
        self._group.engines.remove(former)
        setattr(self, side, self._start(side))
        self.events[f"{side.upper()} restarted"] += 1
        if side == "p" and self.rng.random() < 0.5:  # else the router does not know yet
            self._place = self.p.named()

    # --- requests -----------------------------------------------------------------------------------------------

    def ids(self) -> list[int]:
        """A prompt, often one that begins as another one."""
        texts = PROMPTS if self.case.at_once else 4
        return prompt(450, self.rng.randrange(texts))[: self.rng.choice((1, 15, 17, 60, 130, 200, 300, 400))]

    def ask_p(self) -> None:
        """A prompt, often one that shares a prefix with another, goes to P."""
        ids = self.ids()
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
        for child in [f"{number}_{name}" for number in range(2)] if turn > 0.85 else [f"d-{name}"]:
            logprobs = 1 if self.rng.random() < 0.1 else None
            self.d.add(
                ids, params, request_id=child, max_tokens=tokens, prompt_logprobs=logprobs,
                priority=self.rng.randrange(3),
            )  # fmt: skip
            self.prompts[child] = ids

    def ask(self) -> None:
        """A request whose legs leave at once, or a moment apart, or one of which gets lost."""
        if len(self.d.scheduler.requests) > UNDER_WAY:
            self.step()
            return
        self._names += 1
        if self.rng.random() < 0.2:
            self._place = self.p.named()
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
        params = self._place | {"remote_request_id" if by_id else "transfer_id": name}
        self._lives += 1
        request_id = f"d-{name}-{self._lives}"
        self.d.add(
            ids, params, request_id=request_id, max_tokens=self.rng.choice((1, 3, 20)), priority=self.rng.randrange(3)
        )
        self.prompts[request_id] = ids
        self._at_once.add(request_id)

    def ask_beside(self) -> None:
        """A request without a hand-over, which takes blocks and fills the prefix cache."""
        engine, ids = self.rng.choice((self.p, self.d)), self.ids()
        self.prompts[engine.add(ids, max_tokens=self.rng.choice((1, 8)), priority=self.rng.randrange(3))] = ids

    def send_late(self) -> None:
        if self._later:
            self._later.pop(self.rng.randrange(len(self._later)))()

    # --- other moves --------------------------------------------------------------------------------------------

    def abort(self) -> None:
        engine = self.rng.choice((self.p, self.d))
        names = [name for name, answer in engine.answers.items() if answer.finish is None and name in self.prompts]
        if names:
            name = self.rng.choice(names)
            self.given_up.add(name)
            engine.abort(name)
            self.events["client left"] += 1

    def preempt(self) -> None:
        """Where legs are sent at once, mostly a request of P whose prompt is computed in part, and another one takes
        its blocks."""
        if self.case.at_once and (self._take_computed() or self._take_computing()):
            return
        engine = self.rng.choice((self.p, self.d))
        running = [r.request_id for r in engine.scheduler.running if r.status is RequestStatus.RUNNING]
        if running:
            engine.preempt(self.rng.choice(running))

    def _take_computing(self) -> bool:
        for _ in range(4):  # until a copy reads blocks of a prompt that is computed, or none will
            self.p.scheduler.max_num_scheduled_tokens = self.rng.choice(BUDGETS)
            self.p.step()
            time.sleep(0.001)
            if any(rank.running for rank in self._copies):
                break
        computing = [
            r.request_id for r in self.p.scheduler.running if 0 < r.num_computed_tokens < r.num_prompt_tokens
        ]  # fmt: skip
        if computing:
            self.p.preempt(self.rng.choice(computing))
            self.events["P preempted a prompt that it computed"] += 1
            self._fill(self.rng.random() < 0.7)
        return bool(computing)

    def _take_computed(self) -> bool:
        """P's device has computed a prompt, P's engine does not know yet and gives its blocks to another request. A D
        may read them meanwhile. Returns whether there was one."""
        if not (self.case.ahead and self.rng.random() < 0.5):
            return False
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
        self._fill(True)
        return True

    def _fill(self, fill: bool) -> None:
        """A step of P, in which another request takes all free blocks."""
        if fill and self.p.free_blocks:
            other = prompt(min(500, self.p.free_blocks * self.p.block - 1), 100 + self.rng.randrange(50))
            self.prompts[self.p.add(other, priority=-1)] = other
            self.p.scheduler.max_num_scheduled_tokens = 512
        self.p.step()

    def step(self) -> None:
        self.p.scheduler.max_num_scheduled_tokens = self.rng.choice(BUDGETS if self.case.at_once else (64, 256))
        engine = self.rng.choice((self.p, self.d))
        for _ in range(self.rng.randrange(1, 4)):
            engine.step()

    def pause(self) -> None:
        time.sleep(self.rng.choice((0, 0.001, 0.02)))

    # --- the whole of it ----------------------------------------------------------------------------------------

    def go(self, turns: int) -> None:
        weights = MOVES if self.case.at_once else ONE_BY_ONE
        for move in self.rng.choices(list(weights), list(weights.values()), k=turns):
            if self.outcomes.total() + len(self._at_once) >= HANDOVERS:
                break
            getattr(self, move)()
            if self.case.at_once and self.rng.random() < 1 / 600:
                self.restart()

    def over(self) -> bool:
        """Whether all has come to its end; what P finishes late is passed on as well. Leases that nobody asked for end
        as if their time had come."""
        while self._later:
            self.send_late()
        self.p.scheduler.max_num_scheduled_tokens = self.rng.choice((40, 128, 512))
        if not self.p.scheduler.requests:  # whoever waits for a name now waits for a leg that never comes
            scheduler_half(self.d).clock = lambda: time.monotonic() + 2 * HANDOVER_SECONDS
        while self.waiting():
            self.ask_d()
        if not self.d.scheduler.requests:
            self.p.let_time_pass(2 * LEASE_SECONDS)
        return self.p.idle and self.d.idle

    def check_answers(self, engine: Engine) -> None:
        """All are complete, but those that were given up."""
        for name, answer in engine.answers.items():
            assert name not in self.prompts or name in self.given_up or answer.finish == "length", name

    def count_outcomes(self) -> None:
        """What became of D's requests so far whose legs were sent at once: it has loaded its prompt, or computed it, or
        its client or engine was gone."""
        d = self.d
        failed = d.fallen_loads | d.failed
        for name in self._at_once:
            if d.answers[name].finish != "length":
                outcome = "ended first"
            elif name in failed:
                outcome = "load failed"
            elif name not in d.all_loads:
                outcome = "no load"
            else:
                outcome = "while P computed" if name in d.streamed_loads else "after P's lease"
            self.outcomes[outcome] += 1
        self._at_once.clear()

    def run(self, turns: int = TURNS) -> None:
        """The whole walk, and all that must hold at its end.

        Raises:
            AssertionError: it does not.
        """
        self.go(turns)
        run([self.p, self.d], self.over)
        settle(self.p, self.d)
        self.check_answers(self.p)
        self.check_answers(self.d)
        self.count_outcomes()


# --- many of them -------------------------------------------------------------------------------------------------


def walk(model: Any, case: Case) -> tuple[Counter[str], Counter[str], str]:
    """What became of the requests of one case, what happened, and why it has failed."""
    group, lines, failure = EngineGroup(model), Lines(), ""
    logger = logging.getLogger("vllm.kvferry")
    logger.addHandler(lines)
    made: Walk | None = None
    try:
        made = Walk(case, group)
        made.run()
        if lines("unexpected error"):
            raise AssertionError(f"logged: {lines('unexpected error')[0]}")
    except Exception as error:  # whatever it is, the other cases go on
        failure = f"{error!r}\n{traceback.format_exc()}"
    finally:
        logger.removeHandler(lines)
        group.close()
    return (made.outcomes, made.events, failure) if made is not None else (Counter(), Counter(), failure)


def _cases(job: tuple[int, int, int, int, tuple[str, ...], str]) -> dict[str, Any]:
    """The share of one process: every ``step``-th case from ``first`` on, until ``count`` hand-overs are done."""
    seed, first, step, count, planes, fault = job
    torch.set_num_threads(1)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    outcomes: dict[str, Counter[str]] = {plane: Counter() for plane in planes}
    events: Counter[str] = Counter()
    failed: list[str] = []
    done, number, said = 0, first, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, FAULTS[fault]() if fault else nullcontext():
        model = tiny_model(Path(folder) / "tiny")
        while done < count and not (fault and failed):
            case = draw(seed, number, planes)
            of_case, happened, failure = walk(model, case)
            outcomes[case.plane] += of_case
            events += happened
            done += of_case.total()
            if failure:
                failed.append(f"{case}: {failure[:200]}")
                again = f"{sys.argv[0]} --seed {seed} --case {number} --planes {' '.join(planes)}"
                print(f"FAILED {case}\n{failure}\nrepeat: {again}", flush=True)
            if time.monotonic() > said + 30:
                said = time.monotonic()
                print(f"process {first}: {done} of {count} hand-overs, {len(failed)} cases failed", flush=True)
            number += step
    return {"outcomes": outcomes, "events": events, "failed": failed, "cases": (number - first) // step}


def total(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of all processes together, by plane."""
    rows = []
    for plane in results[0]["outcomes"]:
        counts: Counter[str] = sum((result["outcomes"][plane] for result in results), Counter())
        rows.append({"plane": plane, "handovers": counts.total(), "outcomes": dict(counts.most_common())})
    events: Counter[str] = sum((result["events"] for result in results), Counter())
    return {
        "rows": rows, "events": dict(events.most_common()), "cases": sum(result["cases"] for result in results),
        "failed": [line for result in results for line in result["failed"]],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="hand-overs of all processes together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--case", type=int, help="this one only, by its number")
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=PLANES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--json", type=Path, help="write the counts and versions to this file")
    options = parser.parse_args()
    planes = tuple(plane for plane in options.planes if plane != "ucx" or find_spec("ucxx"))
    processes = 1 if options.case is not None else options.processes
    share = 1 if options.case is not None else -(-options.count // processes)
    print(f"seed {options.seed}: {options.count} hand-overs over {', '.join(planes)}", flush=True)
    jobs = [
        (options.seed, n if options.case is None else options.case, processes, share, planes, options.fault)
        for n in range(processes)
    ]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        together = total(pool.map(_cases, jobs, chunksize=1))
    seconds, handovers = time.monotonic() - began, sum(row["handovers"] for row in together["rows"])
    for row in together["rows"]:
        counts = ", ".join(f"{count} {what}" for what, count in row["outcomes"].items())
        print(f"{row['plane']:5} {row['handovers']:6} hand-overs: {counts}")
    print("; ".join(f"{count} {what}" for what, count in together["events"].items()))
    print(f"{handovers} hand-overs in {together['cases']} cases, {len(together['failed'])} failed, in {seconds:.0f} s")
    if options.json:
        document = {
            "figures": {"handovers": handovers, "seconds": round(seconds), "failed_cases": len(together["failed"])},
            **together,
            "arguments": {"count": options.count, "seed": options.seed, "processes": processes},
            "versions": report.versions(),
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(together["failed"]))


if __name__ == "__main__":
    sys.exit(main())
