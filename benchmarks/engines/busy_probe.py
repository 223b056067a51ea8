"""What ``busy.py`` installs in its engines: the times of each request, and the order of free blocks.

    vllm serve ... --scheduler-cls benchmarks.engines.busy_probe.ProbedAsyncScheduler
        --worker-extension-cls benchmarks.engines.busy_probe.CopyProbe

The engine itself is unchanged. Times are those of ``time.monotonic``, which all processes of a host share. Requests
whose id has ``fg-NUMBER`` are followed, the ones with ``bg-`` in it are counted per step.

The scheduler runs in the engine's process, to which vLLM's HTTP server passes few calls. ``POST /reset_prefix_cache``
is one: it makes the scheduler write what it has noted to the file that the environment variable names, and arrange its
free blocks as the file beside it says.

Marks of a request: ``arrived`` in the engine's queue, ``token``: when it had its first. ``way``: how the connector
answered. ``external``: tokens that come from P. ``computed``: tokens that D computes in the step that the request is
scheduled in.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from tests.support.kv_bytes import KVBytes

NOTES = "KVFERRY_BUSY_NOTES"
"""The environment variable that names the file of a scheduler's notes; the file with ``.order`` at its end says how its
free blocks are to lie."""
FOREGROUND, BACKGROUND = re.compile(r"fg-\d+"), "bg-"


def name_of(request_id: str) -> str | None:
    """The part of a request's id by which the benchmark knows it; None of a request that is not followed."""
    found = FOREGROUND.search(request_id)
    return found[0] if found else None


class Notes:
    """The marks of requests, each of which counts only the first time, and the steps of the background."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}
        self.steps: list[tuple[float, int]] = []

    def mark(self, request_id: str, **values: Any) -> None:
        name = name_of(request_id)
        if name is not None:
            marks = self.requests.setdefault(name, {})
            for key, value in values.items():
                marks.setdefault(key, value)

    def write(self, path: Path) -> None:
        """Append what was noted since the last call."""
        requests, self.requests = self.requests, {}
        steps, self.steps = self.steps, []
        with path.open("a") as file:
            file.write(json.dumps({"requests": requests, "steps": steps}) + "\n")


def arrange(pool: Any, order: str) -> None:
    """Have the pool give its blocks in the order of memory, or in one without any neighbours. All must be free."""
    blocks = [block for block in pool.blocks if not block.is_null]
    assert pool.free_block_queue.num_free_blocks == len(blocks), "some blocks are in use"
    if order == "scattered":
        random.Random(len(blocks)).shuffle(blocks)
    pool.free_block_queue = type(pool.free_block_queue)(blocks)


class _Probed:
    """Mixed into a scheduler of vLLM, before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.busy_notes = Notes()
        self.busy_path = Path(os.environ[NOTES])
        watch_arrivals(self.busy_notes)
        if self.connector is not None:  # type: ignore[attr-defined]
            watch_connector(self.connector, self.busy_notes)  # type: ignore[attr-defined]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            self.busy_notes.mark(new.req_id, computed=output.num_scheduled_tokens[new.req_id])
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        now, count = time.monotonic(), 0
        for of_client in outputs.values():
            for output in of_client.outputs:
                if not output.new_token_ids:
                    continue
                if BACKGROUND in output.request_id:
                    count += 1
                else:
                    self.busy_notes.mark(output.request_id, token=now)
        if count:
            self.busy_notes.steps.append((now, count))
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            arrange(self.kv_cache_manager.block_pool, order_file(self.busy_path).read_text())  # type: ignore[attr-defined]
        self.busy_notes.write(self.busy_path)
        return done


class ProbedScheduler(_Probed, Scheduler):
    """Of an engine without asynchronous scheduling, as on the CPU."""


class ProbedAsyncScheduler(_Probed, AsyncScheduler):
    """Of an engine with asynchronous scheduling."""


def order_file(notes: Path) -> Path:
    return notes.with_name(f"{notes.name}.order")


def watch_arrivals(notes: Notes) -> None:
    """Mark requests when the engine's input thread has them ready for its queue."""
    original = EngineCore.preprocess_add_request

    def preprocess_add_request(self: Any, request: Any) -> Any:
        ready = original(self, request)
        notes.mark(request.request_id, arrived=time.monotonic())
        return ready

    EngineCore.preprocess_add_request = preprocess_add_request


def watch_connector(connector: Any, notes: Notes) -> None:
    """Mark what the scheduler asks and tells its half of the connector, whichever connector it is."""
    matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
        count, beside = matched(request, num_computed_tokens)
        if count is not None:  # else it is asked again
            way = "local" if not count else "beside the steps" if beside else "in the step"
            notes.mark(request.request_id, way=way)
        return count, beside

    def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
        allocated(request, blocks, num_external_tokens)
        notes.mark(request.request_id, external=num_external_tokens)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens
    connector.update_state_after_alloc = update_state_after_alloc


# --- workers ----------------------------------------------------------------------------------------------------------


class CopyNotes:
    """When KVFerry's transfer thread began to copy a request's KV and saw the end, and when its GPU did."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}
        self.local = threading.local()  # of the transfer thread: the copies of the read that it is starting

    def note(self, read: Any, key: str, *, last: bool = False) -> None:
        name = name_of(read.fetch.load.request_id)
        started = getattr(self.local, "started", [])
        if name is None:
            started.clear()
            return
        marks = self.requests.setdefault(name, {})
        if last:
            marks[key] = time.monotonic()
        else:
            marks.setdefault(key, time.monotonic())
        if started:
            marks.setdefault("events", []).extend(started)
            started.clear()

    def take(self) -> dict[str, dict[str, Any]]:
        """What was noted since the last call. The events of the GPU become times of the host's clock; all copies have
        ended."""
        requests, self.requests = self.requests, {}
        if any("events" in marks for marks in requests.values()):
            now_event = torch.cuda.Event(enable_timing=True)
            now_event.record()
            now_event.synchronize()
            now = time.monotonic()
            for marks in [marks for marks in requests.values() if "events" in marks]:
                times = [[now - event.elapsed_time(now_event) / 1e3 for event in both] for both in marks.pop("events")]
                marks["on_gpu"] = [min(begin for begin, _ in times), max(end for _, end in times)]
        return requests


class CopyProbe(KVBytes):
    """Mixed into vLLM's worker; its methods are called through ``collective_rpc``. It also compares KV bytes."""

    def busy_watch(self) -> bool:
        """Start to note KVFerry's copies. Idempotent; False where KVFerry is not loaded or has no such copies."""
        if "busy_copies" in self.__dict__:
            return True
        receiver = sys.modules.get("kvferry.connector.decode_side.read")
        if receiver is None:
            return False
        self.busy_copies = CopyNotes()
        watch_reads(receiver, self.busy_copies)
        copies = sys.modules["kvferry.connector.pages.copies"]
        watch_gpu(copies.GpuCopies, self.busy_copies)
        return True

    def busy_take(self) -> dict[str, dict[str, Any]]:
        """By request: ``begun`` and ``ended`` on the transfer thread, ``on_gpu`` [begin, end] where a GPU copies."""
        return self.busy_copies.take() if "busy_copies" in self.__dict__ else {}


def watch_reads(module: Any, notes: CopyNotes) -> None:
    """``module``: of KVFerry's reads. A read begins with its request to the plane, or with its first page write."""
    receiver, page_write = module.Reads, module.PageWrite
    begin, finished = receiver.begin_pull, receiver.finished_writes

    def begin_pull(self: Any, read: Any, *rest: Any) -> Any:
        notes.note(read, "begun")
        return begin(self, read, *rest)

    def writing(read: Any, *args: Any) -> Any:
        notes.note(read, "begun")
        return page_write(read, *args)

    def finished_writes(self: Any, now: float) -> Iterator[Any]:
        ended = [write.read for write in self.writes if write.copy.done]
        yield from finished(self, now)
        for read in ended:
            notes.note(read, "ended", last=True)

    receiver.begin_pull, receiver.finished_writes, module.PageWrite = begin_pull, finished_writes, writing


def watch_gpu(copies: Any, notes: CopyNotes) -> None:
    """Put an event of the GPU before and after each copy, on the copy's stream."""
    original = copies.start

    def start(self: Any, enqueue: Callable[[], None], *options: Any) -> Any:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def between() -> None:
            before.record()
            enqueue()
            after.record()

        copy = original(self, between, *options)
        if not hasattr(notes.local, "started"):
            notes.local.started = []
        notes.local.started.append((before, after))
        return copy

    copies.start = start
