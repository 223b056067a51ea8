"""What the status page shows: latencies of the last minute, of answers with status 200, in bounded memory."""

from __future__ import annotations

from typing import Any

from kvferry.router.engines import EnginePool
from kvferry.router.metrics import RECENT_REQUESTS, RECENT_SECONDS, Metrics

A = "http://a:1"


def latencies(metrics: Metrics, now: float) -> tuple[dict[str, Any], dict[str, Any]]:
    status = metrics.status(now)
    return status["first_byte_seconds"], status["request_seconds"]


def test_old_answers_leave_and_errors_do_not_count() -> None:
    metrics = Metrics(EnginePool())
    metrics.answered(200, 0.0, 8.0, 9.0)
    metrics.answered(200, RECENT_SECONDS, 3.0, 4.0)
    metrics.answered(503, RECENT_SECONDS, 5.0, 6.0)
    metrics.answered(499, RECENT_SECONDS, None, 7.0)
    assert latencies(metrics, RECENT_SECONDS) == ({"p50": 8.0, "p95": 8.0}, {"p50": 9.0, "p95": 9.0})
    assert latencies(metrics, RECENT_SECONDS + 1) == ({"p50": 3.0, "p95": 3.0}, {"p50": 4.0, "p95": 4.0})
    assert latencies(metrics, 2 * RECENT_SECONDS + 1)[0] == {"p50": None, "p95": None}
    assert metrics.status(0.0)["requests"] == {"200": 2, "503": 1, "499": 1}
    for name in ("first_byte", "request"):
        assert f"kvferry_router_{name}_seconds_count 2.0\n".encode() in metrics.text()


def test_memory_is_bounded_and_an_engine_that_is_passed_over_is_shown_so() -> None:
    metrics = Metrics(EnginePool())
    for number in range(RECENT_REQUESTS + 10):
        metrics.answered(200, 0.0, float(number), float(number))
    assert latencies(metrics, 0.0)[0]["p50"] == 10 + RECENT_REQUESTS // 2, "the first ten are forgotten"
    assert latencies(metrics, 0.0)[1]["p95"] == 10 + RECENT_REQUESTS * 95 // 100
    pool = EnginePool([A], cool_down=5)
    (engine,) = pool
    pool.failed(engine, 10.0)
    shown = [Metrics(pool).status(now)["engines"][0]["passed_over"] for now in (10.0, 14.9, 15.0)]
    assert shown == [True, True, False]
