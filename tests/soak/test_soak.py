"""A slice of the soak, and that a soak sees what leaks."""

from __future__ import annotations

import math

from tests.soak.driver import Soak
from tests.soak.run import failures, verdicts

SEED = 20261123


class Slice(Soak):
    """Some seconds on a slow host: fewer hand-overs. What is left at the end is looked at, and not what grows."""

    under_way, least_loaded = 4, 40
    patience = 600.0


class Leaking(Slice):
    """Without further restarts: each one moves the bound, and a slow host has more of them for as many loads. It lasts
    until what leaks has been seen to grow, for on a slow host most loads may come before the warm-up ends."""

    least_loaded = 150
    next_look = 0.0

    def gap(self) -> float:
        return math.inf

    def goes_on(self, now: float) -> bool:
        if super().goes_on(now):
            return True
        if now < self.next_look:
            return True
        self.next_look, self.lasted = now + 1.0, now - self.began
        grown = {verdict.quantity for verdict in verdicts(self) if not verdict.flat}
        return not (grown >= {"descriptors", "rss_mib"} or self.violations or self.lasted > self.patience)


def test_engines_hold_nothing_after_faults_and_restarts() -> None:
    soak = Slice(3.0, SEED, ("cma", "tcp"))
    soak.run()
    assert not soak.violations
    assert soak.counts["loaded"] >= 40 and soak.restarts >= 2
    assert not soak.untried, "each restarted peer handed over again"


def test_what_grows_or_does_not_come_back_is_seen() -> None:
    """Four descriptors and 4 MiB for each load; the blocks of each tenth lease."""
    soak = Leaking(2.0, SEED, ("shm",), "descriptor memory lease")
    soak.quiet_seconds = 1.0
    soak.run()
    found = "\n".join(failures(soak))
    assert "descriptors" in found and "rss_mib" in found and " blocks" in found, found
