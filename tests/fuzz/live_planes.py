"""The decoders of data planes that need a real plane: answers to offers, and what comes over a channel."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import zmq

from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import shm, tcp
from kvferry.transport.planes import zmq as zmq_plane
from kvferry.transport.planes.push import PushReceiver
from kvferry.transport.planes.shm import Arena
from kvferry.transport.planes.socket_plane import SocketAttach
from kvferry.transport.planes.tcp import TcpRecvChannel
from kvferry.transport.planes.tcp_flows import HEADER
from tests.fuzz.honest import Decoder, encode


@contextmanager
def of_live_planes() -> Iterator[list[Decoder]]:
    """The other end of a channel: answers to offers, and what comes over the channel's connection."""
    context = PlaneContext("127.0.0.1", 64 << 10, 1 << 20)
    planes: list[Any] = [tcp.TcpPlane(context), shm.ShmPlane(context), zmq_plane.ZmqPlane(context)]
    for plane in planes:
        plane.offer()
    tcp_plane, shm_plane, zmq_ = planes
    attach = {
        "tcp": encode(SocketAttach(b"k" * 16, 1 << 20)), "shm": encode(SocketAttach(b"k" * 16, 1 << 20)),
        "zmq": encode(zmq_plane.ZmqAttach(1 << 20, 8)),
    }  # fmt: skip

    def accept(plane: Any, data: bytes) -> None:
        channel, _ = plane.accept(data)
        channel.close()

    def received(data: bytes) -> None:
        """D's end of a TCP channel: headers and bytes."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.setblocking(False)
        channel = TcpRecvChannel(tcp_plane, ours, b"")
        with theirs:
            for tag in (1, 2, 3):
                channel.expect(tag, 100)
            theirs.send(data[: 64 << 10] or b"\0")
            channel.on_readable()
            for message in channel.poll():
                message.release()
            channel.close()

    def records(data: bytes) -> None:
        """Both ends of a shm channel: records of slots."""
        pair = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) for _ in range(2)]
        arena, fd = Arena.create(4096, 2)
        sender, receiver = shm.ShmSendChannel(shm_plane, pair[0][0], arena), shm.ShmRecvChannel(shm_plane, pair[1][0])
        shm_plane.left_bytes -= 2 * 4096
        socket.send_fds(pair[1][1], [shm.GEOMETRY.pack(4096, 2)], [fd])
        os.close(fd)
        receiver.on_readable()
        slot = sender.acquire()
        assert slot is not None
        sender.send(slot, 100, 1)
        receiver.expect(1, 100)
        for peer, end in ((pair[0][1], sender), (pair[1][1], receiver)):
            for at in range(0, min(len(data), 320), 16):
                peer.send(data[at : at + 16])
            end.on_readable()
        for message in receiver.poll():
            message.release()
        for end in (sender, receiver):
            end.close()
        for _, peer in pair:
            peer.close()

    class Silent:
        """A socket that no peer reads."""

        def send(self, *_: Any) -> None:
            return None

    pool = SimpleNamespace(put=lambda slot: None)
    stub = SimpleNamespace(send_pool=pool, recv_pool=pool, copies_frames=False, busy=deque(maxlen=1))

    def credits(data: bytes) -> None:
        """P's end of a zmq channel: hellos and credits."""
        channel = object.__new__(zmq_plane.ZmqSendChannel)
        slot = SimpleNamespace(index=0)
        channel.__dict__.update(_plane=stub, pool=pool, sent={0: slot}, _by_tag={5: (slot, None)}, _fd=None)
        frame: Any = SimpleNamespace(bytes=data, get=lambda name: 7)
        channel.on_message(frame)

    def chunks(data: bytes) -> None:
        """D's end of a zmq channel: heads and bytes, in one to three frames."""
        channel = object.__new__(zmq_plane.ZmqRecvChannel)
        PushReceiver.__init__(channel)
        end = SimpleNamespace(socket=Silent())
        channel.__dict__.update(_plane=stub, window=8, _held=0, _where="", end=end, _waiting=deque())
        channel.expect(1, 3)
        cut = data[0] % 4 if data else 0
        frames = [data[1:18], data[18:21], data[21:]][: max(1, cut)]
        channel.on_message([zmq.Frame(frame) for frame in frames])

    heads = [HEADER.pack(1, 100) + bytes(100) + b"\x01", HEADER.pack(3, 100) + bytes(100) + b"\0"]
    filled = [shm.FILLED.pack(1, 0, 100), shm.FREED.pack(0).ljust(16, b"\0")]
    head = zmq_plane.HEADER
    zmq_messages = [b"\x02" + head.pack(b"m", 1, 3) + b"abc", b"\x01b"]
    plane_errors = (ProtocolError, TransportError, PlaneUnavailableError)
    try:
        yield [
            *(
                Decoder(f"{p.name} attach at P", [attach[p.name]], partial(accept, p), plane_errors, share=share)
                for p, share in ((tcp_plane, 0.2), (shm_plane, 0.2), (zmq_, 0.3))
            ),
            Decoder("tcp messages", [heads[0], heads[1] + heads[0]], received, (), "", 0.15),
            Decoder("shm records", [filled[0], filled[1], b"".join(filled)], records, (), "", 0.05),
            Decoder("zmq credits", [b"h", zmq_plane.CREDIT.pack(b"c", 5)], credits, (), "", 1.0),
            Decoder("zmq messages", zmq_messages, chunks, (ProtocolError,), "", 0.6),
        ]  # fmt: skip
    finally:
        for plane in planes:
            plane.close()
