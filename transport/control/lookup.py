"""Looks up host names on a few threads of its own, so that no other work waits for a name server.

libzmq would look names up on its I/O thread, and every other connection would wait for a name server that is silent.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from kvferry.transport.control.blocking_calls import BlockingCalls

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
        self._on_done = on_done

    def run(self) -> None:
        try:
            self.address = str(socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            self.error = str(error)
        self.done = True
        self._on_done()


_lookups = BlockingCalls("kvferry-lookup", MAX_THREADS, MAX_WAITING)


def look_up(host: str, on_done: Callable[[], None]) -> Lookup:
    """Begin to look up a name. ``on_done`` is called from another thread."""
    lookup = Lookup(host, on_done)
    if not _lookups.start(lookup.run):
        lookup.error, lookup.done = f"{MAX_WAITING} names wait to be looked up", True
    return lookup
