"""Property tests with examples drawn anew, round after round, until the time is over or one fails.

    python tests/explore.py [--seconds 600] [--seed NUMBER] [TEST_FILE ...]  (make explore SECONDS_TO_RUN=... SEED=...)

All other runs draw the same examples every time (``tests/conftest.py``). Each round has a seed of its own, which is
printed: ``--seed`` repeats the round. An example that fails is kept: add it to its test as ``@example(...)``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


class Deadline:
    """A pytest plug-in that ends the session after the test during which the time is over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.tests, self.failed = 0, False

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self.tests += 1
        if self.over:
            item.session.shouldstop = "the time is over"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = self.failed or report.failed  # also in the round that the deadline interrupts


def property_tests() -> list[str]:
    """The files that have property tests."""
    return [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "\nfrom hypothesis import" in path.read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, help="of the first round; each further round adds one")
    parser.add_argument("files", nargs="*", help="all that have property tests, if none is named")
    args = parser.parse_args()
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    deadline, rounds = Deadline(args.seconds), 0
    files = args.files or property_tests()
    options = ["--quiet", "-m", "hypothesis", "--hypothesis-profile", "explore"]
    while rounds == 0 or not deadline.over:
        print(f"explore: round {rounds + 1}, seed {seed}", flush=True)
        status = pytest.main([*options, "--hypothesis-seed", str(seed), *files], plugins=[deadline])
        if deadline.failed or status not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED):
            print(f"explore: FAILED in the round of seed {seed}; to repeat it: make explore SEED={seed}")
            print("explore: keep the test case: add it to its test as @example(...), see CONTRIBUTING.md")
            return 1
        if status == pytest.ExitCode.INTERRUPTED and not deadline.over:
            return 130  # by the keyboard
        rounds, seed = rounds + 1, seed + 1
    print(f"explore: {deadline.tests} tests in {rounds} rounds, none failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
