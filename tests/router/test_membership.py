"""Sources of engines and health checks, without a server: what each look and each check changes, and what is logged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from kvferry.router import engines, membership
from kvferry.router.engines import Role
from kvferry.router.health import Checks, HealthChecks
from kvferry.router.http_client import HttpError
from kvferry.router.membership import EnginesFile, Membership, Named
from kvferry.router.router import Router
from kvferry.transport.errors import UsageError
from tests.router.stand_ins import make_router

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
        return states(router)

    return router, look


def states(router: Router) -> dict[str, str]:
    return {engine.url: engine.state.value for engine in router.engines}


def test_an_engine_that_left_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is kept of it meanwhile."""
    listed = Listed(A, B)
    router, look = watched(monkeypatch, listed)
    first = router.engines.get(A)
    listed.now = {B: Role.DECODE}
    assert look() == {B: "up"}
    listed.now = {A: Role.DECODE, B: Role.DECODE}
    assert look() == {A: "joining", B: "up"} and router.engines.get(A) is not first


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
    assert states(router) == {B: "up"}, "what is there at the first look waits for no check"
    listed.now = {A: Role.DECODE}
    assert look() == {A: "joining"}
    failing.now = {C: Role.DECODE}
    assert look() == {A: "joining", C: "joining"}


def test_engines_beyond_the_limit_come_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engines, "MAX_ENGINES", 2)
    listed = Listed(A, B, C)
    router, look = watched(monkeypatch, listed)
    assert states(router) == {A: "up", B: "up"} and f"is not taken: {C} is one engine too many" in caplog.text
    listed.now = {B: Role.DECODE, C: Role.DECODE}
    assert look() == {B: "up", C: "joining"}


def test_a_file_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(membership, "MAX_FILE_BYTES", 60)
    file = tmp_path / "engines"
    file.write_text(f"decode {A}\n")
    assert asyncio.run(EnginesFile(file).named()) == {A: "decode"}
    file.write_text(f"decode {A}\n" + "#" * 60)
    with pytest.raises(UsageError, match="over 60 bytes"):
        asyncio.run(EnginesFile(file).named())


# --- health checks


class Http:
    """Answers ``/health`` by URL: a status, an exception, or an event that is never set. There are no metrics."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, asyncio.Event()
        self.urls: list[str] = []

    async def send(self, method: str, base: str, path: str, **_: Any) -> Any:
        if path == "/metrics":
            raise HttpError("no connection")
        self.urls.append(base)
        if len(self.urls) == len(self.answers):
            self.asked.set()
        answer = self.answers[base.split("//")[1]]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        if isinstance(answer, Exception):
            raise answer

        return SimpleNamespace(status=answer, body=AsyncMock(), close=lambda: None)


def checked(router: Router, http: Http, **checks: Any) -> HealthChecks:
    router.http = http  # type: ignore[assignment]
    return HealthChecks(router, Checks(**checks))


@pytest.mark.parametrize(
    ("answer", "why"),
    [(503, "/health answered 503"), (HttpError("no connection"), "no connection"), (None, "no answer of /health in")],
    ids=["an error", "no connection", "silence"],
)
def test_what_does_not_pass_a_check(answer: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> Router:
        router = make_router([], ["http://a", "http://b"])
        http = Http(a=asyncio.Event() if answer is None else answer, b=200)
        await checked(router, http, timeout=0.05).round()
        return router

    assert states(asyncio.run(go())) == {"http://a": "down", "http://b": "up"}
    (record,) = [record for record in caplog.records if "http://a is down" in record.getMessage()]
    assert why in record.getMessage() and record.levelname == "WARNING"
    assert not [line for line in caplog.messages if "http://b" in line]


def test_an_engine_that_is_up_again_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def go() -> None:
        router = make_router([], ["http://a"])
        for answer in (503, 200):
            await checked(router, Http(a=answer)).round()

    asyncio.run(go())
    said = [
        (record.levelname, record.getMessage()) for record in caplog.records if "http://a is" in record.getMessage()
    ]
    assert [level for level, _ in said] == ["WARNING", "INFO"] and "http://a is up" in said[1][1]


def test_engines_are_checked_at_the_same_time() -> None:
    """One that is silent does not hold up the others."""

    async def go() -> None:
        http = Http(a=asyncio.Event(), b=asyncio.Event(), c=200)
        router = make_router([], ["http://a", "http://b", "http://c"])
        round_of_checks = asyncio.ensure_future(checked(router, http, timeout=600).round())
        await asyncio.wait_for(http.asked.wait(), 60)
        assert sorted(http.urls) == ["http://a", "http://b", "http://c"] and not round_of_checks.done()
        round_of_checks.cancel()

    asyncio.run(go())
