"""A slice of the soak, and that a soak sees what leaks."""

from __future__ import annotations

import pytest

from tests.soak.driver import Soak

SEED = 20261123


class Slice(Soak):
    """Some seconds on a slow host: fewer hand-overs."""

    under_way, least_loaded = 4, 20
    patience = 600.0


def test_engines_hold_nothing_after_faults_and_restarts() -> None:
    soak = Slice(3.0, SEED, ("cma", "tcp"))
    soak.run()
    assert not soak.violations
    assert soak.counts["loaded"] >= 40 and soak.restarts >= 2
    assert not soak.untried, "each restarted peer handed over again"


@pytest.mark.parametrize(("leak", "found"), [("memory", "rss_mib"), ("lease", " blocks")])
def test_what_grows_or_does_not_come_back_is_seen(leak: str, found: str) -> None:
    """4 MiB for each load; the blocks of each tenth lease."""
    soak = Slice(2.0, SEED, ("shm",), leak)
    soak.quiet_seconds = 1.0 if leak == "lease" else Soak.quiet_seconds  # such blocks do not come
    soak.run()
    assert found in "\n".join(soak.failures())
