"""Asynchronous scheduling on the CPU, where vLLM switches it off: the engine schedules a step while another one runs.

    vllm serve ... --scheduler-cls tests.engine.wrong_tokens.ahead.AheadScheduler
        --worker-extension-cls tests.engine.wrong_tokens.ahead_faults.FaultProbe

vLLM does so by default on GPUs. Then a load that fails inside its step has steps behind it that were scheduled with its
blocks. The scheduler, the engine's loop and the model runner are vLLM's own; only the setting is put back in the
engine's process and in the worker's, and CUDA's streams and events, which a CPU does not need, do nothing.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

logger = logging.getLogger("vllm.kvferry.ahead")


class AheadScheduler(AsyncScheduler):
    """vLLM's, in an engine whose setting is put back before the engine reads it."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **kwargs)
        self._in_flight = self._most_in_flight = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        self._in_flight += 1
        if self._in_flight > self._most_in_flight:
            self._most_in_flight = self._in_flight
            logger.info("ahead: %d steps in flight", self._in_flight)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        self._in_flight -= 1
        return super().update_from_output(*args, **kwargs)


class Passed:
    """In place of a stream or an event of CUDA: all work has ended when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cpu")

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def query(self) -> bool:
        return True


def install() -> None:
    """In the worker's process, before vLLM makes the model runner."""
    begin = CPUModelRunner.__init__

    def init(self: CPUModelRunner, vllm_config: Any, device: torch.device) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        begin(self, vllm_config, device)

    CPUModelRunner.__init__ = init
    torch.cuda.Event = torch.cuda.Stream = Passed  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *_: Passed()  # type: ignore[assignment]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment,return-value]
