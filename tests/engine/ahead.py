"""Engines whose hand-overs fail in the middle of a copy, on a D that schedules each step while the one before runs.

    vllm serve ... --worker-extension-cls tests.engine.ahead.Faults --scheduler-cls tests.engine.ahead.AheadScheduler

On GPUs vLLM schedules ahead by default, on the CPU it switches that off. Then a load that fails inside its step has
steps behind it that were scheduled with its blocks. The scheduler, the engine's loop and the model runner are vLLM's
own; only the setting is put back, and CUDA's streams and events, which a CPU does not need, do nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from kvferry.transport.planes import cma
from tests.support.inside import expire_lease, leases_of, listener_of, producer_of, thread_of, worker_half

logger = logging.getLogger("vllm.kvferry.ahead")
NOBODY = (1 << 22) + 1
"""A process id that Linux does not give."""


class AheadScheduler(AsyncScheduler):
    """vLLM's, in an engine whose setting is put back before the engine reads it."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **kwargs)
        self._in_flight, self._told = 0, False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._in_flight += 1
        if self._in_flight == 2 and not self._told:
            self._told = True
            logger.info("ahead: 2 steps in flight")
        return super().schedule(*args, **kwargs)

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


class Faults:
    """Mixed into vLLM's worker of P and of D; its methods are called through ``collective_rpc``."""

    def plant(self, kind: str, halfway: str) -> None:
        """D: the next copy fails so after half of its bytes. For what P is to do, the file ``halfway`` is made, and the
        copy goes on when it is gone."""
        half = worker_half(get_kv_transfer_group())
        plane: Any = thread_of(half).rank_context.plane("cma")
        progress = type(plane).progress.__get__(plane)

        def stop_halfway() -> bool:
            if not plane.copies:
                return bool(progress())
            plane.progress, copy = progress, plane.copies[0]
            if kind == "copy error":
                copy.pid = NOBODY
            with mock.patch.object(cma, "TURN_BYTES", max(1, int(copy.left.nbytes.sum()) // 2)):
                progress()
            if kind == "given up":
                time.sleep(half.step_hold.patience + 0.3)
            elif kind != "copy error":
                Path(halfway).touch()
                while Path(halfway).exists():
                    time.sleep(1e-3)
            return True

        plane.progress = stop_halfway

    def end_leases(self, reuse: str) -> None:
        """P: end all leases, as their expiry does; with ``reuse`` write other bytes to all pages. P must not cache
        prefixes."""
        thread = thread_of(worker_half(get_kv_transfer_group()))
        producer = producer_of(thread)
        pump, done = producer.pump, Event()

        def end(now: float) -> bool:
            producer.pump = pump
            for lease in leases_of(producer).values():
                expire_lease(producer, lease)
            done.set()
            return bool(pump(now))

        producer.pump = end
        thread.wake()
        assert done.wait(200.0), "P's transfer thread does not turn"
        for cache in self.model_runner.kv_caches if int(reuse) else ():  # type: ignore[attr-defined]
            cache.normal_()

    def cut(self) -> None:
        """P: shut the connections of the control port down."""
        for peer in list(listener_of(thread_of(worker_half(get_kv_transfer_group()))).streams.values()):
            with socket.socket(fileno=os.dup(peer.sock.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _init(self: CPUModelRunner, vllm_config: Any, device: torch.device, init: Any = CPUModelRunner.__init__) -> None:
    vllm_config.scheduler_config.async_scheduling |= vllm_config.scheduler_config.scheduler_cls is not None
    init(self, vllm_config, device)


# At the import of this module, before vLLM makes the model runner.
CPUModelRunner.__init__ = _init
torch.cuda.Event = torch.cuda.Stream = Passed  # type: ignore[misc,assignment]
torch.cuda.current_stream = lambda *_: Passed()  # type: ignore[assignment]
torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment,return-value]
