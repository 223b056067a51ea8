"""Faults on the wire between two real ranks: P's channel sends other bytes than P has packed, or under another tag."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.transport.channels import Pieces, SendChannel, Slot
from tests.support.inside import sessions_of
from tests.support.ranks import Rank

Fault = Callable[[int, bytearray], None]
"""Changes a message in place; the first argument is the number of the message since the fault was planted."""


class Spoiler:
    """Replaces the sends of a rank's only channel. The bytes are changed behind P's checksum, also in place."""

    def __init__(self, p: Rank) -> None:
        (session,) = sessions_of(p).values()
        channel = session.sender
        assert isinstance(channel, SendChannel)
        self.fault: Fault | None = None
        self.retag: Callable[[int], int] = lambda tag: tag
        self.lengths: list[int] = []
        self._keep: list[Any] = []
        send, send_pieces = channel.send, channel.send_pieces

        def spoilt_send(slot: Slot, nbytes: int, tag: int) -> None:
            if self.fault is not None:
                message = bytearray(ctypes.string_at(slot.address, nbytes))
                self.fault(len(self.lengths), message)
                ctypes.memmove(slot.address, bytes(message), nbytes)
            self.lengths.append(nbytes)
            send(slot, nbytes, self.retag(tag))

        def spoilt_pieces(pieces: Callable[[], Pieces], tag: int) -> bool:
            def spoilt() -> Pieces:
                found = pieces()
                runs = zip(found.addresses.tolist(), found.nbytes.tolist(), strict=True)
                message = bytearray(b"".join(ctypes.string_at(address, nbytes) for address, nbytes in runs))
                if self.fault is not None:
                    self.fault(len(self.lengths), message)
                self.lengths.append(len(message))
                copy = np.frombuffer(bytes(message), dtype=np.uint8)
                self._keep.append(copy)
                return Pieces(np.array([copy.ctypes.data]), np.array([len(copy)]))

            return send_pieces(spoilt, self.retag(tag))

        channel.send = spoilt_send  # type: ignore[method-assign]
        channel.send_pieces = spoilt_pieces  # type: ignore[method-assign]
