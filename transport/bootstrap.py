"""The bootstrap page: how D and routers that know P by one HTTP address find the control ports of its ranks.

``GET /query`` answers as the bootstrap server of vLLM's Mooncake connector does: for each data-parallel rank the engine
id, and for each tensor- and pipeline-parallel rank an address, here that of its control port. The page has no secrets:
connections to a control port are admitted by key. P's address comes from a client, so D bounds everything about an
answer.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvferry.transport.blocking_calls import BlockingCall, BlockingCalls
from kvferry.transport.errors import ConfigError, ProtocolError, quoted, quoted_url
from kvferry.transport.host import numeric_address
from kvferry.transport.sockets import Sockets, Stranger, Strangers

PATH = "/query"
READ_SECONDS = 5.0
"""How long a connection may be silent."""
FETCH_SECONDS = 10.0
"""How long the fetch of one page may take."""
MAX_PAGE_BYTES = 1 << 20
MAX_REQUEST_BYTES = 16 << 10
FETCHES = BlockingCalls("kvferry-bootstrap", threads=4, waiting=256)
_END = b"\r\n\r\n"

Ranks = Mapping[tuple[int, int], tuple[str, int]]
"""Host and control port by (tp_rank, pp_rank)."""


class _Entry(msgspec.Struct):
    engine_id: Annotated[str, Meta(max_length=256)]
    worker_addr: dict[str, dict[str, str]]


def bootstrap_page(engine_id: str, dp_rank: int, ranks: Ranks) -> bytes:
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
            with suppress(ValueError):
                address = urlsplit(f"//{entry.worker_addr.get('0', {}).get('0', '')}")
                if address.hostname and address.port:
                    return address.hostname, address.port
            raise ProtocolError("the bootstrap page has no address of the rank tp0 pp0")
    raise ProtocolError(f"the bootstrap page has no engine {quoted(engine_id)}")


def checked_url(text: str) -> tuple[str, int]:
    """Host and port of a bootstrap address such as ``http://10.0.0.1:8998``.

    Raises:
        ProtocolError: it is none.
    """
    with suppress(ValueError):
        url = urlsplit(text)
        usable = url.scheme == "http" and url.path in ("", "/") and not url.query and "@" not in text
        if usable and url.hostname and url.port:
            return url.hostname, url.port
    raise ProtocolError(f"remote_bootstrap_addr {quoted_url(text)} is no address, expected http://HOST:PORT")


# --- D --------------------------------------------------------------------------------------------------------------


def fetch(address: str, port: int) -> bytes:
    """The page at a numeric address. Blocks for ``FETCH_SECONDS`` at most.

    Raises:
        OSError: there is none.
    """
    ipaddress.ip_address(address)
    connection = http.client.HTTPConnection(address, port)
    connection.sock = socket.create_connection((address, port), READ_SECONDS)
    # Else a server could send byte by byte for ever. http.client forgets the socket where the length is not told.
    connected = connection.sock.dup()
    deadline = threading.Timer(FETCH_SECONDS, _shut, (connected,))
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
        connected.close()
        connection.close()
    if len(content) > MAX_PAGE_BYTES:
        raise OSError(f"the bootstrap page has more than {MAX_PAGE_BYTES} bytes")
    return content


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def fetch_page(url: str, refusal: Callable[[str], str], on_done: Callable[[], None]) -> BlockingCall[bytes]:
    """Begin to fetch a page.

    Args:
        url: as ``checked_url`` takes it.
        refusal: why there must be no connection to a numeric address; empty where there may be one.
        on_done: called from another thread.
    """

    def work() -> bytes:
        host, port = checked_url(url)
        address = numeric_address(host, port)
        if refused := refusal(address):
            raise OSError(refused)
        return fetch(address, port)

    return FETCHES.begin(work, on_done)


# --- P --------------------------------------------------------------------------------------------------------------


def _answer(status: str, content: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Connection: close" + _END + content


class BootstrapServer:
    """Serves the page at one address, by a thread of its own. Request and answer share one deadline, and the clients
    the places of ``Strangers``.

    Args:
        host: the address to bind, one interface.
        port: the port to bind.

    Raises:
        ConfigError: it cannot be bound.
    """

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setblocking(False)
        self._sockets = Sockets()
        try:
            self._listener.bind((host, port))
            self._strangers = Strangers(self._sockets, self._listener, self._serve)
        except OSError as error:
            self._listener.close()
            self._sockets.close()
            raise ConfigError(
                f"bootstrap_port: {host}:{port} cannot be bound: {error.strerror or error}; give a free port"
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._page = self._not_found = _answer("404 Not Found")
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-bootstrap", daemon=True)
        self._thread.start()

    def publish(self, content: bytes) -> None:
        """Answer with this page from now on; before, the answer is 404."""
        self._page = _answer("200 OK", content)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._closing = True
        _shut(self._listener)  # wakes the thread
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._sockets.progress(self._strangers.expire())
        self._strangers.close()
        self._sockets.close()

    def _serve(self, stranger: Stranger) -> bool:
        """Read a request, then write its answer. Returns whether there is more to do."""
        try:
            while not stranger.answer and _END not in stranger.said:
                said = stranger.sock.recv(MAX_REQUEST_BYTES)
                stranger.said += said
                if not said or len(stranger.said) > MAX_REQUEST_BYTES:
                    self._sockets.drop(stranger.sock)
                    return False
            if not stranger.answer:
                asked = stranger.said.partition(b"\r\n")[0].split()
                stranger.answer = self._page if asked[:2] == [b"GET", PATH.encode()] else self._not_found
            while stranger.answer:
                stranger.answer = stranger.answer[stranger.sock.send(stranger.answer) :]
        except BlockingIOError:
            return True
        self._sockets.drop(stranger.sock)
        return False
