"""A control connection to a rank, without a rank of D."""

from __future__ import annotations

from kvferry.transport.control.dialer import Connection, Dialer
from tests.support.ranks import Rank


class Dialed:
    """One connection with a dialer of its own."""

    def __init__(self, p: Rank, limit: int) -> None:
        rank_context = p.worker.rank_context
        assert rank_context is not None
        self._dialer = Dialer(rank_context.keys, max_message_bytes=limit)
        host, port, key = p.address.host, p.address.port, p.address.key
        self._connection: Connection = self._dialer.connect(host, port, key=key, timeout=300)

    def send(self, frames: list[bytes]) -> bool:
        return self._connection.send(frames)

    def receive(self) -> list[list[bytes]]:
        self._dialer.progress()
        return self._connection.receive()

    def close(self) -> None:
        self._dialer.close()


def dialed(p: Rank, limit: int = 1 << 20) -> Dialed:
    """A connection to the control port of ``p``, with the keys of ``p``."""
    return Dialed(p, limit)
