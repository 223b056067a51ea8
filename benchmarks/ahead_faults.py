"""``planted_faults`` for a worker whose engine schedules ahead; its import puts vLLM's setting back."""

from __future__ import annotations

import ahead_on_cpu
from planted_faults import FaultProbe

ahead_on_cpu.install()

__all__ = ["FaultProbe"]
