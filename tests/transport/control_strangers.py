"""Peers of the control port that do not behave, and how good ones are seen to be served beside them."""

from __future__ import annotations

import _ssl
import contextlib
import ctypes
import socket
import ssl
import threading

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from kvferry.transport.control.keys import GREETING_BYTES, Keys, certificate_of, new_secret
from kvferry.transport.control.stream import ADMITTED
from tests.fuzz.attackers import greeting_of, packed
from tests.transport.control_ends import KEYS, exchanged, until

GREETING = greeting_of(KEYS)


def served(listener, good):
    """The one message of a good peer comes through, and its answer; all that came before it is dropped."""
    assert exchanged(listener, good) and good.state == (True, False)


def total(listener):
    listener.receive()
    return listener.dropped.total()


@contextlib.contextmanager
def raw(listener, data=b""):
    """A stranger: bytes over TCP."""
    with socket.create_connection(("127.0.0.1", listener.port), timeout=60) as peer:
        with contextlib.suppress(OSError):
            peer.sendall(data)
        yield peer


@contextlib.contextmanager
def holder(listener, data=b"", context=KEYS.of_d):
    """A holder of the key: bytes over TLS, once it is admitted."""
    with raw(listener, GREETING) as peer, context.wrap_socket(peer) as tls:
        assert tls.recv(1) == ADMITTED
        say(listener, tls, data)
        yield tls


def say(listener, peer, data):
    """Send bytes, as far as the listener takes them. Returns what it has received meanwhile."""
    peer.setblocking(False)
    found, left = [], [memoryview(data)]

    def done():
        try:
            while left[0]:
                left[0] = left[0][peer.send(left[0]) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            pass
        except OSError:
            return True
        found.extend(listener.receive())
        return not left[0]

    assert until(done)
    return found


@contextlib.contextmanager
def server_of(context, said=b""):
    """A server with this end of TLS, which says this to all. It minds no greeting. Yields its port, and what it hears
    over TLS."""
    heard = bytearray()

    def serve(peer):
        with contextlib.suppress(OSError), peer:
            peer.recv(GREETING_BYTES, socket.MSG_WAITALL)
            with context.wrap_socket(peer, server_side=True) as tls:
                tls.sendall(ADMITTED + said)
                while data := tls.recv(65536):
                    heard.extend(data)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield server.getsockname()[1], heard
        server.shutdown(socket.SHUT_RDWR)
        accepting.join()


def closed_by_peer(listener, peer):
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

    return until(closed)


def message(first=b"kvferry", second=b"\0\5", third=b"x"):
    """A message as TLS carries it."""
    return packed([first, second, third])


class _Param(ctypes.Structure):
    """OSSL_PARAM."""

    _fields_ = (
        ("key", ctypes.c_char_p), ("type", ctypes.c_uint), ("data", ctypes.c_char_p), ("size", ctypes.c_size_t),
        ("returned", ctypes.c_size_t),
    )  # fmt: skip


def impostor(public, protocol=ssl.PROTOCOL_TLS_CLIENT):
    """TLS of one who shows the certificate of a raw public key, and signs with another secret key. OpenSSL takes such a
    pair only where the two parts of the key are told one by one."""
    if not hasattr(_ssl, "__file__"):
        pytest.skip("this Python shows no OpenSSL")
    openssl = ctypes.CDLL(_ssl.__file__)
    openssl.EVP_PKEY_CTX_new_from_name.restype = ctypes.c_void_p
    maker, key = ctypes.c_void_p(openssl.EVP_PKEY_CTX_new_from_name(None, b"ED25519", None)), ctypes.c_void_p()
    parts = (_Param * 3)(_Param(b"pub", 5, public, 32), _Param(b"priv", 5, bytes(32), 32), _Param())
    assert openssl.EVP_PKEY_fromdata_init(maker) == 1
    assert openssl.EVP_PKEY_fromdata(maker, ctypes.byref(key), 0x87, parts) == 1
    own = Keys(new_secret())
    context = own.of_p if protocol == ssl.PROTOCOL_TLS_SERVER else own.of_d
    inner = ctypes.c_void_p.from_address(id(context) + object.__basicsize__)
    certificate = certificate_of(public).public_bytes(Encoding.DER)
    assert openssl.SSL_CTX_use_certificate_ASN1(inner, len(certificate), certificate) == 1
    assert openssl.SSL_CTX_use_PrivateKey(inner, key) == 1
    return context
