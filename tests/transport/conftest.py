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
