"""Inputs that once did what they must not do, by decoder. They are in the corpus of every run."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

FOUND: Mapping[str, Sequence[bytes]] = {
    # A counter below 0: OverflowError on D's thread in place of no grant.
    "slots of a grant board": [struct.pack("<q16s16sI", -500, bytes(range(16)), bytes(16), 134) + bytes(134)]
}
