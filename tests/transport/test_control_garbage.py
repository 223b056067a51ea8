"""Strangers at the control port, and holders of the key that break the rules: dropped and counted, beside good ones."""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
import socket
import ssl
import struct
import threading

import pytest

from kvferry.transport import sockets
from kvferry.transport.control import listener as control_listener
from kvferry.transport.control.stream import ANSWER
from kvferry.transport.wake import RateLimitedLog
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, Dialed, listening, until
from tests.transport.control_strangers import GREETING, closed_by_peer, head, holder, message, raw, say, served, total

HTTP = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: a-scanner/1.0\r\nAccept: */*\r\n\r\n"


def client_hello():
    """What a holder of the key says first over TLS."""
    said = ssl.MemoryBIO()
    tls = KEYS.of_d.wrap_bio(ssl.MemoryBIO(), said)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return said.read()


@pytest.mark.parametrize(
    "data",
    [
        HTTP,
        HTTP * 50,
        client_hello(),
        b"\n" * 10_000,
        bytes(10_000),
        b"\xff" * 10_000,
        pickle.dumps({"cmd": ("os.system", ["x"])}) * 50,
        random.Random(1).randbytes(100_000),
        GREETING + HTTP,
        GREETING + message() * 100,
        GREETING + client_hello() + HTTP,
    ],
    ids=[
        *("http", "http-long", "tls", "newlines", "zeros", "ones", "pickle", "random"),
        *("greeting-http", "greeting-message", "hello-http"),
    ],
)
def test_garbage_is_dropped_and_counted(listener, good, data):
    served(listener, good)
    with raw(listener, data) as peer:
        assert closed_by_peer(listener, peer)
    assert until(lambda: total(listener) >= 1)
    assert set(listener.dropped) == {"handshake"}
    served(listener, good)


def test_a_stranger_is_told_which_key_it_does_not_know(listener):
    with raw(listener, bytes(len(GREETING))) as peer:
        assert peer.recv(100, socket.MSG_WAITALL) == ANSWER + KEYS.fingerprint.encode()


def test_the_log_is_limited_in_rate(listener, good, caplog, monkeypatch):
    """Its own clock stands: 50 connections may take longer than the time between two lines."""
    monkeypatch.setattr(
        control_listener, "log", RateLimitedLog(logging.getLogger("vllm.kvferry.transport"), clock=lambda: 0.0)
    )
    served(listener, good)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with raw(listener, HTTP) as peer:
                closed_by_peer(listener, peer)
        assert until(lambda: total(listener) >= 50)
    assert listener.dropped["handshake"] == 50
    lines = [line for record in caplog.records if str(listener.port) in (line := record.getMessage())]
    assert len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.parametrize("frames", [(0, 0, LIMIT + 1), (255, 255, 0xFFFF_FFFF), (1, 0, LIMIT)])
def test_a_message_that_is_too_large_ends_its_connection_at_its_head(listener, good, frames):
    served(listener, good)
    with holder(listener, message() + head(*frames)) as peer:
        assert closed_by_peer(listener, peer) and listener.dropped == {"oversize": 1}
    served(listener, good)


def test_a_message_is_whole_however_it_is_cut(listener):
    sent = [[b"kvferry", b"\0\5", b"x"], [b"", b"", bytes(range(256)) * 200], [b"kvferry", b"\0\5", b""]]
    data, found, source = b"".join(message(*frames) for frames in sent), [], random.Random(0)
    with holder(listener) as peer:
        while data:
            size = source.choice([1, 2, 5, 7, 300, 20_000])
            found += say(listener, peer, data[:size])
            data = data[size:]
        assert until(lambda: found.extend(listener.receive()) or len(found) == 3)
    assert [frames for _, frames, _ in found] == sent


def test_a_holder_of_the_key_that_leaves_at_any_moment(listener, good):
    """In the middle of a message, of a record, or of the handshake, with a reset or without."""
    served(listener, good)
    hello, source = GREETING + client_hello(), random.Random(2)
    for number in range(60):
        with contextlib.ExitStack() as stack:
            if number % 3:
                peer = stack.enter_context(raw(listener, hello[: source.randrange(1, len(hello) + 1)]))
            else:
                peer = stack.enter_context(holder(listener, message()[: source.randrange(1, 15)]))
            if number % 2:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        listener.receive()
    assert until(lambda: (listener.receive(), listener.peers)[1] == 1)
    served(listener, good)


@pytest.mark.parametrize("seed", range(3))
def test_a_handshake_with_wrong_bytes(listener, good, seed):
    served(listener, good)
    source = random.Random(seed)
    for _ in range(40):
        hello = bytearray(client_hello())
        for _ in range(source.randrange(1, 5)):
            hello[source.randrange(len(hello))] = source.randrange(256)
        with raw(listener, GREETING + hello + source.randbytes(source.randrange(200))) as peer:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
            assert closed_by_peer(listener, peer)
    assert listener.peers == 1
    served(listener, good)


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_of_a_holder_of_the_key(listener, good, seed):
    served(listener, good)
    source = random.Random(seed)
    for _ in range(20):
        with holder(listener, source.randbytes(source.randrange(1, 5000))):
            pass
        listener.receive()
    assert until(lambda: (listener.receive(), listener.peers)[1] == 1)
    assert set(listener.dropped) <= {"oversize"}
    until(lambda: not listener.receive())
    served(listener, good)


@pytest.mark.parametrize("seed", range(3))
def test_records_that_are_not_of_tls_after_the_handshake(listener, good, seed):
    served(listener, good)
    source = random.Random(seed)
    for _ in range(20):
        with holder(listener, message()) as peer, socket.socket(fileno=peer.detach()) as bare:
            with contextlib.suppress(OSError):
                bare.sendall(b"\x17\x03\x03" + struct.pack(">H", 100) + source.randbytes(100))
            assert until(listener.receive) and closed_by_peer(listener, bare)
    assert listener.peers == 1
    served(listener, good)


def test_slow_connections_end_and_hold_up_nobody(listener, good, monkeypatch):
    served(listener, good)
    monkeypatch.setattr(sockets, "HELLO_SECONDS", 1.0)
    hello = GREETING + client_hello()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(raw(listener, hello[:1])) for _ in range(100)]
        stop = threading.Event()

        def trickle():
            for byte in hello[1:]:
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
        finally:
            stop.set()
            thread.join()
    served(listener, good)


FLOOD = """
import collections, socket, struct, sys
from contextlib import suppress
port, address, said, kept = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3]), collections.deque()
while True:
    with suppress(OSError):
        kept.append(socket.socket())
        kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no port waits for a minute
        kept[-1].bind((address, 0))
        kept[-1].connect(("127.0.0.1", port))
        kept[-1].sendall(said)
    if len(kept) == 300:
        print(flush=True)
    elif len(kept) > 300:
        kept.popleft().close()
"""


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.2", HTTP), ("127.0.0.2", GREETING[:9]), ("127.0.0.1", HTTP)],
    ids=["garbage", "half-greetings", "garbage-of-the-same-address"],
)
def test_a_flood_of_connections_shuts_out_nobody(listener, address, said):
    with fork_server().start("-c", FLOOD, str(listener.port), address, said.hex()) as flood:
        flood.stdout.readline()
        for _ in range(20):
            end = Dialed(listener.port)
            served(listener, end)
            end.close()
            assert until(lambda: (listener.receive(), listener.peers)[1] == 0)
        assert flood.poll() is None


def test_peers_are_bounded():
    listener = listening(max_peers=3)
    ends = []

    def connection():
        ends.append(Dialed(listener.port))
        return ends[-1]

    try:
        for _ in range(3):
            served(listener, connection())
        more = [connection() for _ in range(5)]
        for end in more:
            end.send(MESSAGE)
        assert until(lambda: (listener.receive(), all(end.lost for end in more))[1])
        assert all("as many peers as it takes" in end.reason for end in more) and listener.peers == 3
        assert listener.dropped == {"peers": 5}
        ends[0].close()
        assert until(lambda: (listener.receive(), listener.peers)[1] == 2)
        served(listener, connection())
    finally:
        for end in ends:
            end.close()
        listener.close()
