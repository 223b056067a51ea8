"""The self-test: a known pattern from one process to another over each data plane, every byte checked, with its rate.

A process that crashes, or that does not answer in time, is a fault of that plane only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

from kvferry.cli.doctor.findings import Finding, fault, ok
from kvferry.cli.doctor.planes import PlaneOnDevice
from kvferry.cli.rank_pair.form import CacheForm
from kvferry.cli.rank_pair.pair import RANK_PROGRAM, RankPair
from kvferry.cli.rank_pair.process import PairError

FORM = CacheForm()
"""64 MiB in pages of 32 KiB."""
ROUNDS = 3
"""Hand-overs that are measured; one before them connects the ranks and allocates staging memory."""
PLANE_SECONDS = 60.0
"""Bound on the test of one plane, with the start of its processes."""
_MIB = 1 << 20
_REPORT = "report it with the file of `kvferry doctor --share`; until then set another plane"


class SelfTest:
    """Two processes that test planes in turn. ``host``: the address that the planes listen on. ``program``: the command
    of a rank's process."""

    def __init__(
        self, host: str, *, program: Sequence[str] = RANK_PROGRAM, form: CacheForm = FORM,
        seconds: float = PLANE_SECONDS, rounds: int = ROUNDS,
    ) -> None:  # fmt: skip
        self._pair, self._form, self._seconds, self._rounds = RankPair(host, program), form, seconds, rounds

    def run(self, planes: Sequence[PlaneOnDevice]) -> Iterator[Finding]:
        """Test planes, each as one finding."""
        try:
            for plane in planes:
                yield self._judge(plane)
        finally:
            self._pair.close()

    def _judge(self, plane: PlaneOnDevice) -> Finding:
        what = str(plane)
        try:
            wrong, nbytes, rates = self._hand_over(plane, time.monotonic() + self._seconds)
        except PairError as error:
            self._pair.close()  # the next plane gets new processes
            return fault(what, f"the hand-over failed: {error}", _REPORT, expected="every byte within the time")
        if wrong:
            return fault(what, f"{wrong} of {nbytes} bytes are wrong on D", f"do not use this plane; {_REPORT}",
                         expected="P's bytes")  # fmt: skip
        rate = statistics.median(rates)
        return ok(what, f"{rate:.2f} GB/s; each of {nbytes // _MIB} MiB is right, in {len(rates)} hand-overs")

    def _hand_over(self, plane: PlaneOnDevice, deadline: float) -> tuple[int, int, list[float]]:
        """Returns the wrong bytes of all rounds, the bytes of one hand-over, and the rates in GB/s."""
        pair, form = self._pair, self._form
        pair.start(plane.name, plane.device, form, form, deadline)
        wrong, nbytes, rates = 0, 0, []
        for number in range(self._rounds + 1):
            if number:
                pair.fill(deadline)
            moved = pair.hand_over(form.tokens, deadline)
            wrong += pair.differing(form.tokens, deadline)
            nbytes = moved.nbytes
            if number:
                rates.append(nbytes / moved.seconds / 1e9)
        pair.stop(deadline)
        return wrong, nbytes, rates
