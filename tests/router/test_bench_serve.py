"""vLLM's own load generator, ``vllm bench serve``, against the router and engines that answer by script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.router.test_at_once import Served, stream_of_d
from tests.support.engines import ROOT
from tests.support.tiny_model import ModelSpec, build_model

pytestmark = pytest.mark.vllm
BENCHMARKS = str(ROOT / "benchmarks")


def test_all_requests_of_bench_serve_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines are asked at once."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    serve_load = pytest.importorskip("serve_load")  # it imports vLLM
    tokenizer = build_model(tmp_path / "model", ModelSpec(layers=1), weights=False)
    load = serve_load.Load(tokens=50, output=2, requests=60, beside=8)
    with Served().running() as pair:
        pair.learn()
        pair.d.answer = lambda body: stream_of_d(("a", [11]), ("b", [12]))
        measured = serve_load.bench_serve(pair.url, tokenizer, load, 1, tmp_path / "said")
        pair.nothing_left()
        status = pair.router.metrics.status(pair.router.clock())
    assert 0 < measured.ttft_p50 <= measured.ttft_p99 and measured.per_second > 0
    assert status["requests"] == {"200": load.requests + 1} and not status["failed_legs"]
    assert status["handovers"] == {"serial": 1, "at_once": load.requests}
    assert not any(engine["requests"] for engine in status["engines"])
