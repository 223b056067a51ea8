"""A byte that changes on an established control connection with keys ends this connection at once, and no process."""

from __future__ import annotations

import pytest

from kvferry.transport.control import framing
from tests.faults.pair import PROXY_ADDRESS
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.fork_server import fork_server
from tests.transport.control_ends import MESSAGE, Dialed, exchanged, listening, until

HEARTBEATS = 3000
"""In the time of silence, of 300 s: heartbeats are frequent, and no connection ends because one of them is late."""
PROGRAM = f"""
from kvferry.transport.control import framing
framing.HEARTBEATS = {HEARTBEATS}
from tests.faults.test_damaged_control import damaged
print(damaged(True), flush=True)
"""


def damaged(upwards: bool) -> str:
    """Damage one byte of an established connection to a listener of this process. Returns what became of it."""
    listener, proxy = listening(), FaultProxy(PROXY_ADDRESS)
    proxy.open(listener.port, "127.0.0.1")
    first = Dialed(listener.port, host=PROXY_ADDRESS)
    try:
        assert exchanged(listener, first)
        proxy.arm(Fault(Kind.CORRUPT, listener.port, upwards, at=40))
        until(lambda: not (first.send(MESSAGE) and exchange(listener, first)) or bool(proxy.struck))
        assert proxy.struck
        noticed = until(lambda: first.lost, 20.0)
        first.close()
        proxy.cut()
        again = Dialed(listener.port, host=PROXY_ADDRESS)
        until(lambda: not listener.receive() and False, 1.0)  # time for libzmq's heartbeats
        works = exchanged(listener, again)
        again.close()
        return "noticed" if noticed and works else "not noticed"
    finally:
        proxy.close()
        listener.close()


def exchange(listener, connection) -> bool:
    """Answer what has arrived; True."""
    for identity, _, _ in listener.receive():
        listener.send(identity, MESSAGE)
    connection.receive()
    return True


def test_a_damaged_byte_on_the_way_to_p() -> None:
    """In a process of its own: libzmq aborted the process of P where its monitor told of the failed decryption."""
    done = fork_server().run("-c", PROGRAM, timeout=800)
    assert (done.returncode, done.stdout) == (0, "noticed\n"), done.stderr


def test_a_damaged_byte_on_the_way_to_d(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "HEARTBEATS", HEARTBEATS)
    assert damaged(False) == "noticed"
