"""P's spans of a hand-over: of its lease, and of the reads that it sends."""

from __future__ import annotations

from kvferry.connector.pages.traces import MAX_TEXT
from kvferry.connector.prefill_side.lease import Lease
from kvferry.connector.prefill_side.send import OutgoingRead
from kvferry.connector.wire.step_plan import ID_BYTES
from kvferry.transport.tracing import RecordedSpan

MAX_READS = 32
"""Reads of one lease that have spans of their own. Peers may ask for any number."""


def sending_span(outgoing: OutgoingRead, end: float) -> RecordedSpan:
    """A read that P has sent, or has stopped to send."""
    attributes = {
        "kvferry.peer": outgoing.session.engine_id[:MAX_TEXT],
        "kvferry.bytes": outgoing.nbytes,
        "kvferry.bytes_while_computing": outgoing.early,
        "kvferry.chunks": outgoing.chunks,
    }
    return RecordedSpan("kvferry.send", outgoing.begun_at, end, attributes)


def lease_span(lease: Lease, reason: str, end: float) -> RecordedSpan:
    """A lease that has ended, on one rank of P."""
    grant = lease.grant
    attributes = {
        "kvferry.request_id": grant.request_id[:MAX_TEXT],
        "kvferry.tokens": grant.num_tokens,
        # Regions of one block table share its blocks.
        "kvferry.blocks": sum(map(len, set(lease.block_ids))) // ID_BYTES,
        "kvferry.end": reason,
    }
    error = "" if reason == "released" else f"the lease ended by time ({reason})"
    begin = min([lease.begun_at, *(sent.begin for sent in lease.sent)])  # P may send while it computes
    return RecordedSpan("kvferry.lease", begin, end, attributes, lease.sent, error)
