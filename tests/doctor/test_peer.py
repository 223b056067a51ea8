"""``--peer``: a rank of a running engine that answers, and every way in which a port does not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvferry.cli.doctor import peer
from kvferry.cli.doctor.command import parse_address
from kvferry.cli.doctor.findings import Finding, Level
from kvferry.cli.doctor.peer import findings
from kvferry.connector.config import Settings
from kvferry.connector.wire import messages
from kvferry.transport.control.keys import Keys
from kvferry.transport.control.stream import ANSWER
from kvferry.transport.errors import UsageError
from tests.doctor.planted import is_bad, only
from tests.support.inside import sessions_of
from tests.support.ranks import Rank
from tests.transport.control_ends import KEYS, new_keys

SECONDS = 300.0
WEIGHTS = "0123456789abcdef of /models/x, revision 1"
MODEL = {"architectures": "Labelled", "hidden_size": "64"}


@contextmanager
def rank(settings: Settings | None = None) -> Iterator[Rank]:
    p = Rank(engine_id="engine-p", settings=settings or Settings(), model=MODEL)
    try:
        yield p
    finally:
        p.close()


def look(
    port: int, keys: Keys | None = KEYS, settings: Settings | None = None, seconds: float = SECONDS,
    model: dict[str, Any] | None = None,
) -> list[Finding]:  # fmt: skip
    return list(findings("127.0.0.1", port, settings or Settings(), keys, model, seconds))


def test_an_engine_names_its_model_and_is_not_changed(caplog):
    caplog.set_level("INFO", "vllm.kvferry")
    with rank() as p:
        found = look(p.address.port)
        assert not sessions_of(p), "no session, so no plane is offered either"
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
    assert len([line for line in caplog.messages if line.startswith("kvferry: refused decode rank doctor")]) == 1
    assert all(finding.level in (Level.OK, Level.NOTE) for finding in found), found
    assert only(found, "model of the peer").value == "architectures=Labelled"
    assert only(found, "protocol version").value.startswith(str(messages.PROTOCOL_VERSION))


@pytest.mark.parametrize("tag", [None, "ours"])
def test_a_model_of_this_machine_is_compared(tag):
    ours = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
    settings = Settings(model_tag=tag)
    with rank() as p:
        context = p.worker.rank_context
        assert context is not None
        context.model = peer.model_facts(ours, tag) | ({} if tag else {"weights digest": WEIGHTS})
        found = look(p.address.port, settings=settings, model=ours)
        assert only(found, "model of the peer").level is Level.OK, "as vLLM has it: with the defaults of its class"
        found = look(p.address.port, settings=settings, model=ours | {"num_hidden_layers": 5})
    is_bad(
        only(found, "model of the peer"), Level.FAULT, "num_hidden_layers: the peer's is 4, that of this machine is 5"
    )


def test_an_engine_of_another_release(monkeypatch):
    def decode_reply(frames):
        raise messages.VersionError(6)

    with rank() as p:
        monkeypatch.setattr(peer, "decode_reply", decode_reply)
        found = look(p.address.port)
    is_bad(only(found, "protocol version"), Level.FAULT, "6", str(messages.PROTOCOL_VERSION), "same KVFerry release")


def test_keys_that_are_not_admitted():
    ours = new_keys()
    with rank() as p:
        found = look(p.address.port, ours)
        is_bad(found[-1], Level.FAULT, f"the peer's is {KEYS.fingerprint}", ours.fingerprint, "KVFERRY_KEY_FILE")
        ours = new_keys(KEYS.public)  # we know the peer's, the peer does not know ours
        found = look(p.address.port, ours)
        is_bad(found[-1], Level.FAULT, "does not admit our key", ours.fingerprint, "KVFERRY_PEER_KEYS")
        found = look(p.address.port, None)
        is_bad(found[-1], Level.FAULT, "no key yet")
        found = look(p.address.port, settings=Settings(allowed_peers=("10.0.0.0/8",)))
        is_bad(found[-1], Level.FAULT, "not an allowed peer", "KVFERRY_ALLOWED_PEERS")
    with rank(Settings(peer_keys=(ours.public,))) as p:
        found = look(p.address.port, ours)
    assert only(found, "key of the peer").value.startswith(KEYS.fingerprint)


def test_a_closed_port_and_a_name_that_does_not_exist():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # and does not listen
        is_bad(look(sock.getsockname()[1])[0], Level.FAULT, "refuses the connection")
    (found,) = findings("no.such.host.invalid", 1, Settings(), KEYS, seconds=SECONDS)
    is_bad(found, Level.FAULT, "host 'no.such.host.invalid' does not resolve")


def test_a_black_hole():
    """A listener whose queue is full: the kernel answers no further connection, as a firewall that drops packets."""
    with ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(sock.getsockname())
        found = look(sock.getsockname()[1], seconds=0.3)
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
    is_bad(found[-1], Level.FAULT, "no KVFerry control port", "serves")


@pytest.mark.parametrize(
    "text", ["", "host", "host:x", "host:0", "host:65536", ":5", "::1:5600", "http://h:1", "h:1/x", "a@h:1", "h:²"]
)
def test_texts_that_are_no_address(text):
    with pytest.raises(UsageError) as caught:
        parse_address(text)
    assert "\n" not in str(caught.value) and "expected" in str(caught.value)


def test_addresses():
    assert parse_address("10.0.0.1:5600") == ("10.0.0.1", 5600)
    assert parse_address("[::1]:5600") == ("::1", 5600)
