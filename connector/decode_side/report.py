"""What a rank of D reports of its loads: to the engine, to the metrics, to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvferry.connector.decode_side.link import Reason
from kvferry.connector.decode_side.load_state import LoadPhase
from kvferry.connector.decode_side.read import ActiveLoad
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire.step_plan import Load, PeerEngine, RendezvousResult
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.transport.channels import Copy

logger = logging.getLogger("vllm.kvferry.consumer")

SHORT_NAME = 8
"""Characters of an engine id by which log lines and metrics name the engine."""
MAX_STORIES = 4
"""Reads whose phases are in the log line of a failed hand-over."""

Check = Callable[[], bool | None]
"""Whether a load stands; ``None`` while its copies are under way. Any thread may call it."""


class FinishedLoad(msgspec.Struct, frozen=True):
    """The result of one load, reported once. ``load``: the load as it was posted. Its request id may name two loads,
    of which the first was cancelled and still drains."""

    load: Load
    ok: bool
    estimate: TransferEstimate = UNKNOWN


class StepLoadListener(Protocol):
    """Takes what happens to the loads inside one step. The transfer thread calls it. ``layer_order``: as ``ActiveLoad``
    takes it."""

    layer_order: Sequence[str]

    def begun(self, load: Load, stands: Check | None = None, copies: Sequence[Copy] = ()) -> None:
        """All copies of a load are under way. A load of another step is ignored. ``stands``: whether the copies have
        ended, without an error, under a lease that stands; any thread may call it. ``copies``: those that have not
        ended."""

    def moved(self) -> None:
        """A copy that is under way has moved bytes."""

    def ended(self, load: Load, ok: bool) -> None:
        """A load has ended, and nothing writes its blocks any more. A load of another step is ignored."""

    def yield_to_engine(self, wait: Callable[[float], bool]) -> None:
        """Wait while the engine's threads have more urgent work, for some milliseconds at most. ``wait``: waits for so
        many seconds, or until ``wake`` is called; returns whether there is a plan to run, or a control message."""

    @property
    def final(self) -> bool:
        """Whether all loads have ended."""


class EngineResults(Protocol):
    """Takes what the engine must know. The transfer thread calls it."""

    def begun(self, load: Load, stands: Check | None, copies: Sequence[Copy]) -> None:
        """As ``StepLoadListener.begun``; for any load inside a step, unless its copies have ended."""

    def moved(self) -> None:
        """A copy has moved bytes that was given to ``begun``."""

    def finished(self, finished: FinishedLoad) -> None:
        """A load has ended."""

    def looked_up(self, request_id: str, result: RendezvousResult) -> None:
        """P has told its lease to a request, or that its engine has the prompt; or the request must prefill."""


class LoadReports:
    """Reports to the engine come first, and also after an error of the metrics: a request waits for them."""

    def __init__(self, rank_context: RankContext, results: EngineResults) -> None:
        self._stats, self._clock, self._results = rank_context.stats, rank_context.clock, results

    def begun(self, active_load: ActiveLoad) -> None:
        """Report, once, that all copies are under way: the engine can wait for them. From then on report that they have
        moved bytes."""
        if active_load.lifetime.state.phase is not LoadPhase.MOVING:
            return
        if active_load.begun:
            self._results.moved()
        elif all(read.all_begun for read in active_load.reads):
            active_load.begun = True
            reads = [read for read in active_load.reads if read.planned]
            under_way = [write.copy for read in reads for write in read.writes]
            posted = all(read.fence == "posted" for read in reads)

            def ended_well() -> bool | None:
                if not all(copy.done for copy in under_way):
                    return None
                return not any(copy.error for copy in under_way) and all(read.grant_stands for read in reads)

            self._results.begun(active_load.posted, ended_well if posted else None, under_way)

    def succeeded(self, active_load: ActiveLoad) -> None:
        """The load has ended, and its tokens are in the blocks."""
        load, tokens, seconds = active_load.load, _num_tokens(active_load.load), self._seconds(active_load)
        posted = all([read.fence == "posted" for read in active_load.reads if read.planned])
        waited = max(0.0, active_load.granted_at - active_load.started)
        first = active_load.number == 1
        estimate = TransferEstimate(seconds - waited, max(1, tokens)) if posted and first else UNKNOWN
        try:
            # Before the report, so that the engine takes the counts with the load: an idle engine takes no later step.
            self._stats.finished(
                nbytes=active_load.nbytes, milliseconds=seconds * 1e3, plane=active_load.planes, tokens=tokens,
                peer=short_name(load.peer),
            )  # fmt: skip
            self._count_streamed(active_load)
        finally:
            self._results.finished(FinishedLoad(active_load.posted, True, estimate))

    def log_succeeded(self, active_load: ActiveLoad) -> None:
        """Log what ``succeeded`` has reported."""
        load, number = active_load.load, active_load.number
        logger.info(
            "kvferry: hand-over of %s done: %d tokens, %d bytes in %.2f ms over %s from %s%s%s",
            load.request_id, _num_tokens(load), active_load.nbytes, self._seconds(active_load) * 1e3,
            active_load.planes, short_name(load.peer),
            ", inside the step" if load.now else "" if number == 1 else f", attempt {number}",
            ", from when P computed it" if load.step_tokens else "",
        )  # fmt: skip

    def _seconds(self, active_load: ActiveLoad) -> float:
        # This thread may come to the end of a copy late, see ``yield_to_engine``.
        return (active_load.copied_at or active_load.ended_at) - active_load.started

    def failed(self, load: Load, reason: Reason, active_load: ActiveLoad | None = None) -> None:
        """The load, as it was posted, has ended, and its tokens are not in the blocks. ``active_load``: it, if an
        attempt has begun."""
        try:
            self._stats.failed(reason.kind, short_name((active_load.load if active_load else load).peer))
            if active_load is not None:
                self._count_streamed(active_load)
        finally:
            self._results.finished(FinishedLoad(load, False))
        logger.warning(
            "kvferry: hand-over of %s failed, %d tokens not loaded: %s%s",
            load.request_id, _num_tokens(load), reason, "" if active_load is None else f" [{_stories(active_load)}]",
        )  # fmt: skip

    def not_started(self, load: Load) -> None:
        """The load was not started because of an error, which was logged where it was raised."""
        self._results.finished(FinishedLoad(load, False))

    def _count_streamed(self, active_load: ActiveLoad) -> None:
        """What it costs D to take blocks for a prompt before P has computed it."""
        load = active_load.posted
        if load.found or load.step_tokens:
            blocks = max((len(packed) // 4 for packed in load.block_ids), default=0)
            milliseconds = (self._clock() - active_load.started) * 1e3
            self._stats.streamed(blocks=blocks, milliseconds=milliseconds)


def short_name(peer: PeerEngine) -> str:
    """How log lines and metrics name a P engine."""
    return peer.engine_id[:SHORT_NAME]


def _num_tokens(load: Load) -> int:
    return max([stop - start for start, stop in load.tokens], default=0)


def _stories(active_load: ActiveLoad) -> str:
    """The phases of the hand-over and of each of its reads, with their times."""
    reads = [f"{read.link.name}: {read.story()}" for read in active_load.reads]
    number = [f"attempt {active_load.number}"] if active_load.number > 1 else []
    return "; ".join([*number, active_load.lifetime.story(), *reads[:MAX_STORIES]])
