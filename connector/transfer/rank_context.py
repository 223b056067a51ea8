"""One rank's own side of every hand-over: its caches, its identity, its settings. Shared by both halves of the mover.

Axes ``[L, B, H, N, C]``: layers, blocks, KV heads, tokens in a block, content bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.connector.config import Settings
from kvferry.connector.geometry.topology import EngineForm, TpKVTopology
from kvferry.connector.protocol.metrics import HandoverStats
from kvferry.connector.transfer.caches import RankCaches
from kvferry.transport.control.zap_auth import CurveKeys
from kvferry.transport.errors import IncompatiblePeerError
from kvferry.transport.plane import Plane
from kvferry.transport.wake import RateLimitedLog


@dataclass
class RankContext:
    """Everything that a hand-over needs to know of its own rank."""

    settings: Settings
    engine_id: str
    incarnation: bytes
    model: Mapping[str, str]
    caches: RankCaches
    curve: CurveKeys | None
    planes: Sequence[Plane] = ()
    missing_planes: Mapping[str, str] = field(default_factory=dict)
    stats: HandoverStats = field(default_factory=HandoverStats)
    log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(logging.getLogger("vllm.kvferry.peer")))

    def topology(self, peer: EngineForm) -> TpKVTopology:
        """How this rank, as D, faces the P engine ``peer``: the same object for every peer of that form."""
        return TpKVTopology.between(self.caches.geometry, peer)

    def plane(self, name: str) -> Plane | None:
        """The plane of that name, if this rank has it."""
        return next((plane for plane in self.planes if plane.name == name), None)


def check_model(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Whether two ranks hold the same model.

    Raises:
        IncompatiblePeerError: names the first fact that differs, and both values.
    """
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            raise IncompatiblePeerError(name, ours.get(name, "unset"), theirs.get(name, "unset"))
