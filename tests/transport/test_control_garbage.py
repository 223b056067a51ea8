"""Strangers at the control port, and a P that floods D: dropped and counted, in bounded memory, beside good peers."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import pickle
import random
import socket
import struct
import threading
from typing import Any

import pytest
import zmq

from kvferry.transport.control import plain_listener, zap_auth
from kvferry.transport.control.routing_ids import new_router
from kvferry.transport.control.zap_auth import Monitor, unwatch
from kvferry.transport.wake import RateLimitedLog
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, Dialed, listening, until
from tests.transport.control_strangers import SENDER, closed_by_peer, message, raw, served, total, zmq_peer

HTTP = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: a-scanner/1.0\r\nAccept: */*\r\n\r\n"
GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
READY = READY[:1] + bytes([len(READY) - 2]) + READY[2:]


@pytest.mark.parametrize(
    "data",
    [
        HTTP,
        HTTP * 50,
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(500),
        b"\n" * 10_000,
        bytes(10_000),
        b"\xff" * 10_000,
        GREETING + READY,
        GREETING + b"\xff" * 1000,
        GREETING[:12] + b"\x01" + GREETING[13:],
        pickle.dumps({"cmd": ("os.system", ["x"])}) * 50,
        random.Random(1).randbytes(100_000),
        message()[:4] + b"\xff" * 6,
    ],
    ids=[
        *("http", "http-long", "tls", "newlines", "zeros", "ones", "zmtp", "zmtp-garbage", "cut", "pickle", "random"),
        "huge-claim",
    ],
)
def test_garbage_is_dropped_and_counted(listener, good, data):
    served(listener, good)
    with raw(listener, data) as peer:
        assert closed_by_peer(listener, peer)
    assert until(lambda: total(listener) >= 1)
    assert set(listener.dropped) <= {"handshake", "oversize"}
    served(listener, good)


def test_the_log_is_limited_in_rate(listener, good, caplog, monkeypatch):
    """Its own clock stands: 50 connections may take longer than the time between two lines."""
    for module in (zap_auth, plain_listener):
        monkeypatch.setattr(module, "_log", RateLimitedLog(module._log._logger, clock=lambda: 0.0))
    served(listener, good)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with raw(listener, HTTP) as peer:
                closed_by_peer(listener, peer)
        assert until(lambda: total(listener) >= 50)
    assert listener.dropped["handshake"] == 50
    lines = [line for record in caplog.records if str(listener.port) in (line := record.getMessage())]
    assert len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"x"], "frames"),
        ([*MESSAGE, b"more"], "frames"),
        ([b"x"] * 10_000, "frames"),
        ([b"\xff\xff" + bytes(100)], "frames"),
        ([b"\1\1" + bytes(LIMIT + 1)], "oversize"),
    ],
    ids=["one", "four", "thousands", "cut", "over"],
)
def test_messages_of_key_holders_that_are_not_ours(frames, reason):
    listener = listening()
    good = Dialed(listener.port)
    served(listener, good)
    with zmq_peer(listener) as peer:
        peer.send_multipart(frames)
        assert until(lambda: (listener.receive(), listener.dropped[reason])[1] == 1)
    assert listener.dropped == {reason: 1}
    with zmq_peer(listener, routing_id=b"\1abcd") as peer:  # else one peer could pose as another
        peer.send_multipart(MESSAGE)
        assert until(lambda: (listener.receive(), listener.dropped["identity"])[1] == 1)
    with zmq_peer(listener, zmq.PUB), raw(listener) as silent:
        assert until(lambda: (listener.receive(), listener.dropped["handshake"])[1] >= 1)
        silent.close()
    served(listener, good)
    good.close()
    listener.close()


SPOOFED = """
import socket, struct, sys, time
from kvferry.transport.control.keys import Keys
from tests.transport.control_ends import KEYS, listening
from tests.transport.control_strangers import SENDER, closed_by_peer, message, raw, served, total, zmq_peer
listener = listening(KEYS if sys.argv[1] == "keys" else None)
print(listener.port, flush=True)
while True:
    for identity, frames, _ in listener.receive():
        listener.send(identity, frames)
    time.sleep(0.002)
"""

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("mode", ["keys", "insecure"])
def test_a_spoofed_routing_id_ends_no_process(mode, monkeypatch):
    """libzmq aborts where its own counter reaches a routing id that a peer has chosen. A fresh process counts from
    0x6b8b4567, so that a stranger need not guess."""

    def ready(routing_id):
        body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + struct.pack(">I", len(routing_id)) + routing_id
        return bytes([4, len(body)]) + body

    with fork_server().start("-c", SPOOFED, mode, text=True) as process:
        port = int(process.stdout.readline())
        kept = []
        for routing_id in [b"\0" + struct.pack(">I", 0x6B8B4567 + n) for n in range(20)] + [b""] * 60:
            peer = socket.create_connection(("127.0.0.1", port), timeout=60)
            with contextlib.suppress(OSError):
                peer.sendall(GREETING + ready(routing_id))
                peer.settimeout(0.02)
                peer.recv(200)
            kept.append(peer)
        monkeypatch.undo()
        keys = KEYS if mode == "keys" else None
        connection = Dialed(port, keys=keys)
        assert connection.send(MESSAGE) and until(connection.receive) == [MESSAGE]
        assert process.poll() is None
        connection.close()
        for peer in kept:
            peer.close()


SPOOFED_WITH_KEY = """
import sys, time
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.zmq import ZmqPlane
from tests.transport.control_ends import KEYS, listening
if sys.argv[1] == "control":
    listener = listening(KEYS)
    port, serve = listener.port, listener.receive
else:
    plane = ZmqPlane(PlaneContext("127.0.0.1", 65536, 1 << 20, KEYS))
    plane.offer()
    port, serve = plane._port, plane.progress
print(port, flush=True)
while True:
    serve()
    time.sleep(0.002)
"""


@pytest.mark.parametrize("port_of", ["control", "plane"])
def test_a_holder_of_the_key_does_not_know_the_next_routing_id(port_of):
    """It was 0x6b8b4567 and the numbers behind it: 40 peers that announced them, and one more, ended the process."""
    with fork_server().start("-c", SPOOFED_WITH_KEY, port_of, text=True) as process:
        port = int(process.stdout.readline())
        context, kept = zmq.Context(), []
        try:
            for routing_id in [b"\0" + struct.pack(">I", 0x6B8B4567 + n) for n in range(40)] + [b""] * 60:
                peer = context.socket(zmq.DEALER)
                kept.append(peer)
                peer.linger = 0
                peer.curve_publickey, peer.curve_secretkey, peer.curve_serverkey = SENDER, KEYS.secret.encode(), SENDER
                if routing_id:
                    peer.routing_id = routing_id
                connected = Monitor(peer, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
                peer.connect(f"tcp://127.0.0.1:{port}")
                peer.send(b"h")
                assert connected.socket.poll(60_000), "the peer is admitted"
                assert connected.read()[0][0] == zmq.EVENT_HANDSHAKE_SUCCEEDED
                unwatch(peer)
                connected.close()
            assert process.poll() is None
        finally:
            context.destroy(0)


def test_the_numbers_of_the_c_library_stay_the_same():
    """Other code of the process may have seeded them."""
    libc, context = ctypes.CDLL(None), zmq.Context()

    def numbers(between=lambda: None):
        libc.srand(7)
        first = libc.rand()
        between()
        return first, libc.rand(), libc.rand()

    assert numbers() == numbers(lambda: new_router(context).close(0))
    context.term()


def test_two_threads_leave_the_c_library_its_own_memory():
    """Sockets that two threads open at once: else its numbers come from memory that is free by then."""
    libc, context = ctypes.CDLL(None), zmq.Context()
    began, inside, ended = threading.Event(), threading.Event(), threading.Event()

    class First:
        def socket(self, kind):
            began.set()
            inside.wait(0.2)  # the other one gets here only where nothing keeps it
            return context.socket(kind)

    class Second:
        def socket(self, kind):
            inside.set()
            assert ended.wait(60)
            return context.socket(kind)

    def second():
        assert began.wait(60)
        late: Any = Second()
        new_router(late).close(0)

    def numbers(between=lambda: None):
        libc.srand(7)
        between()
        return libc.rand(), libc.rand()

    def both():
        thread = threading.Thread(target=second)
        thread.start()
        early: Any = First()
        new_router(early).close(0)
        ended.set()
        thread.join(60)

    assert numbers() == numbers(both)
    context.term()


def test_slow_connections_end_and_hold_up_nobody(listener, good, monkeypatch):
    served(listener, good)
    peers = [socket.create_connection(("127.0.0.1", listener.port), timeout=60) for _ in range(100)]
    stop = threading.Event()

    def trickle():
        for byte in GREETING:
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.send(bytes([byte]))
            if stop.wait(0.1):
                return

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        served(listener, good)
        assert all(closed_by_peer(listener, peer) for peer in peers)
        assert until(lambda: (listener.receive(), listener.dropped["handshake"])[1] == 100)
    finally:
        stop.set()
        thread.join()
        for peer in peers:
            peer.close()
    served(listener, good)


def test_peers_are_bounded(keys):
    listener = listening(keys, max_peers=3)
    ends = []

    def connection():
        ends.append(Dialed(listener.port, keys=keys, timeout=300))
        return ends[-1]

    try:
        for _ in range(3):
            served(listener, connection())
            listener.receive()
        more = [connection() for _ in range(5)]
        for end in more:
            end.send(MESSAGE)
        assert until(lambda: (listener.receive(), all(end.lost for end in more))[1])
        assert "as many peers as it takes" in more[0].reason and listener.peers == 3
        assert listener.dropped["peers"] + listener.dropped["half-open"] >= 5
        ends[0].close()
        assert until(lambda: (listener.receive(), listener.peers)[1] == 2)
        served(listener, connection())
    finally:
        for end in ends:
            end.close()
        listener.close()


def test_the_gate_outlives_what_it_cannot_read():
    listener = listening()
    good = Dialed(listener.port)
    served(listener, good)
    asker = listener._context.socket(zmq.REQ)
    asker.linger = 0
    asker.connect("inproc://zeromq.zap.01")
    for request in ([b""], [b"2.0", b"1"], [b"1.0", b"1", b"no such domain", b"", b"", b"NULL"], [b"x"] * 50):
        asker.send_multipart(request)
        assert asker.poll(60_000)
        assert asker.recv_multipart()[2] == b"400"
    asker.close()
    served(listener, good)
    good.close()
    listener.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_after_a_good_start(listener, good, keys, seed):
    served(listener, good)
    source = random.Random(seed)
    for _ in range(40):
        start = message() if keys is None else GREETING.replace(b"NULL\0", b"CURVE")
        with raw(listener, start) as peer, contextlib.suppress(OSError):
            for _ in range(source.randrange(1, 20)):
                flags, size = source.choice([0, 1, 2, 3, 4, 5, 6, 255]), source.randrange(256)
                peer.sendall(bytes([flags, size]) + source.randbytes(size))
        listener.receive()
    assert until(lambda: (listener.receive(), listener.peers)[1] == 1)
    served(listener, good)
