"""P's server of the bootstrap page."""

from __future__ import annotations

import contextlib
import socket
import threading

from kvferry.transport.bootstrap.page import PATH
from kvferry.transport.errors import ConfigError
from kvferry.transport.sockets import Sockets, Stranger, Strangers

MAX_REQUEST_BYTES = 16 << 10
_END = b"\r\n\r\n"


def _answer(status: str, content: bytes = b"") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Connection: close" + _END + content


_NOT_FOUND = _answer("404 Not Found")


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
        self._page = _NOT_FOUND
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-bootstrap", daemon=True)
        self._thread.start()

    def publish(self, content: bytes) -> None:
        """Answer with this page from now on; before, the answer is 404."""
        self._page = _answer("200 OK", content)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
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
                stranger.answer = self._page if asked[:2] == [b"GET", PATH.encode()] else _NOT_FOUND
            while stranger.answer:
                stranger.answer = stranger.answer[stranger.sock.send(stranger.answer) :]
        except BlockingIOError:
            return True
        self._sockets.drop(stranger.sock)
        return False
