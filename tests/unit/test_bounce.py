"""Copies by way of a buffer of the GPU, and the threads that wait for one. A simulated GPU stands in."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.connector.pages import copies as copies_module
from kvferry.connector.pages.copies import BOUNCE_BYTES, GpuCopies
from kvferry.transport.channels import Copy
from kvferry.transport.errors import TransportError

LARGEST = 3 * BOUNCE_BYTES
COPIES = 24
KERNELS, LINK = 1, 2
"""The streams, in the order in which they are made."""


class Gpu:
    """Streams are numbers, their work is done by whoever waits. What an event waits for, as CUDA has it, is its last
    record when the wait was enqueued."""

    def __init__(self, seed: int) -> None:
        self.order, self.lock = random.Random(seed), threading.RLock()
        self.streams: dict[int, deque[tuple[Callable[[], bool], Callable[[], None]]]] = defaultdict(deque)
        self.ahead = KERNELS  # the stream that runs as far as it can; now and then it is the other one
        self.all_enqueued = threading.Event()
        self.room = 1 << 40
        self.gone: set[int] = set()  # addresses of memory that was given back

    def enqueue(self, stream: int, act: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        with self.lock:
            self.streams[stream].append((ready, act))

    def run(self, until: Callable[[], bool]) -> None:
        with self.lock:
            while not until():
                able = [number for number, work in self.streams.items() if work and work[0][0]()]
                if self.order.random() < 0.05:
                    self.ahead = LINK if self.ahead == KERNELS else KERNELS
                number = self.ahead if self.ahead in able else able[0]
                self.streams[number].popleft()[1]()

    def move(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        def act() -> None:
            assert not any(address in self.gone for address in (dst, src)), "the memory was given back"
            ctypes.memmove(dst, src, nbytes)

        self.enqueue(stream, act)

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if nbytes > self.room:
            raise TransportError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY")
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        weakref.finalize(memory, lambda kept: self.gone.add(kept.ctypes.data), memory.numpy()).atexit = False
        return memory


class Event:
    def __init__(self, gpu: Gpu, blocking: bool = False) -> None:
        self.gpu, self.recorded, self.passed = gpu, 0, 0

    def record(self, stream: int) -> None:
        self.recorded += 1
        self.gpu.enqueue(stream, partial(setattr, self, "passed", self.recorded))

    def make_stream_wait(self, stream: int) -> None:
        number = self.recorded
        self.gpu.enqueue(stream, lambda: None, lambda: self.passed >= number)

    def synchronize(self, seconds: float = 0.0) -> bool:
        assert self.gpu.all_enqueued.wait(60)
        number = self.recorded
        self.gpu.run(lambda: self.passed >= number)
        return True


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu(getattr(request, "param", 0))
    numbers = iter((KERNELS, LINK))

    def stream(device: torch.device, priority: int) -> Any:
        number = next(numbers)
        return SimpleNamespace(
            cuda_stream=number, synchronize=lambda: gpu.run(lambda: not gpu.streams[number])
        )  # fmt: skip

    driver = SimpleNamespace(
        Event=partial(Event, gpu), bind_context=lambda device: None, device_guard=contextlib.nullcontext,
        upload=gpu.move, download=gpu.move, allocate=gpu.allocate,
    )  # fmt: skip
    monkeypatch.setattr(copies_module, "cuda", driver)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda which: None)
    return gpu


@pytest.fixture
def copies(gpu: Gpu) -> Iterator[GpuCopies]:
    made = GpuCopies(torch.device("cuda", 0), 1)
    yield made
    gpu.all_enqueued.set()
    made.close()


class Bytes:
    """Pages and slots, one of each for every copy."""

    def __init__(self, gpu: Gpu, copies: GpuCopies, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        self.gpu, self.copies = gpu, copies
        self.pages = numbers.integers(0, 256, (COPIES, LARGEST), dtype=np.uint8)
        self.slots = numbers.integers(0, 256, (COPIES, LARGEST), dtype=np.uint8)
        self.started: list[tuple[Copy, int, np.ndarray, np.ndarray]] = []
        self.launched_at: list[int] = []

    def start(self, nbytes: int, *, to_host: bool) -> None:
        number = len(self.started)
        page, slot = self.pages[number], self.slots[number]

        def launch(address: int) -> None:
            self.launched_at.append(address)
            dst, src = (address, page.ctypes.data) if to_host else (page.ctypes.data, address)
            self.gpu.move(dst, src, nbytes, KERNELS)

        source, target = (page, slot) if to_host else (slot, page)
        wanted = np.concatenate((source[:nbytes], target[nbytes:]))
        copy = self.copies.start_with_host(launch, slot.ctypes.data, nbytes, to_host=to_host)
        self.started.append((copy, number, target, wanted))

    def check(self) -> bool:
        """Whether all copies are done; those that are have moved just their bytes."""
        done = [(number, target, wanted) for copy, number, target, wanted in self.started if copy.done]
        wrong = [number for number, target, wanted in done if not np.array_equal(target, wanted)]
        assert not wrong
        return len(done) == len(self.started)


@pytest.mark.parametrize("gpu", range(20), indirect=True)
def test_any_order_of_streams_moves_the_bytes(gpu: Gpu, copies: GpuCopies, request: pytest.FixtureRequest) -> None:
    """Whatever is done has moved, while others are under way. Copies of either direction and of any size share the
    buffers, which grow."""
    seed: int = request.node.callspec.params["gpu"]
    data, draw = Bytes(gpu, copies, seed), random.Random(seed)
    errors: list[BaseException] = []
    ended = threading.Event()

    def look() -> None:
        try:
            with gpu.lock:
                if data.check():
                    ended.set()
        except BaseException as error:
            errors.append(error)
            ended.set()

    copies.on_done = look
    for _ in range(COPIES):
        data.start(draw.choice([100, BOUNCE_BYTES, LARGEST - 8, LARGEST - 8]), to_host=draw.random() < 0.5)
    gpu.all_enqueued.set()
    assert ended.wait(60)
    assert not errors, errors


def test_without_memory_kernels_copy_and_one_line_says_so(
    gpu: Gpu, copies: GpuCopies, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.room = BOUNCE_BYTES
    gpu.all_enqueued.set()
    data = Bytes(gpu, copies, 0)
    for number in range(4):
        data.start(LARGEST, to_host=number % 2 == 0)
    data.start(BOUNCE_BYTES, to_host=True)
    copies.synchronize()
    slots = [slot.ctypes.data for slot in data.slots]
    assert data.launched_at[:4] == slots[:4] and data.launched_at[4] not in slots, "a smaller buffer can be had"
    for _, _, target, wanted in data.started:
        assert np.array_equal(target, wanted)
    assert caplog.text.count("the GPU has no 2 MiB") == 1 and caplog.text.count("\n") == 1


def test_after_an_error_of_a_launch_nothing_runs(gpu: Gpu, copies: GpuCopies) -> None:
    data = Bytes(gpu, copies, 0)
    data.start(LARGEST, to_host=True)

    def refuse(address: int) -> None:
        gpu.move(address, data.pages[1].ctypes.data, LARGEST, KERNELS)
        raise OSError("no launch")

    with pytest.raises(OSError, match="no launch"):
        copies.start_with_host(refuse, data.slots[1].ctypes.data, LARGEST, to_host=True)
    assert not any(gpu.streams.values())
    data.start(LARGEST, to_host=False)
    copies.synchronize()
    for _, _, target, wanted in data.started:
        assert np.array_equal(target, wanted)


class PassedEvent:
    def __init__(self, blocking: bool = False) -> None: ...

    def record(self, stream: object) -> None: ...

    def synchronize(self, seconds: float = 0.0) -> bool:
        return True


class Driver:
    Event, bind_context, device_guard = PassedEvent, lambda device: None, contextlib.nullcontext
    current_stream = staticmethod(lambda device: 0)


@pytest.fixture
def gpu_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuCopies]:
    stream: Any = type("Stream", (), {"cuda_stream": 0})
    monkeypatch.setattr(copies_module, "cuda", Driver)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream())
    for name in ("set_device", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda which: None)
    made = GpuCopies(torch.device("cuda", 0), 1)
    yield made
    made.close()


@pytest.mark.parametrize("after", ["a step", "a copy"])
def test_an_error_does_not_hide_later_ends(gpu_copies: GpuCopies, caplog: pytest.LogCaptureFixture, after: str) -> None:
    seen = threading.Event()
    calls = [seen.set]

    def act() -> None:
        if not caplog.text:
            raise OSError(24, "Too many open files")
        calls.pop()()

    if after == "a step":
        gpu_copies.after_engine(act)
        gpu_copies.after_engine(act)
        assert seen.wait(60)
    else:
        gpu_copies.on_done = act
        first, second = gpu_copies.start(lambda: None), gpu_copies.start(lambda: None)
        assert seen.wait(60) and first.done and second.done
    assert "Too many open files" in caplog.text
