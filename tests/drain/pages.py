"""A real HTTP server that stands in for engines: each ``/metrics`` page is what the test says."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded")


def recorded(name: str) -> str:
    """A page of a vLLM 0.32 engine on a CPU: ``prefill`` or ``decode``. Only the
    series of requests and of KVFerry were kept."""
    return (RECORDED / f"{name}.txt").read_text()


class Pages:
    """``pages``: the pages of ``url``, one after the other; the last one stays. A page that is a number is that HTTP
    status. A request waits while ``open`` is not set."""

    def __init__(self, *pages: str | int) -> None:
        self.pages = list(pages)
        self.open = threading.Event()
        self.open.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.open.wait()
                page = owner.pages.pop(0) if len(owner.pages) > 1 else owner.pages[0]
                if isinstance(page, int):
                    self.send_error(page)
                    return
                body = page.encode()
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.name = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.name}"
        threading.Thread(target=self._server.serve_forever, name="pages", daemon=True).start()

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
