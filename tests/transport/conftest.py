"""Ends of the control plane that are closed, whatever a test did."""

from __future__ import annotations

import pytest

from tests.transport.control_ends import Dialed, listening


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
