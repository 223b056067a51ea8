"""A stranger without key: garbage, half-open connections and other protocols on every TCP port of some processes."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from tests.transport.control_strangers import message
from tests.transport.test_control_garbage import GREETING, HTTP, READY
from tests.transport.test_planes_hosts import listening_ports

THROW_SECONDS = 0.1
OPENINGS = (b"", HTTP, GREETING, GREETING + READY, message(), message()[:4], b"\xff" * 64)


class Stranger:
    """Throws something each ``THROW_SECONDS`` until ``close``."""

    def __init__(self, pids: Sequence[int], seed: int) -> None:
        self._pids, self._rng = list(pids), random.Random(seed)
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
                peer.sendall(self._rng.choice(OPENINGS) + self._rng.randbytes(self._rng.choice((0, 1, 70, 5000))))
                half_open.append(peer)
                self.throws += 1
            while len(half_open) > 40 or (half_open and self._rng.random() < 0.3):
                half_open.pop(self._rng.randrange(len(half_open))).close()
        for peer in half_open:
            peer.close()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
