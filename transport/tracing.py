"""OpenTelemetry spans of hand-overs and of routers: made of times that were recorded before, sent by the SDK's thread.

A hand-over has spans where its request came with a ``traceparent`` whose sender samples the trace
(https://www.w3.org/TR/trace-context/#traceparent-header). A router begins a trace for a request without one. This is
the only file that reads the time of day: a span carries it, no decision depends on it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.transport.errors import ConfigError, quoted_url

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as SdkSpan

TRACEPARENT = "traceparent"
CLOSE_SECONDS = 2.0
"""How long ``Tracer.close`` waits for the last spans to leave."""
MAX_TEXT = 256
"""Characters of a text in a span: a peer or a client may have chosen it."""
_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-|$)")
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"

Attributes = Mapping[str, str | int | float | bool]


def sampled_traceparent(headers: Mapping[str, str] | None) -> str:
    """The ``traceparent`` of a request; empty where it has none, a malformed one, or one of a trace that is not
    sampled."""
    if not headers:
        return ""
    given = headers.get(TRACEPARENT, "")
    match = _FORM.match(given)
    return given if match is not None and int(match[1], 16) & 1 else ""


def time_of_zero(now: float) -> int:
    """The time of day at 0 of a clock that is at ``now`` seconds: nanoseconds since 1970."""
    return time.time_ns() - int(now * 1e9)


class OpenSpan:
    """A span that has not ended. ``headers``: the trace context of what is sent within it."""

    def __init__(self, tracer: Tracer, name: str, context: Context, attributes: Attributes | None) -> None:
        kind = tracer.trace.SpanKind.SERVER
        self._tracer, self._span = tracer, tracer.native.start_span(name, context, kind, attributes)
        self.headers: dict[str, str] = {}
        tracer.propagator.inject(self.headers, tracer.trace.set_span_in_context(self._span))

    def end(self, attributes: Attributes | None = None, error: str = "") -> None:
        """Only the first call counts. ``error``: why what the span stands for failed."""
        if self._span.is_recording():
            self._span.set_attributes(dict(attributes or {}))
            self._tracer.set_error(self._span, error)
            self._span.end()


class Tracer:
    """Makes spans and hands them to an exporter. Thread-safe."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.trace, self.provider = trace, provider
        self.native = provider.get_tracer("kvferry")
        self.propagator = TraceContextTextMapPropagator()

    def record(self, traceparent: str, name: str, begin: int, end: int, attributes: Attributes, error: str) -> None:
        """Make a span that has ended, within the one that ``traceparent`` names. Times in nanoseconds since 1970."""
        context = self.propagator.extract({TRACEPARENT: traceparent})
        span = self.native.start_span(name, context, attributes=attributes, start_time=begin)
        self.set_error(span, error)
        span.end(end)

    def begin(
        self, name: str, headers: Mapping[str, str] | None = None, attributes: Attributes | None = None
    ) -> OpenSpan:
        """Begin the span of a request that came with these ``headers``: within the span that they name, or of a new
        trace."""
        return OpenSpan(self, name, self.propagator.extract(headers or {}), attributes)

    def set_error(self, span: SdkSpan, error: str) -> None:
        """Why what a span stands for failed; empty where it did not."""
        if error:
            span.set_status(self.trace.Status(self.trace.StatusCode.ERROR, error))

    def close(self) -> None:
        """Send what is left, for ``CLOSE_SECONDS`` at most."""
        closing = threading.Thread(target=self.provider.shutdown, name="kvferry-spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def open_tracer(endpoint: str | None, identity: Attributes | None = None) -> Tracer | None:
    """A tracer that sends spans to an OTLP endpoint, by gRPC, or by HTTP where ``OTEL_EXPORTER_OTLP_TRACES_PROTOCOL``
    is ``http/protobuf``, as vLLM's own tracer does; ``None`` without an endpoint.

    Args:
        endpoint: URL; of HTTP with its path, as in ``http://127.0.0.1:4318/v1/traces``.
        identity: attributes of this process. Its service is ``OTEL_SERVICE_NAME``, or ``kvferry``.

    Raises:
        ConfigError: OpenTelemetry is not installed, or the protocol is another one; one line.
    """
    if not endpoint:
        return None
    protocol = os.environ.get(_PROTOCOL, "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{_PROTOCOL} is {protocol!r}, expected grpc or http/protobuf")
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter: Any
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter = GrpcExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"))
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter(endpoint=endpoint)
    except ImportError as error:
        raise ConfigError(
            f"traces are to go to {quoted_url(endpoint)}, but OpenTelemetry is not there ({error}); "
            "pip install 'kvferry[otel]', or name no endpoint"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME") or "kvferry"
    resource = Resource.create({"service.name": name, **(identity or {})})
    limits = SpanLimits(max_span_attribute_length=MAX_TEXT)
    provider = TracerProvider(resource=resource, span_limits=limits)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)
