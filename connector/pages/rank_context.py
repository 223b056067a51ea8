"""One rank's own side of every hand-over: its caches, identity and settings. ``Producer`` and ``Consumer`` share it.

Axes ``[L, B, H, N, C]``: layers, blocks, KV heads, tokens in a block, content bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.connector.config import Settings
from kvferry.connector.geometry.model_identity import WEIGHTS, agree
from kvferry.connector.geometry.topology import EngineForm, TpKVTopology
from kvferry.connector.pages.caches import RankCaches
from kvferry.connector.wire.messages import MAX_REPLY_BYTES
from kvferry.connector.wire.metrics import HandoverStats, rank_stats
from kvferry.transport.control.dialer import Dialer
from kvferry.transport.control.keys import Keys
from kvferry.transport.errors import IncompatiblePeerError
from kvferry.transport.host import AllowedPeers
from kvferry.transport.limited_log import RateLimitedLog
from kvferry.transport.plane import Plane
from kvferry.transport.tracing import Attributes, Tracer, time_of_zero

P_ENGINES = 64
"""P engines of which D remembers what is the same for all hand-overs from them: ranks, and their addresses."""


@dataclass
class RankContext:
    """All data about its own rank that a hand-over needs. ``clock``: seconds, never going back, by which hand-overs are
    measured; ``time.monotonic`` where copies note their ends (``Copy.ended_at``). ``tracer``: takes the
    spans of hand-overs, where there are traces."""

    settings: Settings
    engine_id: str
    incarnation: bytes
    model: Mapping[str, str]
    caches: RankCaches
    keys: Keys
    planes: Sequence[Plane] = ()
    allowed_peers: AllowedPeers = field(default_factory=lambda: AllowedPeers(None))
    missing_planes: Mapping[str, str] = field(default_factory=dict)
    stats: HandoverStats = field(default_factory=rank_stats)
    log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(logging.getLogger("vllm.kvferry.peer")))
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer | None = None
    dialer: Dialer = field(init=False)

    def __post_init__(self) -> None:
        self.dialer = Dialer(self.keys, max_message_bytes=MAX_REPLY_BYTES, refusal=self._refusal)

    def _refusal(self, address: str) -> str:
        return self.allowed_peers.refusal(address)

    def topology(self, peer: EngineForm) -> TpKVTopology:
        """The topology of this rank, as D, and the P engine ``peer``: the same object for every peer of that form."""
        return TpKVTopology.between(self.caches.geometry, peer)

    def plane(self, name: str) -> Plane | None:
        """The plane with this name, or ``None`` where this rank does not have it."""
        return next((plane for plane in self.planes if plane.name == name), None)

    def drop(self, reason: str, detail: object) -> None:
        """Count and log a control message that this rank does not handle or send."""
        self.stats.dropped(reason)
        self.log.warning(reason, "kvferry: control message dropped (%s): %s", reason, detail)

    def record(self, parent: str, name: str, begin: float, end: float, attributes: Attributes, error: str) -> None:
        """Make a span, in times of ``clock``, within the one that ``parent`` names, where this engine traces.
        Raises nothing: what is traced goes on without its span."""
        if self.tracer is None:
            return
        try:
            zero = time_of_zero(self.clock())
            self.tracer.record(parent, name, zero + int(begin * 1e9), zero + int(end * 1e9), attributes, error)
        except Exception:
            lines = self.log
            lines.exception("span", "kvferry: unexpected error with a span of %s", parent)


def check_model(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Check that two ranks hold the same model.

    Raises:
        IncompatiblePeerError: they do not. The error names the first field that differs, and both values.
    """
    for name in sorted(set(ours) | set(theirs)):
        if not agree(name, ours.get(name), theirs.get(name)):
            raise misfit(name, ours.get(name, "unset"), theirs.get(name, "unset"))


def misfit(field: str, ours: str, theirs: str) -> IncompatiblePeerError:
    """The error of a field that differs, with what to do."""
    advice = "; to hand over all the same, set one model_tag on both engines" if field == WEIGHTS else ""
    return IncompatiblePeerError(field, ours, theirs, advice=advice)
