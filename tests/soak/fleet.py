"""The engines of a soak as its driver has them: orders to their processes, and the events that come back."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any

from tests.support.fork_server import fork_server

PROGRAM = str(Path(__file__).resolve().parent / "engine.py")
SETTINGS = {
    "lease_seconds": 2.0, "lease_cap_seconds": 12.0, "ask_hold_seconds": 1.0, "handshake_timeout_seconds": 2.0,
    "transfer_timeout_seconds": 3.0,
}  # fmt: skip

Event = tuple["EngineProcess", dict[str, Any]]


class EngineProcess:
    """One life of one engine. ``events`` gets what it says; ``None`` for the end of the process."""

    def __init__(
        self, events: Queue[Event], name: str, plane: str, *, port: int = 0, blocks: int, leak: str = "",
        **settings: Any,
    ) -> None:  # fmt: skip
        self.name, self.plane, self.port = name, plane, port
        self.ready, self.alive, self.stopped_until = False, True, 0.0
        arguments = dict(name=name, plane=plane, port=port, blocks=blocks, settings=SETTINGS | settings, leak=leak)
        self.process = fork_server().start(PROGRAM, json.dumps(arguments), text=True)
        self._events = events
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(ValueError):  # the pipe is closed
            for line in self.process.stdout:
                self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "ended"}))

    def order(self, order: str, **values: Any) -> None:
        with suppress(BrokenPipeError, ValueError):
            self.process.stdin.write(json.dumps({"order": order, **values}) + "\n")
            self.process.stdin.flush()

    def stop(self, until: float) -> None:
        """SIGSTOP; the driver calls ``go_on`` at ``until``."""
        self.stopped_until = until
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped_until = 0.0
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.alive = self.ready = False
        self.process.close()
