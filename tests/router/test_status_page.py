"""The router's status page, and what a browser shows of it."""

from __future__ import annotations

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
from kvferry.router.engines import EnginePool, EngineState, Role
from kvferry.router.metrics import Metrics
from tests.router.stand_ins import decode_engine, prefill_engine, routed, served

CHROMIUM = shutil.which("chromium")
P, D = "http://10.0.0.1:8000", ("http://10.0.0.3:8000", "http://10.0.0.4:8000")
WHY = "none of the last 20 prompts was handed over, D says why: denied 20"


def said(loaded: int, failed: int = 0, degraded: str | None = None) -> dict[str, Any]:
    """What a D says: prompts of 100 tokens."""
    return {
        "prompts": {"loaded": loaded, "local": 0, "failed": failed}, "reasons": {"denied": failed} if failed else {},
        "tokens": {"loaded": 100 * loaded, "computed": 100 * failed}, "degraded": degraded, "known": loaded != failed,
    }  # fmt: skip


def status(health: dict[str, Any], *engines: dict[str, Any]) -> dict[str, Any]:
    """A status with a P, and a D for each of ``engines``."""
    role = dict[str, Any](state="up", requests=2, load=2.0, passed_over=False)
    rows = [{"url": url, "role": "decode", "handed_over": each} | role for url, each in zip(D, engines, strict=False)]
    return {
        "in_flight": 4, "oldest_waiting_seconds": 1.5, "engines": [{"url": P, "role": "prefill"} | role, *rows],
        "prefix_sources": [], "health": health,
    }  # fmt: skip


def test_the_page_refers_to_nothing_outside() -> None:
    with routed([], []) as front:
        answer = front.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<[^>]*\b(src|href|action|data)=|://", answer.text)
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


def test_its_data_say_which_engine_is_passed_over() -> None:
    pool, now = EnginePool([P], cool_down=5), [10.0]
    pool.failed(next(iter(pool)), 10.0)
    shown = []
    for now[0] in (10.0, 14.9, 15.0):
        shown += [Metrics(pool, lambda: now[0]).status()["engines"][0]["passed_over"]]
    assert shown == [True, True, False]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_of_a_router_in_a_browser(tmp_path: Path) -> None:
    """Drawn without an error, with the engines."""
    with routed(prefill_engine(), decode_engine()) as front:
        front.router.engines.add("http://h:1/<b>bold</b>", Role.DECODE, EngineState.JOINING)
        front.ask({"prompt": "x"})
        shown = drawn(front.url, tmp_path)
    assert f'<td>{front.p[0]}</td><td class="up">up</td>' in shown and f'<td>{front.d[0]}</td><td class="up">' in shown
    assert '<td>http://h:1/&lt;b&gt;bold&lt;/b&gt;</td><td class="joining">joining</td>' in shown
    assert '<section id="reads" hidden="">' in shown, "no source of a prefix was named"
    assert '<b id="state" class="ok">ok</b>' in shown and 'id="error" role="status"></div>' in shown


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_says_what_is_handed_over_and_what_is_wrong(tmp_path: Path) -> None:
    now = status({"status": "degraded", "handed_over": {D[1]: WHY}}, said(150, 50), said(0, 100, WHY))
    reads = {"prefix_sources": [{"reader": P, "source": D[1], "requests": 1234}]}
    shown = drawn_of(JSONResponse(now | reads), tmp_path)
    assert '<section id="reads">' in shown
    assert f'<tr><td>{P}</td><td>{D[1]}</td><td class="number">1,234</td></tr>' in shown
    assert '<b id="share-prompts">50 %</b>' in shown and '<b id="share-tokens">50 %</b>' in shown
    assert '<b id="state" class="degraded">degraded</b>' in shown and f"<p>{D[1]}: {WHY}. See" in shown
    assert '<td class="number">200</td><td class="number">75 %</td><td class="number">75 %</td>' in shown
    assert '<td class="number degraded">0 %</td><td class="number">0 %</td><td class="why">denied: 100</td>' in shown
    assert '<b id="in-flight">4</b>' in shown and '<b id="oldest">1.5</b>' in shown

    assert ">The router does not answer: status 500</div>" in drawn_of(Response(status_code=500), tmp_path)
    shown = drawn_of(JSONResponse(status({"status": "down"}, said(0))), tmp_path)
    assert '<b id="state" class="down">down</b>' in shown and "No decode engine takes requests." in shown
    assert "the engine does not say" in shown
