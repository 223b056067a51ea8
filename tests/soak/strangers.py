"""A stranger without key: garbage, half-open connections and other protocols on every TCP port of some processes."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress

from kvferry.transport.control.key_file import shared_key
from kvferry.transport.control.keys import Keys, greeting
from tests.transport.test_planes_hosts import listening_ports

THROW_SECONDS = 0.1
HTTP = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: a-scanner/1.0\r\nAccept: */*\r\n\r\n"
ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)


def greeting_of(keys: Keys) -> bytes:
    """What opens the control port of an engine with these keys; whoever listens on the network knows it."""
    return greeting(keys.admitted[keys.fingerprint])


def client_hello() -> bytes:
    """The begin of a TLS handshake, by a client without a key."""
    said = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), said, server_hostname="kvferry").do_handshake()
    return said.read()


class Stranger:
    """Throws something each ``THROW_SECONDS`` until ``close``."""

    def __init__(self, pids: Sequence[int], seed: int) -> None:
        self._pids, self._rng = list(pids), random.Random(seed)
        known = greeting_of(Keys(shared_key()))
        hello = client_hello()
        self._openings = (b"", HTTP, ZMTP, hello, known, known[:4], known + hello, b"\xff" * 64)
        self._end = threading.Event()
        self.throws = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        half_open: list[socket.socket] = []
        while not self._end.wait(THROW_SECONDS):
            ports = [port for _, port in listening_ports(self._rng.choice(self._pids))]
            with suppress(OSError):
                peer = socket.create_connection(("127.0.0.1", self._rng.choice(ports)), timeout=1)
                peer.sendall(self._rng.choice(self._openings) + self._rng.randbytes(self._rng.choice((0, 1, 70, 5000))))
                half_open.append(peer)
                self.throws += 1
            while len(half_open) > 40 or (half_open and self._rng.random() < 0.3):
                half_open.pop(self._rng.randrange(len(half_open))).close()
        for peer in half_open:
            peer.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
