"""The bootstrap page: how routers that know P by one HTTP address find the addresses of its ranks.

``GET /query`` answers as the bootstrap server of vLLM's Mooncake connector does: for each data-parallel rank the engine
id, and for each tensor- and pipeline-parallel rank an address. Here an address is that of the rank's control port. The
page has no secrets: connections to a control port are admitted by key.
"""

from __future__ import annotations

import http.client
import http.server
import ipaddress
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.transport.errors import ConfigError, ProtocolError, quoted

PATH = "/query"
MAX_CONNECTIONS = 16
"""Connections that are served at once; further ones are closed."""
READ_SECONDS = 5.0
"""How long a connection may be silent."""
FETCH_SECONDS = 10.0
"""How long the fetch of one page may take."""
MAX_PAGE_BYTES = 1 << 20
MAX_FETCHES = 4
"""Pages that are fetched at once."""
MAX_WAITING = 256
"""Pages that wait to be fetched; further ones are refused at once."""

Ranks = Mapping[tuple[int, int], tuple[str, int]]
"""Host and control port by (tp_rank, pp_rank)."""


class _Entry(msgspec.Struct):
    engine_id: Annotated[str, Meta(max_length=256)]
    worker_addr: dict[str, dict[str, str]]


def page(engine_id: str, dp_rank: int, ranks: Ranks) -> bytes:
    """The page of one data-parallel rank of P."""
    workers: dict[str, dict[str, str]] = {}
    for (tp_rank, pp_rank), (host, port) in sorted(ranks.items()):
        workers.setdefault(str(tp_rank), {})[str(pp_rank)] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return json.dumps({str(dp_rank): {"engine_id": engine_id, "worker_addr": workers}}).encode()


def first_rank(content: bytes, engine_id: str) -> tuple[str, int]:
    """Host and control port of the first rank of an engine, from a page.

    Raises:
        ProtocolError: the page is malformed, or has no such engine.
    """
    try:
        entries = msgspec.json.decode(content, type=dict[str, _Entry])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"the bootstrap page is malformed: {quoted(str(error)[:200])}") from None
    for entry in entries.values():
        if entry.engine_id == engine_id:
            address = urlsplit(f"//{entry.worker_addr.get('0', {}).get('0', '')}")
            try:
                host, port = address.hostname, address.port
            except ValueError:
                host, port = None, None
            if host and port:
                return host, port
            raise ProtocolError("the bootstrap page has no address of the rank tp0 pp0")
    raise ProtocolError(f"the bootstrap page has no engine {quoted(engine_id)}")


def checked_url(text: str) -> tuple[str, int]:
    """Host and port of a bootstrap address such as ``http://10.0.0.1:8998``.

    Raises:
        ProtocolError: it is none.
    """
    try:
        url = urlsplit(text)
        host, port = url.hostname, url.port
    except ValueError:
        url, host, port = None, None, None
    if url is None or url.scheme != "http" or not host or not port or url.path not in ("", "/") or url.query:
        raise ProtocolError(f"remote_bootstrap_addr {quoted(text)} is no address, expected http://HOST:PORT")
    return host, port


def fetch(address: str, port: int) -> bytes:
    """The page at a numeric address. Blocks for ``FETCH_SECONDS`` at most.

    Raises:
        OSError: there is none.
    """
    ipaddress.ip_address(address)
    connection = http.client.HTTPConnection(address, port, timeout=READ_SECONDS)
    deadline = threading.Timer(FETCH_SECONDS, _shut, (connection,))  # else a server could send byte by byte for ever
    deadline.daemon = True
    deadline.start()
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"the bootstrap page answers {answer.status}")
        if answer.getheader("Transfer-Encoding") is not None:  # http.client does not bound what it reads of a chunk
            raise OSError("the bootstrap page has a Transfer-Encoding, expected none")
        content = answer.read(MAX_PAGE_BYTES + 1)
    except http.client.HTTPException as error:
        raise OSError(f"the bootstrap page does not answer in HTTP: {type(error).__name__}") from None
    finally:
        deadline.cancel()
        connection.close()
    if len(content) > MAX_PAGE_BYTES:
        raise OSError(f"the bootstrap page has more than {MAX_PAGE_BYTES} bytes")
    return content


def _shut(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


class PageFetch:
    """One page, fetched by a thread. ``done``: then either ``content`` is the page, or ``error`` says why there is
    none."""

    def __init__(self, url: str, refusal: Callable[[str], str], on_done: Callable[[], None]) -> None:
        self.url, self.content, self.error, self.done = url, b"", "", False
        self._refusal, self._on_done = refusal, on_done

    def run(self) -> None:
        try:
            host, port = checked_url(self.url)
            address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
            self.error = self._refusal(address)
            if not self.error:
                self.content = fetch(address, port)
        except (OSError, UnicodeError, ProtocolError) as error:
            self.error = str(error)
        except Exception as error:  # whatever P makes the library raise: the request must not wait for ever
            self.error = f"the bootstrap page cannot be fetched: {quoted(repr(error)[:200])}"
        finally:
            self.done = True
            self._on_done()


_lock = threading.Lock()
_waiting: deque[PageFetch] = deque()
_threads = 0


def fetch_page(url: str, refusal: Callable[[str], str], on_done: Callable[[], None]) -> PageFetch:
    """Begin to fetch a page.

    Args:
        url: as ``checked_url`` takes it.
        refusal: why there must be no connection to a numeric address; empty where there may be one.
        on_done: called from another thread.
    """
    global _threads  # noqa: PLW0603
    page_fetch = PageFetch(url, refusal, on_done)
    with _lock:
        if len(_waiting) >= MAX_WAITING:
            page_fetch.error, page_fetch.done = f"{MAX_WAITING} bootstrap pages wait to be fetched", True
            return page_fetch
        _waiting.append(page_fetch)
        if _threads < MAX_FETCHES:
            threading.Thread(target=_serve_fetches, name="kvferry-bootstrap", daemon=True).start()
            _threads += 1
    return page_fetch


def _serve_fetches() -> None:
    global _threads  # noqa: PLW0603
    while True:
        with _lock:
            if not _waiting:
                _threads -= 1
                return
            page_fetch = _waiting.popleft()
        try:
            page_fetch.run()
        except BaseException:  # of ``on_done``; this thread ends, and another one may start
            with _lock:
                _threads -= 1
            raise


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
