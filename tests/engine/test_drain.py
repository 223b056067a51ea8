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
from collections.abc import Callable, Sequence
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
    complete,
    count,
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
QUIET_SECONDS = "5"
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
        while not self._stopping.is_set():
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
    """A router whose engines are changed at run time."""

    def __init__(self, group: ServerGroup, file: Path, p: Sequence[Server], d: Sequence[Server]) -> None:
        self._file, self._lines = file, {engine.url: f"prefill {engine.url}" for engine in p}
        self._lines |= {engine.url: f"decode {engine.url}" for engine in d}
        self.name()
        self.router = group.router(p[0], d[0], arguments=["--engines-file", str(file), "--health-interval", "10"])

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


def restart(group: ServerGroup, model: Path, *engines: Server) -> list[Server]:
    """End engines by SIGTERM, and start new ones at their addresses."""
    for engine in engines:
        terminate(engine)
    for engine in engines:
        eventually(lambda engine=engine: not engine.alive, f"{engine.name} has ended")
        assert engine.process.returncode == 0, engine.log_tail()
        assert "sending SIGKILL" not in engine.log_text(), "its workers have ended by themselves"
        group.stop(engine)
    new = [group.engine(f"{engine.name}-new", model, arguments=DRAIN, port=engine.port) for engine in engines]
    group.wait_ready(servers=new)
    return new


def test_a_rolling_restart_of_all_p_and_all_d_loses_no_request(group, model, tmp_path):
    p1, p2, d1, d2 = (group.engine(name, model, arguments=DRAIN) for name in ("p1", "p2", "d1", "d2"))
    group.wait_ready()
    expected = [tokens_of(complete(d1, ids, max_tokens=NEW_TOKENS))[0] for ids in PROMPTS]
    fleet = Fleet(group, tmp_path / "engines", (p1, p2), (d1, d2))
    with Load(expected, fleet.router) as running:
        running.more(20)
        for p, d in ((p1, d1), (p2, d2)):
            fleet.drain(p, d)
            assert ended_leases(p)[1] == 0 and ended_leases(p)[0] > 0, "every lease was released by D"
            assert count(d).failed == 0
            new_p, new_d = restart(group, model, p, d)
            fleet.name()
            eventually(lambda new=(new_p, new_d): fleet.serves(*new), "the router sends requests to the new engines")
            running.more(20)
            eventually(lambda d=new_d: count(d).external, f"{new_d.name} has loaded prompts")
    assert not running.failed
    for server in (engine for engine in group.servers if engine.is_engine):
        assert count(server).failed == 0, server.log_tail()
        no_block_held(server)


def test_a_p_that_ends_serves_its_leases_until_d_has_read_them(group, model):
    """Without ``kvferry drain``. What P is asked for after SIGTERM is refused, and D prefills it."""
    p, d = (group.engine(name, model, arguments=DRAIN) for name in ("p", "d"))
    group.wait_ready()
    router = group.router(p, d)
    ids, late = prompt(300, 1), prompt(200, 2)
    expected = [tokens_of(complete(d, each, max_tokens=4)) for each in (ids, late)]
    d.post("/reset_prefix_cache")
    params = prefill_leg(p, ids)
    terminate(p)
    eventually(lambda: "start mode=drain" in p.log_text(), "the engine has seen SIGTERM")
    assert tokens_of(complete(router, late, max_tokens=4)) == expected[1]
    before = count(d)
    assert p.alive
    assert tokens_of(complete(d, ids, max_tokens=4, kv_transfer_params=params)) == expected[0]
    eventually(lambda: (count(d) - before).external >= 299, "the prompt is counted as loaded")
    assert (count(d) - before).failed == 0
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
        self._pool.shutdown()

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
        p1, p2, d1, d2 = [group.engine(name, model) for name in ("p1", "p2", "d1", "d2")]
        group.wait_ready()
        limits = ("--connect-timeout", "5", "--prefill-timeout", "300", "--health-interval", "5")
        more = ["--prefill", p2.url, "--decode", d2.url, *limits]
        routers = [group.router(p1, d1, arguments=more, name=f"router{number}") for number in range(3)]
        with Clients(routers[:2]) as clients:
            clients.after(lambda router: None, routers[0])
            clients.after(terminate, routers[0])
            clients.routers[0] = routers[2]
            clients.after(kill, routers[1])
            clients.routers[1] = routers[2]
            clients.after(kill, d1)
            clients.after(terminate, p1)
            group.stop(d1), group.stop(p1)
            again = [group.engine(f"{each.name}-new", model, port=each.port) for each in (p1, d1)]
            group.wait_ready(servers=again)
            clients.after(terminate, d2)
            clients.after(kill, p2)
            clients.after(freeze, again[0])
