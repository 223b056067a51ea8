"""Memory for slots that cannot be had."""

from __future__ import annotations

import pytest

from kvferry.transport import staging
from kvferry.transport.errors import TransportError


def test_page_locked_memory_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link then takes another plane; any other exception would end it."""

    def refused(nbytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(staging, "empty_page_locked", refused)
    pool = staging.SlotPool(1 << 20, 4 << 20, page_locked=True, in_one_piece=True)
    with pytest.raises(
        TransportError, match=r"no 4 MiB of page-locked host memory.*out of memory; lower staging_bytes"
    ):
        pool.take()
