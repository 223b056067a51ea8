"""The spans of one hand-over: D's of its rendezvous, its load and the attempts, P's of its lease and the reads.

Each is made of the history of a lifetime that has ended. Phases are spans within it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.connector.protocol.state_machine import Step
from kvferry.connector.protocol.step_plan import ID_BYTES, Load, Rendezvous
from kvferry.connector.tracing import RecordedSpan
from kvferry.connector.transfer.active_load import ActiveLoad
from kvferry.connector.transfer.held_lease import HeldLease
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.sender import OutgoingRead

MAX_READS = 32
"""Reads of one lease that have spans of their own. Peers may ask for any number."""
MAX_TEXT = 256
"""Characters of a text in a span that a peer or a client has chosen."""


def record(rank_context: RankContext, traceparent: str, span: Callable[[], RecordedSpan], zero: int) -> None:
    """Make a span within the one that ``traceparent`` names, if there are traces. ``zero``: ``time_of_zero`` of the
    transfer thread's clock. Raises nothing: what is traced goes on without its span."""
    if rank_context.tracer is None or not traceparent:
        return
    try:
        rank_context.tracer.record(span(), traceparent, zero)
    except Exception:
        lines = rank_context.log
        lines.exception("span", "kvferry: unexpected error with a span of %s", traceparent)


def phases(history: tuple[Step, ...], end: float) -> list[RecordedSpan]:
    """A span for each phase of a lifetime; the phases at its end take no time and have none."""
    ends = [step.at for step in history[1:]] + [end]
    spans = [RecordedSpan(step.phase, step.at, at, {}) for step, at in zip(history, ends, strict=True)]
    return spans[:-1]


def attempt_span(attempt: ActiveLoad, error: str, now: float) -> RecordedSpan:
    """An attempt of a hand-over that has ended. Its reads must not be forgotten yet."""
    load = attempt.load
    planes = sorted({read.link.plane.name for read in attempt.reads if read.link.plane is not None})
    history = attempt.lifetime.history
    attributes = {
        "kvferry.attempt": attempt.number,
        "kvferry.peer": load.peer.engine_id[:MAX_TEXT],
        "kvferry.plane": "+".join(planes) or "none",
        "kvferry.bytes": attempt.nbytes,
        "kvferry.reads": len(attempt.reads),
    }
    return RecordedSpan("kvferry.attempt", history[0].at, now, attributes, phases(history, now), error)


def handover_span(load: Load, attempts: list[RecordedSpan], error: str, now: float) -> RecordedSpan:
    """A hand-over that has ended, on one rank of D."""
    attributes = {
        "kvferry.request_id": load.request_id[:MAX_TEXT],
        "kvferry.tokens": max((stop - start for start, stop in load.tokens), default=0),
        "kvferry.inside_step": load.now,
        "kvferry.attempts": len(attempts),
    }
    for name in ("kvferry.peer", "kvferry.plane", "kvferry.bytes"):
        attributes |= {name: attempts[-1].attributes[name]} if attempts else {}
    begin = attempts[0].begin if attempts else now
    return RecordedSpan("kvferry.handover", begin, now, attributes, attempts, error)


def sending_span(outgoing: OutgoingRead, now: float) -> RecordedSpan:
    """A read that P has sent, or has stopped to send."""
    history = outgoing.lifetime.history
    attributes = {
        "kvferry.peer": outgoing.session.engine_id[:MAX_TEXT],
        "kvferry.bytes": outgoing.nbytes,
        "kvferry.bytes_while_computing": outgoing.early,
        "kvferry.chunks": outgoing.lifetime.state.chunks,
    }
    return RecordedSpan("kvferry.send", history[0].at, now, attributes)


def lease_span(held: HeldLease, reason: str, now: float) -> RecordedSpan:
    """A lease that has ended, on one rank of P."""
    grant = held.grant
    attributes = {
        "kvferry.request_id": grant.request_id[:MAX_TEXT],
        "kvferry.tokens": grant.num_tokens,
        "kvferry.blocks": sum(map(len, grant.block_ids)) // ID_BYTES,
        "kvferry.end": reason,
    }
    error = "" if reason == "released" else f"the lease ended by time ({reason})"
    begin = held.lifetime.history[0].at
    return RecordedSpan("kvferry.lease", begin, now, attributes, held.sent, error)


def rendezvous_span(wanted: Rendezvous, history: tuple[Step, ...], now: float) -> RecordedSpan:
    """D's questions to P for a lease, which have ended; on the first rank of D."""
    attributes = {"kvferry.request_id": wanted.request_id[:MAX_TEXT], "kvferry.peer": wanted.engine_id[:MAX_TEXT]}
    error = "P could not be asked" if history[-1].event == "PeerFailed" else ""
    return RecordedSpan("kvferry.rendezvous", history[0].at, now, attributes, phases(history, now), error)
