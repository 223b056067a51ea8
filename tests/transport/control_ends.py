"""The two ends of the control plane as tests use them."""

from __future__ import annotations

import select
import time

from kvferry.transport.control.dialer import Dialer
from kvferry.transport.control.key_file import shared_key
from kvferry.transport.control.keys import Keys, new_secret
from kvferry.transport.control.listener import Listener

LIMIT = 1 << 20
MESSAGE = [b"kvferry", b"\0\1", b"body, in plain sight"]


def new_keys(*peers):
    return Keys(new_secret(), peers)


KEYS = Keys(shared_key())
"""The same in all processes of a test."""
_dialed: set[Dialed] = set()


def listening(keys=KEYS, port=0, host="127.0.0.1", **options):
    return Listener(host, port, keys=keys, max_message_bytes=LIMIT, **options)


class Dialed:
    """One connection with a dialer of its own, whose attributes it has."""

    def __init__(self, port, host="127.0.0.1", *, keys=KEYS, key=None, timeout=300.0, limit=LIMIT):
        named = keys.fingerprint if key is None else key
        self.dialer = Dialer(keys, max_message_bytes=limit)
        self.connection = self.dialer.connect(host, port, key=named, timeout=timeout)
        _dialed.add(self)

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def receive(self):
        self.dialer.progress()
        return self.connection.receive()

    @property
    def state(self):
        self.dialer.progress()
        return self.connection.connected, self.connection.lost

    @property
    def connected(self):
        return self.state[0]

    @property
    def lost(self):
        return self.state[1]

    def close(self):
        _dialed.discard(self)
        self.connection.close()
        self.dialer.close()


def until(condition, seconds=300.0):
    """The value of ``condition`` once it is true; all connections of this process make progress meanwhile."""
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        for end in list(_dialed):
            end.dialer.progress()
        time.sleep(0.002)
    return done


def gone(listener, left=0):
    """Whether all peers but so many are gone."""
    return until(lambda: (listener.receive(), listener.peers)[1] == left)


def arrived(end, count=1, seconds=60.0):
    """The first ``count`` messages."""
    found = []
    until(lambda: found.extend(end.receive()) or len(found) >= count, seconds)
    return found


def exchanged(listener, connection):
    """Whether a message goes from D to P, and its answer back."""
    assert connection.send(MESSAGE)
    [(identity, frames, address)] = arrived(listener)
    assert frames == MESSAGE and address == "127.0.0.1"
    assert listener.send(identity, MESSAGE)
    return arrived(connection) == [MESSAGE]


def readable(end, seconds=60.0):
    """Wait until a listener or a dialer is readable."""
    return bool(select.select([end.fd], [], [], seconds)[0])
