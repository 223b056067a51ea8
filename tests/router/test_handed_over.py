"""What the router and its page say of hand-overs is what D counts, not what the router has sent."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from kvferry.router import health
from kvferry.router.engines import EnginePool, Role
from kvferry.router.handed_over import (
    FIRST_PROMPTS,
    LAST_PROMPTS,
    Counts,
    HandedOver,
    counts_of,
)
from kvferry.router.health import Checks
from kvferry.router.http_client import RequestProgress
from kvferry.router.metrics import Metrics
from kvferry.router.page import page as status_page
from kvferry.transport.errors import NO_REPORT, what_to_do
from tests.router.stand_ins import PARAMS, decode_engine, prefill_engine, routed
from tests.support.served import eventually

P, Q = "http://p:1", "http://q:1"


def page(*prompts: tuple[str, str, int], tokens: tuple[int, int, int] = (0, 0, 0)) -> str:
    """Of a D: prompts by result and reason; tokens loaded, computed and found in its cache."""
    of = 'engine="0",model_name="m"'
    lines = [f'vllm:kvferry_prompts_total{{{of},reason="{why}",result="{what}"}} {n}.0' for what, why, n in prompts]
    sources = ("external_kv_transfer", "local_compute", "local_cache_hit")
    lines += [
        f'vllm:prompt_tokens_by_source_total{{{of},source="{s}"}} {n}' for s, n in zip(sources, tokens, strict=True)
    ]
    return "# TYPE x counter\nx 1\n" + "\n".join(lines) + "\n"


def counts(*prompts: tuple[str, str, int], **more: Any) -> Counts:
    return counts_of(page(*prompts, **more))


def one(first: Counts | None = None) -> HandedOver:
    """A D that the router has looked at once."""
    handed_over = HandedOver()
    handed_over.take(first if first is not None else counts(("loaded", "", 0)))
    return handed_over


def test_what_d_has_counted_since_its_start_is_shown() -> None:
    d = one(counts(("loaded", "", 3), ("local", "wrong_role", 1), tokens=(300, 100, 9)))
    assert d.status() == {
        "known": True, "prompts": {"loaded": 3, "local": 1, "failed": 0}, "reasons": {"wrong_role": 1},
        "tokens": {"loaded": 300, "computed": 100}, "degraded": None,
    }  # fmt: skip
    d.take(counts(("loaded", "", 1), ("local", "wrong_role", 6), tokens=(100, 0, 0)))  # it was started anew
    assert d.status()["prompts"] == {"loaded": 1, "local": 6, "failed": 0} and d.status()["tokens"]["loaded"] == 100


def test_what_d_had_missed_before_the_first_look_is_not_of_this_router() -> None:
    page = counts(("loaded", "", 0), ("failed", "key", LAST_PROMPTS))
    d = HandedOver()
    d.sent += LAST_PROMPTS
    for _ in range(2):
        d.take(page)
        assert not d.degraded


def test_a_prompt_that_d_had_already_is_named_and_is_no_miss() -> None:
    d = one()
    d.sent += LAST_PROMPTS
    d.take(counts(("loaded", "", 0), ("local", "cached", LAST_PROMPTS), ("local", "ended", 5)))
    shown = d.status()
    assert not any(shown["prompts"].values()) and shown["reasons"] == {"cached": LAST_PROMPTS, "ended": 5}
    assert not d.degraded


@pytest.mark.parametrize(("loaded", "few"), [(0, FIRST_PROMPTS), (1, LAST_PROMPTS)])
def test_degraded_after_the_last_prompts_and_until_one_is_loaded(loaded: int, few: int) -> None:
    """A D that has loaded none since its start is so after its first ones. Its reason is said as ``check`` says it."""
    before = ("loaded", "", loaded)
    d = one(counts(before))
    d.sent += few
    d.take(counts(before, ("local", "other_prompt", 1), ("failed", "key", few - 2)))
    assert not d.degraded, "one is missing"
    d.take(counts(before, ("local", "other_prompt", 1), ("failed", "key", few - 1), tokens=(9, 9, 9)))
    assert f"none of the last {few} prompts" in d.degraded
    assert d.degraded.endswith(f"key {few - 1}, other_prompt 1; {what_to_do('key')}"), "the most frequent reason first"
    after = ("loaded", "", loaded + 1), ("local", "other_prompt", 1)
    d.take(counts(*after, ("failed", "key", few - 1)))
    assert not d.degraded
    d.sent += LAST_PROMPTS - 1
    d.take(counts(*after, ("failed", "key", few + 3 * LAST_PROMPTS)))
    assert not d.degraded, "others have sent the rest"


def test_what_was_missed_before_a_restart_says_nothing_of_the_new_d() -> None:
    d = one(counts(("loaded", "", 9)))
    d.sent += LAST_PROMPTS
    d.take(counts(("loaded", "", 9), ("failed", "key", LAST_PROMPTS - 1)))
    d.take(counts(("loaded", "", 0), ("failed", "key", FIRST_PROMPTS - 1)))
    assert not d.degraded
    d.take(counts(("loaded", "", 0), ("failed", "key", FIRST_PROMPTS)))
    assert f"none of the last {FIRST_PROMPTS} prompts" in d.degraded


def test_a_page_of_another_connector_is_judged_by_tokens_and_an_empty_one_is_unknown() -> None:
    d = one(counts_of(""))
    d.sent += LAST_PROMPTS
    d.take(counts_of(""))
    assert not d.known and not d.degraded
    d = one(counts())
    d.sent += LAST_PROMPTS
    d.take(counts(tokens=(0, 10, 20_000)))
    assert not d.degraded, "its own cache had the prompts"
    d.take(counts(tokens=(0, 30_000, 20_000)))
    assert "has no vllm:kvferry_prompts_total" in d.degraded and d.degraded.endswith(NO_REPORT)
    d.take(counts(tokens=(16, 30_000, 20_000)))
    assert not d.degraded and d.status()["tokens"]["computed"] == 30_000
    d.take(counts_of(""))
    assert not d.known
    d.take(counts(tokens=(16, 30_000, 20_000)))
    assert d.known


def test_strange_reasons_are_no_label() -> None:
    d = one(counts(("failed", "NO <b>", 7), ("failed", "key", 1)))
    assert d.status()["reasons"] == {"other": 7, "key": 1}
    for text in ("vllm:kvferry_prompts_total{ 1", 'vllm:kvferry_prompts_total{result="loaded"} -1'):
        with pytest.raises(ValueError, match=r".*"):
            counts_of(text)


# --- by way of a router


FAST = Checks(interval=0.02, timeout=60.0)


def test_one_warning_health_metrics_and_status_and_the_end_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    p, d = prefill_engine(), decode_engine()
    d.metrics = lambda: page(("loaded", "", 7), ("local", "wrong_role", 0))
    with routed(p, d, checks=FAST) as front:
        for number in range(LAST_PROMPTS):
            front.ask({"prompt": str(number)})
        assert front.get("/health").json()["status"] == "ok"
        d.metrics = lambda: page(("loaded", "", 7), ("local", "wrong_role", LAST_PROMPTS))
        eventually(lambda: front.get("/health").json()["status"] == "degraded", "the router has looked")
        said, status = front.get("/health"), front.get("/router/status").json()
        metrics = front.get("/metrics").text
        assert said.status_code == 200 and what_to_do("wrong_role") in said.json()["handed_over"][front.d[0]]
        assert status["engines"][1]["handed_over"]["prompts"] == {"loaded": 7, "local": LAST_PROMPTS, "failed": 0}
        assert f'kvferry_router_engine_degraded{{role="decode",url="{front.d[0]}"}} 1.0' in metrics
        d.metrics = lambda: page(("loaded", "", 8), ("local", "wrong_role", LAST_PROMPTS))
        eventually(lambda: front.get("/health").json()["status"] == "ok", "the router has looked again")
        assert "handed_over" not in front.get("/health").json()
        eventually(lambda: "handed over again" in caplog.text, "the end is logged")
    logged = [line for line in caplog.messages if f"decode engine {front.d[0]}: " in line]
    assert len(logged) == 2 and f"wrong_role 20; {what_to_do('wrong_role')}" in logged[0] and "over again" in logged[1]


def test_a_p_that_hands_nothing_over(caplog: pytest.LogCaptureFixture) -> None:
    p, d = prefill_engine(params=None), decode_engine()
    with routed(p, d, checks=FAST) as front:
        for number in range(FIRST_PROMPTS):
            assert front.get("/health").json()["status"] == "ok"
            front.ask({"prompt": str(number)})
        assert "kv_transfer_params" in front.get("/health").json()["handed_over"][front.p[0]]
        assert "kv_consumer" in front.get("/router/status").json()["engines"][0]["handed_over"]["degraded"]
        eventually(lambda: "as kv_consumer" in caplog.text, "it is logged")
        metrics = front.get("/metrics").text
        assert f'kvferry_router_engine_degraded{{role="prefill",url="{front.p[0]}"}} 1.0' in metrics
        assert f'kvferry_router_decode_legs_total{{how="decode_only"}} {FIRST_PROMPTS}.0' in metrics
        handed_over = front.router.engines.of(Role.PREFILL)[0].handed_over
        handed_over.prefilled(PARAMS)
        assert front.get("/health").json()["status"] == "ok"
        for _ in range(LAST_PROMPTS - 1):  # one that has handed over has some prompts that need no hand-over
            handed_over.prefilled(None)
        assert not handed_over.degraded
        handed_over.prefilled(None)
        assert handed_over.degraded


SERIES = "vllm:kvferry_prompts_total"
QUADRATIC = SERIES + '{a="' + '\\"' * health.MAX_LINE_BYTES + '"} 1\n'
"""The parser's time grows with the square of it."""


@pytest.mark.parametrize(
    ("wrong", "logged"),
    [
        ("x 1\n" * 20_000, ""),
        ("x" * 50_000, ""),
        (QUADRATIC, ""),
        (404, ""),
        (SERIES + "{ 1\n", "ValueError"),
        (SERIES + '{a="b", ="c"} 1\n', "IndexError"),
        (SERIES + '{a="b"} 1 ' + "9" * 400 + "\n", "OverflowError"),
    ],
)  # fmt: skip
def test_a_page_that_is_none_or_too_large_changes_nothing(
    wrong: str | int, logged: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "MAX_PAGE_BYTES", 40_000)
    d, looks = decode_engine(), list[int]()
    d.metrics = lambda: page(("loaded", "", 1))
    with routed(prefill_engine(), d, checks=FAST) as front:
        engine = front.router.engines.of(Role.DECODE)[0]

        def bad() -> str:
            looks.append(1)
            if isinstance(wrong, int):
                raise HTTPException(wrong)
            return page(("loaded", "", 3)) + wrong

        d.metrics = bad
        eventually(lambda: len(looks) > 3, "it has looked")
        assert engine.handed_over.status()["prompts"]["loaded"] == 1 and not engine.failed_checks
        d.metrics = lambda: "x" * 9_000 + "\n" + page(("loaded", "", 3))  # a long line of another is no fault
        eventually(lambda: engine.handed_over.status()["prompts"]["loaded"] == 3, "the next look sees all")
    said = [line for line in caplog.messages if "is unusable" in line]
    assert len(said) == bool(logged) and all(logged in line and front.d[0] in line for line in said)


def test_a_page_that_is_read_slowly_holds_up_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    p, d, read, checks = prefill_engine(), decode_engine(), threading.Event(), list[int]()
    monkeypatch.setattr(health, "counts_of", lambda lines: read.wait(60) and counts_of(lines))
    with routed(p, d, checks=Checks(interval=0.02, timeout=1.0)):
        p.health = lambda: checks.append(1) or 200
        try:
            eventually(lambda: len(checks) > 1, "P is checked again while D's page is read")
        finally:
            read.set()


P_URL, DS = "http://10.0.0.1:8000", ("http://10.0.0.3:8000", "http://10.0.0.4:8000")
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
    rows = [{"url": url, "role": "decode", "handed_over": each} | role for url, each in zip(DS, engines, strict=False)]
    engines_shown = [{"url": P_URL, "role": "prefill"} | role, *rows]
    return {"in_flight": 4, "oldest_waiting_seconds": 1.5, "engines": engines_shown, "health": health}


def test_the_page_of_a_router_refers_to_nothing_outside_and_has_its_engines() -> None:
    with routed(prefill_engine(), decode_engine()) as front:
        front.router.engines.add("http://h:1/<b>bold</b>", Role.DECODE)
        front.ask({"prompt": "x"})
        answer = front.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"<[^>]*\b(src|href|action|data)=", answer.text) and 'http-equiv="refresh"' in answer.text
    assert f"<td>{front.p[0]}</td><td>up</td>" in answer.text and f"<td>{front.d[0]}</td><td>up</td>" in answer.text
    assert "<td>http://h:1/&lt;b&gt;bold&lt;/b&gt;</td><td>down</td>" in answer.text
    assert '<span class="ok">ok</span>' in answer.text


def test_the_page_says_what_is_handed_over_and_what_is_wrong() -> None:
    shown = status_page(status({"status": "degraded", "handed_over": {DS[1]: WHY}}, said(150, 50), said(0, 100, WHY)))
    assert "Handed over: 50% of prompts, 50% of prompt tokens" in shown
    assert '<span class="degraded">degraded</span>' in shown and f'<p class="degraded">{DS[1]}: {WHY}. See' in shown
    assert "<td>2</td><td>200</td><td>75%</td><td>75%</td><td>denied: 50</td>" in shown
    assert "<td>2</td><td>100</td><td>0%</td><td>0%</td><td>denied: 100</td>" in shown
    assert "In flight: 4; the oldest waits for a byte for 1.5 s" in shown
    shown = status_page(status({"status": "down"}, said(0)))
    assert '<span class="down">down</span>' in shown and "No decode engine takes requests." in shown
    assert "the engine does not say" in shown


def test_its_data_say_which_engine_is_passed_over_and_which_leg_is_the_oldest() -> None:
    pool, now = EnginePool([P_URL], cool_down=5), [10.0]
    pool.failed(next(iter(pool)), 10.0)
    shown = []
    for now[0] in (10.0, 14.9, 15.0):
        shown += [Metrics(pool, lambda: now[0]).status()["engines"][0]["passed_over"]]
    assert shown == [True, True, False]
    legs = RequestProgress(at=3.0), RequestProgress(at=1.0, answered=True), RequestProgress(at=2.0, held=True)
    assert Metrics(pool, lambda: now[0], legs).oldest_waiting() == 12.0, "of those that wait for an engine"
