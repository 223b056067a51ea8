"""``planted`` for a worker whose engine schedules ahead; its import puts vLLM's setting back."""

from __future__ import annotations

from tests.engine.wrong_tokens import ahead
from tests.engine.wrong_tokens.planted import FaultProbe

ahead.install()

__all__ = ["FaultProbe"]
