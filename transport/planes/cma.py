"""Cross-memory attach: D reads P's pages with ``process_vm_readv``, straight into its own, in one pass. Same host only.

There is no staging and no work on P. A read takes few steps of Python, whatever its size: beside a thread that keeps
the interpreter busy every step costs a wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.transport.channels import ByteRanges, Copy, Int64s, PageRead
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.pull import SECRET_BYTES, ProcessChannel, PullPlane, Ranges, Secret, joined

MAX_VECTORS = 1024
"""IOV_MAX of Linux."""
TURN_BYTES = 16 << 20
"""Bytes that one turn of a plane copies. Control messages wait for a few milliseconds at most, and a large copy still
takes few steps of Python."""
MAX_THREADS = 4
SHARE_BYTES = 1 << 20
"""Threads share a turn, one per this many bytes at most: one thread cannot use all of a host's memory bandwidth, and
with small ranges it mostly looks up pages. 64 MiB in ranges of 8 KiB: 5.8 GB/s with one thread, 10.3 with two."""
WATCH_SECONDS = 0.02
"""How often the plane looks for processes that have ended while it copies. Each look may cost a wait for the GIL."""

_libc = ctypes.CDLL(None, use_errno=True)


class CmaMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of P's file. ``secret`` lies at ``address``: D reads it once to see that it may read P's memory."""

    address: Annotated[int, Meta(ge=1, lt=1 << 62)]
    secret: Secret
    ranges: Ranges


def read_memory(pid: int, dst: Int64s, src: Int64s, nbytes: Int64s) -> None:
    """Copy ranges from another process: ``nbytes[i]`` bytes from its address ``src[i]`` to our address ``dst[i]``.

    Releases the GIL. At most ``MAX_VECTORS`` ranges. Raises OSError: not permitted (EPERM), no such process (ESRCH), an
    address that is not mapped (EFAULT)."""
    count = len(nbytes)
    local, remote = np.empty((2, count, 2), dtype=np.int64)
    local[:, 0], remote[:, 0] = dst, src
    local[:, 1] = remote[:, 1] = nbytes
    wanted = int(nbytes.sum())
    done = _libc.process_vm_readv(
        ctypes.c_int(pid),
        ctypes.c_void_p(local.ctypes.data), ctypes.c_ulong(count),
        ctypes.c_void_p(remote.ctypes.data), ctypes.c_ulong(count), ctypes.c_ulong(0),
    )  # fmt: skip
    if done != wanted:
        number = ctypes.get_errno() if done < 0 else errno.EFAULT
        raise OSError(number, os.strerror(number))


_libc.process_vm_readv.restype = ctypes.c_ssize_t


def thread_count() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


@cache
def helper_pool() -> ThreadPoolExecutor | None:
    """The helper threads; ``None`` where the system refuses one.

    All of them start here: an executor that could not start a thread later would raise after it had queued a share.
    """
    executor, started = ThreadPoolExecutor(MAX_THREADS - 1, "kvferry-cma"), threading.Event()
    try:
        for _ in range(MAX_THREADS - 1):  # each submission finds no idle thread, so each one starts a thread
            executor.submit(started.wait)
    except RuntimeError:
        executor.shutdown(wait=False)
        return None
    finally:
        started.set()
    return executor


def copy_ranges(pid: int, ranges: ByteRanges) -> None:
    """Copy ranges from another process, shared by threads. When it returns or raises, nothing writes ``dst`` any more.
    Raises TransportError: the process is gone, or an address does not belong to it."""
    total = int(ranges.nbytes.sum())
    shares = min(thread_count(), total // SHARE_BYTES, len(ranges.nbytes))
    helpers = helper_pool() if shares > 1 else None
    if helpers is None:
        _copy_share(pid, ranges)
        return
    ends = np.cumsum(ranges.nbytes)
    cuts = [0, *np.searchsorted(ends, total * np.arange(1, shares) // shares), len(ends)]
    parts = [ByteRanges(*(column[slice(*cut)] for column in ranges)) for cut in pairwise(cuts)]
    others = [helpers.submit(_copy_share, pid, part) for part in parts[1:]]
    try:
        _copy_share(pid, parts[0])
    finally:
        wait(others)
    for other in others:
        other.result()


def _copy_share(pid: int, ranges: ByteRanges) -> None:
    for first in range(0, len(ranges.nbytes), MAX_VECTORS):
        part = slice(first, first + MAX_VECTORS)
        try:
            read_memory(pid, ranges.dst[part], ranges.src[part], ranges.nbytes[part])
        except OSError as error:
            raise TransportError(f"cma: reading process {pid} failed: {error.strerror}") from None


class CmaCopy(Copy):
    """A copy of ``left``, of which each turn of the plane copies ``TURN_BYTES``."""

    __slots__ = ("channel", "left", "pid")

    def __init__(self, channel: CmaChannel, ranges: ByteRanges) -> None:
        super().__init__()
        self.channel = channel
        self.pid = channel.process.pid
        self.left: ByteRanges | None = ranges

    def turn(self) -> None:
        """Copy the next ``TURN_BYTES``, on this thread and the helpers."""
        assert self.left is not None
        try:
            now, self.left = self.left.split(TURN_BYTES)
            copy_ranges(self.pid, now)
        except Exception as error:  # only this copy fails, not the plane
            self.peer_lost = isinstance(error, TransportError)
            self.end(str(error) if self.peer_lost else repr(error))
            return
        self.moved += int(now.nbytes.sum())
        self.done = self.left is None

    def end(self, error: str) -> None:
        """Copy no more."""
        self.error = error
        self.done = True


class CmaChannel(ProcessChannel):
    """D's end."""

    def __init__(self, plane: CmaPlane, process: PeerProcess) -> None:
        super().__init__(plane.name, process)
        self._plane = plane

    def read(self, request: PageRead) -> Copy:
        copy = CmaCopy(self, request.byte_ranges())
        if not self._plane.copies:
            self._plane.watch_at = time.monotonic() + WATCH_SECONDS
        self._plane.copies.append(copy)
        return copy

    def cancel(self, copy: Copy) -> None:
        self._cancel(lambda each: each is copy)

    def _close(self) -> None:
        self._cancel(lambda each: each.channel is self)
        self.process.close()

    def _cancel(self, which: Callable[[CmaCopy], bool]) -> None:
        for copy in filter(which, list(self._plane.copies)):
            self._plane.copies.remove(copy)
            copy.end("cma: the copy was cancelled")


class CmaPlane(PullPlane[CmaChannel, CmaMemory]):
    """Reads between processes of one host that may trace each other (same user; see Yama's ``ptrace_scope``).

    ``copies`` are the copies under way. ``progress`` copies a part of the first one and puts it behind the others.
    ``watch_at``: when it looks for processes that have ended.
    """

    name: ClassVar[str] = "cma"
    memory = CmaMemory

    def __init__(self, context: PlaneContext) -> None:
        super().__init__()
        if not hasattr(_libc, "process_vm_readv"):
            raise PlaneUnavailableError("this system has no process_vm_readv")
        self.copies: deque[CmaCopy] = deque()
        self._secret = ctypes.create_string_buffer(secrets.token_bytes(SECRET_BYTES), SECRET_BYTES)
        self.watch_at = 0.0
        self.publish(CmaMemory(ctypes.addressof(self._secret), self._secret.raw, joined(context.memory.ranges)))

    def join(self, process: PeerProcess) -> CmaChannel:
        return CmaChannel(self, process)

    def begin(self, channel: CmaChannel, memory: CmaMemory) -> None:
        found = np.zeros(SECRET_BYTES, dtype=np.uint8)
        one = np.array([SECRET_BYTES], dtype=np.int64)
        try:
            read_memory(channel.process.pid, np.array([found.ctypes.data]), np.array([memory.address]), one)
        except OSError as error:
            hint = "; see kernel.yama.ptrace_scope" if error.errno == errno.EPERM else ""
            raise PlaneUnavailableError(f"the prefill engine's memory cannot be read: {error.strerror}{hint}") from None
        if not secrets.compare_digest(found.tobytes(), memory.secret):
            raise PlaneUnavailableError("the prefill engine's memory is not what its file says")
        channel.ranges = memory.ranges

    @property
    def active(self) -> bool:
        return bool(self.copies)

    def progress(self) -> bool:
        if not self.copies:
            return self.watch()
        copy = self.copies.popleft()
        copy.turn()
        if not copy.done:
            self.copies.append(copy)
        if time.monotonic() >= self.watch_at:
            self.watch_at = time.monotonic() + WATCH_SECONDS
            self.watch()
        return True

    def arm(self) -> bool:
        return not self.copies
