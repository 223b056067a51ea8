"""D's spans of a hand-over: of its lookup, its load and the attempts."""

from __future__ import annotations

from itertools import pairwise

from kvferry.connector.decode_side.read import ActiveLoad
from kvferry.connector.pages.rank_context import MAX_TEXT
from kvferry.connector.wire.step_plan import Load, PromptLookup
from kvferry.transport.tracing import RecordedSpan


def attempt_span(attempt: ActiveLoad, error: str, end: float) -> RecordedSpan:
    """An attempt of a hand-over that has ended. Its reads must not be forgotten yet."""
    load = attempt.load
    attributes = {
        "kvferry.attempt": attempt.number,
        "kvferry.peer": load.peer.engine_id[:MAX_TEXT],
        "kvferry.plane": attempt.planes,
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


def lookup_span(wanted: PromptLookup, begin: float, error: str, end: float) -> RecordedSpan:
    """D's questions to P for a lease, which have ended; on the first rank of D."""
    attributes = {"kvferry.request_id": wanted.request_id[:MAX_TEXT], "kvferry.peer": wanted.engine_id[:MAX_TEXT]}
    return RecordedSpan("kvferry.rendezvous", begin, end, attributes, error=error)
