"""How long a hand-over will take, from how long the last one from the same engine took. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FRESH_SECONDS = 60.0
"""Half of what an unused link is kept for: after that a hand-over may begin with a handshake, over another plane."""

Source = tuple[str, int]
"""The engine that was read from, by its id, and the tensor-parallel rank that read."""


class Pace(msgspec.Struct, frozen=True):
    """One rank's part of a hand-over: ``tokens`` in ``seconds``. Infinite where it failed, and where P had a part in
    it: what P leaves undone makes the next one wait without end."""

    seconds: float
    tokens: int


NEVER = Pace(float("inf"), 1)


class Paces:
    """The last hand-overs from each engine, as the ``ranks`` ranks of this one told."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._told: dict[Source, tuple[Pace, float]] = {}

    def told(self, paces: Mapping[Source, Pace], now: float) -> None:
        """What ranks told at ``now`` seconds."""
        for source, (_, at) in list(self._told.items()):
            if now > at + FRESH_SECONDS:
                del self._told[source]
        self._told |= {source: (pace, now) for source, pace in paces.items()}

    def seconds(self, engine_id: str, tokens: int, now: float) -> float:
        """At most how long ``tokens`` from an engine should take; infinite where that is not known."""
        longest = 0.0
        for rank in self._ranks:
            pace, at = self._told.get((engine_id, rank), (None, 0.0))
            if pace is None or now > at + FRESH_SECONDS:
                return float("inf")
            longest = max(longest, pace.seconds * max(1.0, tokens / pace.tokens))
        return longest
