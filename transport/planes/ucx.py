"""The UCX data plane: tagged messages between UCX workers, from staging slot to staging slot.

Both sides make an endpoint to the other's worker address, so that each notices the other's death. UCX listens for every
worker, and crashes on a forged worker address ("What UCX trusts" in SECURITY.md). So there is no worker before
D attaches the plane, one worker serves the peers on this host and has no port beyond it, and the addresses come by the
control connection, which is authenticated.

D posts no receive for a message that may never come. It probes for arrived messages, and receives each by its handle
into a slot. Of all but small messages only the sender's announcement has arrived by then. So no receive has to be
cancelled, which UCXX cannot do for one request. A D without a free slot slows P down, because it does not answer the
announcement. D receives and drops messages for a closed channel, so that P's sends complete and P's slots become free.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import torch
from msgspec import Meta

from kvferry.transport import cuda
from kvferry.transport.channels import DChannel, Pieces, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.host import host_id, is_ours
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.push import PushPlane, PushReceiver, WindowedSender, windows
from kvferry.transport.planes.ucx_settings import failing_as, lanes_to, refuse_ucx, settings_for, uses_rdma
from kvferry.transport.staging import SlotPool

_WINDOWS, _GPU_WINDOWS = (4, 2), (6, 3)
"""Messages of one channel that P has in flight, and that D receives at the same time. UCX moves all its messages at the
same time, so many messages would end together, and neither side would copy while the link works. On a GPU copies are
short, and the link waits for the announcements instead."""
_MAX_PENDING = 4096
"""Bound on the messages that are announced and wait for their turn or for a slot."""
_SPIN_SECONDS = 2e-3
"""With GPU memory, how long the worker is polled after bytes have moved and while more are on their way: one slot takes
0.1 ms over NVLink, and the end of a copy by the GPU wakes a sleeping thread late."""
_CLOSE_MESSAGE_BYTES = 1
"""The size of the message that closes a channel."""
_CLOSE_SECONDS = 0.5
"""Bound on the wait for the messages in flight when the plane closes."""

# --- UCXX from one thread: a worker, and links to the workers of peers ----------------------------------------------

UcxArray = Any
"""UCXX's ``Array``: the memory of a tensor in the form that UCXX takes. It keeps the tensor alive; ``nbytes``."""
UcxRequest = Any
"""UCXX's request, a send or a receive: ``completed``: UCX uses the memory no more; ``status`` then is ``DONE``, or an
error."""
DONE = 0
"""UCS_OK."""
_CLOSE_ROUNDS = 100
"""Rounds of progress for closing the endpoints. Endpoints that are still open then end with the worker."""


def load_ucxx() -> tuple[Any, Any]:
    """UCXX's binding (``ucxx._lib.libucxx``), and its ``Array``, the form in which it takes memory. Raises
    PlaneUnavailableError: it is not installed, does not load, or is too old."""
    # UCXX itself sets variables, and builds of UCX without CUDA warn about them.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ModuleNotFoundError as error:
        raise _not_installed(error.name) from None
    except (ImportError, OSError) as error:
        raise PlaneUnavailableError(f"ucx: UCXX does not load: {str(error).splitlines()[0]}") from None
    if not hasattr(libucxx.UCXEndpoint, "tag_recv_with_handle"):
        raise PlaneUnavailableError(f"ucx: UCXX {ucxx.__version__} is too old, 0.47 is the first that will do")
    return libucxx, Array


def ucx_context(host: str, *, here: bool) -> Any:
    """UCX's context for workers that peers reach at the local address ``host``. ``here``: these peers are on this host.
    It opens no port, and the first one of a process with a GPU takes 0.75 s. Raises PlaneUnavailableError: UCXX or UCX
    cannot be had, or ``host`` is on no network device."""
    library, _ = load_ucxx()
    settings, feature = settings_for(host, os.environ, here=here), library.Feature
    with failing_as(PlaneUnavailableError, f"ucx: UCX does not start on {host}"):
        return library.UCXContext(settings, (feature.TAG, feature.WAKEUP))


def _not_installed(package: str | None) -> PlaneUnavailableError:
    return PlaneUnavailableError(f"ucx: {package} is not installed; pip install 'kvferry[ucx]'")


class UcxEndpoint:
    """An endpoint to one peer process, always with error handling, so that the death of the peer is noticed."""

    def __init__(self, library: Any, endpoint: Any) -> None:
        self._library, self._endpoint = library, endpoint

    @property
    def alive(self) -> bool:
        """False once the peer is gone."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    @property
    def reason(self) -> str:
        """UCX's name of the error that ended the link."""
        try:
            if self._endpoint is not None:
                self._endpoint.raise_on_error()
        except Exception as error:  # UCXX has a dozen exception types, all of them mean this
            return str(error)
        return "closed"

    def send(self, data: UcxArray, tag: int) -> UcxRequest:
        """Send all of ``data``, which must live until the request is completed. Raises TransportError: the peer is
        gone."""
        if not self.alive:
            raise TransportError(f"ucx: the link is down: {self.reason}")
        with failing_as(TransportError, "ucx: sending failed"):
            return self._endpoint.tag_send(data, self._library.UCXXTag(tag))

    def close(self) -> Any:
        """Begin to close. Returns the request, or ``None`` where there is nothing to close."""
        endpoint, self._endpoint = self._endpoint, None
        # UCXX returns a null request for a broken endpoint, and any use of that request crashes.
        if endpoint is not None and endpoint.alive:
            with contextlib.suppress(Exception):
                return endpoint.close()
        return None


class UcxAnnouncement(NamedTuple):
    """A message that a peer has sent, or has announced."""

    worker: UcxWorker
    probe: Any
    tag: int
    nbytes: int

    def receive(self, into: UcxArray) -> UcxRequest:
        """Receive into ``into``, which must hold at least ``nbytes``. Raises TransportError: UCX refused."""
        assert into.nbytes >= self.nbytes
        with failing_as(TransportError, "ucx: receiving failed"):
            return self.worker.native.tag_recv_with_handle(into, self.probe)


class UcxWorker:
    """One UCX worker, without thread mode and without asyncio; all calls from one thread.

    There is one link per peer process, and it stays until that process is gone: UCX over TCP leaves a connection
    behind for each endpoint that is closed between two living workers.

    From its construction on UCX listens, see ``ucx_settings.settings_for``. Raises PlaneUnavailableError: UCX does not
    start."""

    def __init__(self, context: Any, host: str) -> None:
        self._host = host
        self._library, _ = load_ucxx()
        with failing_as(PlaneUnavailableError, f"ucx: UCX does not start on {host}"):
            self.native = self._library.UCXWorker(context)
            self.native.init_blocking_progress_mode()
        self.fd: int = self.native.epoll_file_descriptor
        self.address = bytes(self.native.address)
        self._any = self._library.UCXXTag(0), self._library.UCXXTagMask(0)
        self._links: dict[bytes, UcxEndpoint] = {}

    def link(self, peer: UcxAttach | UcxReply) -> UcxEndpoint:
        """The link to a peer's worker. Raises PlaneUnavailableError: UCX finds no way to it. Raises ProtocolError: its
        address is damaged."""
        address = peer.address
        if zlib.crc32(address) != peer.checksum:
            raise ProtocolError("ucx: the peer's worker address is damaged")
        link = self._links.get(address)
        if link is not None and link.alive:
            return link
        if address[0] != self.address[0]:  # the version and flags of the format; UCX aborts the process on others
            raise PlaneUnavailableError(
                f"ucx: the peer's worker address is of format {address[0]:#x}, ours is {self.address[0]:#x}; "
                "run the same UCX release on both sides"
            )
        hint = "; both sides need an address (side_channel_host) on a network that they share"
        with failing_as(PlaneUnavailableError, f"ucx: the peer cannot be reached from {self._host}", hint):
            native = self._library.UCXAddress.create_from_buffer(address)
            endpoint = self._library.UCXEndpoint.create_from_worker_address(self.native, native, True)
        self._links[address] = UcxEndpoint(self._library, endpoint)
        return self._links[address]

    def progress(self) -> None:
        """Move the bytes that can move now. UCXX loops inside, without the GIL, until nothing more moves."""
        self.native.progress()

    def prune(self) -> None:
        """Drop the links to peers that are gone."""
        self._links = {address: link for address, link in self._links.items() if link.alive}

    def arm(self) -> bool:
        """True: ``fd`` becomes readable with the next event. False: an event is there already."""
        return bool(self.native.arm())

    def probe(self) -> UcxAnnouncement | None:
        """The next message that is not received yet. The caller must receive it, or its sender waits for ever."""
        probe = self.native.tag_probe(*self._any, True)
        return UcxAnnouncement(self, probe, int(probe.sender_tag.value), int(probe.length)) if probe.matched else None

    def close(self) -> None:
        """Close the links and the worker. Messages in flight break off, and peers see that their link is down."""
        self.native.progress()  # sends the messages that were just handed to UCX
        closing = [request for link in self._links.values() if (request := link.close()) is not None]
        for _ in range(_CLOSE_ROUNDS):
            self.native.progress()
            if all(request.completed for request in closing):
                break
        self._links.clear()
        del self.native


# --- the plane ------------------------------------------------------------------------------------------------------

_Address = Annotated[bytes, Meta(min_length=8, max_length=32 << 10)]
_Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]


class UcxOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``host_id`` is empty for slots in host memory."""

    host_id: Annotated[str, Meta(max_length=64)]


class UcxAttach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """D's worker address. The checksum keeps a damaged address from UCX, which does not check what it parses.
    ``close_message`` is the tag of the message by which either side closes the channel. ``here``: D is on P's host."""

    address: _Address
    checksum: _Checksum
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    close_message: Annotated[bytes, Meta(min_length=8, max_length=8)]
    here: bool


class UcxReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's worker address."""

    address: _Address
    checksum: _Checksum


@dataclass(slots=True, eq=False)
class UcxTransfer:
    """A message that UCX sends or receives, with its slot; ``channel`` is None for a message to be dropped."""

    request: UcxRequest
    slot: Slot
    channel: UcxChannel | None
    tag: int
    nbytes: int


class UcxSendChannel(WindowedSender):
    """P's end."""

    peer: ClassVar[str] = "decode rank"

    def __init__(self, plane: UcxPlane, link: UcxEndpoint, slot_bytes: int, close_message: int) -> None:
        super().__init__(plane.send_pool, slot_bytes, plane.window)
        self.close_message, self.link = close_message, link
        self._plane = plane

    def acquire(self) -> Slot | None:
        slot = super().acquire()
        if slot is not None:  # else nothing moves, and the transfer thread may sleep
            self._plane.moved_at = time.monotonic()
        return slot

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        try:
            request = self.link.send(self._plane.memory(slot, nbytes), tag)
        except TransportError as error:
            self.fail(str(error))
            self.free(slot.index)
            return
        self._plane.transfers.append(UcxTransfer(request, slot, self, tag, nbytes))
        self._plane.moved_at = time.monotonic()
        self._plane.progress_once()

    def _give_up(self) -> None:
        """UCX still has the slots that were sent."""

    def _close(self) -> None:
        self._plane.send_close(self)


class UcxRecvChannel(PushReceiver):
    """D's end. ``worker`` serves it; ``link`` is ``None`` until P has replied with its address."""

    plane_name = "ucx"
    peer: ClassVar[str] = "prefill rank"

    def __init__(self, plane: UcxPlane, worker: UcxWorker, close_message: int) -> None:
        super().__init__()
        self.close_message, self.worker = close_message, worker
        self.link: UcxEndpoint | None = None
        self.receiving: set[int] = set()
        self._plane = plane

    def expect(self, tag: int, nbytes: int, into: Callable[[], Pieces] | None = None) -> None:
        if not self.closed:
            super().expect(tag, nbytes, into)
            self._plane.by_tag[tag] = self
            self._plane.moved_at = time.monotonic()

    def forget(self, tag: int) -> None:
        if self.expected.pop(tag, None) is not None:
            self._plane.by_tag.pop(tag, None)

    def _close(self) -> None:
        for tag in list(self.expected):
            self.forget(tag)
        self.release_arrived()
        self._plane.send_close(self)


UcxChannel = UcxSendChannel | UcxRecvChannel


class UcxPlane(PushPlane):
    """The UCX data plane of one process. The slots lie on the device of the caches. ``_workers``: one for the peers on
    this host (``True``), one for all others, each made when the first of them attaches. ``moved_at``: when bytes have
    moved, or will soon: the worker is polled for ``_SPIN_SECONDS`` from then on. Raises PlaneUnavailableError: UCXX
    cannot be had, ``context.host`` is on no network device, or, for slots on a GPU, NVIDIA's driver is missing."""

    name: ClassVar[str] = "ucx"

    @classmethod
    def check_host(cls, host: str) -> None:
        if find_spec("ucxx") is None:
            raise _not_installed("ucxx")

    def __init__(self, context: PlaneContext) -> None:
        refuse_ucx(context.host, os.environ, context.others)
        slot_bytes, staging_bytes, device = context.slot_bytes, context.staging_bytes, context.memory.device
        super().__init__(slot_bytes)
        self.on_gpu = device.type != "cpu"
        if self.on_gpu:
            cuda.load()  # before the first hand-over allocates its slots: a missing driver is reported here
        self.window, self.receives = windows(_GPU_WINDOWS if self.on_gpu else _WINDOWS, staging_bytes, slot_bytes)
        self.moved_at = 0.0
        _, self.make_array = load_ucxx()
        self._contexts = {False: ucx_context(context.host, here=False)}
        with contextlib.suppress(PlaneUnavailableError):  # a peer on this host is told so
            self._contexts[True] = ucx_context(context.host, here=True)
        self._host = context.host
        self._workers: dict[bool, UcxWorker] = {}
        self.send_pool, self.recv_pool = (SlotPool(slot_bytes, staging_bytes, device) for _ in range(2))
        self.by_tag: dict[int, UcxRecvChannel] = {}
        self.transfers: list[UcxTransfer] = []
        self._memories: dict[int, UcxArray] = {}  # by address
        self._by_close_message: dict[int, UcxChannel] = {}
        self._farewells: list[tuple[UcxRequest, UcxArray]] = []
        self._pending: deque[UcxAnnouncement] = deque()
        self._starved = False

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(UcxOffer(host_id() if self.on_gpu else ""))

    def slower_because(self, offer: bytes, *, reached: bool) -> str:
        if not self.on_gpu or uses_rdma(os.environ):
            return ""
        theirs = decode_payload(offer, UcxOffer, "ucx offer")
        if reached and theirs.host_id == host_id() != "":
            return ""
        return "it has no way of its own between these GPUs, and would go through the host by TCP"

    def lanes_to(self, host: str) -> str:
        return lanes_to(self._host, os.environ, here=is_ours(host), on_gpu=self.on_gpu)

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        decode_payload(offer, UcxOffer, "ucx offer")
        try:
            self.recv_pool.prepare()
        except TransportError as error:
            raise PlaneUnavailableError(f"no staging memory can be had: {error}") from None
        here, close_message = is_ours(host), secrets.token_bytes(8)
        channel = UcxRecvChannel(self, self._worker(here=here), int.from_bytes(close_message, "little"))
        self._add(channel)
        ours = channel.worker.address
        return channel, msgspec.msgpack.encode(UcxAttach(ours, zlib.crc32(ours), self.slot_bytes, close_message, here))

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, UcxAttach, "ucx attach")
        self.send_pool.prepare()
        close_message = int.from_bytes(attach.close_message, "little")
        if close_message in self._by_close_message:
            raise ProtocolError("ucx attach: this channel exists already")
        worker = self._worker(here=attach.here)
        channel = UcxSendChannel(self, worker.link(attach), min(self.slot_bytes, attach.slot_bytes), close_message)
        self._add(channel)
        return channel, msgspec.msgpack.encode(UcxReply(worker.address, zlib.crc32(worker.address)))

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, UcxRecvChannel)
        channel.link = channel.worker.link(decode_payload(reply, UcxReply, "ucx reply"))

    def _add(self, channel: UcxChannel) -> None:
        self.channels[channel] = None
        self._by_close_message[channel.close_message] = channel

    def _worker(self, *, here: bool) -> UcxWorker:
        if here not in self._workers:
            context = self._contexts.get(here) or ucx_context(self._host, here=here)
            self._workers[here] = UcxWorker(context, self._host)
        return self._workers[here]

    def pollables(self) -> list[tuple[int, int]]:
        return [] if self.closed else [(worker.fd, select.POLLIN) for worker in self._workers.values()]

    @property
    def active(self) -> bool:
        return bool(self.channels or self.transfers or self._farewells or self._pending)

    def progress(self) -> bool:
        if self.closed:
            return False
        for worker in self._workers.values():
            worker.progress()
        moved = self._reap()
        moved |= self._receive()
        if self._farewells:
            self._farewells = [(request, memory) for request, memory in self._farewells if not request.completed]
        if moved:
            self.moved_at = time.monotonic()
        lost = False
        for channel in list(self._by_close_message.values()):
            if channel.error is None and channel.link is not None and not channel.link.alive:
                channel.fail(f"ucx: the {channel.peer} closed the channel or died: {channel.link.reason}")
                lost = True
        for worker in self._workers.values() if lost else ():
            worker.prune()
        return moved or lost

    def arm(self) -> bool:
        if self.closed:
            return True
        if self._starved and self.recv_pool.free:
            return False
        if self.on_gpu and self._expecting and time.monotonic() < self.moved_at + _SPIN_SECONDS:
            return False
        return all([worker.arm() for worker in self._workers.values()])

    @property
    def _expecting(self) -> bool:
        """Whether messages are on their way, or will soon be."""
        in_use = (isinstance(channel, UcxSendChannel) and channel.in_use for channel in self.channels)
        return bool(self.transfers or self.by_tag) or any(in_use)

    def _close(self) -> None:
        # UCX does not complete the messages in flight when their endpoint closes, and these keep the worker alive, with
        # its connections. So peers get time to receive them and our close message.
        deadline = time.monotonic() + _CLOSE_SECONDS
        while (self.transfers or self._farewells) and time.monotonic() < deadline:
            self.progress()
        self.closed = True  # what follows calls nothing of ours
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._contexts.clear()
        self._pending.clear()
        self.transfers.clear()  # these too keep the worker alive, and with that its connections
        self._farewells.clear()

    def progress_once(self) -> None:
        """Keep the link busy between the copies of a batch: one copy takes as long as the link needs to empty its
        buffers."""
        if not self.closed:
            for worker in self._workers.values():
                worker.progress()
            self._receive()

    def memory(self, slot: Slot, nbytes: int) -> UcxArray:
        """The first ``nbytes`` of a slot."""
        if nbytes < slot.nbytes:
            return self._array(slot.tensor[:nbytes])
        if slot.address not in self._memories:
            self._memories[slot.address] = self._array(slot.tensor)
        return self._memories[slot.address]

    def _array(self, data: torch.Tensor) -> UcxArray:
        """``data`` (uint8, contiguous) in the form that UCXX takes. Raises TransportError: UCXX refused."""
        try:
            return self.make_array(data if data.is_cuda else data.numpy())
        except Exception as error:  # on any error the caller must get its slot back
            raise TransportError(f"ucx: memory cannot be used: {error!r}") from None

    def _release(self, slot: Slot) -> None:
        self.recv_pool.put(slot)
        self.progress_once()

    def send_close(self, channel: UcxChannel) -> None:
        """Send the close message of a closed channel. UCX may still hold slots of it."""
        self.channels.pop(channel, None)
        self._by_close_message.pop(channel.close_message, None)
        if channel.link is not None:  # else P's channel ends with D's session
            self._say(partial(channel.link.send, tag=channel.close_message))

    def _say(self, move: Callable[[UcxArray], UcxRequest]) -> None:
        """Send or receive a close message, without a slot: on a GPU a P that receives nothing else would allocate all
        its slots for it."""
        with contextlib.suppress(TransportError):
            memory = self._array(torch.zeros(_CLOSE_MESSAGE_BYTES, dtype=torch.uint8))
            self._farewells.append((move(memory), memory))

    def _receive(self) -> bool:
        """Probe for announced messages, and begin to receive as many as there are free slots."""
        probes = chain.from_iterable(iter(worker.probe, None) for worker in list(self._workers.values()))
        while len(self._pending) < _MAX_PENDING and (message := next(probes, None)) is not None:
            if message.nbytes > _CLOSE_MESSAGE_BYTES or message.tag in self.by_tag:
                self._pending.append(message)
                continue
            closing = self._by_close_message.get(message.tag)  # None where we have closed the channel, too
            if closing is not None:
                closing.fail(f"ucx: the {closing.peer} closed the channel")
            self._say(message.receive)
        if not self._pending:
            return False
        before = len(self._pending)
        waiting: deque[UcxAnnouncement] = deque()
        while self._pending and self.recv_pool.free:
            message = self._pending.popleft()
            channel = self.by_tag.get(message.tag)
            if channel is not None and len(channel.receiving) >= self.receives:
                waiting.append(message)
            else:
                self._take_in(message, channel)
        self._starved = bool(self._pending)
        waiting.extend(self._pending)
        self._pending = waiting
        return len(waiting) < before

    def _take_in(self, message: UcxAnnouncement, channel: UcxRecvChannel | None) -> None:
        if channel is not None:
            try:
                channel.check_size(message.tag, message.nbytes)
            except ProtocolError as error:
                channel.fail(str(error))
            channel.forget(message.tag)
            channel = channel if channel.error is None else None
        if message.nbytes > self.slot_bytes:
            return  # not ours, and too large to receive and drop; its sender waits for ever
        slot: Slot | None = None
        try:
            slot = self.recv_pool.take()
            assert slot is not None
            request = message.receive(self.memory(slot, slot.nbytes))
        except TransportError as error:
            if slot is not None:
                self.recv_pool.put(slot)
            if channel is not None:
                channel.fail(str(error))
            return
        if channel is not None:
            channel.receiving.add(message.tag)
        self.transfers.append(UcxTransfer(request, slot, channel, message.tag, message.nbytes))

    def _reap(self) -> bool:
        """Finish the transfers that UCX has completed."""
        ended = [transfer for transfer in self.transfers if transfer.request.completed]
        for transfer in ended:
            self.transfers.remove(transfer)
        for transfer in ended:
            self._finish(transfer)
        return bool(ended)

    def _finish(self, transfer: UcxTransfer) -> None:
        ok, channel, slot = transfer.request.status == DONE, transfer.channel, transfer.slot
        if isinstance(channel, UcxSendChannel):
            channel.free(slot.index)
        elif channel is None or not ok or channel.closed or channel.error is not None:
            self.recv_pool.put(slot)
        else:
            release = partial(self._release, slot)
            message = Received(transfer.tag, slot.address, transfer.nbytes, release, device=slot.tensor.device)
            channel.arrived.append(message)
        if isinstance(channel, UcxRecvChannel):
            channel.receiving.discard(transfer.tag)
        if channel is not None and not ok:
            channel.fail(f"ucx: the {channel.peer} is gone: a message broke off")
