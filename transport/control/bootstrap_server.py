"""P's server of the bootstrap page."""

from __future__ import annotations

import http.server
import socket
import threading
from typing import Any

from kvferry.transport.control.bootstrap_page import PATH
from kvferry.transport.errors import ConfigError

MAX_CONNECTIONS = 16
"""Connections that are served at once; further ones are closed."""
READ_SECONDS = 5.0
"""How long a connection may be silent."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = READ_SECONDS
    server: _Server

    def do_GET(self) -> None:
        content = self.server.content if self.path == PATH else None
        self.send_response(200 if content is not None else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a stranger chooses what would be logged."""


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    content: bytes | None = None

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: an error of one connection, such as a reset, concerns its peer only."""


class BootstrapServer:
    """Serves the page at one address, by a thread of its own and at most ``MAX_CONNECTIONS`` more.

    Args:
        host: the address to bind, one interface.
        port: the port to bind.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port))
        except OSError as error:
            raise ConfigError(
                f"bootstrap_port: {host}:{port} cannot be bound: {error.strerror or error}; give a free port"
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvferry-bootstrap", daemon=True)
        self._thread.start()

    def publish(self, content: bytes) -> None:
        """Answer with this page from now on; before, the answer is 404."""
        self._server.content = content

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
