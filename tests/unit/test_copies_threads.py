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


def broken() -> None:
    raise OSError(24, "Too many open files")


def test_an_error_after_a_step_does_not_hide_the_ends_of_later_steps(
    copies: GpuCopies, caplog: pytest.LogCaptureFixture
) -> None:
    seen = threading.Event()
    copies.after_engine(broken)
    copies.after_engine(seen.set)
    assert seen.wait(60) and "Too many open files" in caplog.text


def test_an_error_after_a_copy_does_not_hide_the_ends_of_later_copies(
    copies: GpuCopies, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Event()
    calls = [told.set, broken]

    def tell() -> None:
        calls.pop()()

    copies.on_done = tell
    first, second = copies.start(lambda: None), copies.start(lambda: None)
    assert told.wait(60) and first.done and second.done and "Too many open files" in caplog.text
