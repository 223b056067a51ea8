"""Engines that come, go, drain, fail their health checks and change their roles while requests run."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.router import membership
from kvferry.router.app import App
from kvferry.router.engines import EngineState, Role
from kvferry.router.health import Checks
from kvferry.router.membership import DnsName, EnginesFile, engines_of
from kvferry.router.router import Router
from kvferry.transport.errors import UsageError
from tests.router.stand_ins import PARAMS, ask, decode_engine, make_router, prefill_engine, served
from tests.support.served import eventually

TOKEN = "an admin token of a test"
OFTEN = Checks(interval=0.1, failures=2, timeout=60)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LOOK_SECONDS", 0.05)


@contextmanager
def running(prefill: list[str], decode: list[str], **app: Any) -> Iterator[tuple[Router, str]]:
    router = make_router(prefill, decode)
    with served(App(router, **app)) as url:
        yield router, url


def change(router_url: str, method: str = "POST", token: str = TOKEN, /, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.request(method, router_url + "/router/engines", json=body, headers=headers, trust_env=False)


def states(url: str) -> dict[str, tuple[str, str]]:
    engines = httpx.get(url + "/router/engines", trust_env=False).json()["engines"]
    return {engine["url"]: (engine["role"], engine["state"]) for engine in engines}


# --- by HTTP


def test_changes_need_the_token() -> None:
    with running(["http://p:1"], [], admin_token=TOKEN) as (_, url):
        for token in ("x", "another token of a test", TOKEN + "x", "\u00e9"):
            headers = {b"authorization": f"Bearer {token}".encode()}
            answer = httpx.delete(url + "/router/engines", headers=headers, trust_env=False)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == 401
        assert states(url) == {"http://p:1": ("prefill", "up")}
    with running(["http://p:1"], []) as (_, url):
        assert change(url, "DELETE", "x", url="http://p:1").status_code == 403
        assert states(url) == {"http://p:1": ("prefill", "up")}


@pytest.mark.parametrize(
    "body",
    [{}, {"url": "p:1", "role": "prefill"}, {"url": "http://p:2"}, {"url": "http://p:2", "role": "both"}, {"uri": "x"}],
)
def test_a_change_that_makes_no_sense_gets_400(body: dict[str, Any]) -> None:
    with running(["http://p:1"], [], admin_token=TOKEN) as (_, url):
        assert change(url, **body).status_code == 400
        assert states(url) == {"http://p:1": ("prefill", "up")}


@pytest.mark.parametrize("role", ["prefill", None])
def test_no_answer_has_the_password_of_a_url(role: str | None) -> None:
    with running(["http://p:1"], [], admin_token=TOKEN) as (_, url):
        for method in ("POST", "DELETE"):
            more = {} if method == "DELETE" or role is None else {"role": role}
            answer = change(url, method, url="http://user:secret@p:2", **more)
            assert answer.status_code == 400 and "'p:2'" in answer.text and "secret" not in answer.text
        assert states(url) == {"http://p:1": ("prefill", "up")}


def test_a_change_that_is_not_utf_8_gets_400() -> None:
    with running(["http://p:1"], [], admin_token=TOKEN) as (_, url):
        headers = {"authorization": f"Bearer {TOKEN}"}
        content = b'{"url": "\xff", "role": "prefill"}'
        answer = httpx.post(url + "/router/engines", content=content, headers=headers, trust_env=False)
        assert answer.status_code == answer.json()["error"]["code"] == 400
        assert states(url) == {"http://p:1": ("prefill", "up")}


def test_a_drained_p_ends_its_requests_and_gets_no_new_ones() -> None:
    """And one that is removed is forgotten when D has loaded what it handed over."""
    go_on = threading.Event()
    p, other, d = prefill_engine(go_on=go_on), prefill_engine(), decode_engine()
    with ExitStack() as stack:
        p_url, other_url, d_url = (stack.enter_context(served(engine.app)) for engine in (p, other, d))
        pool = stack.enter_context(ThreadPoolExecutor())
        with running([p_url], [d_url], admin_token=TOKEN, checks=OFTEN) as (_, url):
            assert change(url, url=other_url, role="prefill").status_code == 200
            first = pool.submit(ask, url, {"prompt": "x"})
            assert p.arrived.wait(60)
            assert change(url, url=p_url, drain=True).status_code == 200
            eventually(lambda: states(url)[other_url] == ("prefill", "up"), "its health check has passed")
            assert ask(url, {"prompt": "y"}).status_code == 200 and len(p.seen) == 1
            change(url, "DELETE", url=p_url)
            assert states(url)[p_url] == ("prefill", "leaving"), "a request is running"
            go_on.set()
            assert first.result(60).json() == {"text": "from D"}
            eventually(lambda: p_url not in states(url), "it is forgotten")
            assert d.seen[-1][0]["kv_transfer_params"] == PARAMS
            assert change(url, "DELETE", url=p_url).status_code == 400


def test_a_drained_d_ends_its_streams() -> None:
    go_on = threading.Event()
    d, other = decode_engine(pieces=3, go_on=go_on), decode_engine()
    with ExitStack() as stack:
        d_url, other_url = (stack.enter_context(served(engine.app)) for engine in (d, other))
        with running([], [d_url], admin_token=TOKEN, checks=OFTEN) as (_, url):
            with httpx.stream(
                "POST", url + "/v1/completions", json={"prompt": "x", "stream": True}, trust_env=False, timeout=60
            ) as response:
                lines = response.iter_lines()
                assert next(lines) == 'data: {"i": 0}'
                change(url, "DELETE", url=d_url)
                change(url, url=other_url, role="decode")
                eventually(lambda: states(url)[other_url][1] == "up", "its health check has passed")
                assert ask(url, {"prompt": "y"}).status_code == 200 and len(d.seen) == 1 and len(other.seen) == 1
                go_on.set()
                assert [line for line in lines if line][-1] == "data: [DONE]"
            eventually(lambda: d_url not in states(url), "it is forgotten")


def test_engines_change_places_without_a_lost_request() -> None:
    a, b = decode_engine(), decode_engine()
    lost = []
    with ExitStack() as stack:
        a_url, b_url = (stack.enter_context(served(engine.app)) for engine in (a, b))
        with running([a_url], [b_url], admin_token=TOKEN, checks=OFTEN) as (_, url):
            over = threading.Event()

            def ask_on() -> None:
                while not over.is_set():
                    answer = ask(url, {"prompt": "x"})
                    if answer.status_code != 200:
                        lost.append(answer.text)

            threads = [threading.Thread(target=ask_on) for _ in range(3)]
            for thread in threads:
                thread.start()
            for _ in range(5):
                for first, second in ((a_url, b_url), (b_url, a_url)):
                    change(url, url=first, role="decode")
                    change(url, url=second, role="prefill")
                    assert states(url) == {first: ("decode", "up"), second: ("prefill", "up")}
            over.set()
            for thread in threads:
                thread.join(60)
    assert not lost and len(a.seen) > 10 and len(b.seen) > 10


# --- by health checks


def test_an_engine_that_fails_its_checks_is_left_out_and_comes_back() -> None:
    p, d, unhealthy = prefill_engine(), decode_engine(), threading.Event()
    d.health = lambda: 503 if unhealthy.is_set() else 200
    with served(p.app) as p_url, served(d.app) as d_url, running([p_url], [d_url], checks=OFTEN) as (_, url):
        health = lambda: httpx.get(url + "/health", trust_env=False)  # noqa: E731
        assert health().json() == {"status": "ok", "prefill": {p_url: True}, "decode": {d_url: True}}
        unhealthy.set()
        eventually(lambda: health().status_code == 503, "D is down")
        assert states(url)[d_url] == ("decode", "down")
        unhealthy.clear()
        eventually(lambda: health().status_code == 200, "D is up again")


def test_an_engine_that_is_down_at_the_start_is_known_to_be(closed: str) -> None:
    with running([closed], [closed.replace("127.0.0.1", "localhost")], checks=OFTEN) as (_, url):
        assert {state for _, state in states(url).values()} == {"down"}


@pytest.fixture
def closed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


# --- by a file


def test_a_file_brings_and_takes_engines(tmp_path: Path) -> None:
    p, d = prefill_engine(), decode_engine()
    file = tmp_path / "engines"
    with served(p.app) as p_url, served(d.app) as d_url:
        file.write_text(f"# ours\ndecode {d_url}  # D\n\n")
        with running([], [], sources=[EnginesFile(file)], checks=OFTEN) as (_, url):
            assert states(url) == {d_url: ("decode", "up")}
            assert ask(url, {"prompt": "x"}).status_code == 200
            file.write_text(f"decode {d_url}\nprefill {p_url}/\n")
            eventually(lambda: states(url).get(p_url) == ("prefill", "up"), "P has come")
            for broken in ("", "decode\n", f"decoder {d_url}\n", f"decode {d_url}\nprefill {d_url}\n"):
                file.write_text(broken)
                threading.Event().wait(0.2)  # several looks
                assert set(states(url)) == {p_url, d_url}, "a broken file changes nothing"
            file.write_text(f"decode {p_url}\n")
            eventually(lambda: states(url) == {p_url: ("decode", "up")}, "P is a D, and D has gone")


def test_a_change_by_http_stands_until_the_file_changes_that_engine(tmp_path: Path) -> None:
    file = tmp_path / "engines"
    file.write_text("decode http://127.0.0.1:1\n")
    with running([], [], sources=[EnginesFile(file)], admin_token=TOKEN) as (_, url):
        change(url, url="http://127.0.0.1:1", drain=True)
        file.write_text("decode http://127.0.0.1:1\nprefill http://127.0.0.1:2\n")
        eventually(lambda: len(states(url)) == 2, "the file was looked at")
        assert states(url)["http://127.0.0.1:1"] == ("decode", "draining")


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
