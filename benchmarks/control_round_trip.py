"""What keys cost on the control port: a round trip of an ask and its answer, and a new connection.

    python benchmarks/control_round_trip.py [--rounds 40] [--json FILE]

Two processes, three wires: with keys (ZMQ and CURVE, the default), the same ZMQ sockets without CURVE (KVFerry does not
offer it), and bare TCP (``insecure``). Rounds of the wires alternate. Both ends sleep in ``poll``, as KVFerry does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

from kvferry.transport.control import curve_dialer, framing
from kvferry.transport.control.dialer import make_dialer
from kvferry.transport.control.keys import Keys
from kvferry.transport.control.listener import Listener, listen

WIRES = ("keys", "zmq without keys", "insecure")
ASK_BYTES, GRANT_BYTES = 300, 1200
"""A prompt of 4096 tokens: an ask with one span, and a grant with 256 block ids."""
MESSAGES = 50
"""Round trips of one round."""
LIMIT = 8 << 20


class BareZmqListener(Listener):
    """The ROUTER of ``CurveListener`` without CURVE."""

    socket: zmq.Socket[bytes]

    def __init__(self) -> None:
        self.socket = zmq.Context().socket(zmq.ROUTER)
        framing.tune(self.socket, LIMIT)
        framing.keep_watch(self.socket, framing.SILENCE_HERE_SECONDS)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._filter = framing.Filter("benchmark", LIMIT, Counter())

    def receive(self) -> list[tuple[bytes, list[bytes], str]]:
        messages = []
        while framing.waiting(self.socket):
            first = self.socket.recv(zmq.NOBLOCK, copy=False)
            identity, *frames = framing.rest(self.socket, [first.bytes], framing.FRAMES + 1)
            framing.source(first)
            message = self._filter.unpack(frames)
            if message is not None:
                messages.append((identity, message, framing.peer_address(first)))
        return messages

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        return not framing.send(self.socket, [identity, framing.pack(frames)])

    @property
    def peers(self) -> int:
        return 0

    def close(self) -> None:
        self.socket.close(0)


def serve(wire: str, secret: str) -> None:
    """P: answers every message until its stdin ends."""
    keys = None if wire == "insecure" else Keys(secret)
    bare = wire == "zmq without keys"
    listener = BareZmqListener() if bare else listen("127.0.0.1", 0, keys=keys, max_message_bytes=LIMIT)
    print(listener.port, flush=True)
    poller = zmq.Poller()
    poller.register(listener.socket, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    answer = [b"kvferry", b"\0\5", bytes(GRANT_BYTES)]
    while sys.stdin.fileno() not in dict(poller.poll()):
        for identity, _, _ in listener.receive():
            listener.send(identity, answer)


class Wire:
    """D's end, and P's process."""

    def __init__(self, name: str, secret: str) -> None:
        self.name = name
        self._keys = None if name == "insecure" else Keys(secret)
        command = [sys.executable, __file__, "--serve", name, "--secret", secret]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
        self._ask = [b"kvferry", b"\0\5", bytes(ASK_BYTES)]
        self._dial()
        self.round_trips: list[float] = []
        self.handshakes: list[float] = []

    def _dial(self) -> None:
        self._dialer = make_dialer(self._keys, max_message_bytes=LIMIT)
        no_keys = mock.patch.object(curve_dialer, "configure_client", lambda socket, keys, server: None)
        key = "" if self._keys is None else self._keys.fingerprint
        with no_keys if self.name == "zmq without keys" else nullcontext():
            self._connection = self._dialer.connect("127.0.0.1", self._port, key=key)
        self._poller = zmq.Poller()
        for pollable in self._dialer.pollables:
            self._poller.register(pollable, zmq.POLLIN)

    def exchange(self) -> float:
        """Microseconds of one round trip."""
        begun = time.perf_counter()
        self._connection.send(self._ask)
        while not self._connection.receive():
            self._poller.poll()
            self._dialer.progress()
            if self._connection.lost:
                raise RuntimeError(self._connection.reason)
        return (time.perf_counter() - begun) * 1e6

    def round(self) -> None:
        self.round_trips += [self.exchange() for _ in range(MESSAGES)]
        self._connection.close()
        self._dialer.close()
        begun = time.perf_counter()
        self._dial()
        self.exchange()
        self.handshakes.append((time.perf_counter() - begun) * 1e6)

    def close(self) -> None:
        self._connection.close()
        self._dialer.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=WIRES, help=argparse.SUPPRESS)
    parser.add_argument("--secret", default=zmq.curve_keypair()[1].decode(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.secret)
        return
    import report  # it imports torch, which P's process does not need

    wires = [Wire(name, args.secret) for name in WIRES]
    for wire in wires:
        wire.round()  # not counted
        wire.round_trips.clear()
        wire.handshakes.clear()
    for number in range(args.rounds):
        for wire in wires if number % 2 else reversed(wires):
            wire.round()
    rows: list[dict[str, Any]] = []
    for wire in wires:
        wire.close()
        quantiles = statistics.quantiles(wire.round_trips, n=100)
        rows.append(
            {
                "wire": wire.name,
                "round_trip_us_p50": round(statistics.median(wire.round_trips), 1),
                "round_trip_us_p10": round(quantiles[9], 1),
                "round_trip_us_p99": round(quantiles[98], 1),
                "new_connection_us_p50": round(statistics.median(wire.handshakes), 1),
            }
        )
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    middle = {row["wire"]: float(row["round_trip_us_p50"]) for row in rows}
    ratios = {"control_round_trip_keys_vs_none": round(middle["keys"] / middle["zmq without keys"], 3)}
    print(ratios)
    report.write(args.json, {"ratios": ratios, "figures": {}, "rows": rows})


if __name__ == "__main__":
    main()
