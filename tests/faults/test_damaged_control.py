"""A byte that changes on an established control connection ends this connection at once, and no process."""

from __future__ import annotations

import pytest

from tests.faults.pair import PROXY_ADDRESS
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.transport.control_ends import MESSAGE, Dialed, exchanged, listening, until


@pytest.mark.parametrize("at", [0, 2, 4, 40], ids=["type", "version", "length", "content"])
@pytest.mark.parametrize("upwards", [True, False], ids=["to P", "to D"])
def test_a_damaged_byte_of_a_tls_record(upwards: bool, at: int) -> None:
    listener, proxy = listening(), FaultProxy(PROXY_ADDRESS)
    proxy.open(listener.port, "127.0.0.1")
    first = Dialed(listener.port, host=PROXY_ADDRESS)
    try:
        assert exchanged(listener, first)
        proxy.arm(Fault(Kind.CORRUPT, listener.port, upwards, at=at))

        def lost() -> bool:
            for identity, frames, _ in listener.receive():
                assert frames == MESSAGE
                listener.send(identity, MESSAGE)
            assert all(frames == MESSAGE for frames in first.receive())
            first.send(MESSAGE)  # a record whose length was changed waits for more bytes
            return first.lost

        assert until(lost) and proxy.struck
        first.close()
        assert until(lambda: (listener.receive(), listener.peers)[1] == 0)
        again = Dialed(listener.port, host=PROXY_ADDRESS)
        assert exchanged(listener, again)
        again.close()
    finally:
        proxy.close()
        listener.close()
