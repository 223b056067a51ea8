"""What ``streaming.py`` installs in the workers of P and of D: steps, moved bytes, and time on a core.

    vllm serve ... --worker-extension-cls benchmarks.engines.step_probe.StepProbe

Times are those of ``time.monotonic``, which all processes of a host share. On a GPU, steps are timed by CUDA
events, so they are those of the device; on the CPU the forward ends with its call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch


class DeviceClock:
    """The moment that a device reaches. ``mark`` notes it, ``seconds`` gives it later."""

    def __init__(self, device: torch.device) -> None:
        self._base: tuple[float, torch.cuda.Event] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._base = time.monotonic(), event

    def mark(self) -> float | torch.cuda.Event:
        if self._base is None:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: float | torch.cuda.Event) -> float:
        """The time of a mark. Blocks until the device has reached it."""
        if isinstance(mark, float):
            return mark
        assert self._base is not None
        mark.synchronize()
        return self._base[0] + self._base[1].elapsed_time(mark) / 1e3


class StepProbe:
    """Mixed into vLLM's worker; its methods are called through ``collective_rpc``, on the engine's own thread."""

    def probe_watch(self) -> int:
        """Start to note. Returns the system's number of the engine's thread. Idempotent."""
        if "probed_steps" not in self.__dict__:
            self.probed_steps: list[dict[str, Any]] = []
            self.probed_moves: list[tuple[float, int]] = []
            self.probed_clock = DeviceClock(self.device)  # type: ignore[attr-defined]
            self._watch_steps()
            watch_moves(self.probed_moves)
        return threading.get_native_id()

    def _watch_steps(self) -> None:
        runner, clock = self.model_runner, self.probed_clock  # type: ignore[attr-defined]
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = scheduler_output.total_num_scheduled_tokens
            if not tokens:
                return execute(scheduler_output, *args, **kwargs)
            ran = time.thread_time()
            step: dict[str, Any] = {"begin": clock.mark(), "tokens": tokens}
            self.probed_steps.append(step)
            result = execute(scheduler_output, *args, **kwargs)
            step["end"] = clock.mark()
            step["core"] = time.thread_time() - ran
            return result

        runner.execute_model = execute_model

    def probe_take(self) -> dict[str, Any]:
        """What was noted since the last call.

        ``steps``: those that computed tokens, with ``begin``, ``end``, ``tokens``, and the seconds of the engine's
        thread on a ``core``. ``moves``: bytes as they came into D's pages, (time, bytes).
        """
        steps, seconds = list(self.probed_steps), self.probed_clock.seconds
        self.probed_steps.clear()
        for step in steps:
            step["begin"], step["end"] = seconds(step["begin"]), seconds(step["end"])
        moves = self.probed_moves[:]
        del self.probed_moves[: len(moves)]
        return {"steps": steps, "moves": moves}


def watch_moves(moves: list[tuple[float, int]]) -> None:
    """Note what KVFerry's transfer thread of this process has put into pages."""
    from kvferry.connector.decode_side.read import Reads

    collected = Reads.collect
    placed: dict[Any, int] = {}  # bytes of each load

    def collect(self: Reads, now: float) -> Iterator[Any]:
        for read in collected(self, now):
            if (nbytes := read.fetch.nbytes) > (before := placed.get(read.fetch, 0)):
                moves.append((time.monotonic(), nbytes - before))
                placed[read.fetch] = nbytes
            yield read

    Reads.collect = collect  # type: ignore[method-assign]
