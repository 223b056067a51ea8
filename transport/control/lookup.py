"""Looks up host names, and bootstrap pages, on a few threads, so that no other work waits for a name server.

libzmq would look names up on its I/O thread, and every other connection would wait for a name server that is silent.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvferry.transport.control import bootstrap

MAX_THREADS = 8
MAX_WAITING = 1024
"""Names that wait for a thread; further names are refused at once."""


def is_numeric(host: str) -> bool:
    """Whether ``host`` is an address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Lookup:
    """One name. ``done``: then either ``address`` is its numeric address, or ``error`` says why there is none."""

    def __init__(self, host: str, on_done: Callable[[], None]) -> None:
        self.host = host
        self.address = ""
        self.error = ""
        self.done = False
        self.on_done = on_done

    def find(self) -> None:
        """Block until it is known. Raises OSError or UnicodeError."""
        self.address = str(socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0][4][0])


class PageLookup(Lookup):
    """The bootstrap page at ``host`` and ``port``. ``content``: the page, where there is no ``error``. ``refusal`` says
    why there must be no connection to a numeric address; empty where there may be one."""

    def __init__(self, host: str, port: int, refusal: Callable[[str], str], on_done: Callable[[], None]) -> None:
        super().__init__(host, on_done)
        self.port, self.refusal, self.content = port, refusal, b""

    def find(self) -> None:
        super().find()
        refused = self.refusal(self.address)
        if refused:
            raise OSError(refused)
        self.content = bootstrap.fetch(self.address, self.port)


L = TypeVar("L", bound=Lookup)
_lock = threading.Lock()
_waiting: deque[Lookup] = deque()
_threads = 0


def look_up(host: str, on_done: Callable[[], None]) -> Lookup:
    """Begin to look up a name. ``on_done`` is called from another thread."""
    return begin(Lookup(host, on_done))


def begin(lookup: L) -> L:
    """Begin to look up what ``lookup`` names, and return it."""
    global _threads  # noqa: PLW0603
    with _lock:
        if len(_waiting) >= MAX_WAITING:
            lookup.error, lookup.done = f"{MAX_WAITING} names wait to be looked up", True
            return lookup
        _waiting.append(lookup)
        if _threads < MAX_THREADS:
            threading.Thread(target=_serve, name="kvferry-lookup", daemon=True).start()
            _threads += 1
    return lookup


def _serve() -> None:
    global _threads  # noqa: PLW0603
    while True:
        with _lock:
            if not _waiting:
                _threads -= 1
                return
            lookup = _waiting.popleft()
        try:
            lookup.find()
        except (OSError, UnicodeError) as error:
            lookup.error = str(error)
        lookup.done = True
        lookup.on_done()
