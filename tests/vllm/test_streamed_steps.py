"""Prompts that leave while P's engine computes them, under vLLM's scheduler: chunked prefill, preemption, abort."""

from __future__ import annotations

import pytest
import torch

from tests.vllm.engine_group import EngineGroup
from tests.vllm.labelled import labels, prompt
from tests.vllm.stepped import PREFILL, Engine, run, settle
from tests.vllm.test_rendezvous import to_d

pytestmark = pytest.mark.vllm
IDS, STEP = prompt(300), 128
NAME = "one-name-for-both-legs"


def holds(d: Engine, request_id: str, start: int, stop: int) -> bool:
    """Whether D's blocks hold these tokens, as P has computed them."""
    tables = d.scheduler.kv_cache_manager.get_block_ids(request_id)
    if len(tables[0]) * d.block < stop:
        return False
    wanted = [labels(worker.heads, 0, IDS[:stop], 0)[:, :, start:stop] for worker in d.workers]
    return all(
        torch.equal(worker.kv(tables, start, stop), of_rank) for worker, of_rank in zip(d.workers, wanted, strict=True)
    )


def begin(p: Engine, d: Engine, *, reads_early: bool = True) -> tuple[str, str]:
    """Both legs, up to the first step of P, whose tokens D has if it reads so early."""
    leg = p.add(IDS, PREFILL | {"transfer_id": NAME})
    request_id = d.add(IDS, to_d(p, transfer_id=NAME), max_tokens=8)
    p.step()
    if reads_early:
        run([d], lambda: holds(d, request_id, 0, STEP))
    return leg, request_id


def ends_well(p: Engine, d: Engine, leg: str, request_id: str) -> None:
    run([p, d], lambda: d.answers[request_id].finish is not None and p.answers[leg].finish is not None)
    assert d.origins[request_id].theirs == len(IDS) - 1
    assert (d.answers[request_id].external, len(d.answers[request_id].tokens)) == (len(IDS), 8)
    settle(p, d)
    assert not any(worker.failed for worker in d.workers)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_the_tokens_of_each_step_leave_before_the_next_step(
    group: EngineGroup, plane: str, runner: str, ahead: int
) -> None:
    p, d = group.pair(extra={"plane": plane}, max_batched=STEP, ahead=ahead, runner=runner)
    leg, request_id = begin(p, d)
    assert p.answers[leg].finish is None and not holds(d, request_id, STEP, 2 * STEP)
    p.step()
    run([d], lambda: holds(d, request_id, 0, 2 * STEP))
    assert p.answers[leg].finish is None and not p.leases
    ends_well(p, d, leg, request_id)


@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2)])
def test_other_numbers_of_ranks(group: EngineGroup, theirs: int, ours: int) -> None:
    extra = {"plane": "tcp"}
    p, d = group.engine(0, extra, max_batched=STEP, tp=theirs), group.engine(1, extra, max_batched=STEP, tp=ours)
    ends_well(p, d, *begin(p, d))


@pytest.mark.parametrize("ahead", [0, 1])
def test_p_preempts_the_request_and_others_get_its_blocks(group: EngineGroup, ahead: int) -> None:
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, ahead=ahead)
    leg, request_id = begin(p, d)
    blocks = set(p.scheduler.kv_cache_manager.get_block_ids(leg)[0])
    p.preempt(leg)
    others = [p.add(prompt(250, seed=seed), max_tokens=2, priority=-1) for seed in (5, 6)]
    reused = set()
    while not all(p.answers[other].finish for other in others) and p.status(leg) is not None:
        p.step()
        for other in others:
            if p.status(other) is not None:
                reused |= blocks & set(p.scheduler.kv_cache_manager.get_block_ids(other)[0])
    ends_well(p, d, leg, request_id)
    assert d.computed[request_id] <= 8, "D has computed none of the prompt"


def test_p_aborts_the_request(group: EngineGroup) -> None:
    """D computes the prompt by itself."""
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP)
    leg, request_id = begin(p, d)
    p.abort(leg)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert len(d.answers[request_id].tokens) == 8 and d.computed[request_id] >= len(IDS)
    settle(p, d)


def test_d_aborts_its_request(group: EngineGroup) -> None:
    """P's lease ends with its begin."""
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP)
    leg, request_id = begin(p, d)
    d.abort(request_id)
    run([p, d], lambda: p.answers[leg].finish is not None)
    settle(p, d)
