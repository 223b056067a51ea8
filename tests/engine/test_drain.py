"""Engines that are ended by SIGTERM: a rolling restart of all P and all D under load, and a lease that is held. And
those that end, or stand still, without a word: every request is answered, or gets an error.

For a drain the engines run with ``--shutdown-timeout``: without it vLLM ends at once, and with it requests and leases.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from tests.support.engines import ServerGroup, python_path
from tests.support.pd_client import stream
from tests.support.served import (
    ForkedServerGroup,
    PatientServerGroup,
    complete,
    count,
    counted,
    ended_leases,
    eventually,
    freeze,
    kill,
    no_block_held,
    prefill_leg,
    prompt,
    terminate,
    tokens_of,
)
from tests.support.server import PATIENCE_SECONDS, EngineError, Server

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
DRAIN = ["--shutdown-timeout", "300"]
QUIET_SECONDS = "1"
CLIENTS = 3
PROMPTS = [prompt(tokens, seed) for seed, tokens in enumerate((17, 64, 150, 333))]
NEW_TOKENS = 12


class Load:
    """Clients that send one request after the other. ``failed``: what went wrong, or which wrong tokens came."""

    def __init__(self, expected: Sequence[list[int]], router: Server) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._expected, self._router = expected, router
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._pool.submit(self._client, seed) for seed in range(CLIENTS)]
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._pool.shutdown()
        for done in self._clients:
            done.result()

    def _client(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopping.wait(0.3):  # a load that leaves room for engines that start
            failure = self._ask(rng.randrange(len(PROMPTS)), rng.random() < 0.5)
            with self._lock:
                self.answered += not failure
                self.failed += [failure] if failure else []

    def _ask(self, number: int, streamed: bool) -> str:
        """What is wrong with one answer; empty where nothing is."""
        options = {"max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        try:
            if streamed:
                got = stream(self._router.url, {"model": "model", "prompt": PROMPTS[number], **options}).token_ids
            else:
                (got,) = tokens_of(complete(self._router, PROMPTS[number], **options))
        except (EngineError, httpx.HTTPError) as error:
            return f"prompt {number}, streamed={streamed}: {error!r}"
        wanted = self._expected[number]
        return "" if got == wanted else f"prompt {number}, streamed={streamed}: {got} in place of {wanted}"

    def more(self, requests: int) -> None:
        """Wait until so many more requests are answered, or one has failed."""
        wanted = self.answered + requests
        eventually(lambda: self.answered >= wanted or self.failed, f"{requests} more requests are answered")
        assert not self.failed, self.failed


class Fleet:
    """Two P, two D and a router whose engines are changed at run time. ``p``, ``d``: those that run."""

    def __init__(self, group: ServerGroup, file: Path, model: Path) -> None:
        self.group, self._file, self._model = group, file, model
        self.p, self.d = ([self._engine(f"{role}{n}") for n in (1, 2)] for role in "pd")
        group.wait_ready()
        self._lines = {engine.url: f"prefill {engine.url}" for engine in self.p}
        self._lines |= {engine.url: f"decode {engine.url}" for engine in self.d}
        self.name()
        watched = "--engines-file", str(file), "--health-interval", "10"
        self.router = group.router(self.p[0], self.d[0], arguments=watched)

    def _engine(self, name: str, port: int | None = None) -> Server:
        environment = {"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60"}  # 4 where unset: less than a host may stand still
        return self.group.engine(name, self._model, arguments=DRAIN, port=port, environment=environment)

    def name(self, *but: Server) -> None:
        """All engines but these."""
        gone, new = [engine.url for engine in but], self._file.with_name("new")
        new.write_text("\n".join(line for url, line in self._lines.items() if url not in gone))
        new.replace(self._file)

    def serves(self, *engines: Server) -> bool:
        answer = httpx.get(f"{self.router.url}/router/status", trust_env=False, timeout=PATIENCE_SECONDS).json()
        states = {engine["url"]: engine["state"] for engine in answer["engines"]}
        return all(states.get(engine.url) == "up" for engine in engines)

    def drain(self, *engines: Server) -> None:
        """No new requests to these engines, and ``kvferry drain`` of all of them at once."""
        self.name(*engines)
        command = [sys.executable, "-m", "kvferry.cli.main", "drain", "--quiet", QUIET_SECONDS, "--timeout", "300"]
        how: dict[str, Any] = {"env": {"PYTHONPATH": python_path()}, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen([*command, engine.url], **how) for engine in engines]
        for process in processes:
            _, said = process.communicate(timeout=400)
            assert process.returncode == 0, said

    def restart(self, number: int) -> tuple[Server, Server]:
        """End a P and a D by SIGTERM, and start new ones at their addresses."""
        engines = self.p[number], self.d[number]
        for engine in engines:
            terminate(engine)
        for engine in engines:
            eventually(lambda engine=engine: not engine.alive, f"{engine.name} has ended")
            assert engine.process.returncode == 0, engine.log_tail()
            assert "sending SIGKILL" not in engine.log_text(), "its workers have ended by themselves"
            self.group.stop(engine)
        p, d = (self._engine(f"{engine.name}-new", engine.port) for engine in engines)
        self.group.wait_ready(servers=(p, d))
        self.p[number], self.d[number] = p, d
        return p, d


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with PatientServerGroup(folder / "logs") as group:
        yield Fleet(group, folder / "engines", model)


def test_a_rolling_restart_of_all_p_and_all_d_loses_no_request(fleet):
    expected = [tokens_of(complete(fleet.d[0], ids, max_tokens=NEW_TOKENS))[0] for ids in PROMPTS]
    with Load(expected, fleet.router) as running:
        running.more(12)
        for number in (0, 1):
            p, d = fleet.p[number], fleet.d[number]
            fleet.drain(p, d)
            assert ended_leases(p)[1] == 0 and ended_leases(p)[0] > 0, "every lease was released by D"
            assert count(d).failed == 0
            new_p, new_d = fleet.restart(number)
            fleet.name()
            eventually(lambda new=(new_p, new_d): fleet.serves(*new), "the router sends requests to the new engines")
            eventually(lambda d=new_d: count(d).external or running.failed, f"{new_d.name} has loaded prompts")
    assert not running.failed
    for server in (*fleet.p, *fleet.d):
        assert count(server).failed == 0, server.log_tail()
        no_block_held(server)


def test_a_p_that_ends_serves_its_leases_until_d_has_read_them(fleet):
    """Without ``kvferry drain``. What P is asked for after SIGTERM is refused, and D prefills it."""
    p, d = fleet.p[0], fleet.d[0]
    router = fleet.group.router(p, d, name="router of two")
    ids, late = prompt(300, 11), prompt(200, 12)
    expected = [tokens_of(complete(d, each, max_tokens=4)) for each in (ids, late)]
    d.post("/reset_prefix_cache")
    params = prefill_leg(p, ids)
    terminate(p)
    eventually(lambda: "start mode=drain" in p.log_text(), "the engine has seen SIGTERM")
    assert tokens_of(complete(router, late, max_tokens=4)) == expected[1]
    before = count(d)
    assert p.alive
    assert tokens_of(complete(d, ids, max_tokens=4, kv_transfer_params=params)) == expected[0]
    counted(d, before, len(ids))
    eventually(lambda: not p.alive, "P has ended, as no lease is left")
    assert p.process.returncode == 0


# --- without a drain


@dataclass
class Answered:
    """``said``: what came of one request: ``tokens``, ``error``, or ``empty``. ``began``, ``seconds``: how long it
    took."""

    said: str
    began: float
    seconds: float


class Clients:
    """Four, each with one request after the other, through a router, or through the next one where that is gone."""

    def __init__(self, routers: Sequence[Server]) -> None:
        self.routers, self.answers, self._over = list(routers), list[Answered](), threading.Event()
        self._pool = ThreadPoolExecutor(4)
        self._clients = [self._pool.submit(self._go_on, seed) for seed in range(4)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._pool.shutdown(wait=False)  # they end with their engines

    def _go_on(self, seed: int) -> None:
        rng, number = random.Random(seed), seed
        while not self._over.is_set():
            ids = prompt(rng.randrange(20, 300), rng.randrange(10**9))
            body = {"model": "model", "prompt": ids, "max_tokens": 24, "ignore_eos": True}
            began = time.monotonic()
            try:
                said = self._ask(body | {"stream": rng.random() < 0.5}, self.routers[number % 2].url)
            except httpx.TransportError:  # as a client of any service does: the next one
                number += 1
                said = "error"
            self.answers.append(Answered(said, began, time.monotonic() - began))

    @staticmethod
    def _ask(body: dict[str, Any], url: str) -> str:
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=PATIENCE_SECONDS)
        if answer.status_code != 200 or '"error":' in answer.text or '"finish_reason":"abort"' in answer.text:
            return "error"
        return "tokens" if '"finish_reason":"length"' in answer.text else "empty"

    def after(self, act: Callable[[Server], None], server: Server) -> None:
        """The clients have 12 more requests answered after ``act``. No answer is empty."""
        at = time.monotonic()
        act(server)

        def since() -> list[Answered]:
            return [each for each in self.answers if each.began + each.seconds >= at]

        eventually(lambda: sum(each.began > at for each in since()) >= 12, "all clients are answered")
        said, longest = Counter(each.said for each in since()), max(each.seconds for each in since())
        print(f"{act.__name__} {server.name}: {dict(said)}, the longest {longest:.1f} s", flush=True)
        assert not said["empty"], "an answer without a token, and without an error"


def test_engines_and_routers_that_end_without_a_drain_leave_no_request_without_an_answer(tmp_path, model):
    with ForkedServerGroup(tmp_path / "logs") as group:
        p1, p2, d1, d2, d3 = [group.engine(name, model) for name in ("p1", "p2", "d1", "d2", "d3")]
        group.wait_ready()
        more = ["--prefill", p2.url, *(word for d in (d2, d3) for word in ("--decode", d.url))]
        more += ["--connect-timeout", "5", "--prefill-timeout", "300", "--health-interval", "5"]
        routers = [group.router(p1, d1, arguments=more, name=f"router{number}") for number in range(2)]
        with Clients(routers) as clients:
            eventually(lambda: Counter(each.said for each in clients.answers)["tokens"] >= 4, "engines answer")
            clients.after(terminate, routers[0])
            clients.routers[0] = routers[1]
            clients.after(kill, d1)
            clients.after(terminate, p1)
            clients.after(terminate, d2)
            clients.after(freeze, p2)
