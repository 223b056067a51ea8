"""What the two ends of plane ``nixl`` tell each other in the handshake."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.transport.sockets import SECRET_BYTES

_Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class NixlOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``release`` and ``lanes`` must be D's own: NIXL's formats are not those of other releases."""

    port: Annotated[int, Meta(gt=0, lt=65536)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    release: Annotated[str, Meta(max_length=64)]
    lanes: Annotated[str, Meta(max_length=256)]


class NixlSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's slots: slot i is the ``slot_bytes`` from ``address + i * slot_bytes`` on; the number of its use is the word
    at ``uses + 8 * i``. ``device``: the index of P's GPU, ``None`` for host memory."""

    address: _Address
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    count: _Count
    uses: _Address
    device: Annotated[int, Meta(ge=0, le=1024)] | None


class NixlReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's agent. ``metadata``: what NIXL needs for the slots and for the numbers of their uses. The checksum keeps
    damaged bytes from NIXL."""

    agent: Annotated[str, Meta(min_length=1, max_length=64)]
    metadata: Annotated[list[Annotated[bytes, Meta(max_length=24 << 10)]], Meta(min_length=2, max_length=2)]
    checksum: Annotated[int, Meta(ge=0, lt=1 << 32)]
    slots: NixlSlots
