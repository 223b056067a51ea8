"""The two ends of a NIXL channel: a TCP connection for announcements, beside the READs that carry the bytes."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvferry.transport.channels import Channel, ExpectingChannel, Received, Slot
from kvferry.transport.planes.nixl_source import NixlSource
from kvferry.transport.socket_plane import CONNECT_SECONDS, AwaitedChannel
from kvferry.transport.sockets import ENDED, READABLE, WRITABLE, tune

if TYPE_CHECKING:
    from kvferry.transport.planes.nixl import NixlPlane

_READY = struct.Struct("!IQQQ")
"""P: a message is ready in slot (index), in this use of the slot, of so many bytes, under this tag."""
_FREE = struct.Struct("!I")
"""D: it needs the slot no more."""
GOODBYE = 0xFFFFFFFF
"""P, as the slot of the last message: this channel ends, P's process lives on."""
_MOST_READY = 4096
"""Bound on the messages of one channel that are ready and wait for a slot of D."""
_MOST_UNSENT = 256 << 10
"""Bound on the bytes that wait in one channel until the peer reads its connection."""
_READ_BYTES = 64 << 10


class Ready(NamedTuple):
    """A message that lies in P's slot ``slot``. ``use``: the number of this use of the slot."""

    slot: int
    use: int
    nbytes: int
    tag: int


class _Connection:
    """The messages of a fixed size that one end receives, and the bytes that it still has to send."""

    def __init__(
        self, plane: NixlPlane, channel: Channel, sock: socket.socket, form: struct.Struct, serve: Callable[[], None]
    ) -> None:
        """``serve`` is called when the socket is ready."""
        self.sock = sock
        self._plane, self._channel, self._form, self._serve = plane, channel, form, serve
        self._received = b""
        self._to_send = b""

    def watch(self) -> None:
        """From now on the connection stands."""
        tune(self.sock)
        self._watch()

    def _watch(self) -> None:
        events = READABLE | ENDED | (WRITABLE if self._to_send else 0)
        self._plane.sockets.watch(self.sock, self._serve, events)

    def send(self, data: bytes = b"") -> None:
        """Send as much as the socket takes now, and the rest when it is writable."""
        waited = bool(self._to_send)
        if len(self._to_send) > _MOST_UNSENT:
            self._channel.fail("nixl: the peer does not read its connection")
            return
        self._to_send += data
        try:
            while self._to_send:
                self._to_send = self._to_send[self.sock.send(self._to_send, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._channel.fail(f"nixl: the connection broke: {error.strerror}")
            return
        if waited != bool(self._to_send):
            self._watch()

    def receive(self) -> list[tuple[int, ...]]:
        """The messages that have arrived. At the end of the stream the channel gets an error."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self._channel.fail(f"nixl: the connection broke: {error.strerror}")
            return []
        if not data:
            self._channel.fail("nixl: the peer closed the channel or died")
            return []
        data = self._received + data
        whole = len(data) - len(data) % self._form.size
        self._received = data[whole:]
        return list(self._form.iter_unpack(data[:whole]))


class NixlSendChannel(AwaitedChannel):
    """P's end. A slot is in use from ``acquire`` until D says that it is free, or the channel ends."""

    def __init__(self, plane: NixlPlane, channel_id: bytes, slot_bytes: int) -> None:
        super().__init__(channel_id, slot_bytes)
        self.closed = False
        self._plane = plane
        self._connection: _Connection | None = None
        self._sent: dict[int, Slot] = {}
        self._acquired = 0

    def connected(self, sock: socket.socket) -> None:
        self._connection = _Connection(self._plane, self, sock, _FREE, self._serve)
        self._connection.watch()

    def acquire(self) -> Slot | None:
        if self.closed or self.error is not None or self._connection is None:
            return None
        if len(self._sent) + self._acquired >= self._plane.window:
            return None
        slot = self._plane.send_pool.take()
        if slot is not None:
            self._acquired += 1
        return slot

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if self.closed or self.error is not None or self._connection is None:
            self.give_back(slot)
            return
        self._acquired -= 1
        self._sent[slot.index] = slot
        self._connection.send(_READY.pack(slot.index, self._plane.use_of(slot), nbytes, tag))

    def give_back(self, slot: Slot) -> None:
        self._acquired -= 1
        self._plane.free(slot)

    def _serve(self) -> None:
        assert self._connection is not None
        self._connection.send()
        for (index,) in self._connection.receive():
            slot = self._sent.pop(index, None)
            if slot is None:
                self.fail(f"nixl: the consumer gave back slot {index}, which it does not have")
                return
            self._plane.free(slot)

    def _give_up(self) -> None:
        for slot in self._sent.values():
            self._plane.free(slot)
        self._sent.clear()
        if self._connection is not None:
            self._plane.sockets.drop(self._connection.sock)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.error is None:
            if self._connection is not None:
                self._connection.send(_READY.pack(GOODBYE, 0, 0, 0))
            self._give_up()
        self._plane.drop(self, None)


class NixlRecvChannel(ExpectingChannel):
    """D's end. ``source``: P's slots; ``None`` until P has replied. ``_lives_on``: P's process does, for P or we ended
    the channel in good order."""

    def __init__(self, plane: NixlPlane, sock: socket.socket, hello: bytes) -> None:
        super().__init__()
        self.source: NixlSource | None = None
        self.closed = False
        self.receiving: set[int] = set()
        self._lives_on = False
        self._plane = plane
        self._ready: deque[Ready] = deque()
        self._connection = _Connection(plane, self, sock, _READY, self._serve)
        self._deadline: float | None = time.monotonic() + CONNECT_SECONDS
        self._hello = hello
        plane.sockets.watch(sock, self._connected, WRITABLE)

    def posted(self) -> set[int]:
        return set(self.receiving)

    def _connected(self) -> None:
        number = self._connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self.fail(f"nixl: the producer cannot be reached: {os.strerror(number)}")
            return
        self._deadline = None
        self._connection.watch()
        self._connection.send(self._hello)

    def is_late(self, now: float) -> bool:
        """Whether the connection has not come in time."""
        return self._deadline is not None and now > self._deadline and self.error is None

    def _serve(self) -> None:
        self._connection.send()
        for fields in self._connection.receive():
            ready = Ready(*fields)
            if ready.slot == GOODBYE:
                self._lives_on = True
                self.fail("nixl: the producer closed the channel")
                return
            if why := self._refusal(ready):
                self.fail(f"nixl: {why}")
                return
            self._ready.append(ready)

    def _refusal(self, ready: Ready) -> str:
        """Why P may not have sent this; empty where it may."""
        if self.source is None:
            return "the producer sends before its reply"
        slots = self.source.slots
        if ready.slot >= slots.count or not 0 < ready.nbytes <= min(slots.slot_bytes, self._plane.slot_bytes):
            return f"the producer announces {ready.nbytes} bytes in slot {ready.slot} of {slots.count}"
        if len(self._ready) >= _MOST_READY:
            return f"the producer has announced more than {_MOST_READY} messages"
        expected = self.expected.get(ready.tag)
        if expected is not None and expected.nbytes != ready.nbytes:
            return f"message {ready.tag:#x} has {ready.nbytes} bytes, expected {expected.nbytes}"
        return ""

    @property
    def may_fetch(self) -> bool:
        """Whether a message waits, and only for a slot."""
        return bool(self._ready) and len(self.receiving) < self._plane.receives and self.error is None

    def next_ready(self) -> Ready | None:
        """The next message that is expected; those that are not are dropped."""
        while self.may_fetch:
            ready = self._ready.popleft()
            expected = self.expected.pop(ready.tag, None)
            if expected is not None and expected.nbytes != ready.nbytes:  # expected after it was announced
                self.fail(f"nixl: message {ready.tag:#x} has {ready.nbytes} bytes, expected {expected.nbytes}")
                return None
            if expected is not None:
                self.receiving.add(ready.tag)
                return ready
            self._connection.send(_FREE.pack(ready.slot))
        return None

    def fetched(self, slot: Slot, ready: Ready) -> None:
        """The bytes of a message are in our slot, and they are the message's."""
        self.receiving.discard(ready.tag)
        self._connection.send(_FREE.pack(ready.slot))
        release = partial(self._plane.release, slot)
        self.arrived.append(Received(ready.tag, slot.address, ready.nbytes, release, device=slot.tensor.device))

    def _give_up(self) -> None:
        self._ready.clear()
        self._plane.sockets.drop(self._connection.sock)
        self._plane.reads.leave(self, lives_on=self._lives_on)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.expected.clear()
        self.release_arrived()
        if self.error is None:
            self._lives_on = True
            self._give_up()
        self._plane.drop(self, None)
