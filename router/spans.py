"""The OpenTelemetry spans of a request and of its legs, in the client's trace; nothing where there is no tracer."""

from __future__ import annotations

from typing import Any

from kvferry.router.engines import Engine
from kvferry.router.http_client import Answer, HttpError
from kvferry.transport.tracing import OpenSpan, Tracer

REQUEST, PREFILL, DECODE = "kvferry.request", "kvferry.prefill", "kvferry.decode"
STATUS, CANCELLED = "http.response.status_code", "kvferry.cancelled"


def begin_request(tracer: Tracer | None, headers: dict[str, str], path: str) -> OpenSpan | None:
    """The span of a request with these headers, from which its trace context is taken away: each leg has its own."""
    if tracer is None:
        return None
    attributes = {"url.path": path, "kvferry.request_id": headers["x-request-id"][:256]}
    span = tracer.begin(REQUEST, headers, attributes)
    for name in ("traceparent", "tracestate"):
        headers.pop(name, None)
    return span


def end_request(span: OpenSpan | None, status: int | None, broken: str) -> None:
    """``status``: None where the client left. ``broken``: why the answer broke off."""
    if span is not None:
        failure = broken or (f"HTTP {status}" if status is not None and status >= 500 else "")
        span.end({CANCELLED: True} if status is None else {STATUS: status}, failure)


class LegSpan:
    """The span of one leg of ``request``; where that is None, nothing. ``headers`` go with the leg. ``answer``: the
    head of the engine's, once received."""

    def __init__(self, request: OpenSpan | None, name: str, engine: Engine) -> None:
        self._span = None if request is None else request.child(name, {"kvferry.engine": engine.url})
        self.headers = {} if self._span is None else self._span.headers
        self.answer: Answer | None = None

    def end(self, error: BaseException | None = None) -> None:
        """The leg is over; only the first call counts. ``error``: what ended it."""
        if self._span is None:
            return
        answer, attributes, failure = self.answer, dict[str, Any](), ""
        if answer is not None:
            attributes[STATUS] = answer.status
            failure = answer.broken or (f"HTTP {answer.status}" if answer.status >= 400 else "")
        if isinstance(error, HttpError | TimeoutError):
            failure = str(error) or type(error).__name__
        elif not failure and (answer is None or not answer.whole):
            attributes[CANCELLED] = True
        self._span.end(attributes, failure)
