"""The spans of one hand-over: D's of its rendezvous, its load and the attempts, P's of its lease and the reads.

Times are those of ``RankContext.clock``. The times of lifetimes are none: they advance once in each turn of the thread.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from kvferry.connector.protocol.step_plan import ID_BYTES, Load, Rendezvous
from kvferry.connector.transfer.active_load import ActiveLoad
from kvferry.connector.transfer.held_lease import HeldLease
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.sender import OutgoingRead
from kvferry.transport.tracing import RecordedSpan, time_of_zero

MAX_READS = 32
"""Reads of one lease that have spans of their own. Peers may ask for any number."""
MAX_TEXT = 256
"""Characters of a text in a span that a peer or a client has chosen."""


def record(rank_context: RankContext, traceparent: str, span: Callable[[], RecordedSpan]) -> None:
    """Make a span within the one that ``traceparent`` names, if there are traces. Raises nothing: what is traced goes
    on without its span."""
    if rank_context.tracer is None or not traceparent:
        return
    try:
        rank_context.tracer.record(span(), traceparent, time_of_zero(rank_context.clock()))
    except Exception:
        lines = rank_context.log
        lines.exception("span", "kvferry: unexpected error with a span of %s", traceparent)


def attempt_span(attempt: ActiveLoad, error: str, end: float) -> RecordedSpan:
    """An attempt of a hand-over that has ended. Its reads must not be forgotten yet."""
    load = attempt.load
    planes = sorted({read.link.plane.name for read in attempt.reads if read.link.plane is not None})
    attributes = {
        "kvferry.attempt": attempt.number,
        "kvferry.peer": load.peer.engine_id[:MAX_TEXT],
        "kvferry.plane": "+".join(planes) or "none",
        "kvferry.bytes": attempt.nbytes,
        "kvferry.reads": len(attempt.reads),
    }
    steps = [RecordedSpan(phase, begin, then, {}) for (begin, phase), (then, _) in pairwise(attempt.phases)]
    return RecordedSpan("kvferry.attempt", attempt.phases[0][0], end, attributes, steps, error)


def handover_span(load: Load, attempts: list[RecordedSpan], error: str, end: float) -> RecordedSpan:
    """A hand-over that has ended, on one rank of D."""
    attributes = {
        "kvferry.request_id": load.request_id[:MAX_TEXT],
        "kvferry.tokens": max((stop - start for start, stop in load.tokens), default=0),
        "kvferry.inside_step": load.now,
        "kvferry.attempts": len(attempts),
    }
    for name in ("kvferry.peer", "kvferry.plane", "kvferry.bytes"):
        attributes |= {name: attempts[-1].attributes[name]} if attempts else {}
    begin = attempts[0].begin if attempts else end
    return RecordedSpan("kvferry.handover", begin, end, attributes, attempts, error)


def sending_span(outgoing: OutgoingRead, end: float) -> RecordedSpan:
    """A read that P has sent, or has stopped to send."""
    attributes = {
        "kvferry.peer": outgoing.session.engine_id[:MAX_TEXT],
        "kvferry.bytes": outgoing.nbytes,
        "kvferry.bytes_while_computing": outgoing.early,
        "kvferry.chunks": outgoing.lifetime.state.chunks,
    }
    return RecordedSpan("kvferry.send", outgoing.begun_at, end, attributes)


def lease_span(held: HeldLease, reason: str, end: float) -> RecordedSpan:
    """A lease that has ended, on one rank of P."""
    grant = held.grant
    attributes = {
        "kvferry.request_id": grant.request_id[:MAX_TEXT],
        "kvferry.tokens": grant.num_tokens,
        "kvferry.blocks": sum(map(len, set(grant.block_ids)))
        // ID_BYTES,  # regions of one block table share its blocks
        "kvferry.end": reason,
    }
    error = "" if reason == "released" else f"the lease ended by time ({reason})"
    begin = min([held.begun_at, *(sent.begin for sent in held.sent)])  # P may send while it computes
    return RecordedSpan("kvferry.lease", begin, end, attributes, held.sent, error)


def rendezvous_span(wanted: Rendezvous, begin: float, error: str, end: float) -> RecordedSpan:
    """D's questions to P for a lease, which have ended; on the first rank of D."""
    attributes = {"kvferry.request_id": wanted.request_id[:MAX_TEXT], "kvferry.peer": wanted.engine_id[:MAX_TEXT]}
    return RecordedSpan("kvferry.rendezvous", begin, end, attributes, error=error)
