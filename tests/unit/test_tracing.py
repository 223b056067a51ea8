"""Spans: which requests are traced, what a span carries, where it goes."""

from __future__ import annotations

import builtins
import threading
import time

import pytest

pytest.importorskip("opentelemetry.sdk.trace")
from kvferry.transport import tracing
from kvferry.transport.errors import ConfigError
from kvferry.transport.tracing import RecordedSpan, open_tracer, sampled_traceparent, time_of_zero
from tests.support.spans import PARENT_ID, SAMPLED, TRACE_ID, Spans, receiver

HTTP = "http/protobuf"


@pytest.mark.parametrize("given", [SAMPLED, SAMPLED.replace("00-", "01-", 1) + "-later", SAMPLED[:-2] + "ff"])
def test_a_sampled_trace(given):
    assert sampled_traceparent({"traceparent": given, "tracestate": "x=y"}) == given


NOT_TRACED = [
    "", "x", SAMPLED[:-2] + "00", SAMPLED[:-2] + "02", SAMPLED.upper(), "ff" + SAMPLED[2:], SAMPLED[:-1], SAMPLED + "0",
    SAMPLED.replace(TRACE_ID, "0" * 32), SAMPLED.replace(PARENT_ID, "0" * 16), " " + SAMPLED,
]  # fmt: skip


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "x"}, *({"traceparent": text} for text in NOT_TRACED)])
def test_what_is_not_traced(headers):
    assert sampled_traceparent(headers) == ""


def test_a_recorded_tree_keeps_its_times_and_attributes():
    spans = Spans()
    child = RecordedSpan("child", 2.0, 3.0, {"n": 2})
    spans.tracer.record(RecordedSpan("top", 1.0, 4.0, {"n": 1}, [child], "broke"), SAMPLED, 10**18)
    (top,) = spans.named("top")
    (inner,) = spans.children(top)
    assert (top.start_time, top.end_time) == (10**18 + 10**9, 10**18 + 4 * 10**9)
    assert (inner.start_time, inner.end_time) == (10**18 + 2 * 10**9, 10**18 + 3 * 10**9)
    assert (f"{top.context.trace_id:032x}", f"{top.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    spans.tracer.record(RecordedSpan("unsampled", 1.0, 4.0, {}), SAMPLED[:-2] + "00", 0)
    assert len(spans) == 2
    clock = time.monotonic()
    assert abs(time_of_zero(clock) + clock * 1e9 - time.time_ns()) < 1e9
    assert top.attributes == {"n": 1} and top.status.description == "broke" and inner.status.is_unset


def test_spans_of_a_router(caplog):
    spans = Spans()
    request = spans.tracer.begin("request", {"traceparent": SAMPLED}, {"a": 1})
    leg = request.child("prefill")
    assert sampled_traceparent(leg.headers) == leg.headers["traceparent"] and TRACE_ID in leg.headers["traceparent"]
    leg.end(error="HTTP 500")
    leg.end({"late": 1}, error="HTTP 501")
    request.end({"b": 2})
    (top,), (inner,) = spans.named("request"), spans.named("prefill")
    assert f"{top.parent.span_id:016x}" == PARENT_ID and inner.parent.span_id == top.context.span_id
    assert top.attributes == {"a": 1, "b": 2} and inner.status.description == "HTTP 500" and not inner.attributes
    assert not caplog.messages, "only the first end counts"
    alone = spans.tracer.begin("request")
    alone.end()
    assert spans.named("request")[1].parent is None


# --- where they go --------------------------------------------------------------------------------------------------


def test_spans_reach_a_receiver_and_the_last_ones_at_the_close(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", HTTP)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "prefill")
    with receiver() as received:
        tracer = open_tracer(received.url, {"service.instance.id": "engine-p"})
        assert tracer is not None
        tracer.record(RecordedSpan("top", 1.0, 4.0, {"n": 1}), SAMPLED, 10**18)
        tracer.close()
        (span,) = received.spans()
    assert (span["service"], span["instance"], span["scope"]) == ("prefill", "engine-p", "kvferry")
    assert (span["trace"], span["parent"], span["attributes"]) == (TRACE_ID, PARENT_ID, {"n": "1"})


def test_without_an_endpoint_nothing_is_imported(monkeypatch):
    def refuse(name, *rest, **options):
        assert not name.startswith("opentelemetry"), name
        return real(name, *rest, **options)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert open_tracer(None) is None and open_tracer("") is None


def test_a_close_does_not_wait_for_a_receiver_that_hangs(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.01)
    tracer, go = Spans().tracer, threading.Event()
    monkeypatch.setattr(tracer.provider, "shutdown", go.wait)
    tracer.close()
    assert not go.is_set()
    go.set()


def test_mistakes_of_a_user(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier/pigeon")
    with pytest.raises(ConfigError, match="is 'carrier/pigeon', expected grpc or http/protobuf"):
        open_tracer("http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", HTTP)

    def refuse(name, *rest, **options):
        if name.startswith("opentelemetry.sdk"):
            raise ImportError("planted")
        return real(name, *rest, **options)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[otel\]'"):
        open_tracer("http://127.0.0.1:4317")
