"""The TCP data plane: scattered pages of P to scattered pages of D, with no staging in between.

P passes a vector of its pages to the kernel, D passes a vector of its own pages, and one stream carries the messages. A
raw socket is as fast as UCX over TCP, and a pack and an unpack cost as much as the link: without them 64 MiB in blocks
of 8 KiB move at 4.4 GB/s over loopback, through UCX and staging slots at 2.9 GB/s. Where the pieces of a page are too
short for a vector, either side uses a slot, independently of the other side.

D connects to P and sends the secret of P's offer and the channel's id. The stream has no other authentication, unless
the engine of P or of D wants its bytes encrypted. Then every message goes through slots, see ``tcp_cipher.py``.
"""

from __future__ import annotations

import time
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.transport.channels import DChannel, Pieces, RecvChannel, SendChannel
from kvferry.transport.errors import ProtocolError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.tcp_channels import TcpRecvChannel, TcpSendChannel
from kvferry.transport.planes.tcp_cipher import KEY_BYTES, TAG_BYTES, Cipher, check_available, new_key
from kvferry.transport.planes.vectors import repeated
from kvferry.transport.socket_plane import SocketAttach, SocketPlane
from kvferry.transport.sockets import SECRET_BYTES
from kvferry.transport.staging import SlotPool

_SCRATCH_BYTES = 256 << 10
_GPU_WINDOW = 3
"""Slots of one channel that a GPU packs, that wait, or that are on the link."""


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(gt=0, lt=65536)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class _Attach(SocketAttach, frozen=True, forbid_unknown_fields=True):
    """``encrypts``: D wants its bytes encrypted."""

    encrypts: bool = False


class TcpPlane(SocketPlane):
    """One TCP connection per channel. For caches of a GPU, whose pages no socket
    reads, every message goes through page-locked slots. In host memory only messages of short pieces need slots."""

    name: ClassVar[str] = "tcp"

    def __init__(self, context: PlaneContext) -> None:
        gpu = context.memory.device.type == "cuda"
        slot_bytes, staging_bytes = context.slot_bytes, context.staging_bytes
        super().__init__(slot_bytes)
        if context.encrypt:
            check_available()
        self.window = _GPU_WINDOW if gpu else 1
        self.send_pool = SlotPool(slot_bytes, staging_bytes, page_locked=gpu)
        self.recv_pool = SlotPool(slot_bytes, staging_bytes, page_locked=gpu)
        self._encrypts = context.encrypt
        self.zeros: npt.NDArray[np.uint8] = np.zeros(_SCRATCH_BYTES, dtype=np.uint8)
        self._waste: npt.NDArray[np.uint8] = np.empty(_SCRATCH_BYTES, dtype=np.uint8)
        self._host = context.host

    @property
    def staging_bytes(self) -> int:
        return self.send_pool.allocated_bytes + self.recv_pool.allocated_bytes

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(_Offer(self.listen_tcp(self._host), self.new_secret()))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, _Offer, "tcp offer")
        sock = self.connect_tcp(host, theirs.port)
        new = self.new_attach()
        attach = _Attach(new.channel, new.slot_bytes, self._encrypts)
        channel = TcpRecvChannel(self, sock, theirs.secret + attach.channel)
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, _Attach, "tcp attach")
        self.check_new(attach)
        key = new_key() if self._encrypts or attach.encrypts else b""
        slot_bytes = min(self.slot_bytes, attach.slot_bytes) - (TAG_BYTES if key else 0)
        channel = TcpSendChannel(self, attach.channel, slot_bytes, Cipher(key) if key else None)
        self.await_connection(channel)
        return channel, key

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, TcpRecvChannel)
        if not reply and self._encrypts:
            raise ProtocolError("tcp: Attached carries no key, and the setting encrypt is on")
        if reply:
            if len(reply) != KEY_BYTES:
                raise ProtocolError(f"tcp: Attached carries a key of {len(reply)} bytes, expected {KEY_BYTES}")
            channel.cipher, channel.encrypted = Cipher(reply), True

    def progress(self) -> bool:
        if self._closed:
            return False
        moved = super().progress()
        now = time.monotonic()
        for channel in [c for c in self.channels if isinstance(c, TcpRecvChannel)]:
            if channel.check(now):  # the channel has a slot now; at the next shortage other channels come first
                moved = True
                self.channels[channel] = self.channels.pop(channel)
        return moved

    def arm(self) -> bool:
        return not any(isinstance(c, TcpRecvChannel) and c.starved and self.recv_pool.free for c in self.channels)

    def nowhere(self, nbytes: int) -> Pieces:
        """Memory for received bytes that belong to no message any more."""
        return repeated(self._waste, nbytes)
