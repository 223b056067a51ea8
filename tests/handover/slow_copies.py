"""Copies that go on after they were started, as on a GPU. They are real, and happen on a thread of their own, each as
soon as the test lets it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.connector.pages.copies import Copies, DeviceEvent, WaitPolicy
from kvferry.connector.worker import worker_setup
from kvferry.transport.channels import Copy


class SlowCopies(Copies):
    """Copies on another thread, each ``seconds`` after ``gate`` is open. With ``error`` set they do nothing and say
    so."""

    def __init__(self, seconds: float = 1e-3) -> None:
        super().__init__()
        self._seconds = seconds
        self.gate = threading.Event()
        self.gate.set()
        self.error = ""
        self.running = 0
        self.waits: list[WaitPolicy] = []  # of each copy
        self.held: list[threading.Event] = []  # what the engine's device waits for
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def start(self, enqueue: Callable[[], None], wait: WaitPolicy = WaitPolicy.NONE) -> Copy:
        copy = Copy(on_stream=True)
        self.running += 1
        self.waits.append(wait)  # after it: who sees the wait sees that the copy runs
        event: Any = threading.Event()
        copy.event = event
        self._queue.put(lambda: self._copy(copy, enqueue, event))
        return copy

    def _run(self) -> None:
        while (act := self._queue.get()) is not None:
            act()

    def _copy(self, copy: Copy, launch: Callable[[], None], event: threading.Event) -> None:
        self.gate.wait(60)
        time.sleep(self._seconds)
        if not self.error:
            launch()
        copy.error = self.error
        self.running -= 1
        copy.ended_at = time.monotonic()
        copy.done = True
        event.set()
        self.on_done()

    def wait_event(self, mark: DeviceEvent) -> None:
        raise AssertionError("there are no marks")

    def make_engine_wait(self, event: Any) -> None:
        self.held.append(event)

    def synchronize(self) -> None:
        while self.running:
            time.sleep(1e-3)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(60)


def install(monkeypatch: pytest.MonkeyPatch) -> list[SlowCopies]:
    """In place of each rank's own; those of each, in the order in which ranks are made."""
    made: list[SlowCopies] = []

    def make(device: torch.device) -> SlowCopies:
        made.append(SlowCopies())
        return made[-1]

    monkeypatch.setattr(worker_setup, "copies_on", make)
    return made
