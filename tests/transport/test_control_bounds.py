"""Descriptors and memory that peers can take from an engine: bounded, over all of them together."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import tracemalloc

import pytest

from kvferry.transport.control import listener as control_listener
from kvferry.transport.control import stream
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, Dialed, until
from tests.transport.control_strangers import GREETING, holder, message, say, served, server_of

BOUND = (stream.MAX_HELD_BYTES + LIMIT) * 5 // 4 + 4 * LIMIT
"""With the room that a growing ``bytearray`` takes beyond its end, and with the bytes of the tests themselves."""
FEW_FILES = """
import resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from tests.transport.control_ends import listening
listener = listening()
print(listener.port, flush=True)
while True:
    for identity, frames, _ in listener.receive():
        listener.send(identity, frames)
    time.sleep(0.002)
"""


@contextlib.contextmanager
def traced():
    """Python counts the bytes that it holds."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("said", [b"", GREETING], ids=["nothing", "greeting"])
def test_slow_connections_take_no_descriptor_from_good_peers(said):
    """480 of them at a process that may open 512 files: the oldest are ended."""
    with fork_server().start("-c", FEW_FILES, text=True) as process, contextlib.ExitStack() as stack:
        port = int(process.stdout.readline())
        for _ in range(480):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            with contextlib.suppress(OSError):
                slow.sendall(said)
        good = [stack.enter_context(contextlib.closing(Dialed(port))) for _ in range(20)]
        for end in good:
            assert end.send(MESSAGE) and until(end.receive) == [MESSAGE], end.reason
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 350


def test_messages_without_end_are_cut(listener, good):
    """100 holders of the key claim a message of a MiB each, and send all but its end."""
    served(listener, good)
    with contextlib.ExitStack() as stack, traced():
        for _ in range(100):
            say(listener, stack.enter_context(holder(listener)), message(third=bytes(LIMIT - 100))[:-1])
        assert until(lambda: (listener.receive(), listener.dropped["flood"] >= 100 - 17)[1])
        assert set(listener.dropped) == {"flood"}
        assert tracemalloc.get_traced_memory()[1] < BOUND, "at its peak"
    served(listener, good)


def test_answers_that_nobody_reads_are_bounded(listener, good):
    """The holder of the key that reads nothing is ended."""
    served(listener, good)
    with holder(listener, message()), traced():
        [(identity, _, _)] = until(listener.receive)
        assert next(n for n in range(1000) if not listener.send(identity, [b"x", b"x", bytes(LIMIT // 2)])) < 100
        assert listener.dropped == {"flood": 1} and listener.peers == 1
        assert tracemalloc.get_traced_memory()[1] < BOUND, "at its peak"
        assert not listener.send(identity, MESSAGE) and listener.dropped["gone"] == 1
    served(listener, good)


def test_a_p_that_floods_d_is_given_up(listener, monkeypatch):
    """It holds the key, and sends a message without end on each connection; another P is heard."""
    monkeypatch.setattr(stream, "MAX_HELD_BYTES", 4 * LIMIT)
    unfinished = message(third=bytes(LIMIT - 100))[:-1]
    with server_of(KEYS.of_p, unfinished) as (port, _), contextlib.closing(Dialed(listener.port)) as good:
        served(listener, good)
        bad = [good.dialer.connect("127.0.0.1", port, key=KEYS.fingerprint, timeout=300) for _ in range(8)]
        assert until(lambda: sum(connection.lost for connection in bad) >= 3)
        assert all("no whole message" in connection.reason for connection in bad if connection.lost)
        served(listener, good)


def test_one_call_takes_bounded_bytes(listener, monkeypatch):
    """Two peers that sent messages of a MiB without a pause took 350 MiB, and held the serving thread for 270 ms."""
    monkeypatch.setattr(control_listener, "BATCH_BYTES", LIMIT)
    ends = [Dialed(listener.port) for _ in range(4)]
    large, taken = [b"x", b"x", bytes(LIMIT // 2)], []

    def calls():
        for end in ends:
            end.send(large)
        taken.append(len(listener.receive()))
        return len(taken) > 20 and sum(taken) >= 60

    assert until(calls)
    assert max(taken) == 2, "half of the bytes is less than a call may take, and twice the half is not"
    for end in ends:
        end.close()


def test_many_keep_alives_have_few_answers(listener, good):
    """One for each read: an answer costs a call of the system."""
    keep_alive = message(b"", b"", b"")
    with holder(listener) as peer:
        say(listener, peer, keep_alive * 2000)
        served(listener, good)
        answers = bytearray()

        def answered():
            listener.receive()
            with contextlib.suppress(ssl.SSLWantReadError):
                answers.extend(peer.recv(65536))
            return answers

        assert until(answered)
        assert len(answers) <= 10 * len(keep_alive)
