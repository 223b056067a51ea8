"""CURVE: only holders of the deployment's key pair get in; every mismatch is lost with a reason, none hangs."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.connection import Connection
from kvferry.transport.control.listener import Listener
from kvferry.transport.control.zap_auth import CurveKeys, configure_curve
from kvferry.transport.errors import ConfigError, TransportError

LIMIT = 1 << 20
MESSAGE = [b"kvferry", b"\0\1", b"body, in plain sight"]


def keys():
    public, secret = zmq.curve_keypair()
    return CurveKeys(public.decode(), secret.decode())


OURS, OTHERS = keys(), keys()


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return done


@pytest.fixture
def ends():
    made = []

    def make(server, client):
        listener = Listener("127.0.0.1", 0, curve=server, max_message_bytes=LIMIT)
        connection = Connection("127.0.0.1", listener.port, curve=client, max_message_bytes=LIMIT, connect_timeout=300)
        made.extend((connection, listener))
        return listener, connection

    yield make
    for end in made:
        end.close()


def exchanged(listener, connection):
    connection.send(MESSAGE)
    found = until(listener.receive)
    assert found and found[0][1] == MESSAGE
    assert listener.send(found[0][0], MESSAGE)
    return until(connection.receive) == [MESSAGE]


def lost(connection):
    connection.send(MESSAGE)
    return until(lambda: [connection.poll_monitor()] and connection.lost)


def test_the_same_keys(ends):
    listener, connection = ends(OURS, OURS)
    assert exchanged(listener, connection)
    assert not listener.dropped and not connection.lost


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        (OURS, None, "this engine has none"),
        (None, OURS, "this engine has keys"),
        (OURS, OTHERS, "CURVE"),
    ],
    ids=["client-without", "server-without", "other-pair"],
)
def test_a_mismatch_is_lost_with_a_reason(ends, server, client, words):
    listener, connection = ends(server, client)
    assert lost(connection)
    assert words in connection.reason and "CURVE" in connection.reason and "\n" not in connection.reason
    assert str(listener.port) in connection.reason
    assert until(lambda: listener.dropped["handshake"] == 1)
    assert listener.receive() == [] and listener.peers == 0
    good = Connection("127.0.0.1", listener.port, curve=server, max_message_bytes=LIMIT)
    assert exchanged(listener, good)
    good.close()


def test_knowing_the_public_key_is_not_enough(ends):
    """The public key is told to nobody, but it is not a secret: a client that has only it is refused."""
    listener, _ = ends(OURS, OURS)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    stranger.linger = 0
    stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = public, secret, OURS.public.encode()
    stranger.connect(listener.endpoint)
    stranger.send_multipart(MESSAGE)
    assert until(lambda: listener.dropped["key"] >= 1)
    time.sleep(0.2)
    assert listener.receive() == []
    context.destroy(0)


class Wiretap:
    """A TCP proxy that records what the client sent, and what the server answered."""

    def __init__(self, port):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port, self.seen, self.answers = self.server.getsockname()[1], b"", b""
        threading.Thread(target=self._run, args=(port,), daemon=True).start()

    def _run(self, port):
        near, _ = self.server.accept()
        far = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._carry, args=(far, near, "answers"), daemon=True).start()
        self._carry(near, far, "seen")

    def _carry(self, source, sink, name):
        try:
            while data := source.recv(65536):
                setattr(self, name, getattr(self, name) + data)
                sink.sendall(data)
        except OSError:
            pass
        sink.close()


@pytest.mark.parametrize("curve", [None, OURS], ids=["plain", "curve"])
def test_what_is_on_the_wire_and_a_replay_of_it(curve):
    listener = Listener("127.0.0.1", 0, curve=curve, max_message_bytes=LIMIT)
    tap = Wiretap(listener.port)
    connection = Connection("127.0.0.1", tap.port, curve=curve, max_message_bytes=LIMIT)
    try:
        assert exchanged(listener, connection)
        readable = b"in plain sight" in tap.seen + tap.answers
        assert readable == (curve is None), "encrypted if and only if keys are set"
        with socket.create_connection(("127.0.0.1", listener.port)) as again:
            start = tap.seen.find(b"kvferry") - 2  # the first frame; a real peer waits for the handshake before it
            again.sendall(tap.seen[:start])
            shaken = until(lambda: listener.peers == 2, 60 if curve is None else 0.3)
            assert shaken is (curve is None)
            again.sendall(tap.seen[start:])
            got_in = until(listener.receive, 60 if curve is None else 1)
            assert bool(got_in) == (curve is None), "a recorded session is refused under CURVE"
    finally:
        connection.close()
        listener.close()
        tap.server.close()


def test_data_sockets_are_guarded_too():
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    configure_curve(server, OURS, server=True)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    clients = []
    for pair in (OTHERS, OURS):
        client = zmq.Context.instance().socket(zmq.DEALER)
        client.linger = 0
        configure_curve(client, pair, server=False)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(pair.public.encode())
        clients.append(client)
    assert server.poll(60_000) and server.recv_multipart()[1] == OURS.public.encode()
    assert not server.poll(300), "the other's message does not come"
    for client in clients:
        client.close()
    server.close()
    context.term()  # returns: the gate ends with its context


def test_two_guarded_sockets_of_one_context():
    context = zmq.Context()
    ports = {}
    for pair in (OURS, OTHERS):
        server = context.socket(zmq.ROUTER)
        server.linger = 0
        configure_curve(server, pair, server=True)
        ports[pair.public] = (server, server.bind_to_random_port("tcp://127.0.0.1"))
    for pair in (OURS, OTHERS):
        server, port = ports[pair.public]
        client = zmq.Context.instance().socket(zmq.DEALER)
        client.linger = 0
        configure_curve(client, pair, server=False)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"x")
        assert server.poll(60_000)
        client.close()
        server.close()
    context.term()


def test_a_foreign_zap_handler_is_not_taken_for_ours():
    """It might let everybody in."""
    context = zmq.Context()
    foreign = context.socket(zmq.REP)
    foreign.bind("inproc://zeromq.zap.01")
    server = context.socket(zmq.ROUTER)
    with pytest.raises(TransportError, match="another ZAP handler"):
        configure_curve(server, OURS, server=True)
    context.destroy(0)


def test_without_keys_nothing_is_set():
    context = zmq.Context()
    plain = context.socket(zmq.ROUTER)
    configure_curve(plain, None, server=True)
    assert plain.mechanism == zmq.NULL
    context.destroy(0)


@pytest.mark.parametrize(
    ("public", "secret"),
    [
        ("short", OURS.secret),
        (OURS.public, "x" * 39 + " "),
        (OURS.public, "é" * 40),
        (OURS.public, OTHERS.secret),
        (OURS.secret, OURS.public),
    ],
    ids=["short", "space", "not-ascii", "not-a-pair", "swapped"],
)
def test_bad_keys_are_one_line_that_tells_no_secret(public, secret):
    with pytest.raises(ConfigError) as error:
        CurveKeys(public, secret)
    text = str(error.value)
    assert "\n" not in text and "curve_" in text and secret not in text


def test_the_secret_is_not_shown():
    assert OURS.secret not in repr(OURS) and OURS.public in repr(OURS)


def test_a_silent_server_under_curve_is_lost_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        connection = Connection("127.0.0.1", port, curve=OURS, max_message_bytes=LIMIT, connect_timeout=0.5)
        assert until(lambda: connection.lost)
        connection.close()
    assert framing.HANDSHAKE_SECONDS >= 1
