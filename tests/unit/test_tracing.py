"""Spans: which requests are traced, what a span carries, where it goes."""

from __future__ import annotations

import builtins
import threading

import pytest

pytest.importorskip("opentelemetry.sdk.trace")
from kvferry.transport import tracing
from kvferry.transport.errors import ConfigError
from kvferry.transport.tracing import open_tracer, sampled_traceparent
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


# --- where they go --------------------------------------------------------------------------------------------------


def test_spans_reach_a_receiver_and_the_last_ones_at_the_close(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", HTTP)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "prefill")
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 600.0)
    with receiver() as received:
        tracer = open_tracer(received.url, {"service.instance.id": "engine-p"})
        assert tracer is not None
        tracer.record(SAMPLED, "top", 10**18, 10**18 + 1, {"n": "1" * 300}, "")
        tracer.close()
        (span,) = received.spans()
    assert (span["service"], span["instance"], span["scope"]) == ("prefill", "engine-p", "kvferry")
    assert (span["trace"], span["parent"], span["attributes"]) == (TRACE_ID, PARENT_ID, {"n": "1" * 256})


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
