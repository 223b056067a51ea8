"""Copies on a rank's device, and when they have ended.

On the host a copy is done on return. On a GPU it is enqueued on a stream of its own; one thread waits for its end in a
call that holds no GIL, so that the mover neither polls the GPU nor stands still for it. Where that would take longer
than the copy, or where the mover has nothing else to do, it does stand still. Where the engine computes with a
copy, its stream waits for it.
"""

from __future__ import annotations

import math
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from kvferry.transport import cuda
from kvferry.transport.channels import CPU, Copy

PATIENCE_SECONDS = 4e-3
"""How long the mover waits itself for the only copy under way while the engine is idle: 1 GiB over NVLink takes 3 ms,
and waking two threads one after the other 0.2 ms."""
_CLOSE_SECONDS = 5.0
"""A GPU that does not end a copy for so long hangs."""


DeviceEvent = cuda.Event
"""A place in what the engine gives its device to do."""


class Copies(ABC):
    """The copies of one rank, in the order in which they are started, all by one thread. ``sms``: GPU SMs that one may
    take at most that is started now; ``None`` is all."""

    device: torch.device
    sms: int | None = None
    idle: bool = False
    """Whether no forward runs beside what is started now, so that it may have all SMs. Written by the engine's
    thread."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called from any thread whenever a copy has ended that was not done on return."""

    @abstractmethod
    def start(self, enqueue: Callable[[], None], *, brief: bool = False, alone: bool = False) -> Copy:
        """``enqueue`` calls kernels; the copy is done when all that they do is. What it raises passes through, and
        then nothing of it is under way. ``alone``: nothing else is under way that could go on meanwhile. ``brief``: it
        takes less than a thread takes to wake."""

    @abstractmethod
    def record_event(self) -> DeviceEvent | None:
        """What the engine's thread, which calls this, has given its device to do so far; ``None`` where all is done."""

    @abstractmethod
    def wait_event(self, event: DeviceEvent) -> None:
        """What is started from now on waits for it."""

    @abstractmethod
    def make_engine_wait(self) -> None:
        """What the engine's thread, which calls this, gives its device from now on waits for all that was started
        before. Some thousand kernels may wait; with more, their launch waits too."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until all copies have ended that were started before."""

    @abstractmethod
    def close(self) -> None:
        """Settle, and take no more."""


class HostCopies(Copies):
    """Copies in host memory, done on return; the engine's own work there is too."""

    device = CPU

    def start(self, enqueue: Callable[[], None], *, brief: bool = False, alone: bool = False) -> Copy:
        enqueue()
        return Copy(done=True, on_stream=True)

    def record_event(self) -> DeviceEvent | None:
        return None

    def wait_event(self, event: DeviceEvent) -> None:
        """It has passed."""

    def make_engine_wait(self) -> None:
        """They have ended."""

    def synchronize(self) -> None:
        """They have ended."""

    def close(self) -> None:
        """They have ended."""


class GpuCopies(Copies):
    """Copies by a GPU, on a stream whose kernels are given SMs before the engine's next ones are.

    Args:
        device: with its index.
        sms: SMs that a copy may take while the engine computes, so that its kernels go on beside it.
    """

    def __init__(self, device: torch.device, sms: int) -> None:
        super().__init__()
        self.device, self._sms = device, sms
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._handle = self._stream.cuda_stream
        self._local = threading.local()
        self._behind: DeviceEvent | None = None
        self._last: Copy | None = None
        self._events: deque[cuda.Event] = deque()  # that can be recorded anew
        self._started: queue.SimpleQueue[tuple[Copy, cuda.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="kvferry-copies", daemon=True)
        self._thread.start()

    @property
    def sms(self) -> int | None:  # type: ignore[override]
        return None if self.idle else self._sms

    def start(self, enqueue: Callable[[], None], *, brief: bool = False, alone: bool = False) -> Copy:
        self._bind()
        copy, event = Copy(on_stream=True), self._events.pop() if self._events else cuda.Event()
        try:
            enqueue()
        except BaseException:
            self._stream.synchronize()  # some of its kernels may have been launched
            raise
        event.record(self._handle)
        seconds = 0.0 if not alone else math.inf if brief else PATIENCE_SECONDS if self.idle else 0.0
        if not (seconds and self._unhindered and self._await(copy, event, seconds)):
            self._last = copy
            self._started.put((copy, event))
        return copy

    def _bind(self) -> None:
        """Make the device, its context and the stream current in the calling thread."""
        if not hasattr(self._local, "bound"):
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)
            cuda.bind_context(self.device)
            self._local.bound = True

    @property
    def _unhindered(self) -> bool:
        """Whether nothing is before the next copy."""
        return (self._last is None or self._last.done) and (self._behind is None or self._behind.query())

    def _await(self, copy: Copy, event: cuda.Event, seconds: float = math.inf) -> bool:
        """Whether it has ended by then."""
        try:
            # It spins, without the GIL: a thread that sleeps sees the end of a copy 0.1 to 0.4 ms later.
            if not event.synchronize(seconds):
                return False
        except Exception as error:  # whatever the driver says, no copy of this process succeeds any more
            copy.error = str(error)
        else:
            self._events.append(event)
        copy.done = True
        return True

    def record_event(self) -> DeviceEvent:
        with cuda.device_guard(self.device):
            event = DeviceEvent()
            event.record(cuda.current_stream(self.device))
        return event

    def wait_event(self, event: DeviceEvent) -> None:
        self._bind()  # a rank without caches has started no copy before
        self._behind = event
        event.make_stream_wait(self._handle)

    def make_engine_wait(self) -> None:
        with cuda.device_guard(self.device):
            event = DeviceEvent()
            event.record(self._handle)
            event.make_stream_wait(cuda.current_stream(self.device))

    def synchronize(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._started.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _watch(self) -> None:
        self._bind()
        while (started := self._started.get()) is not None:
            self._await(*started)
            self.on_done()


def copies_on(device: torch.device, sms: int) -> Copies:
    """The copies of a rank whose caches lie on ``device``."""
    return HostCopies() if device.type == "cpu" else GpuCopies(device, sms)
