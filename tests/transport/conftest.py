"""Ends of the control plane that are closed, whatever a test did, and deadlines that a host that stands still keeps."""

from __future__ import annotations

import pytest

from kvferry.transport import sockets
from kvferry.transport.planes import socket_plane, zmq
from tests.transport.control_ends import Dialed, listening


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Of the ends in this process. A test of one of these deadlines sets it."""
    for module, name in (
        (sockets, "HELLO_SECONDS"), (socket_plane, "CONNECT_SECONDS"), (zmq, "CONNECT_SECONDS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 600.0)


@pytest.fixture
def listener():
    end = listening()
    yield end
    end.close()


@pytest.fixture
def good(listener):
    end = Dialed(listener.port)
    yield end
    end.close()


@pytest.fixture
def connect():
    ends = []

    def make(port, host="127.0.0.1", **options):
        ends.append(Dialed(port, host, **options))
        return ends[-1]

    yield make
    for end in ends:
        end.close()
