"""Copies on a rank's device, and when they have ended.

On the host a copy is done on return. On a GPU it is enqueued on a stream of its own; one thread waits for its end in a
call that holds no GIL, so that the mover neither polls the GPU nor stands still for it. For one that takes less than
that thread takes to wake, the mover does stand still.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from kvferry.transport.plane import CPU

_CLOSE_SECONDS = 5.0
"""A GPU that does not end a copy for so long hangs."""


class Copy:
    """A copy on its way. ``done``: it touches no memory any more; ``error``: why its bytes are not there, empty if
    they are."""

    __slots__ = ("done", "error")

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self.error = ""


class Mark:
    """A place in what the engine gives its device to do."""

    __slots__ = ("event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    @property
    def passed(self) -> bool:
        """Whether the device has done all before it."""
        return bool(self.event.query())


class Copies(ABC):
    """The copies of one rank, in the order in which they are started, all by one thread. ``sms``: GPU SMs that each may
    take at most."""

    device: torch.device
    sms: int | None = None

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called from any thread whenever a copy has ended that was not done on return."""

    @abstractmethod
    def start(self, enqueue: Callable[[], None], *, brief: bool = False) -> Copy:
        """``enqueue`` calls kernels; the copy is done when all that they do is. What it raises passes through, and
        then nothing of it is under way. ``brief``: it takes less than a thread takes to wake."""

    @abstractmethod
    def mark(self) -> Mark | None:
        """What the engine's thread, which calls this, has given its device to do so far; ``None`` where all is done."""

    @abstractmethod
    def after(self, mark: Mark) -> None:
        """What is started from now on waits for it."""

    @abstractmethod
    def settle(self) -> None:
        """Block until all copies have ended that were started before."""

    @abstractmethod
    def close(self) -> None:
        """Settle, and take no more."""


class HostCopies(Copies):
    """Copies in host memory, done on return; the engine's own work there is too."""

    device = CPU

    def start(self, enqueue: Callable[[], None], *, brief: bool = False) -> Copy:
        enqueue()
        return Copy(done=True)

    def mark(self) -> Mark | None:
        return None

    def after(self, mark: Mark) -> None:
        """It has passed."""

    def settle(self) -> None:
        """They have ended."""

    def close(self) -> None:
        """They have ended."""


class GpuCopies(Copies):
    """Copies by a GPU, on a stream whose kernels are given SMs before the engine's next ones are.

    Args:
        device: with its index.
        sms: SMs that a copy may take, so that the engine's kernels go on beside it.
    """

    def __init__(self, device: torch.device, sms: int) -> None:
        super().__init__()
        self.device, self.sms = device, sms
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._local = threading.local()
        self._behind: Mark | None = None
        self._last: Copy | None = None
        self._events: deque[torch.cuda.Event] = deque()  # that can be recorded anew
        self._started: queue.SimpleQueue[tuple[Copy, torch.cuda.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="kvferry-copies", daemon=True)
        self._thread.start()

    def start(self, enqueue: Callable[[], None], *, brief: bool = False) -> Copy:
        if not hasattr(self._local, "bound"):  # this thread's stream from now on
            self._local.bound = True
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)
        copy, event = Copy(), self._events.pop() if self._events else torch.cuda.Event()
        try:
            enqueue()
        except BaseException:
            self._stream.synchronize()  # some of its kernels may have been launched
            raise
        event.record(self._stream)
        if brief and self._idle:
            self._await(copy, event)
        else:
            self._last = copy
            self._started.put((copy, event))
        return copy

    @property
    def _idle(self) -> bool:
        """Whether nothing is before the next copy."""
        return (self._last is None or self._last.done) and (self._behind is None or self._behind.passed)

    def _await(self, copy: Copy, event: torch.cuda.Event) -> None:
        try:
            event.synchronize()  # spins outside the GIL: an event that blocks is seen 0.1 to 0.4 ms later
        except Exception as error:  # whatever the driver says, no copy of this process succeeds any more
            copy.error = str(error).partition("\n")[0] or repr(error)
        else:
            self._events.append(event)
        copy.done = True

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event)

    def after(self, mark: Mark) -> None:
        self._behind = mark
        self._stream.wait_event(mark.event)

    def settle(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._started.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        while (started := self._started.get()) is not None:
            self._await(*started)
            self.on_done()


def copies_on(device: torch.device, sms: int) -> Copies:
    """The copies of a rank whose caches lie on ``device``."""
    return HostCopies() if device.type == "cpu" else GpuCopies(device, sms)
