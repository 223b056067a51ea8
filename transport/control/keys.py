"""An engine's Ed25519 key (RFC 8032), the public keys of the peers that it admits, and TLS 1.3 with them.

OpenSSL wants signed certificates. So a key gets one whose only content is the key, signed with a key that is no secret
and that nobody trusts. A peer is admitted because its certificate is, byte for byte, that of an admitted key: TLS 1.3
proves that the peer has the secret key (RFC 8446, 4.4.3).
"""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import struct
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID
from zmq.utils import z85

from kvferry.transport.errors import ConfigError, KVFerryError

FINGERPRINT_BYTES = 6
GREETING_BYTES, _NAMING_BYTES = 16, 10
WHO_LISTENS = b"kvferry: who is?"
"""In place of a greeting: P is asked for the fingerprint of its key, by `kvferry doctor`."""
_HEX_KEY = re.compile(r"[0-9a-fA-F]{64}")
_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # as `kvferry keygen` made them before
_SHOWN = 8
"""Fingerprints that one error message lists."""
_KEY_IN_DER = bytes.fromhex("2b6570032100")
"""What an Ed25519 key follows in a certificate (RFC 8410)."""
ISSUER = Ed25519PrivateKey.from_private_bytes(b"the key of an issuer of nothing.")
_NO_CHECK_TIME = 0x200000
"""``X509_V_FLAG_NO_CHECK_TIME``: the clock of a host may be wrong, and no key ends by time."""


def raw_key(name: str, key: str) -> bytes:
    """The 32 bytes of a key in hexadecimal text, or in Z85.

    Raises:
        ConfigError: ``key`` is neither. The message contains ``name`` and not the key.
    """
    if _HEX_KEY.fullmatch(key):
        return bytes.fromhex(key)
    if _Z85_KEY.fullmatch(key):
        try:
            return bytes(z85.decode(key))
        except (ValueError, struct.error):  # five characters that stand for more than 32 bits
            pass
    raise ConfigError(f"{name}: {len(key)} characters, expected the 64 hexadecimal digits that `kvferry keygen` makes")


def new_secret() -> str:
    """A new secret key, hexadecimal."""
    return os.urandom(32).hex()


def fingerprint(public: bytes) -> str:
    """A short name of a raw public key, 12 hexadecimal digits."""
    return hashlib.blake2b(public, digest_size=FINGERPRINT_BYTES).hexdigest()


def greeting(public: bytes) -> bytes:
    """What D says first to the P with this raw public key, before the fingerprint of its own. It admits nobody, and
    spares P a handshake, which costs a millisecond, with whoever has only found the port."""
    return hashlib.blake2b(public, digest_size=GREETING_BYTES, person=b"kvferry-greeting").digest()[:_NAMING_BYTES]


class Keys:
    """An engine's own key pair, and the public keys of further peers that it admits. Immutable.

    Engines with the same secret key admit each other; an engine with further peers also those, so that two keys of one
    deployment can be valid at the same time.

    Args:
        secret: the engine's secret key, as ``raw_key`` takes it.
        peers: public keys of peers that have another secret key, likewise.

    Attributes:
        public, fingerprint: the engine's public key, hexadecimal, and its short name.
        admitted: the raw public keys of all admitted peers, by fingerprint; the engine's own comes first.

    Raises:
        ConfigError: a key is none.
    """

    def __init__(self, secret: str, peers: Sequence[str] = ()) -> None:
        raw, others = raw_key("secret_key", secret), [raw_key("peer_keys", key) for key in peers]
        seed = hashlib.blake2b(raw, digest_size=32, person=b"kvferry-ed25519").digest()
        self.secret = secret
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        own = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.public = own.hex()
        self.fingerprint = fingerprint(own)
        if raw in others:
            raise ConfigError("peer_keys: names this engine's secret key; expected public keys of peers")
        self.admitted = {fingerprint(key): key for key in (own, *others)}

    def __repr__(self) -> str:
        return f"Keys({self.fingerprint}, admits {', '.join(self.admitted)})"

    @property
    def shown(self) -> str:
        """The fingerprints of all admitted keys, for an error message."""
        own, *others = self.admitted
        more = [*others[:_SHOWN], f"{len(others) - _SHOWN} more"] if len(others) > _SHOWN else others
        return f"{own} (its own){', ' if more else ''}{', '.join(more)}"

    def find(self, wanted: str) -> bytes:
        """The raw public key of a peer, by the fingerprint that the peer has named. Raises UnknownKeyError."""
        if wanted not in self.admitted:
            raise self.unknown(wanted)
        return self.admitted[wanted]

    def proven(self, tls: ssl.SSLSocket) -> str:
        """The fingerprint of the key that the peer of a finished handshake has. Raises UnknownKeyError."""
        certificate = tls.getpeercert(binary_form=True) or b""
        if certificate not in self.by_certificate:
            raise self.unknown(fingerprint(certificate.partition(_KEY_IN_DER)[2][:32]))
        return self.by_certificate[certificate]

    def unknown(self, wanted: str) -> UnknownKeyError:
        """The error of a peer with the key of this fingerprint."""
        return UnknownKeyError(
            f"the peer's key is {wanted or 'not named'}, and this engine admits {self.shown}; give both engines one "
            "key_file, or add the peer's public key to peer_keys"
        )

    @cached_property
    def of_p(self) -> ssl.SSLContext:
        """P's end of TLS. OpenSSL knows the admitted certificates and no issuer: it checks no signature, and no key, of
        the certificates that a stranger sends."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
        context.num_tickets = 0  # a session that is resumed would show no certificate
        context.load_verify_locations(cadata=b"".join(self.by_certificate))
        return context

    @cached_property
    def of_d(self) -> ssl.SSLContext:
        """D's end of TLS. P shows a certificate in any case, and D judges it by ``proven`` alone."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    @cached_property
    def by_certificate(self) -> dict[bytes, str]:
        return {certificate_of(key).public_bytes(Encoding.DER): name for name, key in self.admitted.items()}

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_ecdh_curve("prime256v1")  # a key exchange of another group costs P up to 200 times as much
        chain = certificate_of(self.admitted[self.fingerprint]).public_bytes(Encoding.PEM)
        chain += self._private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        fd = os.memfd_create("kvferry-key", os.MFD_CLOEXEC)  # OpenSSL reads a secret key from a file only
        try:
            os.write(fd, chain)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


class UnknownKeyError(KVFerryError):
    """The peer's public key is not admitted here."""


def certificate_of(public: bytes) -> x509.Certificate:
    """The certificate of a raw public key: Ed25519 signs without chance, so it is the same at every call."""
    issuer, subject = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in ("kvferry", fingerprint(public))
    )
    draft = x509.CertificateBuilder(issuer, subject, Ed25519PublicKey.from_public_bytes(public), 1)
    return draft.not_valid_before(datetime(2000, 1, 1)).not_valid_after(datetime(9999, 12, 31)).sign(ISSUER, None)
