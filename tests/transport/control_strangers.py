"""Peers of the control port that do not behave, and how good ones are seen to be served beside them."""

from __future__ import annotations

import contextlib
import socket
import struct

import zmq

from tests.transport.control_ends import KEYS, exchanged, until

SENDER = KEYS.public.encode()


def served(listener, good):
    """The one message of a good peer comes through, and its answer; all that came before it is dropped."""
    assert exchanged(listener, good) and good.state == (True, False)


def total(listener):
    listener.receive()
    return listener.dropped.total()


@contextlib.contextmanager
def raw(listener, data=b""):
    with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(data)
        yield peer


@contextlib.contextmanager
def zmq_peer(listener, kind=zmq.DEALER, **options):
    """A holder of the key that speaks ZMTP and nothing else of ours."""
    context = zmq.Context()
    end = context.socket(kind)
    end.linger = 0
    end.curve_publickey, end.curve_secretkey, end.curve_serverkey = SENDER, KEYS.secret.encode(), SENDER
    for name, value in options.items():
        setattr(end, name, value)
    end.connect(f"tcp://127.0.0.1:{listener.port}")
    try:
        yield end
    finally:
        context.destroy(0)


def closed_by_peer(listener, peer, seconds=60.0):
    """Whether the connection ends."""
    peer.settimeout(0.01)

    def closed():
        listener.receive()
        try:
            return not peer.recv(65536)
        except TimeoutError:
            return False
        except OSError:
            return True

    return until(closed, seconds)


def message(first=b"kvferry", second=b"\0\5", third=b"x"):
    """A message as bare TCP carries it."""
    return struct.pack(">4sBBI", b"KVF\x01", len(first), len(second), len(third)) + first + second + third
