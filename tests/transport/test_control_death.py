"""Peers that die, stop, or are cut off: noticed, and nobody else is held up. Real processes."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import time

import pytest

from kvferry.transport.control import stream
from kvferry.transport.control.stream import KEEP_ALIVE
from tests.support.engines import free_port
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.fork_server import fork_server
from tests.transport.control_ends import KEYS, MESSAGE, exchanged, gone, until
from tests.transport.control_strangers import message, server_of

SILENCE = 4.0
"""Seconds of silence after which D gives up a P of another host in these tests; ``stream`` has 30 s."""
P = """
import sys, time
from tests.transport.control_ends import listening
listener = listening(port=int(sys.argv[1]))
print(listener.port, flush=True)
while True:
    for identity, frames, _ in listener.receive():
        listener.send(identity, frames)
    time.sleep(0.005)
"""
D = """
import sys, time
from tests.transport.control_ends import MESSAGE, Dialed
end = Dialed(int(sys.argv[1]))
while not end.lost:
    end.send(MESSAGE)
    time.sleep(0.05)
"""


def answers(connection):
    """Whether the peer answers a message."""
    connection.receive()
    return connection.send(MESSAGE) and until(lambda: MESSAGE in connection.receive())


@pytest.fixture(autouse=True)
def silence(monkeypatch):
    monkeypatch.setattr(stream, "SILENCE_SECONDS", SILENCE)


@pytest.fixture
def far(monkeypatch):
    """Connections of this process take their peer for another host."""
    monkeypatch.setattr(stream, "is_ours", lambda address: False)


@pytest.fixture
def spawn():
    """Starts a process, which answers every message, or sends one every 50 ms."""
    with contextlib.ExitStack() as stack:
        yield lambda program, port=0: stack.enter_context(fork_server().start("-c", program, str(port), text=True))


def port_of(child):
    return int(child.stdout.readline())


def test_a_killed_p_is_noticed_and_the_next_is_another(spawn, connect):
    child = spawn(P, free_port())  # one that nothing else is given before the next life takes it
    port = port_of(child)
    connection, beside = connect(port), connect(port_of(spawn(P)))
    assert answers(connection) and answers(beside)
    child.send_signal(signal.SIGKILL)
    assert until(lambda: connection.lost) and "gone" in connection.reason and not connection.send(MESSAGE)
    assert port_of(spawn(P, port)) == port and answers(connect(port)) and answers(beside)
    assert connection.state == (False, True), "a lost connection does not come back: its queue was for another life"


def test_a_killed_d_is_noticed(spawn, listener):
    child = spawn(D, listener.port)
    [(identity, _, _), *_] = until(listener.receive)
    child.send_signal(signal.SIGKILL)
    assert gone(listener)
    assert not listener.send(identity, MESSAGE) and listener.dropped == {"gone": 1}


def test_a_stopped_p_is_lost(far, spawn, connect):
    """Its kernel still acknowledges all bytes."""
    child = spawn(P)
    connection = connect(port_of(child))
    assert answers(connection)
    child.send_signal(signal.SIGSTOP)
    assert until(lambda: connection.lost) and "has said nothing for" in connection.reason
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
    p, d = spawn(P), spawn(D, listener.port)
    connection = connect(port_of(p))
    assert answers(connection)
    identity = until(listener.receive)[0][0]
    for child in (p, d):
        child.send_signal(signal.SIGSTOP)
    time.sleep(SILENCE + 1)
    for child in (p, d):
        child.send_signal(signal.SIGCONT)
    assert answers(connection) and connection.state == (True, False)
    assert listener.send(identity, MESSAGE) and until(lambda: any(who == identity for who, _, _ in listener.receive()))


def test_a_d_whose_python_is_busy_does_not_take_p_for_dead(far, spawn, connect):
    connection = connect(port_of(spawn(P)))
    assert answers(connection)
    ctypes.PyDLL(None).sleep(int(SILENCE) + 1)  # a C call that keeps the GIL: no thread of Python runs
    assert answers(connection) and connection.state == (True, False)


def test_a_partition_is_noticed_and_heals(far, listener, connect):
    with contextlib.closing(FaultProxy("127.0.0.3")) as proxy:
        proxy.open(listener.port, "127.0.0.1")
        connection = connect(listener.port, proxy.address)
        assert exchanged(listener, connection)
        proxy.arm(Fault(Kind.STALL, listener.port, upwards=True, at=0))
        assert until(lambda: (listener.receive(), connection.lost)[1]) and proxy.struck
        proxy.heal()
        assert gone(listener) and exchanged(listener, connect(listener.port, proxy.address))
