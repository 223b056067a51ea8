"""The threads that wait for a GPU outlive an error of what they call. A driver stands in: its events have passed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvferry.connector.pages import copies as copies_module
from kvferry.connector.pages.copies import GpuCopies


class PassedEvent:
    def __init__(self, blocking: bool = False) -> None: ...

    def record(self, stream: object) -> None: ...

    def synchronize(self, seconds: float = 0.0) -> bool:
        return True


class Driver:
    Event, bind_context, device_guard = PassedEvent, lambda device: None, contextlib.nullcontext
    current_stream = staticmethod(lambda device: 0)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCopies]:
    stream: Any = type("Stream", (), {"cuda_stream": 0})
    monkeypatch.setattr(copies_module, "cuda", Driver)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream())
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda which: None)
    made = GpuCopies(torch.device("cuda", 0), 1)
    yield made
    made.close()


@pytest.mark.parametrize("after", ["a step", "a copy"])
def test_an_error_does_not_hide_later_ends(copies: GpuCopies, caplog: pytest.LogCaptureFixture, after: str) -> None:
    seen = threading.Event()
    calls = [seen.set]

    def act() -> None:
        if not caplog.text:
            raise OSError(24, "Too many open files")
        calls.pop()()

    if after == "a step":
        copies.after_engine(act)
        copies.after_engine(act)
        assert seen.wait(60)
    else:
        copies.on_done = act
        first, second = copies.start(lambda: None), copies.start(lambda: None)
        assert seen.wait(60) and first.done and second.done
    assert "Too many open files" in caplog.text
