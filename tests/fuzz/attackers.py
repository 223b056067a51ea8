"""What throws mutated bytes at the ports of an engine: strangers without key, and holders of the key."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvferry.connector.wire import messages
from kvferry.transport.control.keys import Keys, greeting, new_secret
from kvferry.transport.control.stream import ADMITTED
from kvferry.transport.sockets import CHANNEL_BYTES, SECRET_BYTES
from tests.fuzz.honest import Mutator

HTTP = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: a-scanner/1.0\r\nAccept: */*\r\n\r\n"
ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE" + bytes(15) + b"\0" + bytes(31)
OPEN = 400
"""Connections that an attacker holds open, more than the half-open ones that an engine keeps."""
ENDLESS_BYTES = 256 << 10
"""Bytes of a message that has no end, from one connection."""
_PATIENCE = 0.2
_SECONDS = 60.0


def greeting_of(keys: Keys) -> bytes:
    """What opens the control port of an engine with these keys; whoever listens on the network knows it."""
    return greeting(keys.admitted[keys.fingerprint]) + bytes.fromhex(keys.fingerprint)


def client_hello(context: ssl.SSLContext) -> bytes:
    """The begin of a TLS handshake."""
    said = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


def packed(frames: Sequence[bytes]) -> bytes:
    """A message as it crosses the control connection."""
    return struct.pack(">BBI", *map(len, frames)) + b"".join(frames)


def unix_names(pid: int) -> list[bytes]:
    """The abstract Unix sockets of KVFerry on which a process listens."""
    inodes = {os.readlink(f)[8:-1] for f in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(f).startswith("socket:[")}
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    found = [line.split() for line in lines if "@kvferry-" in line]
    return [b"\0" + fields[7][1:].encode() for fields in found if fields[6] in inodes and fields[5] == "01"]


class Stranger:
    """Connections to one port, by TCP or by a Unix socket's name. ``recorded``: what an honest D sent there.
    ``keys``: of the engine at a control port; only its greeting is used."""

    def __init__(
        self, rng: random.Random, port: int | bytes, recorded: Sequence[bytes], keys: Keys | None = None
    ) -> None:
        self._rng, self._port = rng, port
        self._greeting = b"" if keys is None else greeting_of(keys)
        nothing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nothing.check_hostname, nothing.verify_mode = False, ssl.CERT_NONE
        self._contexts = [nothing, Keys(new_secret()).of_d]
        self._openings = [self._greeting + client_hello(nothing), *recorded]
        garbage = [ZMTP, HTTP, rng.randbytes(SECRET_BYTES + CHANNEL_BYTES)]
        self._mutator = Mutator(rng, [*self._openings, *garbage], "")
        self._open: list[socket.socket] = []
        self.inputs = 0

    def _bytes(self) -> bytes:
        """The bytes of one connection."""
        rng = self._rng
        match rng.randrange(6):
            case 0:
                return rng.randbytes(rng.choice((0, 1, 10, 64, 1000, 20_000)))
            case 1 | 2:
                return self._mutator.next()
            case 3:
                return rng.choice(self._openings)[: rng.randrange(1, 400)]
            case 4:
                return self._greeting + self._records()
            case _:
                start = self._greeting + b"\x16\x03\x01" + rng.choice((b"\xff\xff", b"\x3f\xff", b"\x40\x00", b"\0\0"))
                return start + bytes(rng.choice((100, 5000, ENDLESS_BYTES)))

    def _records(self) -> bytes:
        """TLS records: alerts, handshakes, data, and others."""
        rng, data = self._rng, b""
        for _ in range(rng.choice((1, 3, 30))):
            size = rng.choice((0, 1, 2, 40, 400))
            data += bytes((rng.choice((20, 21, 22, 23, 24, 255)), 3, rng.choice((0, 1, 3, 4))))
            data += size.to_bytes(2, "big") + rng.randbytes(size)
        return data

    def throw(self) -> None:
        """One connection."""
        rng, self.inputs = self._rng, self.inputs + 1
        try:
            if isinstance(self._port, bytes):
                data = self._bytes()
                peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                peer.connect(self._port)
                for at in range(0, min(len(data), 1000), size := rng.choice((1, 12, 16, 48, 300))):
                    peer.send(data[at : at + size])
                if rng.random() < 0.1:
                    socket.send_fds(peer, [data[:48] or b"\0"], [0])
            else:
                peer = socket.create_connection(("127.0.0.1", self._port), timeout=_PATIENCE)
                if self._greeting and rng.random() < 0.3:
                    self._shake_hands(peer)
                else:
                    peer.sendall(self._bytes())
        except OSError:
            return
        self._open.append(peer)
        while len(self._open) > OPEN or (self._open and rng.random() < 0.8):
            self._open.pop(rng.randrange(len(self._open))).close()

    def _shake_hands(self, peer: socket.socket) -> None:
        """A TLS handshake without a key, or with one that is not admitted; most damage some bytes of it on the way."""
        rng = self._rng
        arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = rng.choice(self._contexts).wrap_bio(arrived, leaving)
        peer.sendall(self._greeting)
        for _ in range(4):
            done = False
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
                done = True
            flight = leaving.read()
            if flight and rng.random() < 0.4:
                flight = Mutator(rng, [flight], "").next()
            peer.sendall(flight)
            if done:
                break
            arrived.write(peer.recv(1 << 16))
        with suppress(ssl.SSLWantReadError):
            tls.write(rng.randbytes(100))
            peer.sendall(leaving.read())

    def close(self) -> None:
        for peer in self._open:
            peer.close()


class KeyHolder:
    """A peer with the key: mutated messages behind the TLS handshake, most of them with a head that fits."""

    BATCH = 50

    def __init__(self, rng: random.Random, port: int, keys: Keys, corpus: Sequence[Sequence[bytes]]) -> None:
        self._rng, self._port, self._keys = rng, port, keys
        self._mutator = Mutator(rng, [packed(frames) for frames in corpus], "")
        self._bodies = Mutator(rng, [frames[2] for frames in corpus])
        self._peers: list[ssl.SSLSocket] = []
        self.inputs = 0

    def throw(self) -> None:
        """``BATCH`` messages over one connection, a new one or one that is there."""
        if len(self._peers) < 8:
            sock = socket.create_connection(("127.0.0.1", self._port), timeout=_SECONDS)
            sock.sendall(greeting_of(self._keys))
            self._peers.append(self._keys.of_d.wrap_socket(sock))
            assert self._peers[-1].recv(1) == ADMITTED
        peer = self._rng.choice(self._peers)
        try:
            peer.settimeout(_PATIENCE)
            for _ in range(self.BATCH):
                peer.sendall(self._message())
                self.inputs += 1
            peer.setblocking(False)
            with suppress(ssl.SSLWantReadError):
                while peer.recv(1 << 16):
                    pass
            ends = self._rng.random() < 0.05
        except OSError:  # P has ended it, or reads no more
            ends = True
        if ends:
            self._peers.remove(peer)
            peer.close()

    def _message(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.02:
            return self._mutator.next()
        version = messages.PROTOCOL_VERSION.to_bytes(2, "big")
        start = [messages.MAGIC, version] if rng.random() < 0.9 else [rng.randbytes(rng.randrange(256)), b""]
        return packed([*start, self._bodies.next()])

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
