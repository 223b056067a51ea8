"""Whatever reaches the control port: it is dropped and counted, memory stays bounded, and good peers are served."""

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

from kvferry.transport.control import framing, zap_auth
from kvferry.transport.control.connection import Connection
from kvferry.transport.control.listener import Listener
from kvferry.transport.wake import RateLimitedLog

LIMIT = 1 << 20
MESSAGE = [b"kvferry", b"\0\1", b"body"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Bad handshakes end soon."""
    monkeypatch.setattr(framing, "HANDSHAKE_SECONDS", 2.0)


@pytest.fixture
def listener():
    end = Listener("127.0.0.1", 0, max_message_bytes=LIMIT)
    yield end
    end.close()


@pytest.fixture
def good(listener):
    end = Connection("127.0.0.1", listener.port, max_message_bytes=LIMIT)
    yield end
    end.close()


def served(listener, good, seconds=60.0):
    """The one message of a good peer comes through, and its answer; all that came before it is dropped."""
    assert good.send(MESSAGE)
    found = []
    deadline = time.monotonic() + seconds
    while not found and time.monotonic() < deadline:
        listener.socket.poll(50)
        found.extend(listener.receive())
    assert [frames for _, frames in found] == [MESSAGE]
    assert listener.send(found[0][0], MESSAGE)
    assert good.socket.poll(60_000) and good.receive() == [MESSAGE]
    good.poll_monitor()
    assert good.connected and not good.lost


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return done


@contextlib.contextmanager
def raw(listener, data=b""):
    with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(data)
        yield peer


@contextlib.contextmanager
def zmq_peer(listener, kind=zmq.DEALER, **options):
    """A peer that speaks ZMTP and nothing else of ours."""
    context = zmq.Context()
    end = context.socket(kind)
    end.linger = 0
    for name, value in options.items():
        setattr(end, name, value)
    end.connect(f"tcp://127.0.0.1:{listener.port}")
    try:
        yield end
    finally:
        context.destroy(0)


def closed_by_peer(peer, seconds=60.0):
    """Whether the connection ends."""
    deadline = time.monotonic() + seconds
    peer.settimeout(0.1)
    while time.monotonic() < deadline:
        try:
            if not peer.recv(65536):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


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
        GREETING + b"\xff" * 1000,
        GREETING[:12] + b"\x01" + GREETING[13:],
        pickle.dumps({"cmd": ("os.system", ["x"])}) * 50,
        random.Random(1).randbytes(100_000),
    ],
    ids=["http", "http-long", "tls", "newlines", "zeros", "ones", "zmtp-garbage", "cut", "pickle", "random"],
)
def test_garbage_is_dropped_and_counted(listener, good, data, caplog):
    served(listener, good)
    with caplog.at_level(logging.WARNING), raw(listener, data) as peer:
        assert until(lambda: (listener.receive(), listener.dropped.total())[1] >= 1)
        assert closed_by_peer(peer)
    assert listener.dropped["handshake"] >= 1
    served(listener, good)


def test_the_log_is_limited_in_rate(listener, good, caplog, monkeypatch):
    """Its own clock stands: 50 connections may take longer than the time between two lines."""
    monkeypatch.setattr(zap_auth, "_log", RateLimitedLog(zap_auth._log._logger, clock=lambda: 0.0))
    served(listener, good)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with raw(listener, HTTP):
                pass
        assert until(lambda: listener.dropped["handshake"] >= 50)
    assert listener.dropped["handshake"] == 50
    lines = [line for record in caplog.records if str(listener.port) in (line := record.getMessage())]
    assert len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"x"], "frames"),
        ([b"kvferry", b"\0\1"], "frames"),
        ([*MESSAGE, b"more"], "frames"),
        ([b"x"] * 10_000, "frames"),
        ([pickle.dumps(MESSAGE)], "frames"),
        ([b"kvferry", b"\0\1", bytes(LIMIT)], "oversize"),
        ([bytes(LIMIT // 2)] * 3, "oversize"),
    ],
    ids=["one", "two", "four", "thousands", "pickle", "just-over", "over-in-sum"],
)
def test_messages_that_are_not_ours(listener, good, frames, reason):
    served(listener, good)
    with zmq_peer(listener) as peer:
        peer.send_multipart(frames)
        assert until(lambda: (listener.receive(), listener.dropped[reason])[1] == 1)
    assert listener.dropped == {reason: 1}
    served(listener, good)


def test_a_frame_far_over_the_limit_ends_its_connection(listener, good):
    served(listener, good)
    with raw(listener, GREETING + READY) as peer:
        assert until(lambda: listener.peers == 2)
        with contextlib.suppress(OSError):
            peer.sendall(b"\x02" + struct.pack(">Q", 8 * LIMIT) + bytes(1000))
        assert closed_by_peer(peer)
    assert until(lambda: listener.peers == 1)
    served(listener, good)


def test_an_identity_that_the_peer_chose_is_not_served(listener, good):
    """Else one peer could pose as another."""
    with zmq_peer(listener, routing_id=b"\1abcd") as peer:
        peer.send_multipart(MESSAGE)
        assert until(lambda: (listener.receive(), listener.dropped["identity"])[1] == 1)
    served(listener, good)


def test_other_socket_types(listener, good):
    with zmq_peer(listener, zmq.PUB) as pub, zmq_peer(listener, zmq.REQ) as req:
        pub.send_multipart(MESSAGE)
        req.send_multipart(MESSAGE)  # sends an empty frame first
        assert until(lambda: (listener.receive(), listener.dropped["frames"])[1] == 1)
        assert until(lambda: listener.dropped["handshake"] >= 1)
    served(listener, good)


def test_the_same_message_again_is_passed_on(listener, good):
    """A replay is well framed: whether it means anything is for the protocol to say (reads and tokens are unique)."""
    for _ in range(3):
        served(listener, good)


def test_slow_connections_end_and_hold_up_nobody(monkeypatch, request):
    monkeypatch.setattr(framing, "HANDSHAKE_SECONDS", 5.0)  # long enough to serve the good one meanwhile
    listener, good = request.getfixturevalue("listener"), request.getfixturevalue("good")
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
        assert listener.dropped["handshake"] < 100, "it was served beside them, not after them"
        assert all(closed_by_peer(peer) for peer in peers)
        assert until(lambda: listener.dropped["handshake"] == 100)
    finally:
        stop.set()
        thread.join()
        for peer in peers:
            peer.close()
    served(listener, good)


def test_connections_are_bounded(caplog):
    listener = Listener("127.0.0.1", 0, max_message_bytes=LIMIT, max_peers=3)

    def connections(count):
        return [
            Connection("127.0.0.1", listener.port, max_message_bytes=LIMIT, connect_timeout=300) for _ in range(count)
        ]

    ends = connections(3)
    try:
        assert until(lambda: listener.peers == 3)
        more = connections(5)
        ends += more
        assert until(lambda: [end.poll_monitor() for end in more] and all(end.lost for end in more))
        assert "refused us" in more[0].reason and "as many peers as it takes" in more[0].reason
        assert listener.dropped["peers"] == 5 and listener.peers == 3
        ends[0].close()
        assert until(lambda: listener.peers == 2)
        ends += connections(1)
        served(listener, ends[-1])
    finally:
        for end in ends:
            end.close()
        listener.close()


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def test_a_message_without_end_is_cut_and_memory_bounded(listener, good, monkeypatch):
    """ZMQ bounds neither the frames of a message nor their sum, and keeps them until the last has come."""
    served(listener, good)
    before, most = resident_mib(), 0
    frame = b"\x03" + struct.pack(">Q", 60_000) + bytes(60_000)  # "more follows"
    with raw(listener, GREETING + READY) as peer:
        assert until(lambda: listener.peers == 2)
        deadline, sent = time.monotonic() + 60, 0
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                peer.sendall(frame)
                sent += len(frame)
                most = max(most, resident_mib())
                if sent // len(frame) % 150 == 0:
                    time.sleep(
                        1.2 * zap_auth.BACKLOG_SECONDS
                    )  # 9 MB between two looks: the overshoot of one stays small
        assert time.monotonic() < deadline, f"{sent >> 20} MiB were taken in"
    assert most - before < 150
    assert until(lambda: listener.dropped["flood"] == 1)
    served(listener, good)


def test_much_traffic_that_is_served_is_no_flood(listener, good, monkeypatch):
    listener._guarded.backlog.limit = 4 * LIMIT
    block = [b"", b"", bytes(LIMIT // 2)]
    taken = 0
    begun = time.monotonic()
    while time.monotonic() - begun < 4 * zap_auth.BACKLOG_SECONDS or taken < 100:
        good.send(block)
        listener.socket.poll(60_000)  # one at a time is under way
        taken += len(listener.receive())
    assert not listener.dropped
    good.poll_monitor()
    assert good.connected


def test_the_gate_outlives_what_it_cannot_read(listener, good):
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


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_after_a_good_handshake(listener, good, seed):
    served(listener, good)
    source = random.Random(seed)
    for _ in range(40):
        with raw(listener, GREETING + READY) as peer, contextlib.suppress(OSError):
            for _ in range(source.randrange(1, 20)):
                flags, size = source.choice([0, 1, 2, 3, 4, 5, 6, 255]), source.randrange(256)
                peer.sendall(bytes([flags, size]) + source.randbytes(size))
        listener.receive()
    assert until(lambda: (listener.receive(), listener.peers)[1] == 1)
    served(listener, good)
