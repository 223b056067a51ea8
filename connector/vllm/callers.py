"""vLLM's objects that construct or set up a connector, found among the callers.

vLLM gives a connector no reference to its scheduler or model runner, and no call at two moments that matter: before the
scheduler looks at a step's output, and before a model runner prepares a step. KVFerry wraps one method of each object.
Where an object is not found, the connector works without: see the callers of these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from kvferry.connector.vllm import compat


def find_scheduler() -> Any:
    """vLLM's scheduler whose constructor is calling, half constructed; ``None`` where no scheduler is calling."""
    return _find(lambda owner: isinstance(owner, compat.Scheduler))


def find_model_runner() -> Any:
    """vLLM's model runner that is calling; ``None`` where none is. vLLM has several, without a common base class."""
    return _find(lambda owner: type(owner).__name__.endswith("ModelRunner") and hasattr(owner, "execute_model"))


def _find(wanted: Callable[[Any], bool]) -> Any:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and wanted(owner):
            return owner
        frame = frame.f_back
    return None
