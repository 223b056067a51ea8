"""A lease that P holds, and the messages that grant reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.pages.caches import Ids
from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.prefill_side import lease
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill
from kvferry.transport.tracing import RecordedSpan


@dataclass(slots=True)
class HeldLease:
    """A lease with the blocks it holds. ``posted``: where its posted grant lies on the grant board. Where the
    request is traced, ``begun_at`` is its begin by ``RankContext.clock``, and ``sent`` has the spans of its reads.
    ``readers``: as of ``ComputingPrompt``."""

    grant: LeaseGrant
    ids: list[Ids]
    lifetime: Lifetime[lease.Lease, lease.LeaseEvent, lease.LeaseEffect]
    posted: int | None = None
    begun_at: float = 0.0
    sent: list[RecordedSpan] = field(default_factory=list)
    readers: dict[tuple[bytes, int], PromptBlocks] = field(default_factory=dict)


def granted(
    prompt: LeaseGrant | Prefill, read: int, chunks: int = 0, block_ids: tuple[bytes, ...] = ()
) -> messages.Grant:
    """The Grant message of a read under a lease, or of a prompt that P computes."""
    return messages.Grant(
        read=read, num_tokens=prompt.num_tokens, chunks=chunks, prompt=prompt.prompt, block_ids=block_ids
    )
