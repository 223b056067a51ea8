"""Spans of a hand-over. Times are those of ``RankContext.clock``; those of lifetimes advance once in each turn."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.connector.pages.rank_context import RankContext
from kvferry.transport.tracing import RecordedSpan, time_of_zero

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
