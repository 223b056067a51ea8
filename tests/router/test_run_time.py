"""Engines that come, go, drain, fail their health checks and change their roles while requests run."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.router import membership
from kvferry.router.engines import EngineState, Role
from kvferry.router.health import Checks
from kvferry.router.membership import DnsName, EnginesFile, engines_of
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

TOKEN = "an admin token of a test"
OFTEN = Checks(interval=0.1, failures=2, timeout=60)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.05)


def change(front: Front, method: str = "POST", token: str = TOKEN, /, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return front.request(method, "/router/engines", json=body, headers=headers)


def states(front: Front) -> dict[str, tuple[str, str]]:
    engines = front.get("/router/engines").json()["engines"]
    return {engine["url"]: (engine["role"], engine["state"]) for engine in engines}


# --- by HTTP


def test_changes_need_the_token() -> None:
    with routed(["http://p:1"], [], admin_token=TOKEN) as front:
        for token in ("x", "another token of a test", TOKEN + "x", "\u00e9"):
            headers = {b"authorization": f"Bearer {token}".encode()}
            answer = front.request("DELETE", "/router/engines", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == 401
        assert states(front) == {"http://p:1": ("prefill", "up")}
    with routed(["http://p:1"], []) as front:
        assert change(front, "DELETE", "x", url="http://p:1").status_code == 403
        assert states(front) == {"http://p:1": ("prefill", "up")}


def test_a_change_that_makes_no_sense_gets_400_without_the_password_of_a_url() -> None:
    bodies: list[dict[str, Any]] = [{}, {"url": "p:1", "role": "prefill"}, {"url": "http://p:2"}, {"uri": "x"}]
    with routed(["http://p:1"], [], admin_token=TOKEN) as front:
        for body in (*bodies, {"url": "http://p:2", "role": "both"}):
            assert change(front, **body).status_code == 400, body
        secret = "http://user:secret@p:2"
        for method, more in (("POST", {"role": "prefill"}), ("POST", {}), ("DELETE", {})):
            answer = change(front, method, url=secret, **more)
            assert answer.status_code == 400 and "'p:2'" in answer.text and "secret" not in answer.text
        headers = {"authorization": f"Bearer {TOKEN}"}
        content = b'{"url": "\xff", "role": "prefill"}'
        answer = front.request("POST", "/router/engines", content=content, headers=headers)
        assert answer.status_code == answer.json()["error"]["code"] == 400
        assert states(front) == {"http://p:1": ("prefill", "up")}


def test_a_drained_p_ends_its_requests_and_gets_no_new_ones() -> None:
    """And one that is removed is forgotten when D has loaded what it handed over."""
    go_on = threading.Event()
    p, other, d = prefill_engine(go_on=go_on), prefill_engine(), decode_engine()
    with ExitStack() as stack:
        p_url, other_url, d_url = (stack.enter_context(served(engine.app)) for engine in (p, other, d))
        with routed([p_url], [d_url], admin_token=TOKEN, checks=OFTEN) as front:
            assert change(front, url=other_url, role="prefill").status_code == 200
            first = front.begin({"prompt": "x"})
            assert p.arrived.wait(60)
            assert change(front, url=p_url, drain=True).status_code == 200
            eventually(lambda: states(front)[other_url] == ("prefill", "up"), "its health check has passed")
            assert front.ask({"prompt": "y"}).status_code == 200 and len(p.seen) == 1
            change(front, "DELETE", url=p_url)
            assert states(front)[p_url] == ("prefill", "leaving"), "a request is running"
            go_on.set()
            assert first.result(60).json() == {"text": "from D"}
            eventually(lambda: p_url not in states(front), "it is forgotten")
            assert d.seen[-1][0]["kv_transfer_params"] == PARAMS
            assert change(front, "DELETE", url=p_url).status_code == 400


def test_engines_change_places_without_a_lost_request() -> None:
    a, b = decode_engine(), decode_engine()
    with routed(a, b, admin_token=TOKEN, checks=OFTEN) as front:
        clients, ((a_url,), (b_url,)) = Clients(front), (front.p, front.d)
        with clients.running():
            for first, second in ((a_url, b_url), (b_url, a_url)) * 3:
                change(front, url=first, role="decode")
                change(front, url=second, role="prefill")
                assert states(front) == {first: ("decode", "up"), second: ("prefill", "up")}
                clients.more(4)
    assert not clients.lost and len(a.seen) > 10 and len(b.seen) > 10


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


def seen(front: Front, engine: Restarted) -> tuple[str, int]:
    """Its state, and how many requests the router counts for it."""
    (found,) = [each for each in front.get("/router/status").json()["engines"] if each["url"] == engine.url]
    return found["state"], found["requests"]


def test_a_rolling_restart_loses_no_request() -> None:
    """One P and one D are drained and resumed, the others removed and added again."""
    engines = [Restarted(role) for role in (Role.PREFILL, Role.DECODE) for _ in range(2)]
    with ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.stop)
            engine.start()
        p, d = ([engine.url for engine in engines if engine.role is role] for role in Role)
        front = stack.enter_context(routed(p, d, admin_token=TOKEN, checks=OFTEN))
        clients = Clients(front)
        with clients.running():
            clients.more(12)
            for number, engine in enumerate(engines):
                change(front, url=engine.url, drain=True)
                eventually(lambda e=engine: seen(front, e)[1] == 0, "its requests have ended", 120)
                if number % 2:
                    change(front, "DELETE", url=engine.url)
                engine.stop()
                clients.more(12)
                engine.start()
                change(front, url=engine.url, **({"role": engine.role} if number % 2 else {"drain": False}))
                eventually(lambda e=engine: seen(front, e)[0] == "up", "its health check has passed", 120)
                eventually(lambda e=engine: e.engine.seen, "it is asked again", 120)
        after = front.get("/router/status").json()
    assert not clients.lost and not after["failed_legs"] and "decode_only" not in after["decode_legs"]
    assert after["decode_legs"]["at_once"] > after["decode_legs"]["serial"] > 0
    assert set(after["requests"]) == {"200"} and all(engine.lives == 2 for engine in engines)


# --- by health checks


def test_an_engine_that_fails_its_checks_is_left_out_and_comes_back() -> None:
    p, d, unhealthy = prefill_engine(), decode_engine(), threading.Event()
    d.health = lambda: 503 if unhealthy.is_set() else 200
    with routed([p, gone()], d, checks=OFTEN) as front:
        (p_url, gone_url), (d_url,) = front.p, front.d
        up = {"status": "ok", "prefill": {p_url: True, gone_url: False}, "decode": {d_url: True}}
        assert front.get("/health").json() == up, "one is down at the start"
        unhealthy.set()
        eventually(lambda: front.get("/health").status_code == 503, "D is down")
        assert states(front)[d_url] == ("decode", "down") and states(front)[gone_url] == ("prefill", "down")
        unhealthy.clear()
        eventually(lambda: front.get("/health").json() == up, "D is up again")


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


def test_a_change_by_http_stands_until_the_file_changes_that_engine(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("decode http://127.0.0.1:1\n")
    with routed([], [], sources=[EnginesFile(file)], admin_token=TOKEN) as front:
        change(front, url="http://127.0.0.1:1", drain=True)
        file.write_text("decode http://127.0.0.1:1\nprefill http://127.0.0.1:2\n")
        eventually(lambda: len(states(front)) == 2, "the file was looked at")
        assert states(front)["http://127.0.0.1:1"] == ("decode", "draining")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prefill a b", "line 1"), ("\nprefill x", "no URL"), ("# none", "0 engines"), ("both http://a:1", "line 1"),
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
    seat = router.engines.take_prefill(1, 0.0)
    assert seat is not None
    found = ["10.0.0.3", "fd00::1"]
    assert urls() == {seat.engine.url, "http://10.0.0.3:8000", "http://[fd00::1]:8000"}, "one has a request"
    assert seat.engine.state is EngineState.LEAVING
    seat.release()
    found = OSError("planted")
    assert urls() == {"http://10.0.0.3:8000", "http://[fd00::1]:8000"}


@pytest.mark.parametrize("url", ["dns://p.example", "dns://:8000", "dns://p.example:x", "dns://p.example:8000/path"])
def test_a_name_that_is_wrong_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected dns://NAME:PORT"):
        DnsName(url, Role.DECODE)
