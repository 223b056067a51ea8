"""A forward of P that raises an error has computed nothing, whatever vLLM calls while the error leaves it."""

from __future__ import annotations

import pytest

from tests.support.inside import board_of, producer_of, prompts_of
from tests.vllm.engine_group import EngineGroup
from tests.vllm.stepped import eventually, transfer_thread_of
from tests.vllm.test_rendezvous import IDS, TO_P

pytestmark = pytest.mark.vllm


def test_a_forward_that_raises_posts_no_grant(group: EngineGroup) -> None:
    """The V1 model runner ends the connector's step in a ``finally``, and P's engine ends later than that."""
    p, _ = group.pair(extra={"plane": "cma"}, runner="v1", max_batched=512)

    def breaks() -> None:
        raise MemoryError("planted")

    p.device = breaks
    p.add(IDS, TO_P)
    with pytest.raises(MemoryError, match="planted"):
        p.step()
    producer = producer_of(transfer_thread_of(p))

    def seen() -> bool:
        """The step has ended for KVFerry, one way or the other."""
        board, prompts = board_of(producer), list(prompts_of(producer).values())
        return bool(board.posted or (prompts and prompts[0].blocks is not None and prompts[0].blocks.lost))

    eventually(seen)
    assert not board_of(producer).posted
