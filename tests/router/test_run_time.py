"""Engines that come, go, drain, fail their checks and change their roles, while requests run and without a server."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.router import membership
from kvferry.router.engines import EngineState, Role, Seat
from kvferry.router.health import Checks
from kvferry.router.membership import DnsName, EnginesFile, Membership, Named, engines_of
from kvferry.router.router import Router
from kvferry.transport.errors import UsageError
from tests.router.stand_ins import (
    PARAMS,
    PUSH,
    Clients,
    Engine,
    Front,
    decode_engine,
    gone,
    make_router,
    prefill_engine,
    routed,
    served,
)
from tests.support.engines import free_port
from tests.support.served import eventually

OFTEN = Checks(interval=0.1, failures=2, timeout=60)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.05)


def write(file: Path, **named: list[str]) -> Path:
    """Name these engines, by role, in a file that is replaced at once."""
    new = file.with_name("new")
    new.write_text("".join(f"{role} {url}\n" for role, urls in named.items() for url in urls))
    return new.replace(file)


def states(front: Front) -> dict[str, tuple[str, str]]:
    engines = front.get("/router/status").json()["engines"]
    return {engine["url"]: (engine["role"], engine["state"]) for engine in engines}


# --- by a file, under load


def test_a_p_that_leaves_ends_its_requests_and_gets_no_new_ones(tmp_path: Path) -> None:
    """And is forgotten when D has loaded what it handed over."""
    go_on = threading.Event()
    p, other, d = prefill_engine(go_on=go_on), prefill_engine(), decode_engine()
    with ExitStack() as stack:
        p_url, other_url, d_url = (stack.enter_context(served(engine.app)) for engine in (p, other, d))
        file = write(tmp_path / "engines", prefill=[p_url], decode=[d_url])
        with routed([], [], sources=[EnginesFile(file)], checks=OFTEN) as front:
            first = front.begin({"prompt": "x"})
            assert p.arrived.wait(60)
            write(file, prefill=[other_url], decode=[d_url])
            eventually(lambda: states(front).get(other_url) == ("prefill", "up"), "its health check has passed")
            assert states(front)[p_url] == ("prefill", "leaving"), "a request is running"
            assert front.ask({"prompt": "y"}).status_code == 200 and len(p.seen) == len(other.seen) == 1
            go_on.set()
            assert first.result(60).json() == {"text": "from D"}
            eventually(lambda: p_url not in states(front), "it is forgotten")
            assert d.seen[-1][0]["kv_transfer_params"] == PARAMS


class Restarted:
    """An engine at one address, with a new engine id in each of its lives. While it is away, it refuses connections."""

    def __init__(self, role: Role) -> None:
        self.role, self.port, self.lives = role, free_port(), 0
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine: Engine
        self._stack = ExitStack()

    def start(self) -> None:
        self.lives += 1
        if self.role is Role.PREFILL:
            self.engine = prefill_engine(0.01, params=PUSH | {"remote_engine_id": f"{self.port}-{self.lives}"})
        else:
            self.engine = decode_engine(gap=0.005)
        self._stack.enter_context(served(self.engine.app, socket.create_server(("127.0.0.1", self.port))))

    def stop(self) -> None:
        self._stack.close()


def test_a_rolling_restart_loses_no_request(tmp_path: Path) -> None:
    engines = [Restarted(role) for role in (Role.PREFILL, Role.DECODE) for _ in range(2)]

    def name(but: Restarted | None = None) -> Path:
        named = {role: [each.url for each in engines if each.role is role and each is not but] for role in Role}
        return write(tmp_path / "engines", **named)

    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        front = stack.enter_context(routed([], [], sources=[EnginesFile(name())], checks=OFTEN))
        clients = Clients(front)
        with clients.running():
            clients.more(12)
            for engine in engines:
                name(but=engine)
                eventually(lambda e=engine: e.url not in states(front), "its requests have ended", 120)
                engine.stop()
                clients.more(12)
                engine.start()
                name()
                up = engine.role, "up"
                eventually(lambda e=engine, up=up: states(front).get(e.url) == up, "its check has passed", 120)
                eventually(lambda e=engine: e.engine.seen, "it is asked again", 120)
        legs = front.counts("decode_legs")
    assert not clients.lost and not front.counts("failed_legs") and "decode_only" not in legs
    assert legs["at_once"] > legs["serial"] > 0
    assert set(front.counts("requests")) == {"200"} and all(engine.lives == 2 for engine in engines)


# --- by health checks


def test_an_engine_that_fails_its_checks_is_left_out_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    p, d, unhealthy = prefill_engine(), decode_engine(), threading.Event()
    d.health = lambda: 503 if unhealthy.is_set() else 200
    checks = Checks(interval=0.1, failures=2, timeout=2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with routed([p, gone(), silent_url], d, checks=checks) as front:
            (p_url, gone_url, _), (d_url,) = front.p, front.d
            up = {"status": "ok", "prefill": {p_url: True, gone_url: False, silent_url: False}, "decode": {d_url: True}}
            eventually(lambda: front.get("/health").json() == up, "two are down")
            unhealthy.set()
            eventually(lambda: front.get("/health").status_code == 503, "D is down")
            assert states(front)[d_url] == ("decode", "down") and states(front)[gone_url] == ("prefill", "down")
            unhealthy.clear()
            eventually(lambda: front.get("/health").json() == up, "D is up again")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    for level, text in (
        ("WARNING", f"{gone_url} is down: no connection"),
        ("WARNING", f"{silent_url} is down: no answer of /health in 2 s"),
        ("WARNING", f"{d_url} is down: /health answered 503"),
        ("INFO", f"{d_url} is up: /health answered 200"),
    ):
        assert len([one for one, line in said if one == level and text in line]) == 1, text


# --- by a file


def test_a_file_brings_and_takes_engines(tmp_path: Path) -> None:
    p, d = prefill_engine(), decode_engine()
    file = tmp_path / "engines"
    with served(p.app) as p_url, served(d.app) as d_url:
        file.write_text(f"# ours\ndecode {d_url}  # D\n\n")
        with routed([], [], sources=[EnginesFile(file)], checks=OFTEN) as front:
            assert states(front) == {d_url: ("decode", "up")}
            assert front.ask({"prompt": "x"}).status_code == 200
            file.write_text(f"decode {d_url}\nprefill {p_url}/\n")
            eventually(lambda: states(front).get(p_url) == ("prefill", "up"), "P has come")
            for broken in ("", "decode\n", f"decoder {d_url}\n", f"decode {d_url}\nprefill {d_url}\n"):
                file.write_text(broken)
                threading.Event().wait(0.2)  # several looks
                assert set(states(front)) == {p_url, d_url}, "a broken file changes nothing"
            file.write_text(f"decode {p_url}\n")
            eventually(lambda: states(front) == {p_url: ("decode", "up")}, "P is a D, and D has gone")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill a b", "line 1"), ("\nprefill x", "no URL"), ("# none", "no engine"), ("both http://a:1", "line 1"),
        ("prefil http://user:secret@a:1", "line 1 is 'a:1'"), ("decode http://user:secret@a:1", "a user or a password"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        engines_of(text)
    assert "secret" not in str(raised.value)


# --- by a DNS name


def test_a_name_brings_and_takes_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] | OSError = ["10.0.0.1", "10.0.0.2"]

    async def getaddrinfo(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("p.example", 8000)
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found for _ in range(2)]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    router = make_router([], [])
    look = membership.Membership(router, [DnsName("dns://p.example:8000", Role.PREFILL)])

    def urls() -> set[str]:
        asyncio.run(look.look())
        return {engine.url for engine in router.engines.of(Role.PREFILL)}

    assert urls() == {"http://10.0.0.1:8000", "http://10.0.0.2:8000"}
    best = router.engines.best_prefill(1, 0.0)
    assert best is not None
    seat = Seat(*best, router.engines)
    found = ["10.0.0.3", "fd00::1"]
    assert urls() == {seat.engine.url, "http://10.0.0.3:8000", "http://[fd00::1]:8000"}, "one has a request"
    assert seat.engine.state is EngineState.LEAVING
    seat.release()
    found = OSError("planted")
    assert urls() == {"http://10.0.0.3:8000", "http://[fd00::1]:8000"}


def test_a_name_is_looked_up_as_the_host_does() -> None:
    found = asyncio.run(DnsName("dns://localhost:8000", Role.DECODE).named())
    assert found["http://127.0.0.1:8000"] is Role.DECODE
    with pytest.raises(OSError, match=r"Name|name resolution"):
        asyncio.run(DnsName("dns://no-such-name.invalid:8000", Role.DECODE).named())


@pytest.mark.parametrize("url", ["dns://p.example", "dns://:8000", "dns://p.example:x", "dns://p.example:8000/path"])
def test_a_name_that_is_wrong_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected dns://NAME:PORT"):
        DnsName(url, Role.DECODE)


A, B, C = (f"http://10.0.0.{number}:8000" for number in (1, 2, 3))


class Listed:
    """A source whose engines, or whose error, the test sets."""

    def __init__(self, *urls: str) -> None:
        self.now: Named | Exception = dict.fromkeys(urls, Role.DECODE)

    def __str__(self) -> str:
        return "list"

    async def named(self) -> Named:
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def one_look(monkeypatch: pytest.MonkeyPatch, found: Membership) -> None:
    """Of the loop that looks for ever."""
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 1:
            raise asyncio.CancelledError

    monkeypatch.setattr(membership, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(found.watch())
    assert slept == [membership.LOOK_SECONDS] * 2


def watched(monkeypatch: pytest.MonkeyPatch, *sources: Listed) -> tuple[Router, Callable[[], dict[str, str]]]:
    """A router after its first look at these sources; its engines' states after one more."""
    router = make_router([], [])
    found = Membership(router, sources)
    asyncio.run(found.look())

    def look() -> dict[str, str]:
        one_look(monkeypatch, found)
        return states_of(router)

    return router, look


def states_of(router: Router) -> dict[str, str]:
    return {engine.url: engine.state.value for engine in router.engines}


def test_an_engine_that_left_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is kept of it meanwhile."""
    listed = Listed(A, B)
    router, look = watched(monkeypatch, listed)
    first = router.engines.get(A)
    listed.now = {B: Role.DECODE}
    assert look() == {B: "up"}
    listed.now = {A: Role.DECODE, B: Role.DECODE}
    assert look() == {A: "down", B: "up"} and router.engines.get(A) is not first


@pytest.mark.parametrize("error", [OSError("no such file"), UsageError("line 3 is wrong")])
def test_an_error_is_logged_once_until_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    listed = Listed(A)
    _, look = watched(monkeypatch, listed)
    for now, logged in ((error, 1), (error, 1), ({A: Role.DECODE}, 1), (error, 2), (OSError("another"), 3)):
        listed.now = now
        assert look() == {A: "up"}
        assert len([line for line in caplog.messages if "nothing is changed" in line]) == logged


def test_a_source_that_fails_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a name server that is silent. Once there is an answer it counts."""
    failing, listed = Listed(), Listed(B)
    failing.now = OSError("planted")
    router, look = watched(monkeypatch, failing, listed)
    assert states_of(router) == {B: "up"}, "what is there at the first look waits for no check"
    listed.now = {A: Role.DECODE}
    assert look() == {A: "down"}
    failing.now = {C: Role.DECODE}
    assert look() == {A: "down", C: "down"}
