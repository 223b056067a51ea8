"""The router's status page: the history that the router keeps, and what a browser shows of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvferry.router import app
from kvferry.router.engines import EngineState, Role
from kvferry.router.metrics import SAMPLE_SECONDS, SAMPLES, WINDOW, StatusHistory
from tests.router.stand_ins import decode_engine, prefill_engine, routed, served
from tests.support.served import eventually

CHROMIUM = shutil.which("chromium")
P, D = ("http://10.0.0.1:8000", "http://10.0.0.2:8000"), ("http://10.0.0.3:8000", "http://10.0.0.4:8000")
WHY = "none of the last 20 prompts was handed over, D says why: denied 20"


def said(loaded: int, failed: int = 0, degraded: str | None = None) -> dict[str, Any]:
    """What a D says: prompts of 100 tokens."""
    return {
        "prompts": {"loaded": loaded, "local": 0, "failed": failed}, "reasons": {"denied": failed} if failed else {},
        "tokens": {"loaded": 100 * loaded, "computed": 100 * failed}, "degraded": degraded,
    }  # fmt: skip


def status(*engines: dict[str, Any] | None, requests: int = 0, seconds: float | None = 0.5) -> dict[str, Any]:
    """A status with a P, and a D for each of ``engines``."""
    quantiles = {"p50": seconds, "p95": seconds}
    role = dict[str, Any](state="up", requests=2, load=2.0, passed_over=False)
    rows = [{"url": url, "role": "decode", "handed_over": each} | role for url, each in zip(D, engines, strict=False)]
    return {
        "in_flight": 4, "oldest_waiting_seconds": 1.5, "requests": {"200": requests}, "failed_legs": {},
        "decode_legs": {"serial": requests}, "prefix_affinity": {}, "first_byte_seconds": quantiles,
        "request_seconds": quantiles,
        "engines": [{"url": P[0], "role": "prefill"} | role, *rows],
        "pairs": [{"prefill": P[0], "decode": D[0], "loaded": 150}],
    }  # fmt: skip


def test_a_history_is_of_five_minutes_however_long_the_router_runs() -> None:
    history = StatusHistory()
    for number in range(1000):
        history.take(number * SAMPLE_SECONDS, status(said(9 * number, number), requests=10 * number))
    columns = history.columns(1000 * SAMPLE_SECONDS)
    assert {len(values) for values in columns.values()} == {SAMPLES} and len(history.samples) == SAMPLES + WINDOW
    assert (
        columns["age_seconds"] == [SAMPLE_SECONDS * age for age in range(SAMPLES, 0, -1)]
        and SAMPLES * SAMPLE_SECONDS == 300
    )
    assert set(columns["requests_per_second"]) == {2.0}
    assert set(columns["share_of_prompts"]) == set(columns["share_of_tokens"]) == {0.9}
    assert set(columns["tokens_loaded_per_second"]) == {180.0} and set(columns["tokens_computed_per_second"]) == {20.0}
    assert set(columns["in_flight"]) == {4} and set(columns["first_byte_seconds_p95"]) == {0.5}
    assert len(json.dumps(columns)) < 10_000


def test_shares_are_of_the_last_minute_and_none_where_there_were_no_prompts() -> None:
    history = StatusHistory()
    for second in range(0, 200, 5):
        loaded, failed = min(second, 60), max(0, min(second - 60, 60))
        history.take(second, status(said(100 + loaded, failed), seconds=None))
    shares = dict(zip(history.columns(200)["age_seconds"], history.columns(200)["share_of_prompts"], strict=True))
    assert [shares[200 - second] for second in (5, 60, 90, 120, 150, 180, 195)] == [1, 1, 0.5, 0, 0, None, None]
    assert set(history.columns(200)["request_seconds_p50"]) == {None}


def test_an_engine_that_leaves_or_starts_anew_makes_no_step() -> None:
    history = StatusHistory()
    lives: list[list[dict[str, Any] | None]] = [
        [said(50)], [said(60)], [None], [], [said(73, 1), said(6)], [said(3, 1), said(6)],
    ]  # fmt: skip
    for second, engines in enumerate(lives):
        history.take(second, status(*engines))
    columns = history.columns(4)
    assert columns["tokens_loaded_per_second"] == [1000, 500, 333.3333, 2225, 1840]
    assert columns["share_of_prompts"] == [1, 1, 1, 0.9889, 0.9787]


def test_the_router_itself_keeps_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SAMPLE_SECONDS", 0.01)
    with routed(prefill_engine(), decode_engine()) as front:

        def sampled() -> bool:
            front.ask({"prompt": "x"})
            return any(front.get("/router/status").json()["history"].get("requests_per_second", []))

        eventually(sampled, "a sample has requests")


# --- the page


def test_the_page_refers_to_nothing_outside() -> None:
    with routed([], []) as front:
        answer = front.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<[^>]*\b(src|href|action|data)=|://(?!www.w3.org/2000/svg)", answer.text)
    assert set(re.findall(r'\bel\("([\w-]+)"\)', answer.text)) <= set(re.findall(r'\bid="([\w-]+)"', answer.text))
    assert "/router/status" in answer.text and "prefers-color-scheme: dark" in answer.text


def drawn(url: str, profile: Path) -> str:
    """The page, as a browser has it some polls later."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=9000", "--dump-dom", url + "/"]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=True).stdout


def drawn_of(found: Response, profile: Path) -> str:
    """The page of a router with this status."""
    routes = [Route("/", lambda _: HTMLResponse(app.PAGE)), Route("/router/status", lambda _: found)]
    with served(Starlette(routes=routes)) as url:
        return drawn(url, profile)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_of_a_router_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn without an error, with the engines and a plot."""
    monkeypatch.setattr(app, "SAMPLE_SECONDS", 0.01)
    with routed(prefill_engine(), decode_engine()) as front:
        front.router.engines.add("http://h:1/<b>bold</b>", Role.DECODE, EngineState.DRAINING)
        front.ask({"prompt": "x"})
        shown = drawn(front.url, tmp_path)
    assert f'<td>{front.p[0]}</td><td class="up">up</td>' in shown and f'<td>{front.d[0]}</td><td class="up">' in shown
    assert '<td>http://h:1/&lt;b&gt;bold&lt;/b&gt;</td><td class="draining">draining</td>' in shown
    assert "200: 1" in shown and "serial: 1" in shown
    assert re.search(r'<polyline points="[\d.]+,[\d.]+ [\d., ]+"', shown), "a plot of several samples"
    assert '<section id="reads" hidden="">' in shown, "no source of a prefix was named"
    assert '<b id="state" class="ok">ok</b>' in shown and 'id="error" role="status"></div>' in shown


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_says_what_is_handed_over_and_what_is_wrong(tmp_path: Path) -> None:
    history, now = StatusHistory(), status(said(150, 50), said(0, 100, WHY), requests=300)
    history.take(0, status(said(0), said(0)))
    history.take(5, status(said(75), said(0, 25), requests=100, seconds=4.0))
    history.take(10, now)
    reads = {"prefix_sources": [{"reader": P[0], "source": D[1], "requests": 1234}]}
    shown = drawn_of(JSONResponse(now | reads | {"history": history.columns(12)}), tmp_path)
    assert '<section id="reads">' in shown
    assert f'<tr><td>{P[0]}</td><td>{D[1]}</td><td class="number">1,234</td></tr>' in shown
    assert '<b id="share-prompts">50 %</b>' in shown and '<b id="share-tokens">50 %</b>' in shown
    assert '<b id="state" class="degraded">degraded</b>' in shown and f"<p>{D[1]}: {WHY}. See" in shown
    assert '<td class="number">200</td><td class="number">75 %</td><td class="number">75 %</td>' in shown
    assert '<td class="number degraded">0 %</td><td class="number">0 %</td><td class="why">denied: 100</td>' in shown
    assert f'<td class="pair">from {P[0]}</td>' in shown and shown.count('class="pair"') == 1
    assert '<td class="number">150 loaded</td>' in shown
    assert ">lowest 50<" in shown and ">largest 1,500<" in shown and ">largest 40<" in shown, (
        "of share, tokens, requests"
    )
    assert ">Time to first byte, s<" in shown and ">largest 4<" in shown and " min</text>" in shown

    assert ">The router does not answer: status 500</div>" in drawn_of(Response(status_code=500), tmp_path)
    nobody = status(None) | {"history": {}}
    for engine in nobody["engines"]:
        engine["passed_over"] = True
    shown = drawn_of(JSONResponse(nobody), tmp_path)
    assert '<b id="state" class="down">down</b>' in shown and "No decode engine takes requests." in shown
    assert "No prefill engine takes requests" in shown and "the engine does not say" in shown
