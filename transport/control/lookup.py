"""Looks up host names on a few threads of its own, so that no other work waits for a name server.

libzmq would look names up on its I/O thread, and every other connection would wait for a name server that is silent.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Callable

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


_lock = threading.Lock()
_waiting: deque[Lookup] = deque()
_threads = 0


def look_up(host: str, on_done: Callable[[], None]) -> Lookup:
    """Begin to look up a name. ``on_done`` is called from another thread."""
    global _threads  # noqa: PLW0603
    lookup = Lookup(host, on_done)
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
            lookup.address = str(socket.getaddrinfo(lookup.host, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            lookup.error = str(error)
        lookup.done = True
        lookup.on_done()
