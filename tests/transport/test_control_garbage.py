"""Strangers at the control port, and holders of the key that break the rules: dropped and counted, beside good ones."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct

import pytest

from kvferry.transport.control import listener as control_listener
from kvferry.transport.control.keys import WHO_LISTENS
from kvferry.transport.control.stream import ANSWER
from kvferry.transport.wake import RateLimitedLog
from tests.fuzz.attackers import HTTP, client_hello
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, Dialed, exchanged, gone, listening, until
from tests.transport.control_strangers import GREETING, closed_by_peer, holder, message, raw, say, served, total

HELLO = client_hello(KEYS.of_d)
GARBAGE = {
    "http": HTTP, "tls": HELLO, "ones": b"\xff" * 10_000, "greeting-http": GREETING + HTTP,
    "greeting-message": GREETING + message() * 100, "hello-http": GREETING + HELLO + HTTP,
}  # fmt: skip


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_dropped_and_counted(listener, good, data):
    served(listener, good)
    with raw(listener, data) as peer:
        assert closed_by_peer(listener, peer)
    assert until(lambda: total(listener) >= 1) and set(listener.dropped) == {"handshake"}
    served(listener, good)


def test_a_stranger_is_told_which_key_it_does_not_know(listener):
    with raw(listener, bytes(len(GREETING))) as peer:
        assert peer.recv(100, socket.MSG_WAITALL) == ANSWER + KEYS.fingerprint.encode()


def test_who_asks_whose_port_it_is_is_counted_and_no_line(listener, caplog):
    with caplog.at_level(logging.WARNING), raw(listener, WHO_LISTENS) as peer:
        assert closed_by_peer(listener, peer) and until(lambda: listener.dropped == {"handshake": 1})
    assert not caplog.records


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


@pytest.mark.parametrize("head", [(0, 0, LIMIT + 1), (255, 255, 0xFFFF_FFFF), (1, 0, LIMIT)])
def test_a_message_that_is_too_large_ends_its_connection_at_its_head(listener, good, head):
    served(listener, good)
    with holder(listener, message() + struct.pack(">BBI", *head)) as peer:
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


@pytest.mark.parametrize("at", [0, 2, 4, 40], ids=["type", "version", "length", "content"])
@pytest.mark.parametrize("upwards", [True, False], ids=["to P", "to D"])
def test_a_damaged_byte_of_a_tls_record(listener, connect, upwards, at):
    """It ends its connection, and no process."""
    proxy = FaultProxy("127.0.0.3")
    proxy.open(listener.port, "127.0.0.1")
    first = connect(listener.port, proxy.address)
    with contextlib.closing(proxy):
        assert exchanged(listener, first)
        proxy.arm(Fault(Kind.CORRUPT, listener.port, upwards, at=at))

        def lost():
            for identity, frames, _ in listener.receive():
                assert frames == MESSAGE
                listener.send(identity, MESSAGE)
            assert all(frames == MESSAGE for frames in first.receive())
            first.send(MESSAGE)  # a record whose length was changed waits for more bytes
            return first.lost

        assert until(lost) and proxy.struck
        first.close()
        assert gone(listener) and exchanged(listener, connect(listener.port, proxy.address))


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
    [("127.0.0.2", GREETING[:9]), ("127.0.0.1", HTTP)],
    ids=["half-greetings", "garbage-of-the-same-address"],
)
def test_a_flood_of_connections_shuts_out_nobody(listener, address, said):
    with fork_server().start("-c", FLOOD, str(listener.port), address, said.hex()) as flood:
        flood.stdout.readline()
        for _ in range(20):
            end = Dialed(listener.port)
            served(listener, end)
            end.close()
            assert gone(listener)
        assert flood.poll() is None


def test_peers_are_bounded(connect):
    with contextlib.closing(listening(max_peers=3)) as listener:
        first, *_ = ends = [connect(listener.port) for _ in range(3)]
        for end in ends:
            served(listener, end)
        more = [connect(listener.port) for _ in range(5)]
        for end in more:
            end.send(MESSAGE)
        assert until(lambda: (listener.receive(), all(end.lost for end in more))[1])
        assert all("as many peers as it takes" in end.reason for end in more) and listener.peers == 3
        assert all(not end.failure for end in more), "they have reached it"
        assert until(lambda: listener.dropped == {"peers": 5}), "counted once each has its answer"
        first.close()
        assert gone(listener, 2)
        served(listener, connect(listener.port))
