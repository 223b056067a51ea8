"""The control port: a round trip of an ask and its answer, and a new connection with its first answer.

    python benchmarks/planes/control_round_trip.py [--rounds 40] [--json FILE]

Two processes for each wire: KVFerry's control plane (TLS 1.3), and bare TCP. Both ends sleep in ``poll``. The wires
take turns; half of a turn is beside a thread of D that computes in Python and never gives up the GIL by itself, at the
switch interval of a hand-over. The ratios are medians over the turns.
"""

from __future__ import annotations

import select
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from kvferry.transport.control.dialer import Dialer
from kvferry.transport.control.keys import Keys, new_secret
from kvferry.transport.control.listener import Listener
from kvferry.transport.wake import ShortSwitchInterval, keep_time_exactly

OURS, TCP = "tls", "tcp"
ASK_BYTES, ANSWER_BYTES = 300, 1200
"""A prompt of 4096 tokens: an ask with one span, and a grant with 256 block ids."""
MESSAGES = 25
"""Round trips of one round, and as many beside a thread that computes."""
LIMIT = 8 << 20
ASK, ANSWER = ([b"kvferry", b"\0\7", bytes(size - 9)] for size in (ASK_BYTES, ANSWER_BYTES))
SWITCH_SECONDS = 2e-5
"""As in connector/engine/loop.py."""


# --- the wires ------------------------------------------------------------------------------------------------------


def serve(wire: str, secret: str, orders: Connection) -> None:
    """P: answers every message until ``orders`` has something."""
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    if wire == TCP:
        serve_tcp(poll, orders)
        return
    listener = Listener("127.0.0.1", 0, keys=Keys(secret), max_message_bytes=LIMIT)
    orders.send(listener.port)
    poll.register(listener.fd, select.POLLIN)
    while orders.fileno() not in dict(poll.poll()):
        for identity, _, _ in listener.receive():
            listener.send(identity, ANSWER)


def serve_tcp(poll: select.poll, orders: Connection) -> None:
    server, peers = socket.create_server(("127.0.0.1", 0)), dict[int, socket.socket]()
    orders.send(server.getsockname()[1])
    poll.register(server, select.POLLIN)
    while orders.fileno() not in (ready := dict(poll.poll())):
        for fd in ready:
            if fd == server.fileno():
                peer = prepared(server.accept()[0])
                peers[peer.fileno()] = peer
                poll.register(peer, select.POLLIN)
            elif peers[fd].recv(LIMIT):
                peers[fd].send(bytes(ANSWER_BYTES))
            else:
                poll.unregister(fd)
                peers.pop(fd).close()


def prepared(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class TcpEnd:
    """D's end of one connection."""

    def connect(self, port: int) -> None:
        self._sock = prepared(socket.create_connection(("127.0.0.1", port)))
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)

    def exchange(self) -> None:
        """Send an ask, and wait for the answer."""
        self._sock.send(bytes(ASK_BYTES))
        left = ANSWER_BYTES
        while left:
            self._poll.poll()
            left -= len(self._sock.recv(left))

    def close(self) -> None:
        self._sock.close()


class ControlEnd:
    """As ``TcpEnd``, over the control plane."""

    def __init__(self, keys: Keys) -> None:
        self._key, self._dialer, self._poll = keys.fingerprint, Dialer(keys, max_message_bytes=LIMIT), select.poll()

    def connect(self, port: int) -> None:
        self._connection = self._dialer.connect("127.0.0.1", port, key=self._key)
        self._poll.register(self._dialer.fd, select.POLLIN)

    def exchange(self) -> None:
        self._connection.send(ASK)
        while not self._connection.receive():
            self._poll.poll()
            self._dialer.progress()
            if self._connection.lost:
                raise RuntimeError(self._connection.reason)

    def close(self) -> None:
        self._connection.close()
        self._dialer.close()


# --- D --------------------------------------------------------------------------------------------------------------


@contextmanager
def beside_a_computing_thread() -> Iterator[None]:
    ended = False

    def compute() -> None:
        while not ended:
            pass

    switch, thread = ShortSwitchInterval(SWITCH_SECONDS), threading.Thread(target=compute)
    switch.shorten()
    thread.start()
    try:
        yield
    finally:
        ended = True
        thread.join()
        switch.restore()


def timed(act: Callable[[], object]) -> float:
    """Microseconds."""
    begun = time.perf_counter()
    act()
    return (time.perf_counter() - begun) * 1e6


def dial(wire: str, secret: str, port: int, orders: Connection) -> None:
    """D: a round for each order but the last, None; it answers with the times."""
    keep_time_exactly()
    keys = Keys(secret)

    def make() -> TcpEnd | ControlEnd:
        return TcpEnd() if wire == TCP else ControlEnd(keys)

    end = make()
    end.connect(port)
    end.exchange()  # a handshake has a deadline, and the first round may be late
    while orders.recv() is not None:
        found = {"alone": [timed(end.exchange) for _ in range(MESSAGES)]}
        with beside_a_computing_thread():
            found["computing"] = [timed(end.exchange) for _ in range(MESSAGES)]
        end.close()
        end = make()
        found["new"] = [timed(partial(end.connect, port)) + timed(end.exchange)]
        orders.send(found)
    end.close()


# --- both processes -------------------------------------------------------------------------------------------------


def started(run: Callable[..., None], *arguments: Any) -> Connection:
    """Our end of the pipe to a new process."""
    ours, theirs = Pipe()
    get_context("spawn").Process(target=run, args=(*arguments, theirs), daemon=True).start()
    theirs.close()
    return ours


class Wire:
    """A P and a D of one wire. ``rounds``: the times of each round, in microseconds, by what was timed."""

    def __init__(self, name: str) -> None:
        self.name, secret = name, new_secret()
        self.rounds: list[dict[str, list[float]]] = []
        self._p = started(serve, name, secret)
        self._d = started(dial, name, secret, self._p.recv())

    def round(self) -> None:
        self._d.send("round")
        self.rounds.append(self._d.recv())

    def close(self) -> None:
        self._d.send(None)
        self._p.send(None)

    def row(self) -> dict[str, Any]:
        every = {name: [time for found in self.rounds for time in found[name]] for name in self.rounds[0]}
        row: dict[str, Any] = {"wire": self.name, "new_connection_us_p50": report.percentile(every["new"], 50)}
        for name, title in (("alone", "round_trip_us"), ("computing", "computing_us")):
            row |= {f"{title}_p{percent}": report.percentile(every[name], percent) for percent in (50, 10, 99)}
        return row


def ratio(wire: Wire, than: Wire, what: str) -> float:
    """The median over the rounds of the ratio of both wires' medians in that round."""
    pairs = zip(wire.rounds, than.rounds, strict=True)
    ratios = (statistics.median(ours[what]) / statistics.median(theirs[what]) for ours, theirs in pairs)
    return round(statistics.median(ratios), 3)


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    wires = [Wire(OURS), Wire(TCP)]
    for number in range(args.rounds + 1):
        for wire in wires[:: 1 if number % 2 else -1]:
            wire.round()
            if not number:  # to warm up
                wire.rounds.clear()
    for wire in wires:
        wire.close()
        report.line(wire.row())
    names = {"alone": "control_round_trip", "computing": "control_round_trip_computing", "new": "control_connection"}
    ratios = {f"{title}_vs_tcp": ratio(wires[0], wires[1], what) for what, title in names.items()}
    print(ratios)
    rows = [wire.row() for wire in wires]
    report.write(args.json, {"ratios": ratios, "figures": {}, "rows": rows, "rounds": args.rounds})


if __name__ == "__main__":
    main()
