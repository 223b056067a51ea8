"""CUDA IPC: D maps P's allocations, and D's kernels read P's pages over NVLink. Same host only.

A process that has one of P's handles reads and writes all of the allocation. So the handles do not travel. They lie in
P's file (``pull.py``), which the kernel opens only for a process that may look into P's memory (the same user; see
ptrace(2), PTRACE_MODE_READ), or which P lends to a D of another process namespace (``lent_files.py``). The file also
names the KV caches inside the allocations, and D reads nothing else there.

Mapping takes milliseconds, and unmapping has to wait for the copies under way, so both happen on a thread of their own.
"""

from __future__ import annotations

import os
import secrets
import select
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, ClassVar

import msgspec
import torch
from msgspec import Meta

from kvferry.transport import cuda, sockets
from kvferry.transport.channels import Copy, PageRead, PulledChannel
from kvferry.transport.errors import PeerUnreachableError, PlaneUnavailableError, TransportError
from kvferry.transport.host import host_id, process_namespace
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import pull
from kvferry.transport.planes.lent_files import SOCKET_NAME_BYTES, BorrowedFiles, Lender
from kvferry.transport.planes.pull import SECRET_BYTES, ProcessChannel, PullOffer, PullPlane, joined
from kvferry.transport.wake import Waker

_PROBE_BYTES = 2 << 20
"""Large enough to be an allocation of its own: smaller blocks of memory share an allocation."""
_MAX_ALLOCATIONS = 512


class IpcOffer(PullOffer, frozen=True, forbid_unknown_fields=True):
    """``why``: why P's memory cannot be mapped; empty where it can. ``name``, ``secret``: of the socket over which P
    lends its files."""

    why: Annotated[str, Meta(max_length=512)] = ""
    name: Annotated[bytes, Meta(max_length=SOCKET_NAME_BYTES)] = b""
    secret: Annotated[bytes, Meta(max_length=sockets.SECRET_BYTES)] = b""


class IpcAllocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    base: pull.Address
    nbytes: pull.Address
    handle: Annotated[bytes, Meta(min_length=cuda.HANDLE_BYTES, max_length=cuda.HANDLE_BYTES)]


class IpcMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file. The probe begins with the secret, which shows D that its mappings are P's memory.
    ``ranges``: the KV caches in the allocations."""

    secret: pull.Secret
    gpu: Annotated[str, Meta(max_length=128)]
    probe: IpcAllocation
    allocations: Annotated[tuple[IpcAllocation, ...], Meta(max_length=_MAX_ALLOCATIONS)]
    ranges: pull.Ranges


class IpcChannel(ProcessChannel):
    """D's end: P's allocations, mapped into our address space. D's kernels copy from there.

    Closing it waits, on the plane's thread, for the copies that have been started.
    """

    def __init__(self, plane: CudaIpcPlane, process: PeerProcess) -> None:
        super().__init__(plane.name, process)
        self.ready = False
        self._plane = plane
        self._allocations: Sequence[IpcAllocation] = ()
        self._mapped: list[int] = []

    def translate(self, address: int, nbytes: int) -> int:
        super().translate(address, nbytes)
        for allocation, mapped in zip(self._allocations, self._mapped, strict=False):
            offset = address - allocation.base
            if offset >= 0 and offset + nbytes <= allocation.nbytes:
                return mapped + offset
        raise TransportError(
            f"cuda_ipc: {nbytes} bytes at {address:#x} are in no allocation that the prefill engine has given us"
        )

    def read(self, request: PageRead) -> Copy:
        return request.launch()

    def _close(self) -> None:
        self.process.close()
        self._plane.thread.submit(self._unmap)

    def map(self, memory: IpcMemory) -> None:
        """Map P's allocations. The plane's thread calls this."""
        try:
            cuda.bind_context(self._plane.device)
            for allocation in (*memory.allocations, memory.probe):
                self._mapped.append(cuda.open_handle(allocation.handle))
            probe = cuda.read_bytes(self._mapped[-1], SECRET_BYTES, self._plane.device)
            if not secrets.compare_digest(probe, memory.secret):
                raise TransportError(
                    "the bytes read through the mapping are not the bytes that the prefill engine wrote"
                )
            for allocation, mapped in zip(memory.allocations, self._mapped, strict=False):
                if cuda.address_range(mapped)[1] < allocation.nbytes:
                    raise TransportError("a mapping is smaller than the prefill engine's allocation")
        except Exception as error:  # after any error of the driver another plane may work
            self.error = PeerUnreachableError(f"cuda_ipc: the prefill engine's memory cannot be mapped: {error}")
        else:
            self.ranges, self._allocations = memory.ranges, memory.allocations
            self.ready = True
        self._plane.waker.wake()

    def _unmap(self) -> None:
        self.ready = False
        self._plane.synchronize()  # copies that were started before the channel closed still read
        while self._mapped:
            cuda.close_handle(self._mapped.pop())


class CudaIpcPlane(PullPlane[IpcChannel, IpcMemory]):
    """Reads between processes of one host whose GPUs reach each other's memory, or share a GPU. ``thread`` maps and
    unmaps; ``waker``: a channel has changed. Raises PlaneUnavailableError: NVIDIA's driver is missing."""

    name: ClassVar[str] = "cuda_ipc"
    offers: ClassVar[type[PullOffer]] = IpcOffer
    memory = IpcMemory
    elsewhere: ClassVar[type[PlaneUnavailableError]] = PeerUnreachableError

    def __init__(self, context: PlaneContext) -> None:
        super().__init__()
        memory = context.memory
        self.device, self.synchronize = memory.device, memory.synchronize
        self._probe: torch.Tensor | None = None
        self._lender = Lender()
        self.waker = Waker()
        self.thread = ThreadPoolExecutor(1, "kvferry-cuda-ipc")
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
        allocations = tuple(IpcAllocation(base, size, cuda.ipc_handle(base)) for base, size in found.items())
        secret = secrets.token_bytes(SECRET_BYTES)
        self._probe = cuda.allocate(_PROBE_BYTES, self.device)
        self._probe[:SECRET_BYTES] = torch.frombuffer(bytearray(secret), dtype=torch.uint8)
        torch.cuda.current_stream(self.device).synchronize()
        place = self._probe.data_ptr()
        probe = IpcAllocation(place, _PROBE_BYTES, cuda.ipc_handle(place))
        self.publish(IpcMemory(secret, cuda.device_uuid(self.device), probe, allocations, joined(ranges)))

    def offer(self) -> bytes:
        name, secret = (b"", b"") if self.cannot_serve else self._lender.offer()
        why = self.cannot_serve[:512]
        return msgspec.msgpack.encode(IpcOffer(host_id(), os.getpid(), process_namespace(), why, name, secret))

    def process_of(self, offer: PullOffer) -> tuple[PeerProcess, bytes]:
        assert isinstance(offer, IpcOffer)
        if offer.why:
            raise PlaneUnavailableError(f"the prefill engine's memory cannot be mapped: {offer.why}")
        apart = offer.pids != process_namespace()
        if offer.pid == os.getpid():
            if not apart:
                raise PlaneUnavailableError("the prefill engine is this very process")
            text = f"the prefill engine is process {offer.pid}, as we are in our namespace, and CUDA compares numbers"
            raise self.elsewhere(text)
        if not apart:
            return super().process_of(offer)
        files = BorrowedFiles(self.name, offer.name, offer.secret)
        return files, files.channel

    def channel_to(self, payload: bytes) -> PulledChannel:
        return self._lender.accept(payload) if payload else super().channel_to(payload)

    def join(self, process: PeerProcess) -> IpcChannel:
        return IpcChannel(self, process)

    def begin(self, channel: IpcChannel, memory: IpcMemory) -> None:
        try:
            cuda.check_peer_access(self.device, memory.gpu)
        except TransportError as error:
            raise PeerUnreachableError(str(error)) from None
        self.thread.submit(channel.map, memory)

    def pollables(self) -> list[tuple[int, int]]:
        return [(fd, select.POLLIN) for fd in (self.waker.fd, self._lender.sockets.fd)] + super().pollables()

    @property
    def active(self) -> bool:
        return False

    def progress(self) -> bool:
        changed = self.waker.drain() | self._lender.progress()
        return self.watch() or changed

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        super().close()
        self.thread.shutdown()
        self.waker.close()
        self._lender.close()
        self._probe = None
