"""What throws mutated bytes at the ports of an engine: strangers without key, and holders of the key."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zmq

from kvferry.connector.protocol import messages
from kvferry.transport.control import framing
from kvferry.transport.control.keys import Keys, configure_client
from kvferry.transport.sockets import CHANNEL_BYTES, SECRET_BYTES
from tests.fuzz.mutations import Mutator
from tests.transport.test_control_garbage import GREETING, HTTP, READY

CURVE_GREETING = GREETING.replace(b"NULL\0", b"CURVE")
OPEN = 400
"""Connections that an attacker holds open, more than the half-open ones that an engine keeps."""
ENDLESS_BYTES = 256 << 10
"""Bytes of a message that has no end, from one connection."""
_PLAIN_HEAD = struct.Struct(">4sBBI")
_PATIENCE = 0.2


def spoofed(rng: random.Random) -> bytes:
    """A READY command with a routing id that libzmq may give to a later connection."""
    routing_id = b"\0" + struct.pack(">I", 0x6B8B4567 + rng.randrange(400))
    body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity" + struct.pack(">I", len(routing_id)) + routing_id
    return bytes([4, len(body)]) + body


def plain(frames: Sequence[bytes]) -> bytes:
    """A message as the control port without keys reads it."""
    return _PLAIN_HEAD.pack(b"KVF\x01", *map(len, frames)) + b"".join(frames)


def unix_names(pid: int) -> list[bytes]:
    """The abstract Unix sockets of KVFerry on which a process listens."""
    inodes = {os.readlink(f)[8:-1] for f in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(f).startswith("socket:[")}
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    found = [line.split() for line in lines if "@kvferry-" in line]
    return [b"\0" + fields[7][1:].encode() for fields in found if fields[6] in inodes and fields[5] == "01"]


class Stranger:
    """Connections to one port, by TCP or by a Unix socket's name. ``recorded``: what an honest D sent there."""

    def __init__(self, rng: random.Random, port: int | bytes, recorded: Sequence[bytes]) -> None:
        self._rng, self._port = rng, port
        openings = [GREETING + READY, CURVE_GREETING, HTTP, rng.randbytes(SECRET_BYTES + CHANNEL_BYTES), *recorded]
        requests = [plain(messages.encode(messages.Renew(tokens=(bytes(16),)))), *recorded]
        self._openings, self._requests = Mutator(rng, openings, ""), Mutator(rng, requests, "")
        self._recorded = [*recorded, CURVE_GREETING]
        self._open: list[socket.socket] = []
        self.inputs = 0

    def _bytes(self) -> bytes:
        """The bytes of one connection."""
        rng = self._rng
        match rng.randrange(9):
            case 0:
                return rng.randbytes(rng.choice((0, 1, 10, 64, 1000, 20_000)))
            case 1 | 2:
                return self._openings.next()
            case 3:
                return GREETING + spoofed(rng) + self._frames()
            case 4:
                return CURVE_GREETING + self._frames()
            case 5 | 6:
                return self._requests.next()
            case 7:
                return rng.choice(self._recorded)[: rng.randrange(1, 400)]
            case _:
                size = rng.choice((1 << 20, 1 << 32, (1 << 63) - 1, 5000))
                start = CURVE_GREETING + rng.choice((b"\x02", b"\x03", b"\x06")) + size.to_bytes(8, "big")
                start = rng.choice((start, plain([b"kvferry", b"\0\6", b""])[:6] + b"\x00\x0f\xff\xff"))
                return start + bytes(rng.choice((100, 5000, ENDLESS_BYTES)))

    def _frames(self) -> bytes:
        """ZMTP frames: commands, messages, messages that say that more follows."""
        rng, data = self._rng, b""
        for _ in range(rng.choice((1, 3, 30))):
            flags, size = rng.choice((0, 1, 1, 2, 3, 4, 6, 255)), rng.randrange(256)
            head = size.to_bytes(8, "big") if flags & 2 else bytes((size,))
            data += bytes((flags,)) + head + rng.randbytes(size)
        return data

    def throw(self) -> None:
        """One connection."""
        rng, self.inputs = self._rng, self.inputs + 1
        data = self._bytes()
        try:
            if isinstance(self._port, bytes):
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                peer.connect(self._port)
                for at in range(0, min(len(data), 1000), size := rng.choice((1, 12, 16, 48, 300))):
                    peer.send(data[at : at + size])
                if rng.random() < 0.1:
                    socket.send_fds(peer, [data[:48] or b"\0"], [0])
            else:
                peer = socket.create_connection(("127.0.0.1", self._port), timeout=_PATIENCE)
                peer.sendall(data)
        except OSError:
            return
        self._open.append(peer)
        while len(self._open) > OPEN or (self._open and rng.random() < 0.8):
            self._open.pop(rng.randrange(len(self._open))).close()

    def close(self) -> None:
        for peer in self._open:
            peer.close()


class KeyHolder:
    """A peer with the key that speaks ZMTP: mutated messages in one frame and in many. It announces no routing id that
    libzmq may give to a later connection: see SECURITY.md."""

    BATCH = 50

    def __init__(self, rng: random.Random, port: int, keys: Keys, corpus: Sequence[bytes]) -> None:
        self._rng, self._port, self._keys = rng, port, keys
        self._context = zmq.Context()
        self._mutator = Mutator(rng, corpus, "")
        unpacked = [framing.Filter("", 1 << 20, Counter()).unpack([message]) for message in corpus]
        self._bodies = Mutator(rng, [frames[2] for frames in unpacked if frames] or corpus)
        self._sockets: list[zmq.Socket[bytes]] = []
        self.inputs = 0

    def _connect(self) -> zmq.Socket[bytes]:
        peer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        peer.linger, peer.sndhwm, peer.immediate = 0, 4 * self.BATCH, True
        if self._rng.random() < 0.5:
            peer.routing_id = b"k" + self._rng.randbytes(15)
        raw = next(iter(self._keys.raw_public_keys))
        configure_client(peer, self._keys, raw)
        peer.connect(f"tcp://127.0.0.1:{self._port}")
        return peer

    def throw(self) -> None:
        """``BATCH`` messages over one connection, a new one or one that is there."""
        rng = self._rng
        if len(self._sockets) < 8:
            self._sockets.append(self._connect())
        peer = rng.choice(self._sockets)
        for _ in range(self.BATCH):
            frames = [self._frame() for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 40)))]
            try:
                if not peer.poll(1000, zmq.POLLOUT):
                    break
                peer.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            self.inputs += 1
        with suppress(zmq.ZMQError):
            while peer.poll(0):
                peer.recv_multipart(zmq.NOBLOCK)
        if rng.random() < 0.05:
            self._sockets.remove(peer)
            peer.close(0)

    def _frame(self) -> bytes:
        if self._rng.random() < 0.5:
            return self._mutator.next()
        return framing.pack([messages.MAGIC, messages.PROTOCOL_VERSION.to_bytes(2, "big"), self._bodies.next()])

    def close(self) -> None:
        self._context.destroy(0)
