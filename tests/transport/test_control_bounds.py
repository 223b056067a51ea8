"""Descriptors and memory that peers can take from an engine: bounded, over all of them together."""

from __future__ import annotations

import contextlib
import os
import socket
import time

import pytest
import zmq

from kvferry.transport.control import framing, zap_auth
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, Dialed, listening, resident_mib, until
from tests.transport.control_strangers import SENDER, closed_by_peer, message, raw, served, zmq_peer


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
