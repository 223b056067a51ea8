"""What a scheduler's step says of its requests' blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.connector.errors import ProtocolError

BlockGroups = tuple[list[int], ...]


def yield_req_data(scheduler_output: Any) -> Iterator[tuple[str, BlockGroups | None, bool]]:
    """Every scheduled request: its id, its new block ids per KV cache group, whether it resumes after a preemption.

    New requests first. Of one that resumes, the block ids are all that it has; of another that runs on, those added in
    this step, or ``None``.

    Args:
        scheduler_output: with ``scheduled_new_reqs`` (``req_id``, ``block_ids``) and ``scheduled_cached_reqs``
            (``req_ids``, ``new_block_ids``, ``resumed_req_ids``), as vLLM's.

    Raises:
        ProtocolError: lists of the cached requests differ in length; before anything is yielded.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if len(cached.req_ids) != len(cached.new_block_ids):
        raise ProtocolError(f"{len(cached.req_ids)} running requests with {len(cached.new_block_ids)} lists of blocks")
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids, False
    for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield request_id, blocks, request_id in cached.resumed_req_ids
