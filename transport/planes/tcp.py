"""The TCP data plane: scattered pages of P to scattered pages of D, with no staging in between.

P passes a vector of its pages to the kernel, D passes a vector of its own pages, and one stream carries the messages.
Without a pack and an unpack 64 MiB in blocks of 8 KiB move at 4.4 GB/s over loopback, through UCX and staging slots at
2.9 GB/s. Where the pieces of a page are too short for a vector, either side uses a slot, independently of the other.

D connects to P and sends the secret of P's offer and the channel's id. The stream has no other authentication, unless
the engine of P or of D wants its bytes encrypted. Then every message goes through slots, see ``Cipher``.

A channel has 1 to n such connections, its flows: one where caches are in host memory, for only the transfer thread can
let go of a page at once; between GPUs several where both ends have cores for their threads.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec
from msgspec import Meta

from kvferry.transport.channels import DChannel, Pieces, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import ProtocolError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.socket_plane import AwaitedSender, ConnectingReceiver, SocketAttach, SocketPlane
from kvferry.transport.planes.tcp_flows import (
    GONE,
    KEY_BYTES,
    TAG_BYTES,
    Cipher,
    FlowThreads,
    Outgoing,
    ReceiveFlow,
    SendFlow,
    aead,
)
from kvferry.transport.sockets import CHANNEL_BYTES, ENDED, HELLO_BYTES, SECRET_BYTES
from kvferry.transport.staging import SlotPool

if TYPE_CHECKING:
    import torch

MOST_FLOWS = 4
_MOST_THREADS = 64
_WINDOW = 3
"""Slots of P for each flow that takes them from a GPU or has a thread: one is packed, one waits, and one is on the
link."""
_FEW_GPU_BYTES = 4 << 20
"""Messages of a prompt that is computed, between caches on GPUs: 10.5 GB/s by four flows over loopback, 9.9 with 8 MiB.
Slots have 8 MiB, for while P computes, its engine may wait 0.5 ms for the interpreter with each message of any size."""


def most_flows(device: torch.device) -> int:
    """The flows of a channel of this process: several for caches of a GPU, whose messages all go through slots, where
    the cores suffice for their threads."""
    cores = len(os.sched_getaffinity(0)) if device.type == "cuda" else 1
    return MOST_FLOWS if cores >= 8 else 2 if cores >= 4 else 1


def most_threads(slots: int) -> int:
    """The flows with a thread that a plane with so many slots each way may have: they may hold three quarters."""
    return min(_MOST_THREADS, slots // (_WINDOW + 1))


class TcpOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(gt=0, lt=65536)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class TcpAttach(SocketAttach, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``encrypts``: D wants its bytes encrypted. ``flows``: how many D can have. Where they are several, P's reply is a
    ``TcpFlows``, else the key, if any."""

    encrypts: bool = False
    flows: Annotated[int, Meta(ge=1, le=64)] = 1


class TcpFlows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's reply. ``hellos``: of the connections beside the first one. ``keys``: one for each connection, or none."""

    hellos: tuple[Annotated[bytes, Meta(min_length=HELLO_BYTES, max_length=HELLO_BYTES)], ...]
    keys: tuple[Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)], ...]


class TcpSendChannel(AwaitedSender):
    """P's end. ``ciphers``: of each flow, by the id in the hello of its connection. Each flow sends one message at a
    time. A flow with a thread, or with a cipher, sends only slots."""

    def __init__(self, plane: TcpPlane, slot_bytes: int, ciphers: dict[bytes, Cipher | None]) -> None:
        self.wanted, self.threaded = len(ciphers), len(ciphers) > 1
        window = _WINDOW * self.wanted if self.threaded else plane.window
        super().__init__(plane.send_pool, tuple(ciphers), slot_bytes, window)
        self.sends_in_place = not self.threaded and None in ciphers.values()
        self.plane, self._ciphers = plane, ciphers
        self.flows: list[SendFlow] = []

    @property
    def in_use(self) -> int:
        return super().in_use + any(
            (message := flow.message) is not None and message.slot is None for flow in self.flows
        )

    @property
    def ready(self) -> bool:
        """Whether a message may begin now."""
        return self.open and not any(flow.message or flow.todo for flow in self.flows)

    @property
    def reading(self) -> int | None:
        message = self.flows[0].message if self.flows and not self.threaded else None
        return message.tag if message is not None and message.paged else None

    def connected(self, sock: socket.socket, channel_id: bytes) -> None:
        self.flows.append(SendFlow(self, sock, self._ciphers[channel_id]))
        self.flows[-1].start()

    def send_pieces(self, pieces: Callable[[], Pieces], tag: int) -> bool:
        if not self.sends_in_place:
            return super().send_pieces(pieces, tag)
        if not self.ready:
            return False
        self.flows[0].message = Outgoing(tag, 0).begin(pieces())
        self.flows[0].run()
        return True

    def stop_reading(self) -> None:
        if self.reading is not None and (message := self.flows[0].message) is not None:
            message.stop_reading()  # the stream goes on; its last byte marks the message

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        min(self.flows, key=lambda flow: flow.left).send(Outgoing(tag, nbytes, slot))

    def _give_up(self) -> None:
        for flow in self.flows:
            flow.end()

    def _close(self) -> None:
        self._give_up()
        self.plane.drop(self, None)


class TcpRecvChannel(ConnectingReceiver):
    """D's end, with as many flows as P's answer says, up to ``wanted``. It receives a message into the memory of
    ``into``, or into a slot. ``address``: of P's data port."""

    def __init__(
        self, plane: TcpPlane, sock: socket.socket, hello: bytes, address: tuple[str, int], wanted: int
    ) -> None:
        self.plane, self.few_bytes = plane, plane.few_bytes
        self.wanted, self._address, self.threaded = wanted, address, False
        self.flows: list[ReceiveFlow] = []
        self._socks = [sock]
        self._stand: list[socket.socket] = []  # those that stand, and that have no flow yet
        self._ciphers: Sequence[Cipher | None] = ()  # of ``_socks``, once P has answered
        super().__init__(plane, sock, hello)

    def finish(self, hellos: Sequence[bytes], ciphers: Sequence[Cipher | None]) -> None:
        """P has answered: make a connection for each hello. Raises PlaneUnavailableError: there is no way to P."""
        self._ciphers, self.wanted, self.threaded = ciphers, len(ciphers), len(ciphers) > 1
        for hello in hellos if self.error is None and not self.closed else ():
            self._socks.append(self.plane.connect_tcp(*self._address))
            self.dial(self.plane, self._socks[-1], hello)
        self._start()

    def connected(self, sock: socket.socket) -> None:
        self.plane.sockets.watch(sock, self.gone, ENDED)
        self._stand.append(sock)
        self._start()

    def _start(self) -> None:
        while self._ciphers and self._stand and self.error is None:
            sock = self._stand.pop()
            self.flows.append(ReceiveFlow(self, sock, self._ciphers[self._socks.index(sock)]))
            self.flows[-1].start()

    def gone(self) -> None:
        self.plane.threads.serve()  # what has arrived before counts
        self.fail(GONE)

    def forget(self, tag: int) -> None:
        expected = self.expected.pop(tag, None)
        if expected is not None:
            for flow in self.flows:
                flow.stop_writing(expected)

    def _give_up(self) -> None:
        self._stand.clear()
        for flow in self.flows:
            flow.end()
        for sock in {*self._socks} - {flow.sock for flow in self.flows}:
            self.plane.sockets.drop(sock)

    def _close(self) -> None:
        self._give_up()
        self.plane.drop(self, None)
        self.release_arrived()


class TcpPlane(SocketPlane):
    """For caches of a GPU, whose pages no socket reads, every message goes through page-locked slots. In host memory
    only messages of short pieces need slots."""

    name: ClassVar[str] = "tcp"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context.slot_bytes)
        if context.encrypt:
            aead()
        gpu = context.memory.device.type == "cuda"
        self.window = _WINDOW if gpu else 1
        self.send_pool, self.recv_pool = (
            SlotPool(context.slot_bytes, context.staging_bytes, page_locked=gpu) for _ in range(2)
        )
        self.few_bytes = _FEW_GPU_BYTES if gpu else RecvChannel.few_bytes
        self.flows = most_flows(context.memory.device)
        """The most flows of one channel."""
        self.threads = FlowThreads(self.sockets)
        self._encrypts = context.encrypt
        self._host = context.host

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(TcpOffer(self.listen_tcp(self._host), self.secrets.new()))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, TcpOffer, "tcp offer")
        sock = self.connect_tcp(host, theirs.port)
        flows, channel_id = self._flows(self.flows), secrets.token_bytes(CHANNEL_BYTES)
        attach = TcpAttach(channel_id, self.slot_bytes, self._encrypts, flows)
        channel = TcpRecvChannel(self, sock, theirs.secret + channel_id, (host, theirs.port), flows)
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, TcpAttach, "tcp attach")
        self.check_new(attach)
        flows = self._flows(attach.flows)
        encrypts = self._encrypts or attach.encrypts
        keys = tuple(secrets.token_bytes(KEY_BYTES) for _ in range(flows if encrypts else 0))
        hellos = tuple(self.secrets.new() + secrets.token_bytes(CHANNEL_BYTES) for _ in range(flows - 1))
        slot_bytes = min(self.slot_bytes, attach.slot_bytes) - (TAG_BYTES if keys else 0)
        ids = (attach.channel, *(hello[SECRET_BYTES:] for hello in hellos))
        channel = TcpSendChannel(self, slot_bytes, dict(zip(ids, _ciphers(keys, flows), strict=True)))
        self.await_connection(channel)
        return channel, msgspec.msgpack.encode(TcpFlows(hellos, keys)) if attach.flows > 1 else b"".join(keys)

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, TcpRecvChannel)
        if channel.wanted > 1:
            theirs = decode_payload(reply, TcpFlows, "tcp reply")
        elif len(reply) in (0, KEY_BYTES):
            theirs = TcpFlows((), (reply,) if reply else ())
        else:
            raise ProtocolError(f"tcp: Attached carries a key of {len(reply)} bytes, expected {KEY_BYTES}")
        flows = len(theirs.hellos) + 1
        if flows > channel.wanted or len(theirs.keys) not in (0, flows):
            raise ProtocolError(
                f"tcp: Attached carries {flows} flows, limit {channel.wanted}, and {len(theirs.keys)} keys"
            )
        if not theirs.keys and self._encrypts:
            raise ProtocolError("tcp: Attached carries no key, and the setting encrypt is on")
        channel.encrypted = bool(theirs.keys)
        channel.finish(theirs.hellos, _ciphers(theirs.keys, flows))

    def _flows(self, wanted: int) -> int:
        """The flows that a new channel may have: one where the plane has too many threads already."""
        ends = [one for one in self.channels if isinstance(one, TcpSendChannel | TcpRecvChannel)]
        to_start = sum(one.wanted - len(one.flows) for one in ends if one.wanted > 1 and one.error is None)
        left = most_threads(self.send_pool.capacity) - len(self.threads.flows) - to_start
        return max(1, min(wanted, self.flows, left))

    def progress(self) -> bool:
        moved = super().progress()
        if self.threads.told:  # calls for which no flow has woken this thread
            self.threads.serve()
        now = time.monotonic()
        for channel in self.receivers(TcpRecvChannel):
            if any([flow.check(now) for flow in channel.flows]):  # it has a slot now: at the next shortage others first
                moved = True
                self.channels[channel] = self.channels.pop(channel)
        return moved

    def arm(self) -> bool:
        senders = (channel for channel in self.channels if isinstance(channel, TcpSendChannel))
        self.threads.short_of_slots = not self.send_pool.free or any(one.in_use >= one.window for one in senders)
        if self.threads.told:
            return False
        flows = (flow for channel in self.receivers(TcpRecvChannel) for flow in channel.flows)
        return not (self.recv_pool.free and any(flow.starved and not flow.ending for flow in flows))

    def _close(self) -> None:
        self.threads.close()
        super()._close()


def _ciphers(keys: Sequence[bytes], flows: int) -> list[Cipher | None]:
    """One for each flow; without keys none has any."""
    return [Cipher(key) for key in keys] or [None] * flows
