"""Spans of requests and of their legs: one trace of client, router and engines, and nothing where they are off."""

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

from kvferry.router.legs import LegTimeouts
from kvferry.router.spans import CANCELLED, DECODE, PREFILL, REQUEST, STATUS
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


def named(spans: Spans, name: str, count: int = 1) -> list[ReadableSpan]:
    """The spans of this name, in the order in which they began."""
    eventually(lambda: len(spans.named(name)) >= count, f"{count} {name} have ended")
    found = spans.named(name)
    assert len(found) == count
    return sorted(found, key=lambda span: span.start_time or 0)


def of(span: ReadableSpan, attribute: str) -> Any:
    return (span.attributes or {}).get(attribute)


def outcome(span: ReadableSpan) -> tuple[Any, str, bool]:
    """Its HTTP status, why it failed, and whether it was cancelled."""
    assert span.status.is_unset != bool(span.status.description)
    return of(span, STATUS), span.status.description or "", bool(of(span, CANCELLED))


def is_child(leg: ReadableSpan, request: ReadableSpan, engine: Engine) -> bool:
    """Whether the leg is a child of the request, and the engine was told so."""
    told = f"00-{leg.context.trace_id:032x}-{leg.context.span_id:016x}-{leg.context.trace_flags:02x}"
    assert leg.parent is not None
    return leg.parent.span_id == request.context.span_id and engine.seen[-1][1]["traceparent"] == told


OK = (200, "", False)


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_of_client_router_and_both_engines(stream: bool) -> None:
    p, d = prefill_engine(), decode_engine()
    with traced([p], [d]) as (spans, front):
        headers = {"traceparent": SAMPLED, "tracestate": "a=1, b=2", "x-request-id": "mine"}
        assert front.ask({"prompt": "x", "stream": stream}, **headers).status_code == 200
        (request,), (prefill,), (decode,) = (named(spans, name) for name in (REQUEST, PREFILL, DECODE))
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT_ID
    assert is_child(prefill, request, p) and is_child(decode, request, d)
    assert [engine.seen[0][1]["tracestate"] for engine in (p, d)] == ["a=1,b=2"] * 2
    assert [span.kind for span in (request, prefill, decode)] == [SpanKind.SERVER, SpanKind.CLIENT, SpanKind.CLIENT]
    assert [outcome(span) for span in (request, prefill, decode)] == [OK] * 3
    assert (of(request, "kvferry.request_id"), of(request, "url.path")) == ("mine", "/v1/completions")
    assert of(prefill, "kvferry.engine") != of(decode, "kvferry.engine")
    times = [request.start_time, prefill.start_time, prefill.end_time, decode.start_time, decode.end_time]
    assert times == sorted(times, key=lambda time: time or 0)


@pytest.mark.parametrize("given", ["x", SAMPLED + "-later", SAMPLED.replace(TRACE_ID, "0" * 32)])
def test_a_malformed_trace_context_is_replaced(given: str) -> None:
    p, d = prefill_engine(), decode_engine()
    with traced([p], [d]) as (spans, front):
        front.ask({"prompt": "x"}, traceparent=given, tracestate="a=1", **{"x-request-id": "i" * 1000})
        (request,) = named(spans, REQUEST)
        assert is_child(named(spans, DECODE)[0], request, d)
    assert request.parent is None and "tracestate" not in d.seen[0][1]
    assert of(request, "kvferry.request_id") == "i" * 256 and d.seen[0][1]["x-request-id"] == "i" * 1000


def test_a_trace_that_is_not_sampled_stays_so() -> None:
    p, d = prefill_engine(), decode_engine()
    with traced([p], [d]) as (spans, front):
        front.ask({"prompt": "x"}, traceparent=SAMPLED[:-2] + "00")
    assert not len(spans)
    for engine in (p, d):
        _, trace, _, flags = engine.seen[0][1]["traceparent"].split("-")
        assert (trace, flags) == (TRACE_ID, "00")


# --- what fails


def failing(status: int) -> Engine:
    return prefill_engine(status=status)


FAILURES: list[tuple[Callable[[], tuple[Any, Any]], dict[str, list[tuple[Any, str]]]]] = [
    (lambda: ([failing(503), prefill_engine()], decode_engine()),
     {PREFILL: [(503, "HTTP 503"), (200, "")], DECODE: [(200, "")], REQUEST: [(200, "")]}),
    (lambda: (prefill_engine(delay=600), decode_engine()), {PREFILL: [(None, "TimeoutError")], REQUEST: [(200, "")]}),
    (lambda: ([], [gone(), failing(500)]),
     {DECODE: [(None, "no connection"), (500, "HTTP 500")], REQUEST: [(500, "HTTP 500")]}),
    (lambda: ([], []), {REQUEST: [(503, "HTTP 503")]}),
    (lambda: ([], failing(400)), {DECODE: [(400, "HTTP 400")], REQUEST: [(400, "")]}),
]  # fmt: skip
"""Engines, and the status and the error of each span. That D refuses a request is no failure of the router."""


@pytest.mark.parametrize(("engines", "ends"), FAILURES)
def test_an_engine_that_fails_has_a_span_that_says_so(engines: Any, ends: dict[str, Any]) -> None:
    late = replace(PATIENT, prefill=1.0) if "TimeoutError" in str(ends) else PATIENT
    with traced(*engines(), late) as (spans, front):
        front.ask({"prompt": "x"})
        for name, expected in ends.items():
            for span, (status, error) in zip(named(spans, name, len(expected)), expected, strict=True):
                found, said, cancelled = outcome(span)
                assert (found, bool(said), cancelled) == (status, bool(error), False) and said.startswith(error)
        assert ends.keys() > {REQUEST} or len(spans) == 1


def test_an_answer_that_breaks_off() -> None:
    with traced([prefill_engine()], [decode_engine(break_after=1)]) as (spans, front):
        assert "broke off" in front.ask({"prompt": "x", "stream": True}).text
        (decode,), (request,) = named(spans, DECODE), named(spans, REQUEST)
    assert outcome(decode)[:2] == (200, "the engine closed the connection")
    assert of(request, STATUS) == 200 and "broke off" in (request.status.description or "")


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
        (request,), (leg,) = named(spans, REQUEST), named(spans, PREFILL if during == "prefill" else DECODE)
        status = 200 if during == "stream" else None
        assert outcome(request) == (None, "", True) and outcome(leg) == (status, "", True)
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
        spans = {span["name"]: span for span in otlp.spans()}
    assert spans[REQUEST]["parent"] == PARENT_ID and spans[DECODE]["parent"] == spans[REQUEST]["id"]
    assert spans[REQUEST]["service"] == "router" and SAMPLED not in d.seen[0][1]["traceparent"]


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
