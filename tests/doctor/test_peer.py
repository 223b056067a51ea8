"""``--peer``: a rank of a running engine that answers, and every way in which a port does not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.cli.doctor import peer
from kvferry.cli.doctor.findings import Finding, Level
from kvferry.cli.doctor.peer import findings, parse_address
from kvferry.connector.config import Settings
from kvferry.connector.wire import messages
from kvferry.transport.control.keys import Keys
from kvferry.transport.control.stream import ANSWER
from kvferry.transport.errors import UsageError
from tests.doctor.planted import is_bad, only
from tests.support.inside import sessions_of
from tests.support.ranks import Rank
from tests.transport.control_ends import KEYS, new_keys

SECONDS = 5.0
BLACK_HOLE_SECONDS = 0.3
MODEL = {"architectures": "Labelled", "hidden_size": "64", "rope": "x" * 300}


@contextmanager
def rank(settings: Settings | None = None) -> Iterator[Rank]:
    p = Rank(engine_id="engine-p", settings=settings or Settings(), model=MODEL)
    try:
        yield p
    finally:
        p.close()


def look(port: int, keys: Keys = KEYS, settings: Settings | None = None, seconds: float = SECONDS) -> list[Finding]:
    return findings("127.0.0.1", port, settings or Settings(), keys, seconds)


def test_an_engine_tells_its_model_and_is_not_changed():
    with rank() as p:
        found = look(p.address.port)
        assert not sessions_of(p), "no session, so no plane is offered either"
    assert all(finding.level in (Level.OK, Level.NOTE) for finding in found), found
    model = only(found, "model of the peer").value
    assert model == "3 facts: architectures=Labelled, hidden_size=64"
    assert "the median of 4 control messages" in only(found, "round trip").value
    assert only(found, "protocol version").value.startswith(str(messages.PROTOCOL_VERSION))


def test_a_fact_longer_than_a_refusal_ends_the_questions():
    with rank() as p:
        context = p.worker.rank_context
        assert context is not None
        context.model = {"a": "1", "b": "x" * 2000, "c": "3"}
        found = look(p.address.port)
    assert only(found, "model of the peer").value.startswith("2 facts")


def test_an_engine_of_another_release(monkeypatch):
    with rank() as p:
        monkeypatch.setattr(peer, "decode_reply", of_another_release)
        found = look(p.address.port)
    is_bad(only(found, "protocol version"), Level.FAULT, "6", str(messages.PROTOCOL_VERSION), "same KVFerry release")


def of_another_release(frames):
    raise messages.VersionError(6)


# --- keys -----------------------------------------------------------------------------------------------------------


def test_a_wrong_key():
    ours = new_keys()
    with rank() as p:
        found = look(p.address.port, ours)
    is_bad(found[-1], Level.FAULT, f"the peer's is {KEYS.fingerprint}", ours.fingerprint, "KVFERRY_KEY_FILE")


def test_a_peer_that_does_not_admit_our_key():
    ours = new_keys(KEYS.public)  # we know the peer's, the peer does not know ours
    with rank() as p:
        is_bad(
            look(p.address.port, ours)[-1], Level.FAULT, "does not admit our key", ours.fingerprint, "KVFERRY_PEER_KEYS"
        )


def test_the_key_of_another_peer_is_found_among_the_admitted():
    ours = new_keys(KEYS.public)
    with rank(Settings(secret_key=KEYS.secret, peer_keys=(ours.public,))) as p:
        found = look(p.address.port, ours)
    assert only(found, "key of the peer").value.startswith(KEYS.fingerprint)


def test_a_machine_without_a_key_yet():
    with rank() as p:
        found = findings("127.0.0.1", p.address.port, Settings(), None, SECONDS)
    is_bad(found[-1], Level.FAULT, "no key yet")


# --- the way there --------------------------------------------------------------------------------------------------


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_closed_port_and_a_name_that_does_not_exist():
    is_bad(look(closed_port())[0], Level.FAULT, "refuses the connection")
    found = findings("no.such.host.invalid", 1, Settings(), KEYS, SECONDS)
    is_bad(found[0], Level.FAULT, "no.such.host.invalid cannot be resolved")


def test_a_black_hole():
    """A listener whose queue is full: the kernel answers no further connection, as a firewall that drops packets."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(sock.getsockname())
            waiting.append(one)
        found = look(sock.getsockname()[1], seconds=BLACK_HOLE_SECONDS)
        for one in waiting:
            one.close()
    is_bad(found[0], Level.FAULT, "did not answer within 0.3 s", "firewall")


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Accepts, says ``answer``, and keeps the connections open."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        held: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = sock.accept()
                except OSError:
                    return
                if not held and sock.fileno() < 0:
                    return
                held.append(connection)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, name="server")
        thread.start()
        yield sock.getsockname()[1]
        sock.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


OTHERS = {
    "silent": b"",
    "http": b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64),
    "no fingerprint": ANSWER + b"<b>nothing!!",
    "more than an answer": b"x" + ANSWER + KEYS.fingerprint.encode(),
}


@pytest.mark.parametrize("answer", OTHERS.values(), ids=OTHERS)
def test_a_port_of_something_else(answer):
    with server(answer) as port:
        found = look(port, seconds=1.0)
    assert found[0].level is Level.OK, "it is reached"
    is_bad(found[-1], Level.FAULT, "no KVFerry control port", "serves")


def test_a_peer_that_this_engine_may_not_connect_to():
    with rank() as p:
        found = look(p.address.port, settings=Settings(allowed_peers=("10.0.0.0/8",)))
    is_bad(found[-1], Level.FAULT, "not an allowed peer", "KVFERRY_ALLOWED_PEERS")


# --- the address ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "host", "host:", "host:x", "host:0", "host:65536", ":5", "::1:5600", "http://h:1", "h:²"]
)
def test_texts_that_are_no_address(text):
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert "\n" not in str(caught.value) and "expected" in str(caught.value)


def test_addresses():
    assert parse_address("10.0.0.1:5600") == ("10.0.0.1", 5600)
    assert parse_address("[::1]:5600") == ("::1", 5600)
    assert parse_address("name.example:1") == ("name.example", 1)


def test_no_engine_has_the_last_field():
    assert sorted({*MODEL, "~", peer.LAST_FIELD, "zzz"})[-1] == peer.LAST_FIELD
