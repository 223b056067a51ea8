"""CUDA IPC: D maps P's allocations, and D's kernels read P's pages over NVLink. Same host only.

A process that has one of P's handles reads and writes all of the allocation. So the handles do not travel. They lie in
a file without a name, which D opens through ``/proc``, and the kernel opens it only for a process that may look into
P's memory (the same user; see ptrace(2), PTRACE_MODE_READ). D opens the file of the process at the other end of its
control connection and of no other one, see ``transport/peer_process.py``. The file also names the KV caches inside the
allocations, and D reads nothing else there.

P can neither see nor stop a read of its pages, so a read proves nothing about P's blocks; a grant that is still current
after the read proves it. Mapping takes milliseconds, and unmapping has to wait for the copies under way, so both happen
on a thread of their own.
"""

from __future__ import annotations

import os
import secrets
import select
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta

from kvferry.transport import cuda
from kvferry.transport.channels import Copy, DChannel, PageRead, PullChannel, PulledChannel
from kvferry.transport.errors import PeerUnreachableError, PlaneUnavailableError, TransportError
from kvferry.transport.host import host_id
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import Plane, PlaneContext, decode_payload
from kvferry.transport.planes.memory_file import (
    Address,
    MemoryFileAddress,
    Ranges,
    check_within,
    joined,
    read_memory_file,
    write_memory_file,
)
from kvferry.transport.wake import Waker

_SECRET_BYTES = 16
_PROBE_BYTES = 2 << 20
"""Large enough to be an allocation of its own: smaller blocks of memory share an allocation."""
_MAX_ALLOCATIONS = 512

_Secret = Annotated[bytes, Meta(min_length=_SECRET_BYTES, max_length=_SECRET_BYTES)]


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``why``: why P's memory cannot be mapped; empty where it can."""

    host_id: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=1, le=1 << 30)]
    why: Annotated[str, Meta(max_length=512)] = ""


class _Allocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    base: Address
    nbytes: Address
    handle: Annotated[bytes, Meta(min_length=cuda.HANDLE_BYTES, max_length=cuda.HANDLE_BYTES)]


class _Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file. The probe begins with the secret, which shows D that its mappings are P's memory.
    ``ranges``: the KV caches in the allocations."""

    secret: _Secret
    gpu: Annotated[str, Meta(max_length=128)]
    probe: _Allocation
    allocations: Annotated[tuple[_Allocation, ...], Meta(max_length=_MAX_ALLOCATIONS)]
    ranges: Ranges


class IpcChannel(PullChannel):
    """D's end: P's allocations, mapped into our address space. D's kernels copy from there.

    Closing it waits, on the plane's thread, for the copies that have been started.
    """

    process: PeerProcess

    def __init__(self, plane: CudaIpcPlane, process: PeerProcess) -> None:
        self.ready = False
        self.process = process
        self._plane = plane
        self._memory: _Memory | None = None
        self._mapped: list[int] = []
        self._closed = False

    def map(self, memory: _Memory) -> None:
        """Map P's allocations, on the plane's thread."""
        self._memory = memory
        self._plane.later(self._map)

    def translate(self, address: int, nbytes: int) -> int:
        assert self._memory is not None
        check_within(self._memory.ranges, address, nbytes, "cuda_ipc")
        for allocation, mapped in zip(self._memory.allocations, self._mapped, strict=False):
            offset = address - allocation.base
            if offset >= 0 and offset + nbytes <= allocation.nbytes:
                return mapped + offset
        raise TransportError(f"cuda_ipc: {nbytes} bytes at {address:#x} are in no allocation that P has given us")

    def read(self, request: PageRead) -> Copy:
        return request.launch()

    def watch(self) -> bool:
        """Whether P's process has just ended; sets ``error``."""
        if self.error is not None or self.process.fd < 0 or not self.process.ended:
            return False
        self.fail("cuda_ipc: the producer died")
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.process.close()
            self._plane.later(self._unmap)

    def _map(self) -> None:
        memory = self._memory
        assert memory is not None
        try:
            cuda.bind_context(self._plane.device)
            for allocation in (*memory.allocations, memory.probe):
                self._mapped.append(cuda.open_handle(allocation.handle))
            probe = cuda.read_bytes(self._mapped[-1], _SECRET_BYTES, self._plane.device)
            if not secrets.compare_digest(probe, memory.secret):
                raise TransportError("the bytes read through the mapping are not the bytes that P wrote")
            for allocation, mapped in zip(memory.allocations, self._mapped, strict=False):
                if cuda.address_range(mapped)[1] < allocation.nbytes:
                    raise TransportError("a mapping is smaller than P's allocation")
        except Exception as error:  # after any error of the driver another plane may work
            self.error = PeerUnreachableError(f"cuda_ipc: P's memory cannot be mapped: {error}")
        else:
            self.ready = True
        self._plane.wake()

    def _unmap(self) -> None:
        self.ready = False
        self._plane.synchronize()  # copies that were started before the channel closed still read
        while self._mapped:
            cuda.close_handle(self._mapped.pop())


class CudaIpcPlane(Plane):
    """Reads between processes of one host whose GPUs reach each other's memory, or share a GPU.

    Raises:
        PlaneUnavailableError: NVIDIA's driver is missing.
    """

    name: ClassVar[str] = "cuda_ipc"
    pulls: ClassVar[bool] = True
    same_host: ClassVar[bool] = True

    def __init__(self, context: PlaneContext) -> None:
        if not hasattr(os, "pidfd_open"):
            raise PlaneUnavailableError("this system has no pidfd_open")
        memory = context.memory
        self.device, self.synchronize = memory.device, memory.synchronize
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._probe: torch.Tensor | None = None
        self._fd = -1
        self._channels: list[IpcChannel] = []
        self._waker = Waker()
        self._thread = ThreadPoolExecutor(1, "kvferry-cuda-ipc")
        cuda.bind_context(self.device)
        try:
            self._export(memory.ranges)
        except (PlaneUnavailableError, TransportError) as error:
            self.cannot_serve = str(error)

    def _export(self, ranges: Sequence[tuple[int, int]]) -> None:
        found = {}
        for address, nbytes in ranges:
            base, size = cuda.address_range(address)
            if address + nbytes > base + size:
                raise PlaneUnavailableError("the KV cache of a layer is spread over several allocations")
            found[base] = size
        if len(found) > _MAX_ALLOCATIONS:
            raise PlaneUnavailableError(f"the KV cache lies in {len(found)} allocations, limit {_MAX_ALLOCATIONS}")
        allocations = tuple(_Allocation(base, size, cuda.ipc_handle(base)) for base, size in found.items())
        self._probe = cuda.allocate(_PROBE_BYTES, self.device)
        self._probe[:_SECRET_BYTES] = torch.frombuffer(bytearray(self._secret), dtype=torch.uint8)
        torch.cuda.current_stream(self.device).synchronize()
        place = self._probe.data_ptr()
        probe = _Allocation(place, _PROBE_BYTES, cuda.ipc_handle(place))
        memory = _Memory(self._secret, cuda.device_uuid(self.device), probe, allocations, joined(ranges))
        self._fd = write_memory_file("kvferry-cuda-ipc", memory)

    def offer(self) -> bytes:
        offer = _Offer(host_id(), os.getpid(), self.cannot_serve[:512])
        return msgspec.msgpack.encode(offer)

    def connect(self, offer: bytes, host: str) -> tuple[IpcChannel, bytes]:
        theirs = decode_payload(offer, _Offer, "cuda_ipc offer")
        if not theirs.host_id or theirs.host_id != host_id():
            raise PeerUnreachableError("P is on another host or in another network namespace")
        if theirs.why:
            raise PlaneUnavailableError(f"P's memory cannot be mapped: {theirs.why}")
        if theirs.pid == os.getpid():
            raise PlaneUnavailableError("P is this very process")
        try:
            channel = IpcChannel(self, PeerProcess(theirs.pid))
        except OSError as error:
            raise PeerUnreachableError(f"P's process cannot be found: {error.strerror}") from None
        self._channels.append(channel)
        return channel, b""

    def accept(self, payload: bytes) -> tuple[PulledChannel, bytes]:
        if self._fd < 0:
            raise TransportError(f"cuda_ipc: {self.cannot_serve}")
        return PulledChannel(), msgspec.msgpack.encode(MemoryFileAddress(self._fd))

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, IpcChannel)
        try:
            memory = read_memory_file(channel.process, reply, _Memory, "cuda_ipc")
            cuda.check_peer_access(self.device, memory.gpu)
        except TransportError as error:
            raise PeerUnreachableError(str(error)) from None
        channel.map(memory)

    def later(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the thread that maps and unmaps, after the calls before it."""
        self._thread.submit(act)

    def wake(self) -> None:
        """A channel has changed: let the poller of ``pollables`` return."""
        self._waker.wake()

    def pollables(self) -> list[tuple[int, int]]:
        return [(fd, select.POLLIN) for fd in (self._waker.fd, *(channel.process.fd for channel in self._live()))]

    def _live(self) -> list[IpcChannel]:
        self._channels = [channel for channel in self._channels if channel.process.fd >= 0]
        return [channel for channel in self._channels if channel.error is None]

    @property
    def active(self) -> bool:
        return False

    def progress(self) -> bool:
        changed = self._waker.drain()
        return any([channel.watch() for channel in self._live()]) or changed

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels.clear()
        self._thread.shutdown()
        self._waker.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._probe = None
