"""The control port: a round trip of an ask and its answer, and a new connection with its first answer.

    python benchmarks/planes/control_round_trip.py [--rounds 40] [--former CHECKOUT] [--json FILE]

Two processes for each wire: KVFerry's control plane (TLS 1.3), bare TCP, and the control plane of an older checkout
(ZMQ and CURVE) where ``--former`` names one. Both ends sleep in ``poll``. The wires take turns; half of a turn is
beside a thread of D that computes in Python and never gives up the GIL by itself, at a hand-over's switch interval.
The ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

OURS, TCP, FORMER = "tls", "tcp", "former"
ASK_BYTES, ANSWER_BYTES = 300, 1200
"""A prompt of 4096 tokens: an ask with one span, and a grant with 256 block ids."""
MESSAGES = 25
"""Round trips of one round, and as many beside a thread that computes."""
LIMIT = 8 << 20
ASK, ANSWER = ([b"kvferry", b"\0\7", bytes(size - 9)] for size in (ASK_BYTES, ANSWER_BYTES))
TYPING = Path(__file__).resolve().parents[2] / ".typing"
SWITCH_SECONDS = 2e-5
"""As in connector/engine/loop.py, which an older checkout has elsewhere."""


# --- the wires ------------------------------------------------------------------------------------------------------


def poller(wire: str) -> Any:
    """As the transfer thread of that checkout has it."""
    if wire != FORMER:
        return select.poll()
    import zmq

    return zmq.Poller()


def serve(wire: str, secret: str) -> None:
    """P: answers every message until its stdin ends."""
    poll, stdin = poller(wire), sys.stdin.fileno()
    poll.register(stdin, select.POLLIN)
    if wire == TCP:
        serve_tcp(poll)
        return
    from kvferry.transport.control import listener as control
    from kvferry.transport.control.keys import Keys

    make: Any = control.Listener if wire == OURS else control.listen  # type: ignore[attr-defined]
    listener = make("127.0.0.1", 0, keys=Keys(secret), max_message_bytes=LIMIT)
    print(listener.port, flush=True)
    poll.register(listener.fd if wire == OURS else listener.socket, select.POLLIN)
    while stdin not in dict(poll.poll()):
        for identity, _, _ in listener.receive():
            listener.send(identity, ANSWER)


def serve_tcp(poll: Any) -> None:
    server, peers = socket.create_server(("127.0.0.1", 0)), dict[int, socket.socket]()
    print(server.getsockname()[1], flush=True)
    poll.register(server, select.POLLIN)
    while sys.stdin.fileno() not in (ready := dict(poll.poll())):
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
    """As ``TcpEnd``, over the control plane of that checkout."""

    def __init__(self, wire: str, keys: Any) -> None:
        from kvferry.transport.control import dialer as control

        make: Any = control.Dialer if wire == OURS else control.make_dialer  # type: ignore[attr-defined]
        self._wire, self._key = wire, keys.fingerprint
        self._dialer = make(keys, max_message_bytes=LIMIT)

    def connect(self, port: int) -> None:
        self._connection = self._dialer.connect("127.0.0.1", port, key=self._key)
        self._poll = poller(self._wire)
        for each in [self._dialer.fd] if self._wire == OURS else self._dialer.pollables:
            self._poll.register(each, select.POLLIN)

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
    from kvferry.transport.wake import ShortSwitchInterval

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


def dial(wire: str, port: int, secret: str) -> None:
    """D: a round for each line of its stdin; the times go to its stdout."""
    from kvferry.transport.control.keys import Keys
    from kvferry.transport.wake import keep_time_exactly

    keep_time_exactly()
    keys = Keys(secret)

    def make() -> TcpEnd | ControlEnd:
        return TcpEnd() if wire == TCP else ControlEnd(wire, keys)

    end = make()
    end.connect(port)
    end.exchange()  # a handshake has a deadline, and the first round may be late
    for _ in sys.stdin:
        found = {"alone": [timed(end.exchange) for _ in range(MESSAGES)]}
        with beside_a_computing_thread():
            found["computing"] = [timed(end.exchange) for _ in range(MESSAGES)]
        end.close()
        end = make()
        found["new"] = [timed(partial(end.connect, port)) + timed(end.exchange)]
        print(json.dumps(found), flush=True)
    end.close()


# --- both processes -------------------------------------------------------------------------------------------------


class Wire:
    """A P and a D of one wire. ``rounds``: the times of each round, in microseconds, by what was timed."""

    def __init__(self, name: str, paths: Path, secret: str, stack: ExitStack) -> None:
        self.name = name
        self.rounds: list[dict[str, list[float]]] = []
        environment = os.environ | {"PYTHONPATH": str(paths)}

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, __file__, *arguments, "--wire", name, "--secret", secret], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            return stack.enter_context(process)  # its end closes stdin, and waits

        p = start("--serve")
        assert p.stdout is not None
        self._d = start("--dial", p.stdout.readline().strip())

    def round(self) -> None:
        assert self._d.stdin is not None and self._d.stdout is not None
        self._d.stdin.write("\n")
        self._d.stdin.flush()
        self.rounds.append(json.loads(self._d.stdout.readline()))

    def row(self) -> dict[str, Any]:
        every = {name: [time for found in self.rounds for time in found[name]] for name in self.rounds[0]}
        row: dict[str, Any] = {"wire": self.name}
        for name, title in (("alone", "round_trip_us"), ("computing", "computing_us")):
            hundredths = statistics.quantiles(every[name], n=100)
            for number in (50, 10, 99):
                row[f"{title}_p{number}"] = round(hundredths[number - 1], 1)
        return row | {"new_connection_us_p50": round(statistics.median(every["new"]), 1)}


def ratio(wire: Wire, than: Wire, what: str) -> float:
    """The median over the rounds of the ratio of both wires' medians in that round."""
    pairs = zip(wire.rounds, than.rounds, strict=True)
    ratios = (statistics.median(ours[what]) / statistics.median(theirs[what]) for ours, theirs in pairs)
    return round(statistics.median(ratios), 3)


def measure(rounds: int, former: Path | None) -> dict[str, Any]:
    with ExitStack() as stack:
        paths = {OURS: TYPING, TCP: TYPING}
        if former is not None:
            paths[FORMER] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (paths[FORMER] / "kvferry").mkdir()
            for part in ("connector", "transport", "kernels", "router"):
                (paths[FORMER] / "kvferry" / part).symlink_to(former.resolve() / part)
        from kvferry.transport.control.keys import new_secret

        wires = {name: Wire(name, path, new_secret(), stack) for name, path in paths.items()}
        for number in range(rounds + 1):
            for wire in list(wires.values())[:: 1 if number % 2 else -1]:
                wire.round()
                if not number:  # to warm up
                    wire.rounds.clear()
    names = {"alone": "control_round_trip", "computing": "control_round_trip_computing", "new": "control_connection"}
    ratios = {
        f"{title}_vs_{name}": ratio(wires[OURS], than, what)
        for name, than in wires.items() if than is not wires[OURS] for what, title in names.items()
    }  # fmt: skip
    return {"ratios": ratios, "figures": {}, "rows": [wire.row() for wire in wires.values()], "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--former", type=Path, help="a checkout whose control plane is ZMQ and CURVE")
    parser.add_argument("--json", type=Path)
    for name in ("--wire", "--secret", "--dial"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.wire, args.secret)
        return
    if args.dial:
        dial(args.wire, int(args.dial), args.secret)
        return

    sys.path.insert(0, str(TYPING))
    from benchmarks.harness import report  # it imports torch, which P and D do not need

    result = measure(args.rounds, args.former)
    for row in result["rows"]:
        report.line(row)
    print(result["ratios"])
    report.write(args.json, result)


if __name__ == "__main__":
    main()
