"""Encryption of the messages of one TCP channel: AES-256-GCM with a key of the channel's own.

P makes the key and tells D in its answer to D's Attach, on the control connection, which CURVE encrypts. Only P sends
on the channel, so each key and nonce is used once: the nonce is the number of the message. The header of a message is
authenticated with it. So bytes that were changed, left out, repeated or moved are never taken for P's.

Over it, ``tcp`` moves twice the bytes in a second that ``zmq`` moves over CURVE (benchmarks/encrypted_planes.py). The
kernel's TLS would need its module on both hosts.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from kvferry.transport.channels import Slot
from kvferry.transport.errors import PlaneUnavailableError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
TAG_BYTES = 16
"""What a message grows by."""


def new_key() -> bytes:
    """P: the key of a new channel."""
    return secrets.token_bytes(KEY_BYTES)


class Cipher:
    """One end of an encrypted channel.

    Raises:
        PlaneUnavailableError: this machine lacks the package ``cryptography``, or its version is too old.
    """

    def __init__(self, key: bytes) -> None:
        self._aead = _aead()(key)
        self._messages = 0

    def seal(self, slot: Slot, nbytes: int, header: bytes) -> int:
        """P: encrypt the first ``nbytes`` of a slot in place. Returns their number with the authentication tag."""
        memory = slot.tensor.numpy().data
        self._aead.encrypt_into(self._nonce(), memory[:nbytes], header, memory[: nbytes + TAG_BYTES])
        return nbytes + TAG_BYTES

    def open(self, slot: Slot, nbytes: int, header: bytes) -> bool:
        """D: decrypt the first ``nbytes`` of a slot in place. Whether they are what P sent."""
        from cryptography.exceptions import InvalidTag

        memory = slot.tensor.numpy().data
        try:
            self._aead.decrypt_into(self._nonce(), memory[:nbytes], header, memory[: nbytes - TAG_BYTES])
        except InvalidTag:
            return False
        return True

    def skip(self) -> None:
        """D: a message was received and is not needed."""
        self._messages += 1

    def _nonce(self) -> bytes:
        self._messages += 1
        return self._messages.to_bytes(12, "big")


def check_available() -> None:
    """Raises PlaneUnavailableError where this machine cannot encrypt."""
    _aead()


def _aead() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise PlaneUnavailableError(f"tcp: the setting encrypt needs the package cryptography: {error}") from None
    if not hasattr(AESGCM, "encrypt_into"):
        raise PlaneUnavailableError("tcp: the setting encrypt needs a newer version of the package cryptography")
    return AESGCM
