"""Who comes in at the control port: admitted keys from a file that nobody else may read, no strangers, no garbage."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import random
import re
import secrets
import socket
import ssl
import stat
import struct
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner
from zmq.utils import z85

from kvferry.cli.main import app
from kvferry.transport.control import key_file
from kvferry.transport.control import keys as control_keys
from kvferry.transport.control import listener as control_listener
from kvferry.transport.control.key_file import default_key_file, make_key_file, read_key_file, shared_key
from kvferry.transport.control.keys import WHO_LISTENS, Keys, new_secret
from kvferry.transport.control.stream import ANSWER
from kvferry.transport.errors import ConfigError
from kvferry.transport.limited_log import RateLimitedLog
from tests.doctor.planted import NOBODY, as_nobody
from tests.fuzz.attackers import HTTP, client_hello
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.fork_server import fork_server
from tests.transport.control_ends import (
    KEYS,
    LIMIT,
    MESSAGE,
    Dialed,
    arrived,
    exchanged,
    gone,
    listening,
    new_keys,
    until,
)
from tests.transport.control_strangers import (
    GREETING,
    closed_by_peer,
    holder,
    impostor,
    message,
    raw,
    say,
    served,
    server_of,
    total,
)

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
        attackers = [threading.Thread(target=attack) for _ in range(8)]
        for each in attackers:
            each.start()
        try:
            honest()
            assert until(lambda: (listener.receive(), listener.dropped["key"] > 8)[1])
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


HELLO = client_hello(KEYS.of_d)
GARBAGE = {
    "http": HTTP, "tls": HELLO, "ones": b"\xff" * 10_000, "greeting-http": GREETING + HTTP,
    "greeting-message": GREETING + message() * 100, "hello-http": GREETING + HELLO + HTTP,
}  # fmt: skip


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_dropped_and_counted(listener, good, data):
    served(listener, good)
    with raw(listener, data) as peer:
        assert closed_by_peer(listener, peer)
    assert until(lambda: total(listener) >= 1) and set(listener.dropped) == {"handshake"}
    served(listener, good)


def test_a_stranger_is_told_which_key_it_does_not_know(listener):
    with raw(listener, bytes(len(GREETING))) as peer:
        assert peer.recv(100, socket.MSG_WAITALL) == ANSWER + KEYS.fingerprint.encode()


def test_who_asks_whose_port_it_is_is_counted_and_no_line(listener, caplog):
    with caplog.at_level(logging.WARNING), raw(listener, WHO_LISTENS) as peer:
        assert closed_by_peer(listener, peer) and until(lambda: listener.dropped == {"handshake": 1})
    assert not caplog.records


def test_the_log_is_limited_in_rate(listener, good, caplog, monkeypatch):
    """Its own clock stands: 50 connections may take longer than the time between two lines."""
    monkeypatch.setattr(
        control_listener, "log", RateLimitedLog(logging.getLogger("vllm.kvferry.transport"), clock=lambda: 0.0)
    )
    served(listener, good)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with raw(listener, HTTP) as peer:
                closed_by_peer(listener, peer)
        assert until(lambda: total(listener) >= 50)
    assert listener.dropped["handshake"] == 50
    lines = [line for record in caplog.records if str(listener.port) in (line := record.getMessage())]
    assert len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.parametrize("head", [(0, 0, LIMIT + 1), (255, 255, 0xFFFF_FFFF), (1, 0, LIMIT)])
def test_a_message_that_is_too_large_ends_its_connection_at_its_head(listener, good, head):
    served(listener, good)
    with holder(listener, message() + struct.pack(">BBI", *head)) as peer:
        assert closed_by_peer(listener, peer) and listener.dropped == {"oversize": 1}
    served(listener, good)


def test_a_message_is_whole_however_it_is_cut(listener):
    sent = [[b"kvferry", b"\0\5", b"x"], [b"", b"", bytes(range(256)) * 200], [b"kvferry", b"\0\5", b""]]
    data, found, source = b"".join(message(*frames) for frames in sent), [], random.Random(0)
    with holder(listener) as peer:
        while data:
            size = source.choice([1, 2, 5, 7, 300, 20_000])
            found += say(listener, peer, data[:size])
            data = data[size:]
        assert until(lambda: found.extend(listener.receive()) or len(found) == 3)
    assert [frames for _, frames, _ in found] == sent


@pytest.mark.parametrize("at", [0, 2, 4, 40], ids=["type", "version", "length", "content"])
@pytest.mark.parametrize("upwards", [True, False], ids=["to P", "to D"])
def test_a_damaged_byte_of_a_tls_record(listener, connect, upwards, at):
    """It ends its connection, and no process."""
    proxy = FaultProxy("127.0.0.3")
    proxy.open(listener.port, "127.0.0.1")
    first = connect(listener.port, proxy.address)
    with contextlib.closing(proxy):
        assert exchanged(listener, first)
        proxy.arm(Fault(Kind.CORRUPT, listener.port, upwards, at=at))

        def lost():
            for identity, frames, _ in listener.receive():
                assert frames == MESSAGE
                listener.send(identity, MESSAGE)
            assert all(frames == MESSAGE for frames in first.receive())
            first.send(MESSAGE)  # a record whose length was changed waits for more bytes
            return first.lost

        assert until(lost) and proxy.struck
        first.close()
        assert gone(listener) and exchanged(listener, connect(listener.port, proxy.address))


FLOOD = """
import collections, socket, struct, sys
from contextlib import suppress
port, address, said, kept = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3]), collections.deque()
while True:
    with suppress(OSError):
        kept.append(socket.socket())
        kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no port waits for a minute
        kept[-1].bind((address, 0))
        kept[-1].connect(("127.0.0.1", port))
        kept[-1].sendall(said)
    if len(kept) == 300:
        print(flush=True)
    elif len(kept) > 300:
        kept.popleft().close()
"""


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.2", GREETING[:9]), ("127.0.0.1", HTTP)],
    ids=["half-greetings", "garbage-of-the-same-address"],
)
def test_a_flood_of_connections_shuts_out_nobody(listener, address, said):
    with fork_server().start("-c", FLOOD, str(listener.port), address, said.hex()) as flood:
        flood.stdout.readline()
        for _ in range(6):
            end = Dialed(listener.port)
            served(listener, end)
            end.close()
            assert gone(listener)
        assert flood.poll() is None


def test_peers_are_bounded(connect):
    with contextlib.closing(listening(max_peers=3)) as listener:
        first, *_ = ends = [connect(listener.port) for _ in range(3)]
        for end in ends:
            served(listener, end)
        more = [connect(listener.port) for _ in range(5)]
        for end in more:
            end.send(MESSAGE)
        assert until(lambda: (listener.receive(), all(end.lost for end in more))[1])
        assert all("as many peers as it takes" in end.reason for end in more) and listener.peers == 3
        assert all(not end.failure for end in more), "they have reached it"
        assert until(lambda: listener.dropped == {"peers": 5}), "counted once each has its answer"
        first.close()
        assert gone(listener, 2)
        served(listener, connect(listener.port))


SECRET = new_secret()


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_processes_that_start_at_once_agree_on_one_key(runtime):
    script = "from kvferry.transport.control.key_file import shared_key; print(shared_key())"
    environment = {"XDG_RUNTIME_DIR": str(runtime)}
    with ThreadPoolExecutor(8) as pool:
        started = pool.map(lambda _: fork_server().run("-c", script, environment=environment, timeout=800), range(8))
        runs = list(started)
    assert len({run.stdout.strip() for run in runs}) == 1 and len(runs[0].stdout.strip()) == 64, runs[0].stderr
    assert [path.name for path in runtime.iterdir()] == ["kvferry.key"], "no draft is left"
    assert stat.S_IMODE((runtime / "kvferry.key").stat().st_mode) == 0o600


def refused(path, *words):
    with pytest.raises(ConfigError) as error:
        read_key_file(path)
    text = str(error.value)
    assert "\n" not in text and str(path) in text and SECRET not in text
    assert all(word in text for word in words)


CONTENTS = (b"", SECRET[:20].encode(), b"\n" * 65, b"%" * 64, SECRET.encode() + b"x", bytes(99))


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [(content, 0o600, ("contains no key", f"{len(content)} bytes")) for content in CONTENTS]
    + [(SECRET.encode(), mode, (f"{mode:04o}", "0600")) for mode in (0o640, 0o604, 0o660, 0o644)],
    ids=map(str, range(10)),
)
def test_a_file_without_a_key_or_that_others_may_read(tmp_path, content, mode, words):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 0, NOBODY)  # a group that this process is not in
    refused(path, *words)


def test_a_folder_a_fifo_and_no_file(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(tmp_path / "folder", "regular file")
    refused(tmp_path / "fifo", "regular file")
    refused(tmp_path / "loop", "cannot be used")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        read_key_file(tmp_path / "dangling")


@pytest.fixture
def secret(tmp_path):
    """A Secret as the kubelet mounts it: the key is a link into a folder that another link names."""
    tmp_path.chmod(0o755)
    (tmp_path / "..2026_11_26").mkdir()
    make_key_file(tmp_path / "..2026_11_26" / "key")
    (tmp_path / "..data").symlink_to("..2026_11_26")
    (tmp_path / "key").symlink_to("..data/key")
    return tmp_path / "key"


def test_links_of_this_user_lead_to_the_key(secret):
    assert read_key_file(secret) == secret.read_text().strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
@pytest.mark.parametrize(
    ("mode", "group", "words"),
    [(0o440, 0, None), (0o640, 0, None), (0o440, NOBODY, ("0440",)), (0o444, 0, ("0444",)), (0o460, 0, ("0460",))],
    ids=["fsGroup", "default", "other-group", "all", "group-writes"],
)
def test_a_kubernetes_secret_of_root_for_another_user(secret, mode, group, words):
    """``fsGroup`` is a group of the engine: of this process it is root's."""
    secret.chmod(mode)
    os.chown(secret, 0, group)
    for folder in secret.parents[:-2]:  # all below the system's folder of temporary files
        folder.chmod(0o755)
    text = secret.read_text().strip()
    with as_nobody():
        if words is None:
            assert read_key_file(secret) == text
        elif mode & 0o004 or group == 0:
            refused(secret, *words)
        else:  # the kernel refuses
            refused(secret, "Permission denied")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")
def test_files_and_links_of_another_user_are_refused(secret):
    os.chown(secret, NOBODY, NOBODY)
    refused(secret, f"belongs to user {NOBODY}; expected 0, who runs this engine, or root")
    os.chown(secret, 0, 0)
    os.chown(secret, NOBODY, NOBODY, follow_symlinks=False)
    refused(secret, f"is a symbolic link of user {NOBODY}; expected 0")


def test_a_host_without_a_runtime_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative/path")
    monkeypatch.setattr(key_file, "is_private", lambda path: "run" not in path.parts and is_private(path))
    own = tmp_path / f"kvferry-{os.geteuid()}"
    assert default_key_file() == own / "kvferry.key" and stat.S_IMODE(own.stat().st_mode) == 0o700
    own.chmod(0o777)
    with pytest.raises(ConfigError, match=f"key_file: {own} is not a directory that only user"):
        shared_key()
    own.rmdir()
    own.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"remove it, or set key_file"):
        shared_key()


is_private = key_file.is_private


def test_a_runtime_directory_that_others_may_write_is_passed_over(runtime, monkeypatch, tmp_path_factory):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("tmp")))
    runtime.chmod(0o777)
    assert default_key_file().parent != runtime


def test_keygen(tmp_path):
    def keygen(path):
        return CliRunner().invoke(app, ["keygen", str(path)])

    done = keygen(tmp_path / "key")
    secret = read_key_file(tmp_path / "key")
    keys = Keys(secret)
    assert done.exit_code == 0 and f"\n    {keys.public}  {keys.fingerprint}\n" in done.stdout
    assert secret not in done.stdout and all(re.fullmatch("[0-9a-f]{64}", key) for key in (secret, keys.public))
    assert "KVFERRY_KEY_FILE=" in done.stdout and "KVFERRY_PEER_KEYS" in done.stdout
    again = keygen(tmp_path / "key")
    assert again.exit_code == 1 and "exists already, and nothing was changed" in again.stderr
    assert f"{keys.public}, fingerprint {keys.fingerprint}" in again.stderr
    nowhere = keygen(tmp_path / "no" / "key")
    assert nowhere.exit_code == 2 and "cannot be written" in nowhere.stderr and "Traceback" not in nowhere.stderr
    assert read_key_file(tmp_path / "key") == secret
    for file in ("", ".", "/"):
        done = keygen(file)
        assert done.exit_code == 2 and done.stderr == "kvferry: FILE is empty or a folder; name a file\n"
