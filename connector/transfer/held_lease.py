"""A lease that P holds, and the messages that grant reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.protocol import lease, messages
from kvferry.connector.protocol.state_machine import Lifetime
from kvferry.connector.protocol.step_plan import LeaseGrant, Prefill
from kvferry.connector.tracing import RecordedSpan
from kvferry.connector.transfer.caches import Ids


@dataclass(slots=True)
class HeldLease:
    """A lease with the blocks it holds. ``posted``: where its posted grant lies on the grant board. ``sent``: the spans
    of reads that have ended, where the request is traced."""

    grant: LeaseGrant
    ids: list[Ids]
    lifetime: Lifetime[lease.Lease, lease.LeaseEvent, lease.LeaseEffect]
    posted: int | None = None
    sent: list[RecordedSpan] = field(default_factory=list)


def granted(
    prompt: LeaseGrant | Prefill, read: int, chunks: int = 0, block_ids: tuple[bytes, ...] = ()
) -> messages.Grant:
    """The Grant message of a read under a lease, or of a prompt that P computes."""
    return messages.Grant(
        read=read, num_tokens=prompt.num_tokens, chunks=chunks, prompt=prompt.prompt, block_ids=block_ids
    )
