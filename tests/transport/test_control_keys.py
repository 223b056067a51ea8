"""Keys: only admitted peers get in, traffic is encrypted, and every mismatch is one clear line on both sides."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import ssl
from datetime import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvferry.transport.control import keys as control_keys
from kvferry.transport.control import listener as control_listener
from kvferry.transport.control.keys import Keys
from kvferry.transport.control.stream import OTHER_KEY
from kvferry.transport.errors import ConfigError
from kvferry.transport.wake import RateLimitedLog
from tests.support.fault_proxy import FaultProxy
from tests.transport.control_ends import KEYS, MESSAGE, Dialed, arrived, exchanged, listening, new_keys, until
from tests.transport.control_strangers import GREETING, closed_by_peer, impostor, raw, server_of

OTHERS = new_keys()
ADMITS_BOTH = Keys(KEYS.secret, [OTHERS.public])
PUBLIC = KEYS.admitted[KEYS.fingerprint]


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    """Lines of an earlier test do not keep those of this one back."""
    monkeypatch.setattr(control_listener, "log", RateLimitedLog(logging.getLogger("vllm.kvferry.transport")))


@pytest.fixture
def ends(connect):
    """Makes a listener with one set of keys, and a connection to it with another."""
    with contextlib.ExitStack() as stack:

        def make(server, client, key=None):
            listener = stack.enter_context(contextlib.closing(listening(server)))
            return listener, connect(listener.port, keys=client, key=server.fingerprint if key is None else key)

        yield make


def lines_of(caplog, port):
    return [line for record in caplog.records if str(port) in (line := record.getMessage())]


MISMATCHES = {
    "unknown-to-d": (
        KEYS, OTHERS, None, f"the peer's key is {KEYS.fingerprint}, and this engine admits {OTHERS.fingerprint}", None
    ),
    "unknown-to-p": (
        KEYS, Keys(OTHERS.secret, [KEYS.public]), None,
        f"it does not admit our key {OTHERS.fingerprint}; give both engines one secret_key, or add our public key "
        f"{OTHERS.public} to peer_keys of the peer",
        f"connection ended: the peer's key is {OTHERS.fingerprint}, and this engine admits {KEYS.fingerprint}",
    ),
    "not-named": (KEYS, KEYS, "", "the peer's key is not named", None),
    "other": (
        OTHERS, ADMITS_BOTH, KEYS.fingerprint, "its key is not the one that it has named",
        "connection ended: the handshake failed: it is no KVFerry engine, or takes this one for another",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("server", "client", "key", "ours", "theirs"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_one_clear_line_on_each_side(ends, caplog, server, client, key, ours, theirs):
    with caplog.at_level(logging.WARNING, "vllm.kvferry.transport"):
        listener, connection = ends(server, client, key)
        connection.send(MESSAGE)
        assert until(lambda: (listener.receive(), connection.lost)[1])
        assert ours in connection.reason and "\n" not in connection.reason
        if theirs is None:  # D does not even connect
            assert not listener.dropped
        else:
            assert until(lambda: (listener.receive(), lines_of(caplog, listener.port))[1])
            assert listener.dropped == {"key" if "admits" in theirs else "handshake": 1}
    found = lines_of(caplog, listener.port)
    assert len(found) == (theirs is not None) and all(theirs in line and "\n" not in line for line in found)
    assert listener.peers == 0 and listener.receive() == []
    with contextlib.closing(Dialed(listener.port, keys=server)) as good:
        assert exchanged(listener, good), "others are served"


def test_a_key_is_changed_on_one_engine_after_the_other_while_requests_go_on(ends):
    """Three engines, each of them P and D. Every engine is started anew twice; every pair always works."""
    old, new = new_keys(), new_keys()
    during, after = Keys(new.secret, [old.public]), new
    engines = [Keys(old.secret, [new.public])] * 3
    for number, keys in [(0, engines[0]), *((number, keys) for keys in (during, after) for number in range(3))]:
        engines[number] = keys
        for p in engines:
            for d in engines:
                listener, connection = ends(p, d)
                assert exchanged(listener, connection) and not listener.dropped
                connection.close()
                listener.close()


def test_what_is_on_the_wire_and_a_replay_of_it(listener, connect):
    with contextlib.closing(FaultProxy("127.0.0.3", records=True)) as tap:
        tap.open(listener.port, "127.0.0.1")
        assert exchanged(listener, connect(listener.port, tap.address))
        [(up, down)] = tap.recorded
        assert GREETING in up and not any(each in up + down for each in (MESSAGE[2], PUBLIC, KEYS.secret.encode()))
        with raw(listener, bytes(up)) as again:
            assert closed_by_peer(listener, again) and listener.dropped == {"handshake": 1}
        assert arrived(listener, seconds=0.2) == [] and listener.peers == 1


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (OTHERS, "its key is not the one that it has named"),
        (new_keys(), "and this engine admits"),
        (None, "the peer hung up during the handshake; it is no KVFerry control port, or its key is not the one"),
    ],
    ids=["admitted", "unknown", "copied"],
)
def test_a_server_without_the_secret_key_learns_nothing(server, reason):
    """D names KEYS. The server has another key, which D admits or not, or has only copied the certificate of KEYS."""
    context = impostor(PUBLIC, ssl.PROTOCOL_TLS_SERVER) if server is None else server.of_p
    with server_of(context) as (port, heard), contextlib.closing(Dialed(port, keys=ADMITS_BOTH)) as connection:
        connection.send(MESSAGE)
        assert until(lambda: connection.lost) and reason in connection.reason and "\n" not in connection.reason
        assert not connection.receive() and not heard


def test_a_peer_that_has_only_copied_an_admitted_certificate_is_refused(ends, caplog):
    """It signs with another secret key, and cannot finish the handshake."""
    listener, good = ends(KEYS, KEYS)
    with caplog.at_level(logging.WARNING, "vllm.kvferry.transport"), raw(listener, GREETING) as peer:
        with impostor(PUBLIC).wrap_socket(peer) as tls:
            assert closed_by_peer(listener, tls)
        [line] = until(lambda: lines_of(caplog, listener.port))
    assert "BAD_SIGNATURE" in line and listener.dropped == {"handshake": 1}
    assert exchanged(listener, good)


def test_a_certificate_that_merely_contains_an_admitted_key_is_refused(ends, tmp_path):
    """Anybody can sign it: the issuer's key is no secret."""
    listener, good = ends(KEYS, KEYS)
    secret, context = Ed25519PrivateKey.generate(), new_keys().of_d
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, KEYS.fingerprint)])
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvferry")])
    draft = x509.CertificateBuilder(issuer, name, secret.public_key(), 1, datetime(2000, 1, 1), datetime(9999, 12, 31))
    admitted = control_keys.certificate_of(PUBLIC).public_bytes(Encoding.DER)
    draft = draft.add_extension(x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), admitted), critical=False)
    chain = draft.sign(control_keys.ISSUER, None).public_bytes(Encoding.PEM)
    chain += secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "chain").write_bytes(chain)
    context.load_cert_chain(tmp_path / "chain")
    with raw(listener, GREETING) as peer, context.wrap_socket(peer) as tls:
        assert tls.recv(1) == OTHER_KEY and closed_by_peer(listener, tls)
    assert listener.dropped == {"key": 1}
    assert exchanged(listener, good)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
def test_a_peer_without_a_certificate_or_with_an_older_tls_is_refused(ends, version):
    listener, good = ends(KEYS, KEYS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    with raw(listener, GREETING) as peer, contextlib.suppress(OSError), context.wrap_socket(peer) as tls:
        assert version is not ssl.TLSVersion.TLSv1_2 and closed_by_peer(listener, tls)
    assert until(lambda: (listener.receive(), listener.dropped)[1]) == {"handshake": 1}
    assert exchanged(listener, good)


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


def test_the_certificate_of_a_key_stays_the_same():
    """Both ends make it, perhaps with other releases of ``cryptography``, and compare it byte for byte."""
    (certificate,) = Keys("rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7").by_certificate
    assert hashlib.sha256(certificate).hexdigest() == "db2deeca9c65c2ff8b04939f4f009489bb671a6edd16ea6f25383678fc3a218c"
