"""Spans that stay in this process, and a real OTLP/HTTP receiver for those of other processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvferry.transport.tracing import Tracer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"


class Spans:
    """``tracer``: keeps its spans here."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider)

    def named(self, name: str) -> list[Any]:
        """The spans of this name that have ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def __len__(self) -> int:
        return len(self._exporter.get_finished_spans())


class Receiver:
    """``requests``: all that came to ``url``, decoded."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                owner.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, name="otlp", daemon=True).start()

    def spans(self) -> list[dict[str, Any]]:
        """All spans, each with its ``service``, its ``scope`` and flat ``attributes``; ids as hexadecimal digits."""
        found = []
        for request in list(self.requests):
            for resource in request.resource_spans:
                identity = _flat(resource.resource.attributes)
                for scope in resource.scope_spans:
                    found += [
                        {
                            "service": identity["service.name"], "instance": identity.get("service.instance.id", ""),
                            "scope": scope.scope.name, "name": span.name, "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(), "parent": span.parent_span_id.hex(),
                            "begin": span.start_time_unix_nano, "end": span.end_time_unix_nano,
                            "error": span.status.message, "attributes": _flat(span.attributes),
                        }
                        for span in scope.spans
                    ]  # fmt: skip
        return found


def _flat(attributes: Any) -> dict[str, Any]:
    return {each.key: next(iter(MessageToDict(each.value).values()), "") for each in attributes}


@contextmanager
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
