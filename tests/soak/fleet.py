"""The engines of a soak as its driver has them: orders to their processes, and the events that come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from tests.support.remote import Remote

SETTINGS = {
    "lease_seconds": 2.0, "lease_cap_seconds": 12.0, "ask_hold_seconds": 1.0, "handshake_timeout_seconds": 2.0,
    "transfer_timeout_seconds": 3.0,
}  # fmt: skip


class EngineProcess(Remote):
    """One life of one engine (``engine.SoakEngine``)."""

    def __init__(self, name: str, plane: str, *, port: int = 0, blocks: int, leak: str = "", **settings: Any) -> None:
        self.name, self.plane, self.port = name, plane, port
        self.ready, self.alive, self.stopped_until = False, True, 0.0
        super().__init__(
            "tests.soak.engine:SoakEngine", name=name, plane=plane, port=port, blocks=blocks,
            settings=SETTINGS | settings, leak=leak,
        )  # fmt: skip

    def order(self, method: str, **values: Any) -> None:
        with suppress(OSError):
            self.start(method, **values)

    def events(self) -> Iterable[dict[str, Any]]:
        """Those that have come. Raises EOFError where the process has ended."""
        while self.alive and self.connection.poll():
            try:
                kind, value = self.connection.recv()
            except ConnectionError:
                raise EOFError from None
            if kind != "answer":
                yield value if kind == "event" else {"event": "violation", "text": value}

    def stop(self, until: float) -> None:
        """SIGSTOP; the driver calls ``go_on`` at ``until``."""
        self.stopped_until = until
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped_until = 0.0
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.alive:
            self.alive = self.ready = False
            self.close()


class Driver:
    """Handles the events of its engines. ``violations``: what must not be, in words; nothing is waited for after one.
    Subclasses say what each event means."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    @property
    def engines(self) -> list[EngineProcess]:
        raise NotImplementedError

    def handle(self, engine: EngineProcess, event: dict[str, Any]) -> None:
        raise NotImplementedError

    def take_events(self, seconds: float) -> None:
        """Wait for an event, at most ``seconds``, and handle all that are there."""
        by_connection = {engine.connection: engine for engine in self.engines if engine.alive}
        for connection in wait(list(by_connection), seconds):
            engine = by_connection[connection]  # type: ignore[index]
            try:
                for event in engine.events():
                    self._handle(engine, event)
            except EOFError:
                engine.kill()
                self.violations.append(f"{engine.name} has ended by itself: {engine.process.poll()}")

    def _handle(self, engine: EngineProcess, event: dict[str, Any]) -> None:
        match event["event"]:
            case "violation":
                self.violations.append(f"{engine.name}: {event['text']}")
            case "ready":
                engine.ready, engine.port = True, event["port"]
        self.handle(engine, event)

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end and not self.violations:
            self.take_events(0.02)
        return condition()
