"""Descriptors and memory that peers can take from an engine: bounded, over all of them together."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from kvferry.transport.control import framing, zap_auth
from kvferry.transport.control.unread_bytes import UnreadBytesGuard, bytes_received, shutdown_connection
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, Dialed, listening, resident_mib, until
from tests.transport.control_strangers import closed_by_peer, message, raw, served

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

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("mode", ["keys", "insecure"])
def test_silent_connections_take_no_descriptor_from_good_peers(mode, monkeypatch):
    """480 silent connections at a process that may open 512 files: the oldest are ended."""
    monkeypatch.undo()
    keys = KEYS if mode == "keys" else None
    with fork_server().start("-c", FEW_FILES, mode, text=True) as process:
        port = int(process.stdout.readline())
        silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(480)]
        good = [Dialed(port, keys=keys, timeout=60) for _ in range(20)]
        for end in good:
            assert end.send(MESSAGE) and until(end.receive) == [MESSAGE], end.reason
        assert len(os.listdir(f"/proc/{process.pid}/fd")) < 350
        for connection in silent:
            connection.close()
        for end in good:
            end.close()


LAST_FILES = """
import os, resource, sys
from kvferry.transport.control.dialer import make_dialer
from tests.transport.control_ends import KEYS, LIMIT, MESSAGE, until
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
dialer, taken = make_dialer(KEYS, max_message_bytes=LIMIT), []

def answer():
    connection = dialer.connect("127.0.0.1", int(sys.argv[1]), key=KEYS.fingerprint, timeout=60)
    connection.send(MESSAGE)
    return until(lambda: (dialer.progress(), connection.receive())[1]) == [MESSAGE]

try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    for _ in range(int(sys.argv[2])):
        os.close(taken.pop())
print(answer())
"""


@pytest.mark.parametrize("left", [1, 2, 3, 4, 8])
def test_the_first_connection_of_a_process_that_has_few_descriptors_left(left):
    """libzmq ended the process where its threads, which the first socket starts, found none."""
    with fork_server().start("-c", FEW_FILES, "keys", text=True) as p:
        d = fork_server().run("-c", LAST_FILES, p.stdout.readline().strip(), str(left), timeout=60)
    assert (d.returncode, d.stdout) == (0, "True\n"), d.stderr


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


def test_bytes_before_the_handshake_are_bounded():
    """libzmq takes a whole message before it looks at it."""
    listener = listening()
    good = Dialed(listener.port)
    served(listener, good)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)
    most = greeting + b"\x06" + (LIMIT - 100).to_bytes(8, "big") + bytes(LIMIT - 101)
    with contextlib.ExitStack() as stack:
        before = resident_mib()
        for _ in range(100):
            endless(stack.enter_context(raw(listener)), most, listener, len(most))
        assert until(lambda: listener.dropped["flood"] >= 30)
        assert resident_mib() - before < 110
    served(listener, good)
    good.close()
    listener.close()


def test_unread_bytes_are_counted_over_all_connections():
    """Of a real connection each; a ZMQ client sends no part of a message before its end is there."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]
        pairs = []
        for _ in range(3):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            pairs.append((client, stack.enter_context(server.accept()[0])))
        fds = [accepted.fileno() for _, accepted in pairs]
        watched = [(fd, port) for fd in fds]

        def send(number, size):
            client, accepted = pairs[number]
            client.sendall(bytes(size))
            assert len(accepted.recv(size, socket.MSG_WAITALL)) == size

        guard = UnreadBytesGuard(limit=300_000)
        for number in range(3):
            send(number, 99_000)
        assert guard.over(watched, 0.0) == []
        send(1, 10_000)
        assert guard.over(watched, 1.0) == [fds[1]], "the sum is too large, and it has the most"
        guard.served.add(fds[1])
        assert guard.over(watched, 2.0) == [], "a whole message came"
        send(2, 290_000)
        assert guard.over(watched[2:], 3.0) == [fds[2]]
        guard.forget(fds[2])
        assert guard.over(watched[:2], framing.UNFINISHED_SECONDS + 1.0) == [fds[0]], "its message takes too long"
        assert guard.over([(fds[0], port + 1)], 9e9) == [], "a descriptor of another port is another file by now"


def test_a_look_at_a_descriptor_that_is_no_socket_opens_none():
    with open(os.devnull) as file:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert bytes_received(file.fileno(), 1) is None and not shutdown_connection(file.fileno(), 1)
        assert len(os.listdir("/proc/self/fd")) == before


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


def test_one_call_takes_bounded_bytes(listener, keys, monkeypatch):
    """Two peers that sent messages of a MiB without a pause took 350 MiB, and held the serving thread for 270 ms."""
    monkeypatch.setattr(framing, "BATCH_BYTES", LIMIT)
    ends = [Dialed(listener.port, keys=keys) for _ in range(4)]
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
