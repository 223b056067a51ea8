"""P's end of the control plane with keys: one ZMQ ROUTER, which CURVE encrypts and authenticates."""

from __future__ import annotations

from collections import Counter

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.keys import Keys
from kvferry.transport.control.listener import Listener
from kvferry.transport.control.routing_ids import new_router
from kvferry.transport.control.zap_auth import ZapHandler, unwatch


class CurveListener(Listener):
    """See :func:`kvferry.transport.control.listener.listen`."""

    socket: zmq.Socket[bytes]

    def __init__(self, address: str, port: int, keys: Keys, max_message_bytes: int, limit: int) -> None:
        self.dropped: Counter[str] = Counter()
        # A context of its own: its I/O thread and its ZAP handler end with it.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = new_router(self._context)
        framing.tune(self.socket, max_message_bytes)
        # Some peers are on this host. TCP reports the loss of another host; nothing here waits for a D that only hangs.
        framing.keep_watch(self.socket, framing.SILENCE_HERE_SECONDS)
        self.socket.router_mandatory = True
        self.socket.ipv6 = ":" in address
        try:
            self._gate = ZapHandler(self._context)
            label = f"control port {address}"
            self._guarded = self._gate.guard(self.socket, keys, limit=limit, dropped=self.dropped, label=label)
            self.socket.bind(framing.url(address, port or "*"))
        except zmq.ZMQError:
            self.close()
            raise
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])
        self._guarded.port, self._guarded.label = self.port, f"control port {self.endpoint}"
        self._filter = framing.Filter(self._guarded.label, max_message_bytes, self.dropped)

    def receive(self) -> list[tuple[bytes, list[bytes], str]]:
        messages, nbytes = [], 0
        for _ in range(framing.BATCH):
            if nbytes >= framing.BATCH_BYTES or not framing.waiting(self.socket):
                break
            try:
                first = self.socket.recv(zmq.NOBLOCK, copy=False)
                identity, *frames = framing.rest(self.socket, [first.bytes], framing.FRAMES + 1)
            except zmq.ZMQError:  # the socket or the context is closed
                break
            self._guarded.served.add(framing.source(first))
            nbytes += sum(map(len, frames))
            if identity[:1] != b"\0" or len(identity) != 5:  # chosen by the peer, not made by libzmq
                self.dropped["identity"] += 1
                continue
            message = self._filter.unpack(frames)
            if message is not None:
                messages.append((identity, message, framing.peer_address(first)))
        return messages

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        failure = framing.send(self.socket, [identity, framing.pack(frames)])
        if failure:
            self.dropped["full" if failure == zmq.EAGAIN else "gone"] += 1
        return not failure

    @property
    def peers(self) -> int:
        return self._gate.connections()

    def close(self) -> None:
        if not self.socket.closed:
            unwatch(self.socket)
            self.socket.close(0)
            if hasattr(self, "_gate"):
                self._gate.close()
            self._context.term()
