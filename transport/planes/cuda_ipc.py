"""CUDA IPC: D maps P's allocations, and D's kernels read P's pages over NVLink. Same host only.

A process that has one of P's handles reads and writes all of the allocation. So the handles do not travel. They lie in
a file without a name, which D opens through ``/proc``, and the kernel opens it only for a process that may look into
P's memory (the same user; see ptrace(2), PTRACE_MODE_READ). The offer names the process and the file, and contains a
secret that distinguishes P from another process of the same number.

P can neither see nor stop a read of its pages, so a read proves nothing about P's blocks; a grant that is still current
after the read proves it. Mapping takes milliseconds, and unmapping has to wait for the copies under way, so both happen
on a thread of their own.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, ClassVar

import msgspec
import torch
import zmq
from msgspec import Meta

from kvferry.transport import cuda
from kvferry.transport.channels import Copy, PageRead, PullChannel, PulledChannel
from kvferry.transport.errors import PeerUnreachableError, PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.host import PeerProcess, host_id, open_peer_file
from kvferry.transport.plane import MAX_PAYLOAD_BYTES, Plane, PlaneContext, decode_payload
from kvferry.transport.wake import Waker

_SECRET_BYTES = 16
_PROBE_BYTES = 2 << 20
"""Large enough to be an allocation of its own: smaller blocks of memory share an allocation."""
_MAX_ALLOCATIONS = 512

_Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
_Secret = Annotated[bytes, Meta(min_length=_SECRET_BYTES, max_length=_SECRET_BYTES)]


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``why``: why P's memory cannot be mapped; empty where it can."""

    host_id: Annotated[str, Meta(max_length=64)]
    pid: Annotated[int, Meta(ge=1, le=1 << 30)]
    fd: Annotated[int, Meta(ge=-1, le=1 << 30)]
    secret: _Secret
    why: Annotated[str, Meta(max_length=512)] = ""


class _Allocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    base: _Address
    nbytes: _Address
    handle: Annotated[bytes, Meta(min_length=cuda.HANDLE_BYTES, max_length=cuda.HANDLE_BYTES)]


class _Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file. The probe begins with the secret, which proves to D that it reads P's memory."""

    secret: _Secret
    gpu: Annotated[str, Meta(max_length=128)]
    probe: _Allocation
    allocations: Annotated[tuple[_Allocation, ...], Meta(max_length=_MAX_ALLOCATIONS)]


class IpcChannel(PullChannel):
    """D's end: P's allocations, mapped into our address space. D's kernels copy from there.

    Closing it waits, on the plane's thread, for the copies that have been started.
    """

    def __init__(self, plane: CudaIpcPlane, process: PeerProcess, memory: _Memory) -> None:
        self.ready = False
        self.process = process
        self._plane = plane
        self._memory = memory
        self._mapped: list[int] = []
        self._closed = False
        plane.later(self._map)

    def translate(self, address: int, nbytes: int) -> int:
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

    def _export(self, ranges: Iterable[tuple[int, int]]) -> None:
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
        memory = _Memory(self._secret, cuda.device_uuid(self.device), probe, allocations)
        self._fd = os.memfd_create("kvferry-cuda-ipc", os.MFD_CLOEXEC)
        os.write(self._fd, msgspec.msgpack.encode(memory))

    def offer(self) -> bytes:
        offer = _Offer(host_id(), os.getpid(), self._fd, self._secret, self.cannot_serve[:512])
        return msgspec.msgpack.encode(offer)

    def connect(self, offer: bytes, host: str) -> tuple[IpcChannel, bytes]:
        theirs = decode_payload(offer, _Offer, "cuda_ipc offer")
        if not theirs.host_id or theirs.host_id != host_id():
            raise PeerUnreachableError("P is on another host or in another network namespace")
        if theirs.why:
            raise PlaneUnavailableError(f"P's memory cannot be mapped: {theirs.why}")
        if theirs.pid == os.getpid():
            raise PlaneUnavailableError("P is this very process")
        memory = _memory_of(theirs)
        try:
            cuda.check_peer_access(self.device, memory.gpu)
            process = PeerProcess(theirs.pid)
        except (TransportError, OSError) as error:
            raise PeerUnreachableError(str(error)) from None
        channel = IpcChannel(self, process, memory)
        self._channels.append(channel)
        return channel, b""

    def accept(self, payload: bytes) -> tuple[PulledChannel, bytes]:
        return PulledChannel(), b""

    def later(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the thread that maps and unmaps, after the calls before it."""
        self._thread.submit(act)

    def wake(self) -> None:
        """A channel has changed: let the poller of ``pollables`` return."""
        self._waker.wake()

    def pollables(self) -> list[tuple[int | zmq.Socket[bytes], int]]:
        return [(fd, zmq.POLLIN) for fd in (self._waker.fd, *(channel.process.fd for channel in self._live()))]

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


def _memory_of(offer: _Offer) -> _Memory:
    """P's description of its memory, from P's file.

    Raises:
        PeerUnreachableError: this process may not look into P's memory, or P's number is another process's here.
    """
    try:
        fd = open_peer_file(offer.pid, offer.fd)
        try:
            content = os.pread(fd, MAX_PAYLOAD_BYTES + 1, 0)
        finally:
            os.close(fd)
        memory = decode_payload(content, _Memory, "cuda_ipc memory")
    except PermissionError:
        raise PeerUnreachableError("P runs as another user, or may not be traced") from None
    except (OSError, ProtocolError):
        memory = None
    if memory is None or not secrets.compare_digest(memory.secret, offer.secret):
        raise PeerUnreachableError("P runs in another process namespace")
    return memory
