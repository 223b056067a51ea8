"""Prompts that leave while P's engine computes them, under vLLM's scheduler: chunked prefill, preemption, abort."""

from __future__ import annotations

import pytest
import torch

from kvferry.connector.prefill_side import lease
from tests.support.inside import board_of, producer_of, prompts_of
from tests.vllm.labelled import labels, prompt
from tests.vllm.stepped import PREFILL, Engine, EngineGroup, eventually, loaded, run, settle

pytestmark = pytest.mark.vllm
IDS, STEP = prompt(300), 128
NAME = "one-name-for-both-legs"
AHEAD = pytest.mark.parametrize("ahead", [0, 1])


def holds(d: Engine, request_id: str, start: int, stop: int) -> bool:
    """Whether D's blocks hold these tokens, as P has computed them."""
    tables = d.block_tables(request_id)
    if len(tables[0]) * d.block < stop:
        return False
    wanted = [labels(worker.heads, 0, IDS[:stop], 0)[:, :, start:stop] for worker in d.workers]
    return all(
        torch.equal(worker.kv(tables, start, stop), of_rank) for worker, of_rank in zip(d.workers, wanted, strict=True)
    )


def begin(p: Engine, d: Engine, *, reads_early: bool = True) -> tuple[str, str]:
    """Both legs, up to the first step of P, whose tokens D has if it reads so early."""
    leg = p.add(IDS, PREFILL | {"transfer_id": NAME})
    request_id = d.add(IDS, p.named(transfer_id=NAME), max_tokens=8)
    p.step()
    if reads_early:
        run([d], lambda: holds(d, request_id, 0, STEP))
    return leg, request_id


def ends_well(p: Engine, d: Engine, leg: str, request_id: str) -> None:
    assert loaded(p, d, request_id).external == len(IDS)
    p.finish(leg)
    settle(p, d)
    assert not d.failed


@AHEAD
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


@AHEAD
def test_p_preempts_the_request_and_others_get_its_blocks(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(lease, "PREEMPTED_SECONDS", 600.0)
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, ahead=ahead)
    leg, request_id = begin(p, d)
    p.preempt(leg)
    others = [p.add(prompt(250, seed=seed), max_tokens=2, priority=-1) for seed in (5, 6)]
    while not all(p.answers[other].finish for other in others) and p.status(leg) is not None:
        p.step()
    ends_well(p, d, leg, request_id)
    assert d.computed[request_id] <= 8, "D has computed none of the prompt"


def test_p_aborts_the_request(group: EngineGroup) -> None:
    """D computes the prompt by itself."""
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP)
    leg, request_id = begin(p, d)
    p.abort(leg)
    assert d.finish(request_id, beside=[p]).finish == "length" and d.computed[request_id] >= len(IDS)
    settle(p, d)


def test_a_forward_that_raises_posts_no_grant(group: EngineGroup) -> None:
    """The V1 model runner ends the connector's step in a ``finally``, and P's engine ends later than that."""
    p, _ = group.pair(extra={"plane": "cma"}, runner="v1", max_batched=512)

    def breaks() -> None:
        raise MemoryError("planted")

    p.device = breaks
    p.add(IDS, PREFILL | {"transfer_id": NAME})
    with pytest.raises(MemoryError, match="planted"):
        p.step()
    producer = producer_of(p)

    def seen() -> bool:
        """The step has ended for KVFerry, one way or the other."""
        board, prompts = board_of(producer), list(prompts_of(producer).values())
        return bool(board.posted or (prompts and prompts[0].blocks is not None and prompts[0].blocks.lost))

    eventually(seen)
    assert not board_of(producer).posted
