"""CURVE keys: an engine's own key pair, and the public keys of the peers that it admits."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from functools import cached_property

import zmq
from zmq.utils import z85

from kvferry.transport.errors import ConfigError, KVFerryError

FINGERPRINT_BYTES = 6
_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_SHOWN = 8
"""Fingerprints that one error message lists."""


def raw_key(name: str, key: str) -> bytes:
    """The 32 bytes of a key in Z85 text.

    Raises:
        ConfigError: ``key`` is not 40 characters of Z85. The message contains ``name`` and not the key.
    """
    if _Z85_KEY.fullmatch(key):
        try:
            return bytes(z85.decode(key))
        except (ValueError, struct.error):  # five characters that stand for more than 32 bits
            pass
    raise ConfigError(f"{name}: {len(key)} characters, expected the 40 of a Z85 key as `kvferry keygen` makes it")


def fingerprint(public: bytes) -> str:
    """A short name of a raw public key, 12 hexadecimal digits."""
    return hashlib.blake2b(public, digest_size=FINGERPRINT_BYTES).hexdigest()


class Keys:
    """An engine's own key pair, and the public keys of further peers that it admits. Immutable.

    Engines with the same secret key admit each other. An engine also admits the peers of ``peers``, and connects to
    them; so two keys of one deployment can be valid at the same time.

    Args:
        secret: the engine's secret key, Z85.
        peers: public keys of peers that have another secret key, Z85.

    Attributes:
        public: the engine's public key, Z85.
        fingerprint: the short name of ``public``.
        admitted: the raw public keys of all admitted peers, by fingerprint; the engine's own comes first.

    Raises:
        ConfigError: a key is not Z85, or this libzmq has no CURVE.
    """

    def __init__(self, secret: str, peers: Sequence[str] = ()) -> None:
        if not zmq.has("curve"):
            raise ConfigError("secret_key: this libzmq has no CURVE; install pyzmq from PyPI, or set insecure")
        raw_key("secret_key", secret)
        self.secret = secret
        self.public = zmq.curve_public(secret.encode()).decode()
        own = z85.decode(self.public)
        self.fingerprint = fingerprint(own)
        raw = [own, *(raw_key("peer_keys", key) for key in peers)]
        if z85.decode(secret) in raw[1:]:
            raise ConfigError("peer_keys: names this engine's secret key; expected public keys of peers")
        self.admitted = {fingerprint(key): key for key in raw}

    def __repr__(self) -> str:
        return f"Keys({self.fingerprint}, admits {', '.join(self.admitted)})"

    @cached_property
    def raw_public_keys(self) -> frozenset[bytes]:
        """The raw public keys of all admitted peers."""
        return frozenset(self.admitted.values())

    @property
    def shown(self) -> str:
        """The fingerprints of all admitted keys, for an error message."""
        own, *others = self.admitted
        more = [*others[:_SHOWN], f"{len(others) - _SHOWN} more"] if len(others) > _SHOWN else others
        return f"{own} (its own){', ' if more else ''}{', '.join(more)}"

    def find(self, wanted: str) -> bytes:
        """The raw public key of a peer, by the fingerprint that the peer has named.

        Raises:
            UnknownKeyError: no admitted key has this fingerprint.
        """
        key = self.admitted.get(wanted)
        if key is None:
            raise UnknownKeyError(
                f"the peer's key is {wanted}, and this engine admits {self.shown}; give both engines one secret_key, "
                "or add the peer's public key to peer_keys"
            )
        return key


class UnknownKeyError(KVFerryError):
    """The peer's public key is not admitted here."""


def key_of_peer(keys: Keys | None, wanted: str) -> bytes | None:
    """The raw public key of the peer that has named the fingerprint ``wanted``; it names none where it is insecure.
    ``None`` where neither side has keys.

    Raises:
        UnknownKeyError: the peer's key is not admitted, or only one of the two sides has keys.
    """
    if keys is not None and wanted:
        return keys.find(wanted)
    if keys is None and not wanted:
        return None
    which = "the peer is insecure, and this engine is not" if keys else "this engine is insecure, and the peer is not"
    raise UnknownKeyError(f"{which}; remove the setting `insecure`, or set it on both sides")


def configure_client(socket: zmq.Socket[bytes], keys: Keys, server: bytes) -> None:
    """Let the next connections of ``socket`` prove our key, and admit only the server with the raw key ``server``."""
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    socket.curve_serverkey = z85.encode(server)
