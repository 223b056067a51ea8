"""Prefixes that an engine offers, where vLLM's block pool does not tell when it hands a block out, as in 0.26."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool

from kvferry.connector.decode_side.load_state import LoadPhase
from kvferry.connector.wire.messages import Ask, LendPrefix
from tests.vllm.labelled import prompt
from tests.vllm.paused_transfer import PausedTransfer, in_phase, job_of
from tests.vllm.stepped import EngineGroup, run
from tests.vllm.test_prefix_reads import both, counted, source, turn

pytestmark = pytest.mark.vllm


class SilentPool(BlockPool):
    """Has what the pool of 0.26 has."""

    @property
    def unpin_blocks(self) -> None:
        raise AttributeError("unpin_blocks")


@pytest.fixture(autouse=True)
def silent_pool() -> Iterator[None]:
    with mock.patch.object(kv_cache_coordinator, "BlockPool", SilentPool):
        yield


def test_a_prefix_is_read_and_nothing_is_held(group: EngineGroup, runner: str) -> None:
    a, b = both(group, runner=runner)
    history = turn(a, prompt(100))
    name = b.add(history, source(a), max_tokens=8)
    b.finish(name)
    assert not hasattr(a.scheduler.kv_cache_manager.block_pool, "unpin_blocks")
    assert b.origins[name].theirs == 112 and a.free_blocks == a.baseline and counted(b) == {"loaded": 1}


@pytest.mark.parametrize("plane", ["cma", "shm"])
@pytest.mark.parametrize("begun", [True, False], ids=["in the middle", "before"])
def test_blocks_that_are_reused_before_the_read_has_ended(group: EngineGroup, plane: str, begun: bool) -> None:
    """The source's next request gets them, and writes into them; D computes the prompt itself."""
    a, b = both(group, {"num_blocks": 20}, extra={"plane": plane})
    history = turn(a, prompt(200))
    paused = PausedTransfer(a, reader=b, chunks=1) if begun else PausedTransfer(a, LendPrefix, Ask)
    name = b.add(history, source(a), max_tokens=8)
    run([b], lambda: job_of(b, name) is not None)
    if begun:
        in_phase(b, name, LoadPhase.MOVING, lambda job: job.nbytes > 0)
    a.finish(a.add(prompt(250, 1)))
    paused.open()
    b.finish(name)
    assert b.origins[name].theirs == 0 and counted(b) == {"failed expired": 1}
    run([a], lambda: counted(a)["lent reused" if begun else "lent gone"] == 1)


def test_a_reset_takes_all_back(group: EngineGroup) -> None:
    a, b = both(group)
    history = turn(a, prompt(100))
    assert a.scheduler.reset_prefix_cache() and a.connector.has_pending_push_work()
    a.step()
    name = b.add(history, source(a), max_tokens=8)
    b.finish(name)
    assert b.origins[name].theirs == 0
