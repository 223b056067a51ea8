"""Keys: only admitted peers get in, traffic is encrypted, and every mismatch is one clear line on both sides."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import suppress

import pytest
import zmq

from kvferry.transport.control import framing, zap_auth
from kvferry.transport.control.keys import Keys, configure_client
from kvferry.transport.control.zap_auth import configure_server
from kvferry.transport.errors import ConfigError, TransportError
from kvferry.transport.wake import RateLimitedLog
from tests.transport.control_ends import KEYS, MESSAGE, Dialed, arrived, exchanged, listening, new_keys, until

OTHERS = new_keys()


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Lines of an earlier test do not keep those of this one back."""
    from kvferry.transport.control import plain_listener

    for module in (zap_auth, plain_listener):
        monkeypatch.setattr(module, "_log", RateLimitedLog(logging.getLogger("vllm.kvferry.transport")))


@pytest.fixture
def ends():
    made = []

    def make(server, client, key=None):
        listener = listening(server)
        made.append(listener)
        named = key if key is not None else "" if server is None else server.fingerprint
        connection = Dialed(listener.port, keys=client, key=named, timeout=300)
        made.insert(0, connection)
        return listener, connection

    yield make
    for end in made:
        end.close()


def lines_of(caplog, port):
    return [line for record in caplog.records if str(port) in (line := record.getMessage())]


@pytest.mark.parametrize(
    ("server", "client", "key", "ours", "theirs"),
    [
        (
            KEYS,
            OTHERS,
            None,
            f"the peer's key is {KEYS.fingerprint}, and this engine admits {OTHERS.fingerprint}",
            None,
        ),
        (
            KEYS,
            new_keys(KEYS.public),
            None,
            "the peer refused us: it does not admit our key",
            f"and this engine admits {KEYS.fingerprint}",
        ),
        (KEYS, None, None, "this engine is insecure, and the peer is not", None),
        (None, KEYS, None, "the peer is insecure, and this engine is not", None),
        (KEYS, None, "", "this engine is insecure", "`insecure` is set on one side only"),
        (None, KEYS, KEYS.fingerprint, "it is insecure", "the peer uses keys, and this engine is insecure"),
        (OTHERS, KEYS, KEYS.fingerprint, "its key is not the one that it has named", "the handshake failed"),
    ],
    ids=["unknown-to-d", "unknown-to-p", "d-insecure", "p-insecure", "d-insecure-unsaid", "p-insecure-unsaid", "other"],
)
def test_a_mismatch_is_one_clear_line_on_each_side(ends, caplog, server, client, key, ours, theirs):
    with caplog.at_level(logging.WARNING, "vllm.kvferry.transport"):
        listener, connection = ends(server, client, key)
        connection.send(MESSAGE)
        assert until(lambda: (listener.receive(), connection.lost)[1])
        assert ours in connection.reason and str(listener.port) in connection.reason and "\n" not in connection.reason
        if theirs is None:  # D does not even connect
            assert not listener.dropped
        else:
            assert until(lambda: (listener.receive(), lines_of(caplog, listener.port))[1])
    found = lines_of(caplog, listener.port)
    assert len(found) == (theirs is not None) and all(theirs in line and "\n" not in line for line in found)
    assert listener.peers == 0 and listener.receive() == []
    good = Dialed(listener.port, keys=server)
    assert exchanged(listener, good), "others are served"
    good.close()


def test_a_key_is_changed_on_one_engine_after_the_other_while_requests_go_on(ends):
    """Three engines, each of them P and D. Every engine is started anew twice; every pair always works."""
    old, new = new_keys(), new_keys()
    before, during, after = Keys(old.secret, [new.public]), Keys(new.secret, [old.public]), new
    engines = [before] * 3
    stages = [(number, keys) for keys in (during, after) for number in range(3)]
    for number, keys in [(0, before), *stages]:
        engines[number] = keys
        for p in engines:
            listener = listening(p)
            for d in engines:
                connection = Dialed(listener.port, keys=d, key=p.fingerprint)
                assert exchanged(listener, connection)
                connection.close()
            assert not listener.dropped
            listener.close()


def test_a_key_for_each_engine_with_an_allow_list():
    p, outsider = new_keys(), new_keys()
    d = new_keys(p.public)
    p = Keys(p.secret, [d.public])
    listener = listening(p)
    connection, other = Dialed(listener.port, keys=d, key=p.fingerprint), Keys(outsider.secret, [p.public])
    refused = Dialed(listener.port, keys=other, key=p.fingerprint, timeout=300)
    try:
        assert exchanged(listener, connection)
        refused.send(MESSAGE)
        assert until(lambda: refused.lost) and "does not admit our key " + other.fingerprint in refused.reason
        assert listener.dropped == {"key": 1} and listener.receive() == []
    finally:
        for end in (connection, refused, listener):
            end.close()


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


@pytest.mark.parametrize("keys", [None, KEYS], ids=["insecure", "keys"])
def test_what_is_on_the_wire_and_a_replay_of_it(keys):
    listener = listening(keys)
    tap = Wiretap(listener.port)
    connection = Dialed(tap.port, keys=keys)
    try:
        assert exchanged(listener, connection)
        assert (b"in plain sight" in tap.seen + tap.answers) == (keys is None), "encrypted if and only if keys are set"
        with socket.create_connection(("127.0.0.1", listener.port)) as again:
            again.sendall(tap.seen)
            got_in = until(lambda: arrived(listener, seconds=0.2) or listener.dropped["handshake"])
            assert got_in and isinstance(got_in, list) == (keys is None), "a recorded session is refused"
    finally:
        connection.close()
        listener.close()
        tap.server.close()


def test_a_server_that_has_only_copied_the_public_key_learns_nothing(ends):
    """It cannot finish the handshake, so that D sends it no message."""
    _, connection = ends(OTHERS, KEYS, KEYS.fingerprint)
    connection.send(MESSAGE)
    assert until(lambda: connection.lost) and not connection.receive()


def test_data_sockets_are_guarded_too():
    context, clients = zmq.Context(), zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    configure_server(server, Keys(KEYS.secret, [new_keys().public]))
    port = server.bind_to_random_port("tcp://127.0.0.1")
    for pair in (OTHERS, KEYS):
        client = clients.socket(zmq.DEALER)
        client.linger = 0
        configure_client(client, pair, KEYS.admitted[KEYS.fingerprint])
        client.connect(f"tcp://127.0.0.1:{port}")
        with suppress(zmq.Again):  # refused already: a send would wait for ever
            client.send(pair.public.encode(), zmq.NOBLOCK)
    assert server.poll(60_000) and server.recv_multipart()[1] == KEYS.public.encode()
    assert not server.poll(300), "the other's message does not come"
    clients.destroy(0)
    server.close()
    context.term()  # returns: the gate ends with its context


def test_a_foreign_zap_handler_is_not_taken_for_ours():
    """It might let everybody in."""
    context = zmq.Context()
    foreign = context.socket(zmq.REP)
    foreign.bind("inproc://zeromq.zap.01")
    server = context.socket(zmq.ROUTER)
    with pytest.raises(TransportError, match="another ZAP handler"):
        configure_server(server, KEYS)
    context.destroy(0)


@pytest.mark.parametrize(
    ("secret", "peers", "word"),
    [
        ("short", (), "secret_key"),
        ("x" * 39 + " ", (), "secret_key"),
        ("é" * 40, (), "secret_key"),
        (KEYS.secret, ("%" * 40,), "peer_keys"),
        (KEYS.secret, (KEYS.secret,), "secret key; expected public keys"),
    ],
    ids=["short", "space", "not-ascii", "over", "own-secret"],
)
def test_bad_keys_are_one_line_that_tells_no_secret(secret, peers, word):
    with pytest.raises(ConfigError) as error:
        Keys(secret, peers)
    text = str(error.value)
    assert "\n" not in text and word in text and secret not in text
    assert KEYS.secret not in repr(KEYS) and KEYS.fingerprint in repr(KEYS)


def test_a_silent_server_is_lost_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connection = Dialed(silent.getsockname()[1], timeout=0.5)
        assert until(lambda: connection.lost) and "no answer" in connection.reason
        connection.close()
    assert framing.HANDSHAKE_SECONDS >= 1
