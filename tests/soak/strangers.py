"""A stranger without key: garbage, half-open connections and other protocols on every TCP port of some processes."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from kvferry.transport.control.key_file import shared_key
from kvferry.transport.control.keys import Keys
from tests.fuzz.attackers import Stranger
from tests.transport.test_planes_hosts import listening_ports

THROW_SECONDS = 0.1


class Strangers:
    """One on each port. Something is thrown each ``THROW_SECONDS`` until ``close``."""

    def __init__(self, pids: Sequence[int], seed: int) -> None:
        self._pids, self._rng = list(pids), random.Random(seed)
        self._end, self._by_port = threading.Event(), dict[int, Stranger]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        keys = Keys(shared_key())
        while not self._end.wait(THROW_SECONDS):
            ports = [port for _, port in listening_ports(self._rng.choice(self._pids))]
            port = self._rng.choice(ports)
            if port not in self._by_port:
                self._by_port[port] = Stranger(self._rng, port, [], keys)
            self._by_port[port].throw()

    @property
    def throws(self) -> int:
        return sum(stranger.inputs for stranger in self._by_port.values())

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        for stranger in self._by_port.values():
            stranger.close()
