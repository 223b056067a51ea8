"""What follows when a load fails inside the step that computes with it.

vLLM has scheduled further steps by then, and its own recovery does not know of them: it would take the outputs of steps
in flight, which were computed from the blocks that were not filled. So this module looks at each step's output before
vLLM does. It finds every request that has used a block of a failed load, takes what they computed from these blocks out
of the prefix cache, and preempts them, with the outputs of their steps in flight dropped. vLLM computes them anew.
Where ``kv_load_failure_policy`` is ``fail``, they end with an error.

``hooks`` calls ``StepLoadRecovery.processed`` before the scheduler looks at an output.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from kvferry.connector.geometry.engine_types import BlockTable
from kvferry.connector.scheduler.planning import NULL_BLOCK
from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.vllm import compat
from kvferry.connector.vllm.worker_meta import load_ends
from kvferry.connector.wire.step_plan import LOST, Load, LoadEnd, StepPlan, unpack_ids
from kvferry.transport.limited_log import FAILED_LINES, RateLimitedLog

logger = logging.getLogger("vllm.kvferry.adapter")


@dataclass
class _Suspect:
    """A load inside a step whose output has not been seen.

    ``tables``: of each step since, the requests with all their blocks by table, and how many tokens these had at the
    begin of the step; or with those that were added, and no number. They are looked at only if the load fails. Then
    ``users`` are the requests that were scheduled with a block that the load should have filled, and ``derived`` the
    blocks that they have computed, of all tables, from the tokens of the first of these on: a layer computes with what
    the ones before it have made of wrong KV. What a user found in the prefix cache is right where nobody of these has
    computed it: others may have used it for long.
    """

    load: Load
    tables: list[tuple[str, Sequence[Sequence[int]], int | None]] = field(default_factory=list)
    users: set[str] = field(default_factory=set)
    derived: set[int] = field(default_factory=set)

    def find_users(self, tables: Sequence[BlockTable], held: Iterable[tuple[str, Sequence[Sequence[int]]]]) -> None:
        """Of the steps since, and of the requests that hold blocks now."""
        self.users.add(self.load.request_id)
        self.derived.update(filled_blocks(self.load, tables))
        # A request on a block that another user has computed has a filled one before it, but not in a window.
        plain = _keeps_all(tables)
        wrong = self.derived.copy() if plain else self.derived
        known = -1
        while known != len(self.derived):
            known = len(self.derived)
            for request_id, by_table, computed in self.tables:
                first = _first_token(tables, by_table, wrong)
                if first is not None or (computed is None and request_id in self.users):
                    self.users.add(request_id)
                    begin = 0 if first is None or computed is None else first if plain else max(first, computed)
                    for table, ids in zip(tables, by_table, strict=True):
                        self.derived.update(ids[begin // table.block_size :])
                    self.derived.discard(NULL_BLOCK)  # at once: it is in the tables of others
        self.users.update(name for name, ids in held if _first_token(tables, ids, wrong) is not None)


@dataclass
class _Step:
    """A step in flight. ``stale``: requests whose outputs of this step must not be used."""

    output: Any
    suspects: list[_Suspect]
    stale: set[str] = field(default_factory=set)


class StepLoadRecovery:
    """All steps in flight of one engine, and the loads inside them. Called by vLLM's scheduler, by one thread."""

    def __init__(
        self, scheduler: Any, in_flight: StepsInFlight, *, tables: Sequence[BlockTable], ranks: int, fails: bool,
        ended: Callable[[str, LoadEnd], object],
    ) -> None:  # fmt: skip
        """
        Args:
            scheduler: vLLM's, which may be half constructed.
            in_flight: learns of each step whose output has come.
            tables: of its KV cache groups, all of which are handed over.
            ranks: how many worker halves report on each load.
            fails: a failed load ends its request, by ``kv_load_failure_policy``.
            ended: takes the end of each load, with its request's id.
        """
        self._scheduler, self._tables, self._ranks, self._fails = scheduler, tables, ranks, fails
        self._in_flight, self._ended = in_flight, ended
        self._log = RateLimitedLog(logger, per_key=FAILED_LINES)
        self.steps: deque[_Step] = deque()

    # --- what vLLM reports --------------------------------------------------------------------------------------

    def scheduled(self, output: Any, plan: StepPlan) -> None:
        """A step was scheduled, with this plan."""
        loads = *plan.joins, *[load for load in plan.loads if load.now]
        self.steps.append(_Step(output, [_Suspect(load) for load in loads]))
        suspects = [suspect for step in self.steps for suspect in step.suspects]
        if suspects:
            self._note_tables(output, suspects)

    def _note_tables(self, output: Any, suspects: list[_Suspect]) -> None:
        tables = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        of_all = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new_ids, computed in of_all:
            if new_ids is not None:  # for a resumed request all its blocks
                tables.append((request_id, new_ids, computed if request_id in cached.resumed_req_ids else None))
        for suspect in suspects:
            suspect.tables += tables

    # --- a step's output ----------------------------------------------------------------------------------------

    def processed(self, output: Any, result: Any) -> Sequence[Any]:
        """The scheduler is about to look at ``result``, the output of the step ``output``. Returns the requests that
        have been ended with an error, of which the clients must be told."""
        step = self.take(output)
        if step is None:
            return ()
        ended = self._recover(failed, step, result) if step.suspects and (failed := self._failed(step, result)) else ()
        for request_id in step.stale:
            drop_output(result, request_id)
        self._in_flight.processed(time.monotonic(), computed=output.total_num_scheduled_tokens > 0)
        return ended

    def take(self, output: Any) -> _Step | None:
        """The step of an output. There is none where vLLM 0.33 reports, after a worker has failed, with an empty output
        of its own what other workers had to report."""
        for place, step in enumerate(self.steps):  # the first, as a rule
            if step.output is output:
                if place:  # a worker failed, and vLLM goes on: nothing says that the loads of these stand
                    skipped = [self.steps.popleft() for _ in range(place)]
                    step.suspects = [suspect for one in (*skipped, step) for suspect in one.suspects]
                    for _ in skipped:
                        self._in_flight.processed(time.monotonic(), computed=False)
                self.steps.popleft()
                return step
        return None

    def _failed(self, step: _Step, result: Any) -> list[_Suspect]:
        """The loads that do not stand on all ranks."""
        ends = load_ends(result.kv_connector_output and result.kv_connector_output.kv_connector_worker_meta)
        failed = []
        for suspect in step.suspects:
            end = ends.get(suspect.load.request_id, LOST)
            if end.failed or end.ranks < self._ranks:
                failed.append(suspect)
                end = end if end.failed else LOST
            self._ended(suspect.load.request_id, end)
        return failed

    def _recover(self, failed: list[_Suspect], step: _Step, result: Any) -> list[Any]:
        scheduler, ended = self._scheduler, list[Any]()
        held = [  # also by requests that wait for a load beside the steps
            (name, scheduler.kv_cache_manager.get_block_ids(name)) for name in scheduler.requests
        ]
        for suspect in failed:
            suspect.find_users(self._tables, held)
        users = set[str]().union(*(suspect.users for suspect in failed))
        # Out of the prefix cache, and also blocks of requests that have ended since, which vLLM no longer finds.
        scheduler.kv_cache_manager.evict_blocks(set[int]().union(*(suspect.derived for suspect in failed)))
        names = ", ".join(suspect.load.request_id for suspect in failed)
        if self._fails:
            ended = self._end(users)
            users -= {request.request_id for request in ended}
            text = "kvferry: the hand-over of %s failed inside its step: %d request(s) end with an error"
            self._log.error("inside", text, names, len(ended))
        else:
            running = [request for request in scheduler.running if request.request_id in users]
            for request in reversed(running):  # each goes before the requests that wait
                compat.preempt(scheduler, request, time.monotonic())
            text = (
                "kvferry: the hand-over of %s failed inside its step: %d request(s) are computed here, from the start"
            )
            self._log.warning("inside", text, names, len(users))
        self._restart_waiting(users, step)
        return ended

    def _end(self, users: Collection[str]) -> list[Any]:
        """The running ones, and those that wait for a load beside the steps."""
        ends = RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS
        requests = [self._scheduler.requests[name] for name in users if name in self._scheduler.requests]
        ended = [request for request in requests if request.status in ends]
        self._scheduler.finish_requests([one.request_id for one in ended], RequestStatus.FINISHED_ERROR)
        return ended

    def _restart_waiting(self, request_ids: Collection[str], step: _Step) -> None:
        """Drop the outputs in flight of requests that do not run, and what they hold of the blocks."""
        for flying in (step, *self.steps):
            flying.stale |= flying.output.num_scheduled_tokens.keys() & request_ids
        for request_id in request_ids:
            request = self._scheduler.requests.get(request_id)
            if request is not None and not request.is_finished():
                compat.restart_waiting(self._scheduler, request)


def drop_output(result: Any, request_id: str) -> None:
    """Leave nothing of a request in the output of a step."""
    index = result.req_id_to_index.get(request_id)
    if index is not None and result.sampled_token_ids:
        result.sampled_token_ids[index] = []
    if index is not None and result.pooler_output:
        result.pooler_output[index] = None
    if result.prompt_logprobs_dict:
        result.prompt_logprobs_dict.pop(request_id, None)


def filled_blocks(load: Load, tables: Sequence[BlockTable]) -> frozenset[int]:
    """The ids of the blocks that a load fills, of all block tables; not those of a local prefix hit before them."""
    filled = (
        unpack_ids(ids)[start // table.block_size :].tolist()
        for table, ids, (start, _) in zip(tables, load.block_ids, load.tokens, strict=True)
    )
    return frozenset(block_id for ids in filled for block_id in ids)


def _keeps_all(tables: Sequence[BlockTable]) -> bool:
    """Whether a request has one table, with the blocks of all its tokens."""
    return len(tables) == 1 and tables[0].whole


def _first_token(
    tables: Sequence[BlockTable], by_table: Sequence[Sequence[int]], blocks: Collection[int]
) -> int | None:
    """The first token of the first block of a request that is one of ``blocks``; ``None`` where it has none."""
    places = (
        next((place * table.block_size for place, block_id in enumerate(ids) if block_id in blocks), None)
        for table, ids in zip(tables, by_table, strict=True)
    )
    return min((token for token in places if token is not None), default=None)
