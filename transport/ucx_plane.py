"""The UCX data plane: tagged messages between UCXX workers, from staging slot to staging slot.

Both sides create an endpoint to the other's worker address, always with error handling, so that each notices the
other's death. There is no UCX listener: UCXX's binds to all interfaces.

D posts no receive for a message that may never come. It probes for what has arrived, which for all but small messages
is only the sender's announcement, and receives it by its handle into a slot. So nothing has to be cancelled, which
UCXX cannot do for one request, and D without a free slot holds P back by not answering.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
import zmq
from msgspec import Meta

from kvferry.connector.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import Plane, Received, RecvChannel, SendChannel, Slot, decode_payload
from kvferry.transport.staging import SlotPool
from kvferry.transport.ucx_library import load_ucxx, settings_for

_DONE = 0
"""UCS_OK."""
_CLOSING, _DRAINED = 1, 2
"""Farewells, told by their length: I close this channel; nothing of mine is in flight on it any more."""
_PARTING_SECONDS = 5.0
_WINDOW = 8
"""Messages of one channel that P has in flight; 4 already fill a link, and every D gets its share of the slots."""


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checksum keeps a damaged address from UCX, which does not check what it parses."""

    address: Annotated[bytes, Meta(min_length=8, max_length=32 << 10)]
    checksum: Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``farewell`` is the tag under which either side says that it closes the channel."""

    address: Annotated[bytes, Meta(min_length=8, max_length=32 << 10)]
    checksum: Annotated[int, Meta(ge=0, lt=1 << 32)]
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    farewell: Annotated[bytes, Meta(min_length=8, max_length=8)]


@dataclass(slots=True)
class _Transfer:
    """A message in the hands of UCX, with the slot it occupies."""

    request: Any
    slot: Slot
    channel: UcxSendChannel | UcxRecvChannel | None
    tag: int
    nbytes: int
    retired: bool = False


@dataclass(slots=True)
class _Parting:
    """A closed channel whose endpoint stays until both sides are drained, or until ``deadline``."""

    channel: UcxSendChannel | UcxRecvChannel
    deadline: float
    done: Any = None


class UcxSendChannel(SendChannel):
    """P's end."""

    peer_drained = False

    def __init__(self, plane: UcxPlane, endpoint: Any, slot_bytes: int, farewell: int) -> None:
        self.slot_bytes = slot_bytes
        self.farewell = farewell
        self._plane = plane
        self._endpoint = endpoint
        self._in_flight = 0
        self._closed = False

    def acquire(self) -> Slot | None:
        if self._closed or self.error is not None or self._in_flight >= _WINDOW:
            return None
        slot = self._plane._send_pool.take()
        self._in_flight += slot is not None
        return slot

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if self._closed or self.error is not None:
            self.give_back(slot)
            return
        try:
            request = self._endpoint.tag_send(self._plane._array(slot, nbytes), self._plane._ucx.UCXXTag(tag))
        except Exception as error:  # UCXX has a dozen exception types, all of them mean this
            self._fail(TransportError(f"ucx: sending failed: {error}"))
            self.give_back(slot)
            return
        self._plane._transfers.append(_Transfer(request, slot, self, tag, nbytes))

    def give_back(self, slot: Slot) -> None:
        self._in_flight -= 1
        self._plane._send_pool.put(slot)

    def flush(self, tags: Iterable[int]) -> None:
        pass  # D has receives posted only for what was sent

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._plane._hang_up(self, self._endpoint)

    def _drained(self) -> bool:
        return self._in_flight == 0

    def _fail(self, error: TransportError) -> None:
        if self.error is None:
            self.error = error


class UcxRecvChannel(RecvChannel):
    """D's end."""

    peer_drained = False

    def __init__(self, plane: UcxPlane, endpoint: Any, farewell: int) -> None:
        self.farewell = farewell
        self._plane = plane
        self._endpoint = endpoint
        self._announced: dict[int, int] = {}
        self._receiving: set[int] = set()
        self._arrived: list[Received] = []
        self._closed = False

    def expect(self, tag: int, nbytes: int) -> None:
        self._announced[tag] = nbytes
        self._plane._by_tag[tag] = self
        self._plane._starved = False  # it may have come before it was announced

    def poll(self) -> list[Received]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def posted(self) -> set[int]:
        return set(self._receiving)

    def forget(self, tag: int) -> None:
        if self._announced.pop(tag, None) is not None:
            self._plane._by_tag.pop(tag, None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for tag in list(self._announced):
                self.forget(tag)
            for message in self.poll():  # nobody will see these any more
                message.release()
            self._plane._hang_up(self, self._endpoint)

    def _drained(self) -> bool:
        return not self._receiving

    def _fail(self, error: TransportError) -> None:
        if self.error is None:
            self.error = error


class UcxPlane(Plane):
    """One UCX worker, in one thread, without thread mode and without asyncio.

    Args:
        host: the local address that peers reach; UCX uses its network device, see ``settings_for``.
        slot_bytes: size of a slot; peers with different sizes use the smaller one.
        staging_bytes: bound for P's slots, and for D's.
        device: where the slots lie; host memory where ``None``.

    Raises:
        PlaneUnavailableError: UCXX or UCX cannot be had.
    """

    name: ClassVar[str] = "ucx"

    def __init__(self, host: str, slot_bytes: int, staging_bytes: int, device: torch.device | None = None) -> None:
        self._host = host
        self._ucx = load_ucxx()
        from ucxx._lib.arr import Array

        self._make_array = Array
        feature = self._ucx.Feature
        try:
            self._context = self._ucx.UCXContext(settings_for(host, os.environ), (feature.TAG, feature.WAKEUP))
            self._worker = self._ucx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except Exception as error:  # whatever UCX finds missing on this machine
            raise PlaneUnavailableError(f"ucx: UCX does not start on {host}: {error}") from None
        self._fd: int = self._worker.epoll_file_descriptor
        self._any_tag, self._any_mask = self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0)
        self._farewells = {n: Array(np.zeros(n, np.uint8)) for n in (_CLOSING, _DRAINED)}
        self._slot_bytes = slot_bytes
        self._send_pool = SlotPool(slot_bytes, staging_bytes, device)
        self._recv_pool = SlotPool(slot_bytes, staging_bytes, device)
        self._by_tag: dict[int, UcxRecvChannel] = {}
        self._transfers: list[_Transfer] = []
        self._channels: dict[int, UcxSendChannel | UcxRecvChannel] = {}
        self._parting: list[_Parting] = []
        self._closing: list[tuple[Any, Any]] = []
        self._starved = False
        self._closed = False

    @property
    def retired_slots(self) -> int:
        """Slots in the hands of requests whose peer is gone."""
        return self._send_pool.retired + self._recv_pool.retired

    def offer(self) -> bytes:
        address = bytes(self._worker.address)
        return msgspec.msgpack.encode(_Offer(address, zlib.crc32(address)))

    def connect(self, offer: bytes) -> tuple[RecvChannel, bytes]:
        endpoint = self._reach(decode_payload(offer, _Offer, "ucx offer"), "producer")
        farewell = secrets.token_bytes(8)
        channel = UcxRecvChannel(self, endpoint, int.from_bytes(farewell, "little"))
        self._channels[channel.farewell] = channel
        address = bytes(self._worker.address)
        return channel, msgspec.msgpack.encode(_Attach(address, zlib.crc32(address), self._slot_bytes, farewell))

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, _Attach, "ucx attach")
        farewell = int.from_bytes(attach.farewell, "little")
        if farewell in self._channels:
            raise ProtocolError("ucx attach: this channel exists already")
        endpoint = self._reach(attach, "consumer")
        channel = UcxSendChannel(self, endpoint, min(self._slot_bytes, attach.slot_bytes), farewell)
        self._channels[farewell] = channel
        return channel, b""

    def pollables(self) -> list[tuple[int | zmq.Socket[bytes], int]]:
        return [] if self._closed else [(self._fd, zmq.POLLIN)]

    def progress(self) -> bool:
        if self._closed:
            return False
        self._worker.progress()
        moved = self._receive()
        if self._transfers:
            moved |= self._reap()
        for channel in self._channels.values():
            if channel.error is None and not channel._closed and not channel._endpoint.alive:
                self._lost(channel)
                moved = True
        if self._parting or self._closing:
            self._part()
        return moved

    def arm(self) -> bool:
        if self._closed:
            return True
        if self._starved and self._recv_pool.free:
            return False
        return bool(self._worker.arm())

    def close(self) -> None:
        if self._closed:
            return
        for channel in list(self._channels.values()):
            channel.close()
        self._worker.progress()  # the farewells go out; destroying the worker ends what is left
        self._part()
        self._closed = True
        self._parting.clear()
        self._closing.clear()
        self._transfers.clear()
        self._by_tag.clear()
        del self._worker, self._context

    def _reach(self, hail: _Offer | _Attach, peer: str) -> Any:
        if zlib.crc32(hail.address) != hail.checksum:
            raise ProtocolError(f"ucx: the {peer}'s worker address is damaged")
        try:
            address = self._ucx.UCXAddress.create_from_buffer(hail.address)
            return self._ucx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
        except Exception as error:  # UCXX has a dozen exception types, all of them mean this
            raise PlaneUnavailableError(
                f"ucx: the {peer} cannot be reached from {self._host}: {error}; "
                "both sides need an address (side_channel_host) on a network that they share"
            ) from None

    def _array(self, slot: Slot, nbytes: int) -> Any:
        part = slot.tensor[:nbytes]
        return self._make_array(part if part.is_cuda else part.numpy())

    def _receive(self) -> bool:
        """Take in what has been announced, as far as there are slots."""
        moved = False
        while self._recv_pool.free:
            probe = self._worker.tag_probe(self._any_tag, self._any_mask, True)
            if not probe.matched:
                self._starved = False
                return moved
            moved = True
            self._take_in(probe)
        self._starved = True
        return moved

    def _take_in(self, probe: Any) -> None:
        tag, nbytes = int(probe.sender_tag.value), int(probe.length)
        leaver = self._channels.get(tag)
        if leaver is not None and leaver.error is None:
            self._lost(leaver)
        if leaver is not None and nbytes == _DRAINED:
            leaver.peer_drained = True
        channel = self._by_tag.pop(tag, None)
        expected = None if channel is None else channel._announced.pop(tag)
        if channel is not None and expected != nbytes:
            channel._fail(TransportError(f"ucx: message {tag:#x} has {nbytes} bytes, expected {expected}"))
            channel = None
        if nbytes > self._slot_bytes:
            return  # not ours and too large to take in and drop; its sender waits for ever
        slot = self._recv_pool.take()
        assert slot is not None
        try:
            request = self._worker.tag_recv_with_handle(self._array(slot, max(nbytes, 1)), probe)
        except Exception as error:  # UCXX has a dozen exception types, all of them mean this
            self._recv_pool.put(slot)
            if channel is not None:
                channel._fail(TransportError(f"ucx: receiving failed: {error}"))
            return
        if channel is not None:
            channel._receiving.add(tag)
        self._transfers.append(_Transfer(request, slot, channel, tag, nbytes))

    def _reap(self) -> bool:
        """Finish the transfers that UCX is done with, and mark those that a dead peer left behind."""
        waiting = []
        for transfer in self._transfers:
            if transfer.request.completed:
                self._finish(transfer)
            else:
                waiting.append(transfer)
        moved = len(waiting) < len(self._transfers)
        self._transfers = waiting
        return moved

    def _finish(self, transfer: _Transfer) -> None:
        ok = transfer.request.status == _DONE
        channel, slot = transfer.channel, transfer.slot
        if isinstance(channel, UcxSendChannel):
            channel._in_flight -= 1
            self._put(self._send_pool, transfer)
            if not ok:
                channel._fail(TransportError("ucx: the consumer is gone: a message could not be delivered"))
            return
        if channel is not None:
            channel._receiving.discard(transfer.tag)
            if not ok:
                channel._fail(TransportError("ucx: the producer is gone: a message broke off"))
        if channel is None or not ok or channel._closed or channel.error is not None:
            self._put(self._recv_pool, transfer)
            return
        release = partial(self._recv_pool.put, slot)
        channel._arrived.append(Received(transfer.tag, slot.address, transfer.nbytes, release))

    @staticmethod
    def _put(pool: SlotPool, transfer: _Transfer) -> None:
        (pool.revive if transfer.retired else pool.put)(transfer.slot)

    def _lost(self, channel: UcxSendChannel | UcxRecvChannel) -> None:
        peer = "consumer" if isinstance(channel, UcxSendChannel) else "producer"
        reason = ""
        try:
            channel._endpoint.raise_on_error()
        except Exception as error:
            reason = f": {error}"
        channel._fail(TransportError(f"ucx: the {peer} closed the channel or died{reason}"))

    def _hang_up(self, channel: UcxSendChannel | UcxRecvChannel, endpoint: Any) -> None:
        for transfer in self._transfers:
            if transfer.channel is channel:
                transfer.retired = True
                (self._send_pool if isinstance(channel, UcxSendChannel) else self._recv_pool).retire(transfer.slot)
        self._parting.append(_Parting(channel, time.monotonic() + _PARTING_SECONDS))
        self._say(channel, _CLOSING)

    def _say(self, channel: UcxSendChannel | UcxRecvChannel, what: int) -> Any:
        """A farewell message; its length is what it says."""
        if not channel._endpoint.alive:
            return None
        try:
            return channel._endpoint.tag_send(self._farewells[what], self._ucx.UCXXTag(channel.farewell))
        except Exception:  # UCXX has a dozen exception types, all of them mean that the peer is gone
            return None

    def _part(self) -> None:
        """Close the endpoints of closed channels, once both sides are done with what was in flight.

        Closing sooner would leave sends of P behind that UCX never completes, and their slots with them.
        """
        now, staying = time.monotonic(), []
        for parting in self._parting:
            channel = parting.channel
            endpoint = channel._endpoint
            if parting.done is None and channel._drained():
                parting.done = self._say(channel, _DRAINED)
            done = parting.done is not None and parting.done.completed and channel.peer_drained
            if endpoint.alive and not done and now < parting.deadline:
                staying.append(parting)
                continue
            self._channels.pop(channel.farewell, None)
            if endpoint.alive:  # UCXX returns a null request for one that broke, and touching that crashes
                with contextlib.suppress(Exception):
                    self._closing.append((endpoint, endpoint.close()))
        self._parting = staying
        self._closing = [pair for pair in self._closing if not pair[1].completed]
