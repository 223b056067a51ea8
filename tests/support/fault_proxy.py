"""A TCP proxy between two processes. It passes every byte on, until a fault is armed: then the stream is damaged once.

A fault strikes at an exact byte: after ``at`` bytes have passed a port in one direction since ``arm``. So the same
fault strikes at the same place of the protocol in each run, however fast the machine is.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

_READ_BYTES = 1 << 16
_GATHER_SECONDS = 0.2
"""How long a fault waits for the bytes that it needs, where the sender says no more."""


class Kind(enum.Enum):
    """What happens to the stream. ``STALL``: the port accepts connections and passes nothing on, either way, until
    ``FaultProxy.heal``. ``CALL``: the proxy calls a function, and holds this byte and all behind it back meanwhile."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    CORRUPT = "corrupt"
    TRUNCATE = "truncate"
    DELAY = "delay"
    STALL = "stall"
    CALL = "call"


@dataclass(frozen=True)
class Fault:
    """One fault on the connections to ``port``.

    ``upwards``: on the bytes towards the process that listens. ``nbytes`` are dropped, repeated, or put behind the
    ``nbytes`` that follow them. ``flip``: the bits of the byte that is corrupted. ``seconds``: of a delay.
    ``abruptly``: a truncated connection ends with a reset, not in order.
    """

    kind: Kind
    port: int
    upwards: bool
    at: int
    nbytes: int = 1
    flip: int = 1
    seconds: float = 0.0
    abruptly: bool = False
    call: Callable[[], None] | None = None


class _Connection:
    """Both sockets of one connection through the proxy."""

    def __init__(self, port: int, lower: socket.socket, upper: socket.socket) -> None:
        self.port, self.lower, self.upper = port, lower, upper
        self.came = bytearray(), bytearray()

    def end(self, *, abruptly: bool = False) -> None:
        """Close both sockets; with a reset where ``abruptly``."""
        for each in (self.lower, self.upper):
            with suppress(OSError):
                if abruptly:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # It wakes the thread that reads here: the system closes nothing while one does.
                each.shutdown(socket.SHUT_RD if abruptly else socket.SHUT_RDWR)
            each.close()


class FaultProxy:
    """Listens at ``address`` on the ports that ``open`` names, and connects to the same ports at another address."""

    def __init__(self, address: str, *, records: bool = False) -> None:
        self.address, self._records = address, records
        self.recorded: list[tuple[bytearray, bytearray]] = []
        """Where it records: what came on each connection, upwards and downwards."""
        self.passed = 0
        """Bytes passed on so far, over all connections."""
        self.struck: list[Fault] = []
        self._listeners: dict[int, socket.socket] = {}
        self._connections: set[_Connection] = set()
        self._armed: Fault | None = None
        self._left = 0
        self._stalled: int | None = None
        self._healed = threading.Condition()
        self._lock = threading.Lock()

    def open(self, port: int, to: str) -> None:
        """Pass connections to ``port`` on to the process that listens there at the address ``to``. Idempotent."""
        if port in self._listeners:
            return
        listener = self._listeners[port] = socket.create_server((self.address, port))
        threading.Thread(target=self._accept, args=(listener, port, to), daemon=True).start()

    def arm(self, fault: Fault) -> None:
        """Let this fault strike once, in place of one that has not struck yet."""
        with self._lock:
            self._armed, self._left = fault, fault.at

    def heal(self) -> None:
        """No fault is armed any more, and what a stalled port holds goes on."""
        with self._lock:
            self._armed = None
        with self._healed:
            self._stalled = None
            self._healed.notify_all()

    def cut(self) -> None:
        """End all connections with a reset."""
        for connection in list(self._connections):
            connection.end(abruptly=True)

    def close(self) -> None:
        """End everything."""
        for listener in self._listeners.values():
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.heal()
        self.cut()

    # --- threads: one for each port, two for each connection -----------------------------------------------------

    def _accept(self, listener: socket.socket, port: int, to: str) -> None:
        while True:
            try:
                lower, _ = listener.accept()
            except OSError:
                return
            try:
                upper = socket.create_connection((to, port))
            except OSError:  # nobody listens there: so it looks to the one that has connected, too
                lower.close()
                continue
            connection = _Connection(port, lower, upper)
            self._connections.add(connection)
            self.recorded.append(connection.came)
            for upwards in (True, False):
                threading.Thread(target=self._pump, args=(connection, upwards), daemon=True).start()

    def _pump(self, connection: _Connection, upwards: bool) -> None:
        of, to = (connection.lower, connection.upper) if upwards else (connection.upper, connection.lower)
        with suppress(OSError, ValueError):
            while data := of.recv(_READ_BYTES):
                if self._records:
                    connection.came[not upwards].extend(data)
                for piece in self._pieces(connection, upwards, of, data):
                    self._wait(connection.port)
                    to.sendall(piece)
                    self.passed += len(piece)
        self._wait(connection.port)  # the end of a connection is held back like its bytes
        connection.end()
        self._connections.discard(connection)

    def _wait(self, port: int) -> None:
        with self._healed:
            self._healed.wait_for(lambda: self._stalled != port)

    def _due(self, connection: _Connection, upwards: bool, nbytes: int) -> tuple[Fault | None, int]:
        """The fault that strikes within the next ``nbytes``, and how many pass before it."""
        with self._lock:
            fault = self._armed
            if fault is None or (fault.port, fault.upwards) != (connection.port, upwards):
                return None, nbytes
            before, self._left = self._left, self._left - nbytes
            if before >= nbytes:
                return None, nbytes
            self._armed = None
            return fault, before

    def _pieces(self, connection: _Connection, upwards: bool, of: socket.socket, data: bytes) -> Iterator[bytes]:
        """What becomes of ``data``."""
        fault, before = self._due(connection, upwards, len(data))
        if before:
            yield data[:before]
        if fault is None:
            return
        rest = data[before:]
        self.struck.append(fault)
        match fault.kind:
            case Kind.DROP:
                yield _at_least(of, rest, fault.nbytes)[fault.nbytes :]
            case Kind.DUPLICATE:
                rest = _at_least(of, rest, fault.nbytes)
                yield rest[: fault.nbytes] + rest
            case Kind.REORDER:
                n, rest = fault.nbytes, _at_least(of, rest, 2 * fault.nbytes)
                yield rest[n : 2 * n] + rest[:n] + rest[2 * n :]
            case Kind.CORRUPT:
                yield bytes([rest[0] ^ fault.flip]) + rest[1:]
            case Kind.TRUNCATE:
                connection.end(abruptly=fault.abruptly)
                raise OSError("truncated")
            case Kind.DELAY:
                threading.Event().wait(fault.seconds)
                yield rest
            case Kind.STALL:
                with self._healed:
                    self._stalled = connection.port
                yield rest
            case Kind.CALL:
                assert fault.call is not None
                fault.call()
                yield rest


def _at_least(of: socket.socket, data: bytes, nbytes: int) -> bytes:
    """``data`` and what follows it, until there are ``nbytes`` or the sender pauses."""
    while len(data) < nbytes and select.select([of], [], [], _GATHER_SECONDS)[0]:
        more = of.recv(_READ_BYTES)
        if not more:
            break
        data += more
    return data
