"""Peers that die, stop, or are cut off: noticed, and nobody else is held up. Real processes."""

from __future__ import annotations

import ctypes
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from kvferry.transport.control import stream
from kvferry.transport.control.stream import KEEP_ALIVE
from tests.support.engines import free_port
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, MESSAGE, exchanged, until
from tests.transport.control_strangers import message, server_of

SILENCE = 6.0
"""Seconds of silence after which D gives up a P of another host in these tests; ``stream`` has 30 s."""


def answers(connection, seconds=300.0):
    """Whether the peer answers a message."""
    connection.receive()
    return connection.send(MESSAGE) and until(lambda: MESSAGE in connection.receive(), seconds)


@pytest.fixture(autouse=True)
def silence(monkeypatch):
    monkeypatch.setattr(stream, "SILENCE_SECONDS", SILENCE)


@pytest.fixture
def far(monkeypatch):
    """Connections of this process take their peer for another host."""
    monkeypatch.setattr(stream, "is_ours", lambda address: False)


@pytest.fixture
def spawn():
    children = []

    def start(role, port=0):
        script = Path(__file__).with_name("control_peer.py")
        children.append(fork_server().start(str(script), role, str(port), KEYS.secret, text=True))
        return children[-1]

    yield start
    for child in children:
        child.close()


def test_a_killed_p_is_noticed_and_the_next_is_another(spawn, connect):
    child = spawn("listen", free_port())  # one that nothing else is given before the next life takes it
    port = int(child.stdout.readline())
    connection, beside = connect(port), connect(int(spawn("listen").stdout.readline()))
    assert answers(connection) and answers(beside)
    child.send_signal(signal.SIGKILL)
    assert until(lambda: connection.state[1])
    assert "gone" in connection.reason
    assert not connection.send(MESSAGE)
    again = spawn("listen", port)
    assert int(again.stdout.readline()) == port
    time.sleep(0.3)
    assert connection.state == (False, True), "a lost connection does not come back: its queue was for another life"
    assert answers(connect(port)) and answers(beside)


def test_a_killed_d_is_noticed(spawn, listener):
    child = spawn("connect", listener.port)
    [(identity, _, _), *_] = until(listener.receive)
    child.send_signal(signal.SIGKILL)
    assert until(lambda: (listener.receive(), listener.peers == 0)[1])
    assert not listener.send(identity, MESSAGE) and listener.dropped == {"gone": 1}


def test_a_stopped_p_is_lost(far, spawn, connect):
    """Its kernel still acknowledges all bytes."""
    child = spawn("listen")
    connection = connect(int(child.stdout.readline()))
    assert answers(connection)
    child.send_signal(signal.SIGSTOP)
    assert until(lambda: connection.state[1])
    assert "has said nothing for" in connection.reason
    child.send_signal(signal.SIGCONT)
    assert answers(connect(connection.port))


def test_a_p_that_reads_and_answers_no_keep_alive_is_lost(far, connect):
    with server_of(KEYS.of_p) as (port, heard):
        connection = connect(port)
        assert until(lambda: connection.connected)
        assert until(lambda: connection.lost) and "has said nothing for" in connection.reason
        assert heard == message(*KEEP_ALIVE), "it is asked once"


def test_keep_alives_keep_an_idle_connection_and_nobody_sees_them(far, listener, connect):
    connection = connect(listener.port)
    assert exchanged(listener, connection)
    assert not until(lambda: listener.receive() or connection.receive(), 1.5 * SILENCE)
    assert connection.state == (True, False) and listener.peers == 1


def test_processes_of_this_host_may_stand_still(spawn, listener, connect):
    """Their end would be told by the kernel; where many threads want few cores, one may wait very long."""
    p, d = spawn("listen"), spawn("connect", listener.port)
    connection = connect(int(p.stdout.readline()))
    assert answers(connection)
    identity = until(listener.receive)[0][0]
    for child in (p, d):
        child.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE + 3)
    for child in (p, d):
        child.send_signal(signal.SIGCONT)
    assert answers(connection) and connection.state == (True, False)
    assert listener.send(identity, MESSAGE) and until(lambda: any(who == identity for who, _, _ in listener.receive()))


def test_a_d_whose_python_is_busy_does_not_take_p_for_dead(far, spawn, connect):
    connection = connect(int(spawn("listen").stdout.readline()))
    assert answers(connection)
    ctypes.PyDLL(None).sleep(int(SILENCE) + 2)  # a C call that keeps the GIL: no thread of Python runs
    assert answers(connection) and connection.state == (True, False)


class Cable:
    """A TCP proxy between two real ends that can be cut: bytes stop, and no end is told."""

    def __init__(self, port):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port, self._target = self.server.getsockname()[1], port
        self.cut = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self._ends = []

    def _accept(self):
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source, sink):
        try:
            while data := source.recv(65536):
                while self.cut.is_set():
                    time.sleep(0.01)
                sink.sendall(data)
        except OSError:
            pass
        for end in (source, sink):
            end.close()

    def close(self):
        self.cut.clear()
        for end in (self.server, *self._ends):
            end.close()


def test_a_partition_is_noticed_and_heals(far, listener, connect):
    cable = Cable(listener.port)
    try:
        connection = connect(cable.port)
        assert exchanged(listener, connection)
        cable.cut.set()
        assert until(lambda: (listener.receive(), connection.lost)[1])
        cable.cut.clear()
        assert until(lambda: (listener.receive(), listener.peers)[1] == 0)
        assert exchanged(listener, connect(cable.port))
    finally:
        cable.close()
