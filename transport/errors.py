"""Typed errors. Each message says what, the value, what was expected, and what to do.

``assert`` is for our own invariants; whatever a peer or a user sent raises one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVFerryError(Exception):
    """Base of every error that KVFerry raises on purpose."""


class ConfigError(KVFerryError, ValueError):
    """A setting is unknown, of the wrong type, or impossible."""


class GeometryError(KVFerryError, ValueError):
    """A KV cache, or the description of one, is not of a form that can be carried."""


class EmbeddingError(KVFerryError, ValueError):
    """Multimodal embeddings, or the mask of their placeholders, are not of the form that is needed."""


class RatioError(GeometryError):
    """No integer ratio exists between two sizes.

    ``TpKVTopology.tp_ratio`` and ``block_size_ratio`` raise it; transfers themselves go by
    ``overlaps()``, which needs no integer ratio.
    """

    def __init__(self, what: str, local: int, remote: int) -> None:
        super().__init__(
            f"no integer {what} between local {local} and remote {remote}; "
            "plan by overlaps(), which carries any pair of sizes"
        )
        self.what, self.local, self.remote = what, local, remote


class ProtocolError(KVFerryError):
    """A message is malformed, oversized, of another protocol version, or out of place."""


class IncompatiblePeerError(KVFerryError):
    """A peer's model or geometry does not fit ours; names the field and both values."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"peer refused: {field} differs, ours is {ours}, the peer's is {theirs}")
        self.field, self.ours, self.theirs = field, ours, theirs


class TransportError(KVFerryError):
    """A data plane or a control connection failed."""


class PlaneUnavailableError(TransportError):
    """A data plane that was asked for cannot be had here, and why."""


class PeerUnreachableError(PlaneUnavailableError):
    """Our GPU does not reach P's memory, by whatever plane."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a misspelt name, or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
