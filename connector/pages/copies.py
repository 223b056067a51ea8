"""Copies on a rank's device, and when they have ended.

On the host a copy is done on return. On a GPU it is enqueued on a separate stream. One thread waits for the end of
each copy in a call that holds no GIL, so that the transfer thread neither polls the GPU nor blocks. The transfer thread
itself waits where waking it would take longer than the copy, or where it has nothing else to do. Where the engine
computes with the copied data, the engine's stream waits for the copy.

Kernels could copy between pages and page-locked host memory by themselves, but would hold their SMs for as long as PCIe
takes, and hold the engine up. So they copy to or from a buffer of the GPU, in a tenth of that time, and a copy
engine of the GPU, which takes no SM, moves the bytes over PCIe, on a stream of its own: ``Bounce``.
"""

from __future__ import annotations

import enum
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from kvferry.transport import cuda
from kvferry.transport.channels import CPU, Copy
from kvferry.transport.errors import TransportError
from kvferry.transport.limited_log import RateLimitedLog

logger = logging.getLogger("vllm.kvferry.copies")

PATIENCE_SECONDS = 4e-3
"""A bounded wait of the transfer thread. 1 GiB over NVLink takes 3 ms, and waking two threads one after the other takes
0.2 ms."""
BOUNCE_BYTES = 256 << 10
"""Shorter copies to and from host memory are left to kernels alone: PCIe takes 5 us for them, a bounce begins later."""
_BOUNCES = 2
"""Buffers in use by turns. With one, kernels and PCIe wait for each other: 48 in place of 54 GB/s for 16 MiB on an idle
H100, and 11 in place of 22 beside large matrix products."""
COPY_SMS = 20  # that a copy takes while the engine computes: more would hold up its kernels
_CLOSE_SECONDS = 5.0
"""A GPU that has not ended a copy after this time hangs."""


class WaitPolicy(enum.Enum):
    """Whether the transfer thread itself waits for the end of a copy before it goes on. The value is its longest wait,
    in seconds. It waits for no copy that stands behind other work of the device."""

    NONE = 0.0
    BOUNDED = PATIENCE_SECONDS
    UNTIL_DONE = math.inf


DeviceEvent = cuda.Event
"""A point in the order of the work that the engine's thread launches on its device."""


class Bounce(msgspec.Struct, eq=False):
    """A buffer of the GPU that copies between pages and host memory pass through. ``full``: its bytes are in it.
    ``last``: the last copy that needs it."""

    memory: torch.Tensor
    full: cuda.Event
    last: Copy | None = None


class Copies:
    """The copies of one rank, in the order in which they are started. One thread starts all of them.

    These are copies in host memory: each is done on return, and so is the engine's own work in host memory.
    """

    device: torch.device = CPU
    sms: int | None = None
    """The most GPU SMs that a copy started now may take; ``None`` is all."""
    idle: bool = False
    """Whether no forward pass runs beside a copy that is started now, so that the copy may take all SMs. The engine's
    thread writes this flag."""

    def __init__(self) -> None:
        self.on_done: Callable[[], None] = lambda: None
        """Called, from any thread, at the end of each copy that was not done when ``start`` returned."""

    def start(self, enqueue: Callable[[], None], wait: WaitPolicy = WaitPolicy.NONE) -> Copy:
        """Start a copy. ``enqueue`` launches its kernels; the copy is done when all of them have ended. An error of
        ``enqueue`` is raised here, and then none of its kernels runs any more. ``wait``: whether this call waits for
        the end of the copy."""
        enqueue()
        return Copy(done=True, on_stream=True)

    def start_with_host(
        self,
        launch: Callable[[int], None],
        address: int,
        nbytes: int,
        wait: WaitPolicy = WaitPolicy.NONE,
        *,
        to_host: bool,
    ) -> Copy:
        """Start a copy between pages and the ``nbytes`` bytes at ``address`` of host memory, which is page-locked for a
        GPU. ``launch`` launches its kernels, for these bytes at the address that it is given. ``to_host``: they write
        all of the bytes; else they read them, and write none. Otherwise as ``start``."""
        return self.start(partial(launch, address), wait)

    def record_event(self) -> DeviceEvent | None:
        """The work that the engine's thread has launched on its device so far; ``None`` where all of it is done. The
        engine's thread calls this."""
        return None

    def after_engine(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the device has done the work that the engine's thread has launched so far: at once, or from
        another thread, in the order of these calls. The engine's thread calls this."""
        act()

    def wait_event(self, event: DeviceEvent) -> None:
        """Copies that are started from now on wait for ``event``."""

    def make_engine_wait(self, event: DeviceEvent) -> None:
        """Work that the engine's thread launches from now on waits for ``event``. Some thousand kernels may wait; with
        more, their launch waits too. The engine's thread calls this."""

    def synchronize(self) -> None:
        """Block until all copies that were started before have ended."""

    def close(self) -> None:
        """Wait for the copies that were started, up to 5 s on a GPU, and start no more."""


class GpuCopies(Copies):
    """Copies by a GPU, ``device``, with its index. Its stream has priority: its kernels receive SMs before the engine's
    next kernels. ``sms``: as many as a copy may take while the engine computes."""

    def __init__(self, device: torch.device, sms: int = COPY_SMS) -> None:
        super().__init__()
        self.device, self._sms, self._log = device, sms, RateLimitedLog(logger)
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._handle = self._stream.cuda_stream
        self._link = torch.cuda.Stream(device, priority=-1)  # of the copy engines
        self._bounces: deque[Bounce] = deque()
        self._bounce_limit = math.inf
        self._local = threading.local()
        self._behind: DeviceEvent | None = None
        self._last: Copy | None = None
        self._events: deque[cuda.Event] = deque()  # events that can be recorded again
        self._started: queue.SimpleQueue[tuple[Copy, cuda.Event] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="kvferry-copies", daemon=True)
        self._thread.start()
        self._engine: queue.SimpleQueue[tuple[cuda.Event, Callable[[], None]] | None] = queue.SimpleQueue()
        self._engine_events: deque[cuda.Event] = deque()  # as ``_events``
        self._engine_thread: threading.Thread | None = None

    @property
    def sms(self) -> int | None:  # type: ignore[override]
        return None if self.idle else self._sms

    def start(self, enqueue: Callable[[], None], wait: WaitPolicy = WaitPolicy.NONE) -> Copy:
        return self._start(enqueue, wait, self._handle)

    def _start(self, enqueue: Callable[[], None], wait: WaitPolicy, last: int) -> Copy:
        """``last``: the stream on which the copy ends."""
        self._bind()
        copy, event = Copy(on_stream=True), self._events.pop() if self._events else cuda.Event()
        try:
            enqueue()
        except BaseException:
            self.synchronize()  # some of the kernels may have been launched
            raise
        event.record(last)
        copy.event = event  # recorded again once the copy has ended: who waits for it then, waits longer
        if wait is WaitPolicy.NONE or not (self._unhindered and self._await(copy, event, wait.value)):
            self._last = copy
            self._started.put((copy, event))
        return copy

    def start_with_host(
        self,
        launch: Callable[[int], None],
        address: int,
        nbytes: int,
        wait: WaitPolicy = WaitPolicy.NONE,
        *,
        to_host: bool,
    ) -> Copy:
        bounce = self._bounce(nbytes) if nbytes >= BOUNCE_BYTES else None
        if bounce is None:
            return self.start(partial(launch, address), wait)
        kernels, link, memory = self._handle, self._link.cuda_stream, bounce.memory.data_ptr()
        first, last = (kernels, link) if to_host else (link, kernels)

        def enqueue() -> None:
            if bounce.last is not None and not bounce.last.done and bounce.last.event is not None:
                bounce.last.event.make_stream_wait(first)
            if to_host:
                launch(memory)
            else:
                cuda.upload(memory, address, nbytes, link)
            bounce.full.record(first)
            bounce.full.make_stream_wait(last)
            if to_host:
                cuda.download(address, memory, nbytes, link)
            else:
                launch(memory)

        bounce.last = self._start(enqueue, wait, last)
        return bounce.last

    def _bounce(self, nbytes: int) -> Bounce | None:
        """The buffer whose turn it is; ``None`` where the GPU has no memory for buffers of ``nbytes``."""
        if nbytes >= self._bounce_limit:
            return None
        self._bind()
        if not self._bounces or self._bounces[0].memory.nbytes < nbytes:
            self.synchronize()  # until now copies use the buffers
            self._bounces.clear()
            size = 1 << (nbytes - 1).bit_length()  # seldom more than a slot, and few sizes until then
            try:
                self._bounces.extend(Bounce(cuda.allocate(size, self.device), cuda.Event()) for _ in range(_BOUNCES))
            except TransportError as error:
                self._bounces.clear()
                self._bounce_limit = nbytes
                logger.warning(
                    "kvferry: the GPU has no %d MiB for copies to and from host memory, so its kernels copy over PCIe "
                    "and slow the engine: %s",
                    _BOUNCES * size >> 20,
                    error,
                )
                return None
        self._bounces.rotate(-1)
        return self._bounces[-1]

    def _bind(self) -> None:
        """Make the device, its context and the stream current in the calling thread."""
        if not hasattr(self._local, "bound"):
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)
            cuda.bind_context(self.device)
            self._local.bound = True

    @property
    def _unhindered(self) -> bool:
        """Whether the next copy would wait for nothing: the last copy has ended, and so has the awaited event."""
        return (self._last is None or self._last.done) and (self._behind is None or self._behind.query())

    def _await(self, copy: Copy, event: cuda.Event, seconds: float = math.inf) -> bool:
        """Wait for the end of a copy, at most ``seconds``. Returns whether it has ended."""
        try:
            # This call spins without the GIL: a sleeping thread notices the end of a copy 0.1 to 0.4 ms later.
            if not event.synchronize(seconds):
                return False
        except Exception as error:  # after any driver error no copy of this process succeeds any more
            copy.error = str(error)
        else:
            self._events.append(event)
        copy.ended_at = time.monotonic()
        copy.done = True
        return True

    def record_event(self) -> DeviceEvent:
        with cuda.device_guard(self.device):
            event = DeviceEvent()
            event.record(cuda.current_stream(self.device))
        return event

    def after_engine(self, act: Callable[[], None]) -> None:
        if self._engine_thread is None:
            self._engine_thread = threading.Thread(target=self._watch_engine, name="kvferry-prefills", daemon=True)
            self._engine_thread.start()
        with cuda.device_guard(self.device):
            event = self._engine_events.pop() if self._engine_events else cuda.Event(blocking=True)
            event.record(cuda.current_stream(self.device))
        self._engine.put((event, act))

    def wait_event(self, event: DeviceEvent) -> None:
        self._bind()  # a rank without caches has started no copy before
        self._behind = event
        event.make_stream_wait(self._handle)

    def make_engine_wait(self, event: DeviceEvent) -> None:
        with cuda.device_guard(self.device):
            event.make_stream_wait(cuda.current_stream(self.device))

    def synchronize(self) -> None:
        self._stream.synchronize()
        self._link.synchronize()  # copies to host memory end there

    def close(self) -> None:
        self._started.put(None)
        self._engine.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._engine_thread is not None:
            self._engine_thread.join(_CLOSE_SECONDS)

    def _watch_engine(self) -> None:
        """Sleep until the engine's device has passed each event. To wait on ``kvferry-copies`` would delay the ends of
        copies, and a wait of the copies' stream would hold up the copies of other hand-overs."""
        cuda.bind_context(self.device)
        while (awaited := self._engine.get()) is not None:
            event, act = awaited
            try:
                event.synchronize()
            except Exception:  # after any driver error nothing of this process is computed any more
                logger.exception("kvferry: the device has failed")
                continue
            self._engine_events.append(event)
            self._call(act)

    def _watch(self) -> None:
        self._bind()
        while (started := self._started.get()) is not None:
            self._await(*started)
            self._call(self.on_done)

    def _call(self, act: Callable[[], None]) -> None:
        """An error in one call must not end the thread: no later copy, or step, would be seen to end."""
        try:
            act()
        except Exception:
            self._log.exception("call", "kvferry: unexpected error at the end of work of the device, going on")


def copies_on(device: torch.device) -> Copies:
    """The copies of a rank whose caches lie on ``device``."""
    return Copies() if device.type == "cpu" else GpuCopies(device)
