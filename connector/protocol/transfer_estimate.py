"""How long a hand-over will take, from how long the last ones from the same engine took. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FRESH_SECONDS = 60.0
"""Half of what an unused link is kept for: after that a hand-over may begin with a handshake, over another plane."""

EstimateKey = tuple[str, int]
"""The engine that was read from, by its id, and the tensor-parallel rank that read."""


class TransferEstimate(msgspec.Struct, frozen=True):
    """One rank's part of a hand-over: ``tokens`` in ``seconds``. Infinite where it failed, and where P had a part in
    it: what P leaves undone makes the next one wait without end."""

    seconds: float
    tokens: int

    def bound(self, tokens: int) -> float:
        """Seconds that so many tokens take at most: a part is the same for any length, the rest grows with that."""
        return self.seconds * max(1.0, tokens / self.tokens)


UNKNOWN = TransferEstimate(float("inf"), 1)


class TransferEstimates:
    """The last hand-overs from each engine, by length, as the ``ranks`` ranks of this one told."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._told: dict[
            EstimateKey, dict[int, tuple[TransferEstimate, float]]
        ] = {}  # the last of each order of magnitude

    def told(self, estimates: Mapping[EstimateKey, TransferEstimate], now: float) -> None:
        """What ranks told at ``now`` seconds."""
        for source, estimate in estimates.items():
            known = self._told.setdefault(source, {})
            for length, (before, _) in list(known.items()):
                if before.bound(estimate.tokens) < estimate.seconds:  # it was faster then; or this one has failed
                    del known[length]
            known[estimate.tokens.bit_length()] = estimate, now
        for source, known in list(self._told.items()):
            fresh = {length: (estimate, at) for length, (estimate, at) in known.items() if now <= at + FRESH_SECONDS}
            if fresh:
                self._told[source] = fresh
            else:
                del self._told[source]

    def seconds(self, engine_id: str, tokens: int, now: float) -> float:
        """How long ``tokens`` from an engine should take at most; infinite where that is not known."""
        longest = 0.0
        for rank in self._ranks:
            known = self._told.get((engine_id, rank), {}).values()
            fresh = [estimate for estimate, at in known if now <= at + FRESH_SECONDS]
            longest = max(longest, min((estimate.bound(tokens) for estimate in fresh), default=float("inf")))
        return longest
