"""Keys: only admitted peers get in, traffic is encrypted, and every mismatch is one clear line on both sides."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import secrets
import socket
import ssl
import threading
import time
from datetime import datetime
from itertools import pairwise

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from zmq.utils import z85

from kvferry.transport.control import keys as control_keys
from kvferry.transport.control import listener as control_listener
from kvferry.transport.control.keys import Keys
from kvferry.transport.errors import ConfigError
from kvferry.transport.wake import RateLimitedLog
from tests.fuzz.attackers import client_hello
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
        f"the peer, whose key is {KEYS.fingerprint}, refused us: it does not admit our key {OTHERS.fingerprint}; give "
        f"both engines one key_file, or add our public key {OTHERS.public} to peer_keys of the peer",
        f"connection ended: the peer's key is {OTHERS.fingerprint}, and this engine admits {KEYS.fingerprint}",
    ),
    "not-named": (KEYS, KEYS, "", "the peer's key is not named", None),
    "other": (
        OTHERS, ADMITS_BOTH, KEYS.fingerprint,
        f"the peer's key is {OTHERS.fingerprint}, expected {KEYS.fingerprint}, and this engine admits ",
        "connection ended: the handshake failed: it is no KVFerry engine, or takes this one for another",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("server", "client", "key", "ours", "theirs"), MISMATCHES.values(), ids=MISMATCHES)
def test_a_mismatch_is_one_clear_line_on_each_side(ends, caplog, server, client, key, ours, theirs):
    with caplog.at_level(logging.WARNING, "vllm.kvferry.transport"):
        listener, connection = ends(server, client, key)
        connection.send(MESSAGE)
        assert until(lambda: (listener.receive(), connection.lost)[1])
        assert ours in connection.reason and "\n" not in connection.reason and connection.failure == "key"
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
        (None, "the peer hung up during the handshake; it is no KVFerry control port"),
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
        assert closed_by_peer(listener, tls)
    assert until(lambda: (listener.receive(), listener.dropped)[1]) == {"key": 1}
    assert exchanged(listener, good)


@pytest.mark.parametrize("odd", ["no certificate", "an older TLS", "a key exchange that costs P much"])
def test_a_handshake_of_another_form_is_refused(ends, odd):
    listener, good = ends(KEYS, KEYS)
    context = new_keys().of_d if "exchange" in odd else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2 if "older" in odd else ssl.TLSVersion.TLSv1_3
    context.set_ecdh_curve("secp521r1" if "exchange" in odd else "prime256v1")
    with raw(listener, GREETING) as peer, contextlib.suppress(OSError), context.wrap_socket(peer) as tls:
        assert odd == "no certificate" and closed_by_peer(listener, tls)
    assert until(lambda: (listener.receive(), listener.dropped)[1]) == {"handshake": 1}
    assert exchanged(listener, good)


def test_no_clock_decides_who_is_admitted(monkeypatch):
    """Certificates that are not valid yet, as all are on a host whose clock stands before the year 2000."""
    monkeypatch.setattr(control_keys, "datetime", lambda *_: datetime(9000, 1, 1))
    keys = new_keys()
    with contextlib.closing(listening(keys)) as listener, contextlib.closing(Dialed(listener.port, keys=keys)) as good:
        assert exchanged(listener, good) and not listener.dropped


def heavy_chain(path, top, length=72):
    """TLS of a stranger whose chain of certificates costs much to verify: RSA keys of 3,072 bits with exponents as
    long. ``top``: whose certificate it says to end at."""
    numbers = rsa.generate_private_key(65537, 3072).private_numbers()
    p, q = numbers.p, numbers.q
    exponent = next(e for e in iter(lambda: secrets.randbits(3060) | 1, 0) if math.gcd(e, (p - 1) * (q - 1)) == 1)
    d, public = pow(exponent, -1, (p - 1) * (q - 1)), rsa.RSAPublicNumbers(exponent, p * q)
    key = rsa.RSAPrivateNumbers(p, q, d, d % (p - 1), d % (q - 1), pow(q, -1, p), public).private_key()
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{n}")]) for n in (*range(length), top)]
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for number, (subject, issuer) in enumerate(pairwise(names)):
        draft = x509.CertificateBuilder(
            issuer, subject, key.public_key(), 1, datetime(2000, 1, 1), datetime(9999, 1, 1)
        )
        draft = draft.add_extension(x509.BasicConstraints(ca=number > 0, path_length=None), critical=True)
        last = draft.sign(control_keys.ISSUER, None) if number == length - 1 else draft.sign(key, hashes.SHA256())
        pem += last.public_bytes(Encoding.PEM)
    path.write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(path)
    return context


@pytest.mark.parametrize("top", ["kvferry", KEYS.fingerprint], ids=["nobody", "an admitted key"])
def test_strangers_with_heavy_certificates_keep_nobody_out(tmp_path, top):
    """Each cost 200 honest handshakes, and honest peers beside 20 of them waited 20 s, or were given up."""
    context, over = heavy_chain(tmp_path / "chain", top), threading.Event()
    before = set(threading.enumerate())
    with contextlib.closing(listening()) as listener:
        (gate,) = (each for each in set(threading.enumerate()) - before if each.name == "kvferry-gate")
        assert gate.ident is not None
        clock = time.pthread_getcpuclockid(gate.ident)

        def seconds():
            return time.clock_gettime(clock)

        def honest():
            begun = seconds()
            for _ in range(4):
                with contextlib.closing(Dialed(listener.port)) as good:
                    assert exchanged(listener, good)
            return seconds() - begun

        def attack():
            while not over.is_set():
                with contextlib.suppress(OSError), raw(listener, GREETING) as peer, context.wrap_socket(peer) as tls:
                    tls.recv(1)

        alone, begun = honest(), seconds()
        attackers = [threading.Thread(target=attack) for _ in range(20)]
        for each in attackers:
            each.start()
        try:
            honest()
            assert until(lambda: (listener.receive(), listener.dropped["key"] > 20)[1])
            assert seconds() - begun < listener.dropped["key"] * 10 * alone, "of the gate: 40 handshakes for each"
        finally:
            over.set()
            for each in attackers:
                each.join()
        assert set(listener.dropped) == {"key"}


def test_others_come_before_an_address_whose_handshakes_fail(monkeypatch):
    """The gate stands until all are there; then the honest peer, who came last, waits for one of the others at most."""
    monkeypatch.setattr(control_listener, "STRANGER_SECONDS", 0.0)
    monkeypatch.setattr(control_listener, "LATE_SECONDS", 0.0)
    heard, stands, keys, hello = [], threading.Event(), Keys(KEYS.secret), GREETING + client_hello(new_keys().of_d)

    class Heard(ssl.SSLSocket):
        def do_handshake(self, block=False):
            heard.append(self.getpeername()[0])
            if heard[-1] == "127.0.0.3":
                assert stands.wait(300)
            super().do_handshake(block)

    keys.of_p.sslsocket_class = Heard
    with contextlib.closing(listening(keys)) as listener, contextlib.ExitStack() as stack:
        for address in ("127.0.0.2", "127.0.0.3", *["127.0.0.2"] * 40):
            source = (address, 0)
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", listener.port), 60, source))
            peer.sendall(hello)
            assert until(lambda: len(heard) >= 2 or heard == ["127.0.0.2"])
        good = stack.enter_context(contextlib.closing(Dialed(listener.port)))
        assert until(lambda: good.ends)
        good.dialer.progress()
        stands.set()
        assert exchanged(listener, good)
    assert heard.index("127.0.0.1") <= 3


@pytest.mark.parametrize(
    ("secret", "peers", "word"),
    [
        ("short", (), "secret_key"),
        ("x" * 39 + " ", (), "secret_key"),
        ("é" * 40, (), "secret_key"),
        (KEYS.secret, ("%" * 40,), "peer_keys"),
        (KEYS.secret, (z85.encode(bytes.fromhex(KEYS.secret)).decode(),), "secret key; expected public keys"),
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
    """Both ends make it, perhaps with other releases of ``cryptography`` or with the key in Z85, as key files of older
    releases have it, and compare it byte for byte."""
    z85_key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    (certificate,) = Keys(z85_key).by_certificate
    (same,) = Keys(z85.decode(z85_key).hex().upper()).by_certificate
    assert certificate == same
    assert hashlib.sha256(certificate).hexdigest() == "db2deeca9c65c2ff8b04939f4f009489bb671a6edd16ea6f25383678fc3a218c"
