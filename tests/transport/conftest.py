"""Ends of the control plane that are closed, whatever a test did."""

from __future__ import annotations

import pytest

from kvferry.transport.control import framing
from tests.transport.control_ends import KEYS, Dialed, listening


@pytest.fixture
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
