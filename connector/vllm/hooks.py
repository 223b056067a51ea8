"""The methods of vLLM that are wrapped, and the objects that have them, found among a connector's callers.

vLLM gives a connector no reference to its scheduler or model runner, and no call at moments that matter: after a change
of weights (``weights.py``), before a model runner prepares a step (``execute_model``), and before the scheduler looks
at a step's output (``update_from_output``). Without the second, loads inside a step begin a millisecond or two later.
Without the third nobody could recover from one that fails, so all loads go beside the steps.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from types import FrameType
from typing import Any

import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from kvferry.connector.vllm import compat

logger = logging.getLogger("vllm.kvferry.adapter")

RECOVERY_NEEDS = (
    (Scheduler, "update_from_output"),
    (Scheduler, "_preempt_request"),
    (KVCacheManager, "get_block_ids"),
    (KVCacheManager, "evict_blocks"),
)
"""What ``step_load_recovery`` wraps and calls of vLLM; none of it is part of vLLM's connector API."""


def find_scheduler() -> Any:
    """vLLM's scheduler whose constructor is calling, half constructed; ``None`` where no scheduler is calling."""
    return _find(lambda owner: isinstance(owner, Scheduler))


def find_config() -> tuple[VllmConfig, Any] | None:
    """vLLM's configuration whose constructor is calling, and the ``kv_transfer_config`` of the connector that it looks
    at: the configuration's, or below MultiConnector that of one connector. ``None`` where no configuration is calling.
    """
    frame: FrameType | None = sys._getframe(1)
    transfer = None
    while frame is not None:
        if isinstance(local := frame.f_locals.get("kv_transfer_config"), KVTransferConfig):
            transfer = transfer or local
        if isinstance(owner := frame.f_locals.get("self"), VllmConfig):
            transfer = transfer or owner.kv_transfer_config
            return None if transfer is None else (owner, transfer)
        frame = frame.f_back
    return None


def find_model_runner() -> Any:
    """vLLM's model runner that is calling; ``None`` where none is. vLLM has several, without a common base class."""
    return _find(lambda owner: type(owner).__name__.endswith("ModelRunner") and hasattr(owner, "execute_model"))


def find_worker(runner: object) -> Any:
    """vLLM's worker that is calling and has this model runner; ``None`` where none is."""
    return _find(lambda owner: getattr(owner, "__dict__", {}).get("model_runner") is runner)


def _find(wanted: Callable[[Any], bool]) -> Any:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and wanted(owner):
            return owner
        frame = frame.f_back
    return None


def can_recover(scheduler: Any) -> bool:
    """Whether a load that fails inside a step can be recovered from. One log line says why not."""
    if scheduler is None:
        why = "vLLM's scheduler is not among the callers of the connector"
    elif lacks := [f"{owner.__name__}.{name}" for owner, name in RECOVERY_NEEDS if not hasattr(owner, name)]:
        why = f"vLLM {vllm.__version__} has no {', '.join(lacks)}"
    elif len(signature(Scheduler.update_from_output).parameters) != 3:  # self, the step, its output
        why = f"vLLM {vllm.__version__} calls Scheduler.update_from_output in another way"
    else:
        return True
    logger.warning("kvferry: %s: all loads go beside the steps, and take about three steps more", why)
    return False


def before_step(runner: Any, connector: object, act: Callable[[Any], None]) -> None:
    """Call ``act`` with each step that a model runner gets, before it prepares the step. Once for each connector."""

    def around(execute: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            act(scheduler_output)
            return execute(scheduler_output, *args, **kwargs)

        return execute_model

    wrap(runner, "execute_model", connector, around)


def before_update(scheduler: Any, connector: object, act: Callable[[Any, Any], tuple[Any, Sequence[Any]]]) -> None:
    """Call ``act`` with each step and its output before the scheduler looks at the output. It returns the output to
    look at, and requests whose clients are told of an error. Once for each connector."""

    def around(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            model_runner_output, ended = act(scheduler_output, model_runner_output)
            told = update(scheduler_output, model_runner_output)
            return compat.with_errors(told, ended) if ended else told

        return update_from_output

    wrap(scheduler, "update_from_output", connector, around)


def wrap(target: Any, name: str, connector: object, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of an object by what ``around`` makes of it. Once for each connector."""
    method = getattr(target, name)
    if getattr(method, "wrapped_for", None) is not connector:  # vLLM may register caches anew
        wrapper = around(method)
        wrapper.wrapped_for = connector  # type: ignore[attr-defined]
        setattr(target, name, wrapper)
