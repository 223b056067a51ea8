"""Conversations at random between engines that read prefixes from each other: no token and no KV may be wrong.

    python tests/vllm/prefix_histories.py [--count N] [--seed S] [--case N] [--fault NAME] [--json FILE]

A case is two or three engines below vLLM's real scheduler, with few blocks, and ten histories; a seed and a number draw
it. The engines differ in TP size, block size, layout, dtype, and sometimes in the model. Each turn of a history goes to
any of them, and names sources of its prefix: right ones, wrong ones, ones that have restarted. The KV of a token is a
function of the model, the salt and all tokens up to it, and each forward compares all KV that it reads. No load may
bring more than the longest common prefix with what its source has computed, or come from a source whose life was over.
``--fault`` switches a guard off, which must be seen. The order of what threads do is not drawn.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".typing"))
if __name__ == "__main__":  # vLLM reads this when it is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec  # noqa: E402
import torch  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from benchmarks.harness import report  # noqa: E402
from kvferry.connector.decode_side import link  # noqa: E402
from kvferry.connector.pages.computed_steps import PromptBlocks  # noqa: E402
from kvferry.connector.prefill_side import session  # noqa: E402
from kvferry.connector.prefill_side.prefixes import PrefixIndex  # noqa: E402
from kvferry.connector.scheduler import load_planner, prefixes  # noqa: E402
from kvferry.connector.scheduler.lease_planner import LeasePlanner  # noqa: E402
from kvferry.connector.vllm import adapter, from_vllm  # noqa: E402
from kvferry.connector.wire.messages import Ask  # noqa: E402
from kvferry.connector.wire.params import HANDED_OVER  # noqa: E402
from tests.support.inside import consumer_of, leases_of, prompts_of, sends_of  # noqa: E402
from tests.vllm import stepped  # noqa: E402
from tests.vllm.labelled import CONTENT, HEADS, LAYERS, prompt  # noqa: E402
from tests.vllm.paused_transfer import PausedTransfer  # noqa: E402
from tests.vllm.stepped import PATIENT, ROOM, EngineGroup, Lines, run, settle, tiny_model  # noqa: E402

HISTORIES, UNDER_WAY, LONGEST = 10, 4, 400
"""Histories of a case, turns at a time, and tokens of a prompt, at most."""
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
SALTS = (None, None, "one", "two")
PLANES = ("auto", "auto", "shm", "tcp", *(() if current_platform.is_cuda() else ("zmq",)))
EDITS = ("append", "append", "append", "change", "insert", "remove", "drop thinking", "salt", "go back")
FACTORS = torch.tensor([random.Random(n).getrandbits(62) | 1 for n in range(LAYERS * HEADS * CONTENT)])
"""[L*H*C]: one for each element of a token."""


def content_labels(heads: Sequence[int], scope: tuple[str, str | None], ids: Sequence[int]) -> torch.Tensor:
    """[L,H,T,C] float32: the KV of tokens, each of which depends on the model and the salt, which are ``scope``, and on
    all tokens up to it. Every dtype here has these numbers, 0 to 255."""
    state, states = random.Random(str(scope)).getrandbits(62), []
    for token in ids:
        state = ((state ^ token) * 6364136223846793005 + 1442695040888963407) & (1 << 62) - 1
        states.append(state ^ state >> 29)
    factors = FACTORS.reshape(LAYERS, HEADS, 1, CONTENT)[:, list(heads)]
    return (torch.tensor(states, dtype=torch.int64)[None, None, :, None] * factors >> 40 & 255).float()


class Forward(stepped.Forward):
    """As ``stepped.Forward``, with KV that depends on all tokens before."""

    engine: Engine

    def __init__(self, engine: stepped.Engine, worker: stepped.Worker, turns: dict[str, stepped.Turn]) -> None:
        super().__init__(engine, worker, turns)
        assert isinstance(engine, Engine)
        self._right, self._places = {}, {}
        self._bad: dict[str, set[int]] = {}
        for name, turn in turns.items():
            scope = engine.tag, engine.scheduler.requests[name].cache_salt
            self._right[name] = content_labels(worker.heads, scope, turn.ids).transpose(1, 2)  # [L,T,H,C]
            tokens = torch.arange(len(turn.ids))
            self._places[name] = torch.tensor(self.tables[name][0])[tokens // engine.block], tokens % engine.block

    def update(self, layer: int) -> None:
        cache = self.worker.caches[self.engine.layers[layer]]
        for name, turn in self.turns.items():
            blocks, slots = (place[turn.start :] for place in self._places[name])
            wrong = name in self._bad  # from wrong KV comes wrong KV
            cache[blocks, :, slots] = (self._right[name][layer, turn.start :] + wrong).to(cache.dtype)

    def attend(self, layer: int) -> None:
        self.engine.at_layer(layer)
        cache = self.worker.caches[self.engine.layers[layer]]
        for name, turn in self.turns.items():
            blocks, slots = (place[: turn.start] for place in self._places[name])
            differs = cache[blocks, :, slots].float() != self._right[name][layer, : turn.start]
            if differs.any():
                self._bad.setdefault(name, set()).update(differs.flatten(1).any(1).nonzero().flatten().tolist())

    def finish(self) -> None:
        for layer in range(LAYERS) if self._bad else ():
            self.update(layer)
        for name, places in self._bad.items():
            text = f"{name}: wrong KV at positions {sorted(places)} of {self.turns[name].start}"
            self.engine.wrong.append((name, set(self.tables[name][0]), text))


class Engine(stepped.Engine):
    """One life of an engine. ``held``: salt and tokens of what its blocks may hold, of requests that have ended."""

    forward_class, alive = Forward, True

    def __init__(self, *args: Any, tag: str, planned: Callable[[Engine, Any], None], **kwargs: Any) -> None:
        self.tag, self._planned = tag, planned
        self.held: list[tuple[str | None, list[int]]] = []
        super().__init__(*args, **kwargs)

    def _note(self, metadata: Any) -> None:
        super()._note(metadata)
        for load in metadata.plan.loads:
            if load.prefix:
                self._planned(self, load)

    @property
    def place(self) -> dict[str, Any]:
        """As ``sources`` has it."""
        names = ("remote_host", "remote_port", "remote_engine_id")
        return dict(zip(names, (self.address.host, self.address.port, self.engine_id), strict=True))


@dataclass(eq=False)
class History:
    """A conversation. ``places``: where turns ran, the last one last; ``versions``: what it was before. ``request``: of
    the last turn, which is under way at ``engine``; ``sources``: that it names."""

    salt: str | None
    ids: list[int]
    turns: int
    answer_at: int = 0
    places: list[dict[str, Any]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    engine: Engine | None = None
    request: str = ""
    sources: list[dict[str, Any]] = field(default_factory=list)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens of the longest common prefix."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def six_ports() -> list[int]:
    """Three ports of this process, the successor of each is free: for one rank or two. They and a seventh are held,
    which keeps other processes from them."""
    while True:
        first, held = 20_000 + 7 * random.SystemRandom().randrange(1_500), [socket.socket() for _ in range(7)]
        try:
            for number, each in enumerate(held):  # fails beside any other, because SO_REUSEADDR is not set yet
                each.bind(("127.0.0.1", first + number))
        except OSError:
            for each in held:
                each.close()
            continue
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        GUARDS.extend(held)
        return [first, first + 2, first + 4]


GUARDS: list[socket.socket] = []
PORTS: list[int] = []
PART = 10
"""Cases that a process plays at a time."""


class Case:
    """The engines and the histories of one case. ``events`` counts what happened."""

    def __init__(self, seed: int, number: int, group: EngineGroup, model: Any) -> None:
        self.rng = rng = random.Random(f"{seed} {number}")
        self._group, self._model, self._name = group, model, f"{seed}-{number}"
        self.events: Counter[str] = Counter()
        PORTS.extend(() if PORTS else six_ports())
        self._plane, self._runner = rng.choice(PLANES), rng.choice(("v1", "v2", "v2 eager"))
        self._held = rng.random() < 0.5  # loads go beside the steps, and some are held up: a step would wait for them
        self._tags, self._wait = rng.choice((("",), ("", "tuned"))), rng.choice((600.0, 600.0, 600.0, 0.02))
        self._lives: dict[bytes, Engine] = {}
        self._alive: dict[str, bool] = {}  # by request: whether the source of its load was alive when it was planned
        self._paused: list[PausedTransfer] = []
        self.engines = [self._start(slot) for slot in range(rng.choice((2, 3, 3)))]
        texts = [[5 + rng.randrange(3), *prompt(rng.choice((20, 60, 110)))] for _ in range(4)]
        drawn = [(rng.choice(SALTS), rng.choice(texts), rng.randint(1, 6)) for _ in range(HISTORIES)]
        self.histories = [History(*each) for each in drawn]

    def _start(self, slot: int) -> Engine:
        rng = self.rng
        block, tag = rng.choice((16, 16, 32, 48)), rng.choice(self._tags)
        extra: dict[str, Any] = PATIENT | ROOM | {
            "prefix_reads": True, "prefix_wait_seconds": self._wait, "plane": self._plane, "convert_dtype": True,
            "side_channel_port": PORTS[slot], "model_tag": tag or None,
            "step_hold_seconds": 0.0 if self._held else 0.01,
        }  # fmt: skip
        engine = Engine(
            self._model, 0, extra=extra, tag=tag, planned=self._planned, runner=self._runner, ahead=rng.choice((0, 1)),
            block=block, num_blocks=rng.choice((448, 800, 1200)) // block + 1, tp=rng.choice((1, 1, 2)),
            layout=rng.choice(("HND", "NHD")), engine_id=f"engine-{self._name}-{slot}", dtype=rng.choice(DTYPES),
            one_process=rng.random() < 0.5,
        )  # fmt: skip
        self._group.engines.append(engine)
        self._lives.update((thread.rank_context.incarnation, engine) for thread in engine.threads)
        return engine

    def _planned(self, engine: Engine, load: Any) -> None:
        """A load is planned: how much it may bring."""
        history = next(each for each in self.histories if each.request == load.request_id)
        source, count = self._lives[load.peer.ranks[0].incarnation], load.tokens[0][1]
        named = source.tag == engine.tag and source.place in history.sources
        alike = [ids for salt, ids in source.held if named and salt == history.salt]
        limit = max((common(ids, history.ids) for ids in alike), default=0)
        assert count <= limit, f"{load.request_id} loads {count} tokens, and has {limit} in common with its source"
        self._alive[load.request_id] = source.alive
        self.events["loads"] += 1

    def _restart(self, slot: int, histories: Sequence[History] = ()) -> None:
        """An engine ends, with all that it has. One of another form takes its address, and is given some of the prompts
        before anything else happens."""
        former = self.engines[slot]
        former.alive = False
        self._count(former)
        for history in self.histories:
            if history.engine is former:
                history.engine = None
        former.close()
        self._group.engines.remove(former)
        again = self.engines[slot] = self._start(slot)
        for history in histories or self.rng.sample(self.histories, 2):
            again.finish(again.add(history.ids, salt=history.salt))
            again.held.append((history.salt, history.ids))
        again.step()
        self.events["restarts"] += 1

    def _count(self, engine: Engine) -> None:
        self.events.update({f"prefixes {what}": count for what, count in engine.prefixes.items()})

    def _edit(self, history: History) -> None:
        """What comes before the next turn."""
        rng, ids, how = self.rng, [*history.ids], self.rng.choice(EDITS)
        at, places = rng.randrange(len(ids)), {"change": (1, [7]), "insert": (0, [7]), "remove": (1, [])}
        count, new = places.get(how, (0, []))
        if how == "drop thinking":
            at, count = history.answer_at, rng.choice((4, 12))
        elif how == "salt":
            history.salt = rng.choice(SALTS)
        elif how == "go back" and history.versions:
            ids = [*rng.choice(history.versions)]
        ids[at : at + count] = new
        ids += prompt(rng.choice((1, 16, 20, 70)), rng.randrange(3))
        history.versions.append(history.ids)
        history.ids = ids if len(ids) <= LONGEST else ids[: rng.choice((60, 150, 240))]
        self.events[how] += 1

    def _begin(self) -> None:
        """A turn goes to an engine. Its read may be held up."""
        rng, ready = self.rng, [each for each in self.histories if each.turns and each.engine is None]
        if not ready or sum(each.engine is not None for each in self.histories) >= UNDER_WAY:
            return
        history = rng.choice(ready)
        engine = rng.choice([each for each in self.engines if each.place not in history.places[-1:]])
        known = [*history.places[::-1], *(rng.choice(self.engines).place for _ in range(rng.randrange(2)))]
        if rng.random() < 0.1 and known:
            known[0] = known[0] | {"remote_engine_id": "another"}
        history.sources = [each for n, each in enumerate(known) if each not in known[:n]][: rng.choice((1, 2, 4))]
        others = [each for each in self.engines if each.place in history.sources and each is not engine]
        held = rng.choice(others) if others and self._held and not self._paused and rng.random() < 0.8 else None
        if held is not None:
            kinds, chunks = rng.choice((((), 0), ((), 1), ((Ask,), None)))
            self._paused.append(PausedTransfer(held, *kinds, chunks=chunks, reader=engine))
            self.events["held reads"] += 1
        history.request, history.engine = f"turn-{self.events['turns']}", engine
        params, tokens = {"sources": history.sources, "report": True}, rng.choice((1, 8, 24))
        engine.add(history.ids, params, request_id=history.request, max_tokens=tokens, salt=history.salt)
        self.events["turns"] += 1
        for _ in range(rng.randrange(4) if others else 0):  # asked, answered, planned
            self._step(engine)
            time.sleep(0.003)
        if held is not None and held.free_blocks and rng.random() < 0.5:  # another request takes all blocks
            ids = prompt(min(440, held.free_blocks * held.block - 1), rng.randrange(9))
            held.finish(held.add(ids))
            held.held.append((None, ids))
            self.events["evictions"] += 1
        elif others and rng.random() < 0.1:
            self._restart(self.engines.index(rng.choice(others)), [history])

    def _step(self, engine: Engine) -> None:
        engine.step()
        for history in self.histories:
            if history.engine is engine and engine.answers[history.request].finish is not None:
                self._ended(history, engine)

    def _ended(self, history: History, engine: Engine) -> None:
        answer, name = engine.answers[history.request], history.request
        assert answer.finish == "length", f"{name}: {answer.finish}"
        told = (answer.params or {}).get(HANDED_OVER) or {}
        loaded = told.get("result") == "loaded"
        assert not loaded or self._alive.get(name, True), f"{name} has loaded from a source whose life was over"
        history.answer_at, history.ids = len(history.ids), [*history.ids, *answer.tokens]
        engine.held.append((history.salt, history.ids[:-1]))
        history.places = [*history.places, engine.place][-4:]
        history.engine, history.turns = None, history.turns - 1
        if history.turns:
            self._edit(history)

    def _open(self) -> None:
        while self._paused:
            self._paused.pop().open()

    def _move(self) -> None:
        rng, dice = self.rng, self.rng.random()
        if dice < 0.25:
            self._begin()
        elif dice < 0.29:
            self._open()
        elif dice < 0.295:
            self._restart(rng.randrange(len(self.engines)))
        elif dice < 0.30:
            self.events["resets"] += rng.choice(self.engines).scheduler.reset_prefix_cache()
        elif dice < 0.305:
            if (history := rng.choice(self.histories)).engine is not None:
                history.engine.abort(history.request)
                history.engine = None
        else:
            for _ in range(rng.randint(1, 4)):
                self._step(rng.choice(self.engines))
            time.sleep(rng.choice((0, 0, 0.0005)))

    def run(self) -> None:
        """All turns. Raises AssertionError: something was wrong, or is left."""
        end = time.monotonic() + 300
        while any(each.turns for each in self.histories):
            assert time.monotonic() < end, "not in time: " + "; ".join(each.why_busy() for each in self.engines)
            self._move()
        self._open()
        run(self.engines, lambda: not any(each.scheduler.requests for each in self.engines))
        for engine in self.engines:
            engine.let_time_pass(40_000.0)  # of a reader that was restarted, no release comes
        settle(*self.engines)
        run(self.engines, lambda: not self._left())
        for engine in self.engines:
            assert engine.scheduler.reset_prefix_cache(), "a block is held"
            self._count(engine)

    def _left(self) -> bool:
        """Whether a table of a transfer thread is not empty."""
        tables = []
        for thread in (thread for engine in self.engines for thread in engine.threads):
            reads = consumer_of(thread)
            tables += [leases_of(thread), prompts_of(thread), thread.prefixes.lent, thread.prefixes.lost]
            tables += [sends_of(thread).live, reads.loads.running, reads.reads.by_number, reads.lookups.open]
        return any(map(len, tables))


# --- guards that are switched off: each takes the product's function, and the arguments of a call -----------------


def _alone(digests: Any, seed: bytes, content: Any, first: int = 0, before: bytes = b"") -> bytes:
    ids = content.token_ids
    parts = [ids[at : at + 16] for at in range(16 * first, len(ids) // 16 * 16, 16)]
    return b"".join(digests(seed, replace(content, token_ids=part)) for part in parts)


FAULTS: Mapping[str, Sequence[tuple[Any, str, Callable[..., Any]]]] = {
    "reuse is not said": [(LeasePlanner, "block_reused", lambda *args: None)],
    "no revocation": [
        (PromptBlocks, "lose", lambda *args: None), (PrefixIndex, "take_lost", lambda *args: []),
    ],
    "no salt": [(from_vllm, "kv_content", lambda content, *args: replace(content(*args), scope=()))],
    "digests are not chained": [(prefixes, "prefix_digests", _alone), (load_planner, "prefix_digests", _alone)],
    "any model": [
        (adapter, "model_seed", lambda *args: b"any"),
        *((module, "check_model", lambda *args: None) for module in (link, session)),
    ],
    "any engine": [
        (load_planner, "sources_of",
         lambda of, *args: tuple(msgspec.structs.replace(each, engine_id="") for each in of(*args))),
    ],
}  # fmt: skip
SEEN_AS = ("wrong KV", "in common with its source", "whose life was over")


@contextmanager
def switched_off(fault: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, other in FAULTS.get(fault, ()):
            real = getattr(owner, name)
            stack.enter_context(mock.patch.object(owner, name, lambda *args, f=other, real=real: f(real, *args)))
        yield


def play(model: Any, seed: int, number: int) -> tuple[Counter[str], str]:
    """What happened in one case, and why it has failed."""
    group, lines, failure = EngineGroup(model), Lines(), ""
    logger = logging.getLogger("vllm.kvferry")
    logger.addHandler(lines)
    events: Counter[str] = Counter(cases=1)
    try:
        case = Case(seed, number, group, model)
        case.run()
        events += case.events
        assert not lines("unexpected error"), lines("unexpected error")[0]
    except Exception as error:  # whatever it is, the other cases go on
        failure = f"{error!r}\n{traceback.format_exc()}"
    finally:
        logger.removeHandler(lines)
        group.close()
    return events, failure


def _play_all(job: tuple[int, Sequence[int], str]) -> list[tuple[int, Counter[str], str]]:
    """Some cases in this process, up to one in which a fault is seen that is planted."""
    seed, numbers, fault = job
    torch.set_num_threads(1)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    done = []
    with tempfile.TemporaryDirectory() as folder, switched_off(fault):
        model = tiny_model(Path(folder) / "tiny")
        for number in numbers:
            done.append((number, *play(model, seed, number)))
            if done[-1][2] and fault:
                break
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="histories")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--case", type=int, help="this one only, by its number")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--fault", choices=FAULTS, default="", help="switch a guard off, until that is seen")
    parser.add_argument("--json", type=Path, help="write the counts and versions to this file")
    options = parser.parse_args()
    cases = range(options.count // HISTORIES) if options.case is None else range(options.case, options.case + 1)
    events, failed, began = Counter[str](), list[str](), time.monotonic()
    parts = [(options.seed, cases[at : at + PART], options.fault) for at in range(0, len(cases), PART)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for done in pool.imap_unordered(_play_all, parts):
            for number, happened, failure in done:
                events += happened
                if failure:
                    failed.append(f"case {number}: {failure[:300]}")
                    print(f"FAILED {failure}\nrepeat: {sys.argv[0]} --seed {options.seed} --case {number}", flush=True)
            print(f"{events['cases'] * HISTORIES} histories, {len(failed)} cases failed", flush=True)
            if failed and options.fault:
                break
    histories, seconds = events["cases"] * HISTORIES, round(time.monotonic() - began)
    figures = {"histories": histories, "failed_cases": len(failed), "seconds": seconds}
    print(f"seed {options.seed}: {figures}\n" + "; ".join(f"{count} {what}" for what, count in events.most_common()))
    arguments = {"count": options.count, "seed": options.seed}
    report.write(
        options.json,
        {"figures": figures, "events": dict(events.most_common()), "failed": failed, "arguments": arguments},
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
