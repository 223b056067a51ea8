"""Whether a load goes on inside the step that computes with it. Pure.

A load inside the step costs its request no step: the step is launched at once, and the device waits for what the copy
still needs when the step's kernels could begin. The other requests in the step wait as long. So the rule is one
comparison: that time, for all loads of the step together, is at most ``step_hold_seconds``, and at most a step: longer
than that, the others would wait longer than the request gains. A load that does not fit is begun beside the steps. By
the same comparison a later step joins it: it is reported once the step that can then compute with it would wait no
longer.
"""

from __future__ import annotations

import math

from kvferry.connector.wire.step_plan import ALONE_SECONDS


class StepLoadRule:
    """The loads inside the step that is being scheduled."""

    def __init__(self, hold_seconds: float) -> None:
        """``hold_seconds``: the most that loads may hold up a step of other requests; 0: no load goes inside a step."""
        self.hold_seconds = hold_seconds
        self._planned = 0.0

    def fits(self, copy_seconds: float, seconds_left: float, step_seconds: float, *, others: bool) -> bool:
        """Whether a load may go inside the next step. ``copy_seconds``: the most that the load should take; infinite
        where nothing is known. ``seconds_left``: how long the device is busy until the step's kernels can begin.
        ``step_seconds``: of the engine's steps; infinite where none is known. ``others``: the engine has other
        requests, which the step may compute."""
        if not self.hold_seconds:
            return False
        hold = min(self.hold_seconds, step_seconds)
        most = hold if others or self._planned else max(hold, ALONE_SECONDS)
        return self._planned + copy_seconds - seconds_left <= most

    def lead(self, seconds_left: float, step_seconds: float) -> float:
        """How long before its end a load beside the steps may be reported. ``seconds_left``: how long it takes at
        least, from the report on, until the step that can compute with it can begin. The rest as of ``fits``."""
        return seconds_left + min(self.hold_seconds, step_seconds) if self.hold_seconds else -math.inf

    def planned(self, copy_seconds: float) -> None:
        """A load goes inside the next step. Copies of one step follow each other."""
        self._planned += copy_seconds

    def next_step(self) -> None:
        """The step was scheduled."""
        self._planned = 0.0
