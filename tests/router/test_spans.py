"""The span of a request: one trace of client, router and engines, and nothing where they are off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from kvferry.router.app import CANCELLED, STATUS
from kvferry.router.legs import LegTimeouts
from tests.router.stand_ins import (
    PATIENT,
    Engine,
    Front,
    decode_engine,
    gone,
    leave_after,
    prefill_engine,
    routed,
    router_process,
)
from tests.support.fork_server import fork_server
from tests.support.served import eventually
from tests.support.spans import PARENT_ID, SAMPLED, TRACE_ID, Spans, receiver


@contextmanager
def traced(p: Any, d: Any, *timeouts: LegTimeouts) -> Iterator[tuple[Spans, Front]]:
    """A router that passes an engine over once it has failed, and whose spans stay here."""
    spans = Spans()
    with routed(p, d, *timeouts, cool_down=600, tracer=spans.tracer) as front:
        yield spans, front


def request_of(spans: Spans) -> ReadableSpan:
    """The only span."""
    eventually(lambda: len(spans), "it has ended")
    (found,) = spans.named("kvferry.request")
    assert len(spans) == 1
    return found


def of(span: ReadableSpan, attribute: str) -> Any:
    return (span.attributes or {}).get(attribute)


def outcome(span: ReadableSpan) -> tuple[Any, str, bool]:
    """Its HTTP status, why it failed, and whether it was cancelled."""
    assert span.status.is_unset != bool(span.status.description)
    return of(span, STATUS), span.status.description or "", bool(of(span, CANCELLED))


def names_it(engine: Engine, request: ReadableSpan) -> bool:
    """Whether the engine got the span as its parent."""
    told = f"00-{request.context.trace_id:032x}-{request.context.span_id:016x}-{request.context.trace_flags:02x}"
    return engine.seen[-1][1]["traceparent"] == told


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_of_client_router_and_both_engines(stream: bool) -> None:
    p, d = prefill_engine(), decode_engine()
    with traced([p], [d]) as (spans, front):
        headers = {"traceparent": SAMPLED, "tracestate": "a=1, b=2", "x-request-id": "mine"}
        assert front.ask({"prompt": "x", "stream": stream}, **headers).status_code == 200
        request = request_of(spans)
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT_ID
    assert names_it(p, request) and names_it(d, request) and request.kind is SpanKind.SERVER
    assert [engine.seen[0][1]["tracestate"] for engine in (p, d)] == ["a=1,b=2"] * 2
    assert outcome(request) == (200, "", False)
    about = "kvferry.request_id", "url.path", "kvferry.prefill", "kvferry.decode", "kvferry.alone"
    assert [of(request, name) for name in about] == ["mine", "/v1/completions", front.p[0], front.d[0], None]


@pytest.mark.parametrize("given", ["x", SAMPLED + "-later", SAMPLED.replace(TRACE_ID, "0" * 32)])
def test_a_malformed_trace_context_is_replaced(given: str) -> None:
    p, d = prefill_engine(), decode_engine()
    with traced([p], [d]) as (spans, front):
        front.ask({"prompt": "x"}, traceparent=given, tracestate="a=1", **{"x-request-id": "i" * 1000})
        request = request_of(spans)
        assert names_it(d, request)
    assert request.parent is None and "tracestate" not in d.seen[0][1]
    assert of(request, "kvferry.request_id") == "i" * 256 and d.seen[0][1]["x-request-id"] == "i" * 1000


# --- what fails


def failing(status: int) -> Engine:
    return prefill_engine(status=status)


FAILURES: list[tuple[Callable[[], tuple[Any, Any]], int, str, str]] = [
    (lambda: (failing(503), decode_engine()), 200, "", "answered 503"),
    (lambda: (prefill_engine(delay=600), decode_engine()), 200, "", "failed: TimeoutError"),
    (lambda: ([], [gone(), failing(500)]), 500, "HTTP 500", "no prefill engine"),
    (lambda: ([], gone()), 502, "no connection", ""),
    (lambda: ([], []), 503, "no decode engine", ""),
    (lambda: ([], failing(400)), 400, "", "no prefill engine"),
    (lambda: (prefill_engine(), decode_engine(break_after=1)), 200, "broke off: the engine closed", ""),
]
"""Engines, and of the span the status, the error, and why D got no parameters. That D refuses a request is no failure
of the router."""


@pytest.mark.parametrize(("engines", "status", "error", "alone"), FAILURES)
def test_a_span_says_what_failed(engines: Any, status: int, error: str, alone: str) -> None:
    late = replace(PATIENT, prefill=1.0) if "TimeoutError" in alone else PATIENT
    with traced(*engines(), late) as (spans, front):
        front.ask({"prompt": "x", "stream": True})
        request = request_of(spans)
    found, said, cancelled = outcome(request)
    assert (found, bool(said), cancelled) == (status, bool(error), False) and error in said
    assert alone in of(request, "kvferry.alone") if alone else of(request, "kvferry.alone") is None


@pytest.mark.parametrize("during", ["prefill", "decode", "stream"])
def test_a_client_that_leaves_is_no_failure(during: str) -> None:
    never = threading.Event()
    p = prefill_engine(go_on=never if during == "prefill" else None)
    d = decode_engine(go_on=never) if during == "stream" else decode_engine(before=600)
    with traced([p], [d], replace(PATIENT, abandoned_prefill=0.1)) as (spans, front):
        if during == "stream":
            with front.streaming() as response:
                next(response.iter_lines())
        else:
            leave_after(front.url, {"prompt": "x"}, (p if during == "prefill" else d).arrived)
        assert outcome(request_of(spans)) == (None, "", True)
        never.set()


# --- the command


COMMAND = """
from kvferry.cli.main import app
from kvferry.transport import tracing
tracing.CLOSE_SECONDS = 300.0
app()
"""
"""``kvferry router`` that waits longer for its last spans."""


def test_spans_of_a_router_that_is_ended_arrive() -> None:
    """The last ones, too: they leave at SIGTERM."""
    d = decode_engine()
    environment = {"OTEL_SERVICE_NAME": "router", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    environment |= {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
    with receiver() as otlp, d.running() as d_url:
        arguments = "--decode", d_url, "--otlp-traces-endpoint", otlp.url
        with router_process(*arguments, environment=environment, program=("-c", COMMAND)) as (site, _):
            eventually(lambda: site.healthy, "the router answers")
            assert site.ask({"prompt": "x"}, traceparent=SAMPLED).status_code == 200
        (span,) = otlp.spans()
    assert (span["parent"], span["service"]) == (PARENT_ID, "router")
    assert span["id"] in d.seen[0][1]["traceparent"]


OFF = """
import sys, threading
from kvferry.router import command
from tests.router.stand_ins import decode_engine, prefill_engine, routed
p, d = prefill_engine(), decode_engine()
with routed(p, d) as front:
    assert front.ask({"prompt": "x", "stream": True}, traceparent=sys.argv[1]).status_code == 200
assert [engine.seen[0][1]["traceparent"] for engine in (p, d)] == [sys.argv[1]] * 2
assert "kvferry.transport.tracing" in sys.modules
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    done = fork_server().run("-c", OFF, SAMPLED, timeout=800)
    assert done.stdout == "[]\n", done.stderr
