"""An estimate of how long a hand-over will take, from the last hand-overs from the same engine. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

FRESH_SECONDS = 60.0
"""Half of the time for which D keeps an unused link. A later hand-over may begin with a handshake, over another
plane."""
SPREAD = 1.25
"""A hand-over of another length that takes up to so many times what an estimate says raises it; a slower one ends it.
"""

EstimateKey = tuple[str, int]
"""The id of the P engine, and the tensor-parallel rank of D that read from it."""


class TransferEstimate(msgspec.Struct, frozen=True):
    """One rank's part of a hand-over: ``tokens`` in ``seconds``. ``seconds`` is infinite where the hand-over failed, or
    where it needed work of P: if P does not do this work, the next hand-over waits without end."""

    seconds: float
    tokens: int

    def bound(self, tokens: int) -> float:
        """The most seconds that ``tokens`` tokens take. A part of the time is the same for any length, the rest grows
        with the length."""
        return self.seconds * max(1.0, tokens / self.tokens)


UNKNOWN = TransferEstimate(float("inf"), 1)


class TransferEstimates:
    """The last hand-overs from each P engine, by length, as the ``ranks`` ranks of this engine reported them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self.observed: dict[
            EstimateKey, dict[int, tuple[TransferEstimate, float]]
        ] = {}  # the last estimate for each power of two of tokens

    def observe(self, estimates: Mapping[EstimateKey, TransferEstimate], now: float) -> None:
        """Take the estimates that ranks reported at ``now`` seconds."""
        for source, estimate in estimates.items():
            known = self.observed.setdefault(source, {})
            for length, (before, at) in list(known.items()):
                if (bound := before.bound(estimate.tokens)) * SPREAD < estimate.seconds:  # too low, or this one failed
                    del known[length]
                elif bound < estimate.seconds:
                    known[length] = replace(before, seconds=before.seconds * estimate.seconds / bound), at
            known[estimate.tokens.bit_length()] = estimate, now
        for source, known in list(self.observed.items()):
            fresh = {length: (estimate, at) for length, (estimate, at) in known.items() if now <= at + FRESH_SECONDS}
            if fresh:
                self.observed[source] = fresh
            else:
                del self.observed[source]

    def seconds(self, engine_id: str, tokens: int, now: float) -> float:
        """The most seconds that ``tokens`` tokens from an engine should take; infinite where no estimate is known."""
        longest = 0.0
        for rank in self._ranks:
            known = self.observed.get((engine_id, rank), {}).values()
            fresh = [estimate for estimate, at in known if now <= at + FRESH_SECONDS]
            longest = max(longest, min((estimate.bound(tokens) for estimate in fresh), default=float("inf")))
        return longest
