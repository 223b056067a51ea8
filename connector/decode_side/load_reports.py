"""What a rank of D reports of its loads: to the engine, to the metrics, to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvferry.connector.decode_side.active_load import ActiveLoad, SourceRead
from kvferry.connector.decode_side.handover import HandoverPhase, Reason
from kvferry.connector.decode_side.link_state import LinkPhase
from kvferry.connector.wire.metrics import HandoverStats
from kvferry.connector.wire.step_plan import Load, PeerEngine
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.transport.channels import Copy

logger = logging.getLogger("vllm.kvferry.consumer")

SHORT_NAME = 8
"""Characters of an engine id by which log lines and metrics name the engine."""
MAX_STORIES = 4
"""Reads whose phases are in the log line of a failed hand-over."""

Check = Callable[[], bool | None]
"""Whether a load stands; ``None`` while its copies are under way. Any thread may call it."""
OnBegun = Callable[[Load, Check | None, Sequence[Copy]], None]


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
        many seconds, or until ``wake`` is called; returns whether a control message has arrived."""

    def interrupt(self) -> None:
        """End ``yield_to_engine``: there is new work."""

    @property
    def final(self) -> bool:
        """Whether all loads have ended."""


class LoadReports:
    """Reports to the engine come first, and also after an error of the metrics: a request waits for them."""

    def __init__(
        self,
        stats: HandoverStats,
        begun: OnBegun,
        moved: Callable[[], None],
        finished: Callable[[FinishedLoad], None],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            stats: this rank's metrics.
            begun: called with each load inside a step once all its copies are under way, unless they have ended, and
                with the question whether the load stands, which any thread may ask; ``None`` where P must answer it;
                and with the copies.
            moved: called when a copy has moved bytes that was given to ``begun``.
            finished: called with the result of each load as soon as it has ended.
            clock: seconds, never going back, as ``Copy.ended_at`` and ``ActiveLoad.started`` count them.
        """
        self._stats = stats
        self._on_begun, self._on_moved, self._on_finished = begun, moved, finished
        self._clock = clock

    def begun(self, active_load: ActiveLoad, copies: Callable[[ActiveLoad], list[Copy]]) -> None:
        """Report, once, that all copies are under way: the engine can wait for them. From then on report that they have
        moved bytes."""
        moving = active_load.lifetime.state.phase is HandoverPhase.MOVING
        if moving and active_load.begun:
            self._on_moved()
        elif moving and all(read.state.all_begun for read in active_load.reads):
            active_load.begun = True
            reads = [read for read in active_load.reads if read.planned]
            under_way = copies(active_load)
            posted = all(read.state.fence == "posted" for read in reads)

            def ended_well() -> bool | None:
                if not all(copy.done for copy in under_way):
                    return None
                return not any(copy.error for copy in under_way) and all(map(grant_stands, reads))

            stands = ended_well if posted else None
            self._on_begun(active_load.posted, stands, under_way)

    def succeeded(self, active_load: ActiveLoad) -> Callable[[], None]:
        """The load has ended, and its tokens are in the blocks. The call that is returned logs it."""
        load, tokens = active_load.load, _num_tokens(active_load.load)
        # This thread may come to it late, see ``yield_to_engine``.
        seconds = (active_load.copied_at or self._clock()) - active_load.started
        planes = sorted({read.link.plane.name for read in active_load.reads if read.link.plane is not None})
        plane = "+".join(planes) or "none"
        posted = all(read.state.fence == "posted" for read in active_load.reads if read.planned)
        first = active_load.attempts is None
        waited = max(0.0, active_load.granted_at - active_load.started)
        estimate = TransferEstimate(seconds - waited, max(1, tokens)) if posted and first else UNKNOWN
        nbytes, milliseconds, peer = active_load.nbytes, seconds * 1e3, load.peer.engine_id[:SHORT_NAME]

        def log() -> None:
            logger.info(
                "kvferry: hand-over of %s done: %d tokens, %d bytes in %.2f ms over %s from %s%s%s",
                load.request_id, tokens, nbytes, milliseconds, plane, peer,
                ", inside the step" if load.now else "" if first else f", attempt {active_load.number}",
                ", from when P computed it" if load.step_tokens else "",
            )  # fmt: skip

        try:
            # Before the report, so that the engine takes the counts with the load: an idle engine takes no later step.
            self._stats.finished(nbytes=nbytes, milliseconds=milliseconds, plane=plane, tokens=tokens, peer=peer)
            self._count_streamed(active_load)
        finally:
            self._on_finished(FinishedLoad(active_load.posted, True, estimate))
        return log

    def failed(self, load: Load, reason: Reason, active_load: ActiveLoad | None = None) -> None:
        """The load, as it was posted, has ended, and its tokens are not in the blocks. ``active_load``: its last
        attempt, if one has begun."""
        try:
            self._stats.failed(reason.kind, short_name((active_load.load if active_load else load).peer))
            if active_load is not None:
                self._count_streamed(active_load)
        finally:
            self._on_finished(FinishedLoad(load, False))
        logger.warning(
            "kvferry: hand-over of %s failed, %d tokens not loaded: %s%s",
            load.request_id, _num_tokens(load), reason, "" if active_load is None else f" [{_stories(active_load)}]",
        )  # fmt: skip

    def _count_streamed(self, active_load: ActiveLoad) -> None:
        """What it costs D to take blocks for a prompt before P has computed it."""
        load = active_load.posted
        if load.found or load.step_tokens:
            blocks = max((len(packed) // 4 for packed in load.block_ids), default=0)
            milliseconds = (self._clock() - active_load.started) * 1e3
            self._stats.streamed(blocks=blocks, milliseconds=milliseconds)

    def not_started(self, load: Load) -> None:
        """The load was not started because of an error, which was logged where it was raised."""
        self._on_finished(FinishedLoad(load, False))


def grant_stands(read: SourceRead) -> bool:
    """Whether the grant that P posted for a read has been posted without a break since D found it, and P's process has
    not ended. Nobody withdraws the grants of a process that was killed, and its number may be another's by now: what D
    has copied by that number is P's only if P lives after the copy."""
    link = read.link
    stands = read.note is not None and read.note.is_current and link.phase is not LinkPhase.FAILED
    return stands and link.process is not None and not link.process.ended


def short_name(peer: PeerEngine) -> str:
    """How log lines and metrics name a P engine."""
    return peer.engine_id[:SHORT_NAME]


def _num_tokens(load: Load) -> int:
    return max((stop - start for start, stop in load.tokens), default=0)


def _stories(active_load: ActiveLoad) -> str:
    """The phases of the hand-over and of each of its reads, with their times."""
    reads = [f"{read.link.name}: {read.lifetime.story()}" for read in active_load.reads]
    number = [f"attempt {active_load.number}"] if active_load.number > 1 else []
    return "; ".join([*number, active_load.lifetime.story(), *reads[:MAX_STORIES]])
