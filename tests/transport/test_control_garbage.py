"""Strangers at the control port, and a P that floods D: dropped and counted, in bounded memory, beside good peers."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import socket
import struct
import threading
import time

import pytest
import zmq

from kvferry.transport.control import framing, plain_listener, zap_auth
from kvferry.transport.wake import RateLimitedLog
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, Dialed, exchanged, listening, resident_mib, until

SENDER = KEYS.public.encode()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Bad handshakes end soon."""
    monkeypatch.setattr(framing, "HANDSHAKE_SECONDS", 2.0)


@pytest.fixture(params=[KEYS, None], ids=["keys", "insecure"])
def keys(request):
    return request.param


@pytest.fixture
def listener(keys):
    end = listening(keys)
    yield end
    end.close()


@pytest.fixture
def good(listener, keys):
    end = Dialed(listener.port, keys=keys)
    yield end
    end.close()


def served(listener, good):
    """The one message of a good peer comes through, and its answer; all that came before it is dropped."""
    assert exchanged(listener, good) and good.state == (True, False)


def total(listener):
    listener.receive()
    return listener.dropped.total()


@contextlib.contextmanager
def raw(listener, data=b""):
    with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(data)
        yield peer


@contextlib.contextmanager
def zmq_peer(listener, kind=zmq.DEALER, **options):
    """A holder of the key that speaks ZMTP and nothing else of ours."""
    context = zmq.Context()
    end = context.socket(kind)
    end.linger = 0
    end.curve_publickey, end.curve_secretkey, end.curve_serverkey = SENDER, KEYS.secret.encode(), SENDER
    for name, value in options.items():
        setattr(end, name, value)
    end.connect(f"tcp://127.0.0.1:{listener.port}")
    try:
        yield end
    finally:
        context.destroy(0)


def closed_by_peer(listener, peer, seconds=60.0):
    """Whether the connection ends."""
    peer.settimeout(0.01)

    def closed():
        listener.receive()
        try:
            return not peer.recv(65536)
        except TimeoutError:
            return False
        except OSError:
            return True

    return until(closed, seconds)


def message(first=b"kvferry", second=b"\0\5", third=b"x"):
    """A message as bare TCP carries it."""
    return struct.pack(">4sBBI", b"KVF\x01", len(first), len(second), len(third)) + first + second + third


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
        ([bytes(LIMIT // 2)] * 3, "oversize"),
    ],
    ids=["one", "four", "thousands", "over-in-sum"],
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
listener = listening(KEYS if sys.argv[1] == "keys" else None)
print(listener.port, flush=True)
while True:
    for identity, frames, _ in listener.receive():
        listener.send(identity, frames)
    time.sleep(0.002)
"""


@pytest.mark.parametrize("mode", ["keys", "insecure"])
def test_a_spoofed_routing_id_ends_no_process(mode):
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
        keys = KEYS if mode == "keys" else None
        connection = Dialed(port, keys=keys)
        assert connection.send(MESSAGE) and until(connection.receive) == [MESSAGE]
        assert process.poll() is None
        connection.close()
        for peer in kept:
            peer.close()


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
        ends[-1].send(MESSAGE)
        return ends[-1]

    try:
        for _ in range(3):
            served(listener, connection())
            listener.receive()
        more = [connection() for _ in range(5)]
        assert until(lambda: (listener.receive(), all(end.lost for end in more))[1])
        assert "as many peers as it takes" in more[0].reason and listener.peers == 3
        assert listener.dropped["peers"] + listener.dropped["half-open"] == 5
        ends[0].close()
        assert until(lambda: (listener.receive(), listener.peers)[1] == 2)
        served(listener, connection())
    finally:
        for end in ends:
            end.close()
        listener.close()


FEW_FILES = """
import os, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from tests.transport.control_ends import KEYS, listening
listener = listening(KEYS if sys.argv[1] == "keys" else None)
print(listener.port, flush=True)
while True:
    for identity, frames, _ in listener.receive():
        listener.send(identity, frames)
    time.sleep(0.002)
"""


@pytest.mark.parametrize("mode", ["keys", "insecure"])
def test_silent_connections_take_no_descriptor_from_good_peers(mode):
    """480 silent connections at a process that may open 512 files: the oldest are ended."""
    keys = KEYS if mode == "keys" else None
    with fork_server().start("-c", FEW_FILES, mode, text=True) as process:
        port = int(process.stdout.readline())
        silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(480)]
        good = [Dialed(port, keys=keys, timeout=60) for _ in range(20)]
        for end in good:
            assert end.send(MESSAGE) and until(end.receive) == [MESSAGE], end.reason
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 350
        for end in [*silent, *good]:
            end.close()


def endless(peer, frame, listener, most=400 << 20):
    """Send until the connection is ended. Returns the bytes that left, and the growth of this process."""
    before, grown, sent = resident_mib(), 0, 0
    peer.settimeout(5)
    with contextlib.suppress(OSError):
        while sent < most:
            peer.sendall(frame)
            sent += len(frame)
            listener.receive()
            grown = max(grown, resident_mib() - before)
    return sent, grown


def test_a_message_without_end_is_cut_where_there_are_no_keys():
    """Every connection claims a message and sends all but its end."""
    listener = listening(None)
    good = Dialed(listener.port, keys=None)
    served(listener, good)
    with contextlib.ExitStack() as stack:
        before = resident_mib()
        for _ in range(100):
            peer = stack.enter_context(raw(listener))
            endless(peer, message(third=bytes(LIMIT - 100))[:-1], listener, LIMIT - 100)
        until(lambda: (listener.receive(), False)[1], 0.2)
        assert listener.dropped["flood"] >= 30, "100 MiB are more than all unfinished messages may take"
        assert resident_mib() - before < 110
    served(listener, good)
    good.close()
    listener.close()


def test_a_message_that_takes_too_long_is_cut(monkeypatch):
    monkeypatch.setattr(framing, "UNFINISHED_SECONDS", 0.3)
    listener = listening(None)
    with raw(listener, message() + message()[:-1]) as peer:
        assert closed_by_peer(listener, peer) and listener.dropped["flood"] == 1
    listener.close()


def test_a_key_holder_that_sends_without_end_is_cut(monkeypatch):
    """ZMQ bounds neither the frames of a message nor their sum, and keeps them until the last has come."""
    monkeypatch.setattr(zap_auth, "UNREAD_SECONDS", 0.05)
    listener = listening()
    good = Dialed(listener.port)
    served(listener, good)
    with zmq_peer(listener, sndhwm=50) as peer:
        before, begun, sent = resident_mib(), time.monotonic(), 0
        while not listener.dropped["flood"] and time.monotonic() - begun < 60:
            with contextlib.suppress(zmq.Again):
                peer.send(bytes(60_000), zmq.SNDMORE | zmq.NOBLOCK)
                sent += 60_000
            if sent % 9_000_000 == 0:
                time.sleep(0.06)
        assert listener.dropped["flood"] == 1, f"{sent >> 20} MiB were taken in"
        assert resident_mib() - before < 400
    served(listener, good)
    good.close()
    listener.close()


def test_a_p_that_sends_without_end_is_cut(monkeypatch):
    """P holds a key, and D keeps no more of it than of anybody."""
    monkeypatch.setattr("kvferry.transport.control.curve_dialer._CHECK_SECONDS", 0.02)
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    server.curve_server, server.curve_publickey, server.curve_secretkey = True, SENDER, KEYS.secret.encode()
    d = Dialed(server.bind_to_random_port("tcp://127.0.0.1"))
    d.send(MESSAGE)
    assert until(lambda: server.poll(10))
    identity = server.recv_multipart()[0]
    server.send(identity, zmq.SNDMORE)
    begun = time.monotonic()
    while not d.lost and time.monotonic() - begun < 60:
        with contextlib.suppress(zmq.ZMQError):
            server.send(bytes(60_000), zmq.SNDMORE | zmq.NOBLOCK)
    assert "many bytes arrived and no whole message" in d.reason
    d.close()
    context.destroy(0)


def test_much_traffic_that_is_served_is_no_flood(listener, good, monkeypatch):
    monkeypatch.setattr(framing, "MAX_UNFINISHED_BYTES", 4 * LIMIT)
    monkeypatch.setattr(zap_auth, "UNREAD_SECONDS", 0.02)
    if hasattr(listener, "_guarded"):
        listener._guarded.unread.limit = 4 * LIMIT
    block = [b"x", b"x", bytes(LIMIT // 2)]
    for _ in range(100):
        good.send(block)
        assert until(listener.receive)
    assert not listener.dropped and good.state == (True, False)


def test_an_answer_that_nobody_reads_is_bounded(monkeypatch):
    monkeypatch.setattr(framing, "MAX_UNFINISHED_BYTES", 4 * LIMIT)
    listener = listening(None)
    good = Dialed(listener.port, keys=None)
    with raw(listener, message()):
        [(identity, _, _)] = until(listener.receive)
        assert next(n for n in range(1000) if not listener.send(identity, [b"x", b"x", bytes(LIMIT // 2)])) < 40
        assert listener.dropped["full"] == 1
        served(listener, good)
    good.close()
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
