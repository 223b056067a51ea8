"""The results that the transfer thread has for its engine: loads that have ended, P's answers, and freed leases."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvferry.connector.decode_side.report import Check, FinishedLoad, StepLoadListener
from kvferry.connector.wire.step_plan import Load, RendezvousResult
from kvferry.transport.channels import Copy


class Results:
    """The transfer thread adds results. One other thread waits for them and takes them; each is returned once."""

    def __init__(self) -> None:
        self._finished: deque[FinishedLoad] = deque()
        self._freed: deque[str] = deque()
        self._rendezvous: deque[tuple[str, RendezvousResult]] = deque()
        self._ready = threading.Event()
        self._listeners: list[StepLoadListener] = []

    # --- the transfer thread ------------------------------------------------------------------------------------

    @property
    def listeners(self) -> tuple[StepLoadListener, ...]:
        """The listeners of the loads inside steps that are not final. Any thread may ask."""
        return tuple(self._listeners)

    def listen(self, listener: StepLoadListener) -> None:
        self._listeners.append(listener)

    def begun(self, load: Load, stands: Check | None, copies: Sequence[Copy]) -> None:
        """All copies of a load are under way: tell the listener of its step."""
        for listener in self._listeners:
            listener.begun(load, stands, copies)

    def moved(self) -> None:
        """A copy that is under way has moved bytes."""
        for listener in self._listeners:
            listener.moved()

    def finished(self, finished: FinishedLoad) -> None:
        """Add a load that has ended, and tell the listener of its step."""
        self._finished.append(finished)
        self._set_ready()
        if finished.load.now:
            for listener in self._listeners:
                listener.ended(finished.load, finished.ok)
            self._listeners = [listener for listener in self._listeners if not listener.final]

    def freed(self, request_id: str) -> None:
        """Nothing reads the leased blocks of a request any more."""
        self._freed.append(request_id)
        self._set_ready()

    def looked_up(self, request_id: str, result: RendezvousResult) -> None:
        """P has told its lease to a request, or that its engine has the prompt; or the request must prefill."""
        self._rendezvous.append((request_id, result))
        self._set_ready()

    def _set_ready(self) -> None:
        """Let ``wait`` return. It clears the event before it looks, so it misses no result that was appended before."""
        if not self._ready.is_set():
            self._ready.set()

    # --- the engine's thread ------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether there is a result to take."""
        return bool(self._finished or self._freed or self._rendezvous)

    def wait(self, timeout: float) -> None:
        """Block for up to ``timeout`` seconds. Returns early if there is a result to take."""
        self._ready.clear()
        if not self.any:  # after the clear: nothing is missed
            self._ready.wait(timeout)

    def take_finished(self) -> list[FinishedLoad]:
        """The loads that have ended."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def take_rendezvous(self) -> list[tuple[str, RendezvousResult]]:
        """The requests of which ``looked_up`` was called, in that order."""
        return [self._rendezvous.popleft() for _ in range(len(self._rendezvous))]

    def take_freed(self) -> list[str]:
        """The requests whose leased blocks may be freed."""
        return [self._freed.popleft() for _ in range(len(self._freed))]
