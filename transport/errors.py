"""Typed errors. Each message names the fault, the value, the expected value, and the remedy.

``assert`` is for our own invariants; a fault in data of a peer or a user raises one of these errors.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from math import inf

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def quoted(value: object) -> str:
    """``repr`` of a value of a peer or a client for a log line: one line of some hundred characters, of any value."""
    try:
        return _repr.repr(value)[:400]
    except Exception:  # an integer of more digits than Python prints
        return f"a value of type {type(value).__name__}"


def quoted_url(text: str) -> str:
    """``quoted`` of a URL, or of what should be one, without a user and a password."""
    return quoted(text.rpartition("@")[2])


def shortened(text: str, length: int = 300) -> str:
    """A text of a peer, cut for a log line."""
    return text if len(text) <= length else f"{text[: length - 4]} ..."


class KVFerryError(Exception):
    """Base of every error that KVFerry raises on purpose."""


class ConfigError(KVFerryError, ValueError):
    """A setting is unknown, of the wrong type, or impossible."""


class UsageError(KVFerryError, ValueError):
    """An argument of the command ``kvferry`` is not usable."""


class GeometryError(KVFerryError, ValueError):
    """A KV cache, or the description of one, is not of a form that can be carried."""


class EmbeddingError(KVFerryError, ValueError):
    """Multimodal embeddings, or the mask of their placeholders, are not of the form that is needed."""


class RatioError(GeometryError):
    """No integer ratio exists between two sizes. Transfers use ``overlaps()``, which needs none."""

    def __init__(self, what: str, local: int, remote: int) -> None:
        super().__init__(
            f"no integer {what} between local {local} and remote {remote}; "
            "plan by overlaps(), which carries any pair of sizes"
        )
        self.what, self.local, self.remote = what, local, remote


class ProtocolError(KVFerryError):
    """A message is malformed, oversized, of another protocol version, or out of place."""


class IncompatiblePeerError(KVFerryError):
    """A peer's model or geometry does not fit ours; the message names the field and both values."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        what, mine, other = (shortened(str(text)) for text in (field, ours, theirs))
        super().__init__(f"peer refused: {what} differs, ours is {mine}, the peer's is {other}")
        self.field, self.ours, self.theirs = field, ours, theirs


class TransportError(KVFerryError):
    """A data plane or a control connection failed."""


class PlaneUnavailableError(TransportError):
    """A data plane cannot be used here; the message gives the reason."""


class PeerUnreachableError(PlaneUnavailableError):
    """Our GPU does not reach P's memory by any plane."""


def check_positive(option: str, value: float) -> None:
    """Raises UsageError: the value of this option of a command is not above 0, or is no finite number."""
    if not 0 < value < inf:
        raise UsageError(f"{option} is {value if isinstance(value, int) else f'{value:g}'}, expected a number above 0")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a misspelt name, or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
