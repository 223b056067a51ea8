"""The plans of P under vLLM's real scheduler: a prompt's blocks chunk by chunk, and again after a preemption."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.wire.step_plan import StepPlan, unpack_ids
from tests.vllm.engine_group import EngineGroup
from tests.vllm.labelled import prompt
from tests.vllm.stepped import PREFILL, Engine, run

pytestmark = pytest.mark.vllm


def plans_of(engine: Engine) -> list[StepPlan]:
    connector = engine.connector
    real, plans = connector.build_connector_meta, []

    def build(output: Any) -> Any:
        meta = real(output)
        plans.append(meta.plan)
        return meta

    connector.build_connector_meta = build
    return plans


def ids(packed: tuple[bytes, ...]) -> list[int]:
    return list(unpack_ids(packed[0]))


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_chunks_of_a_prompt_are_the_lease(group: EngineGroup, ahead: int) -> None:
    p, _ = group.pair(max_batched=128, ahead=ahead)
    plans = plans_of(p)
    first = p.add(prompt(400), PREFILL)
    run([p], lambda: p.answers[first].finish is not None)
    second = p.add(prompt(400), PREFILL | {"transfer_id": "again"})
    run([p], lambda: p.answers[second].finish is not None and len(p.leases) == 2)
    for request_id in (first, second):
        (prefill,) = [each for plan in plans for each in plan.prefills if each.request_id == request_id]
        chunks = [each for plan in plans for each in plan.chunks if each.token == prefill.token]
        (lease,) = [each for plan in plans for each in plan.leases if each.token == prefill.token]
        assert prefill.streams and lease.request_id == request_id and lease.params == b""
        assert [block for chunk in chunks for block in ids(chunk.block_ids)] == ids(lease.block_ids)
        ends = [chunk.stop for chunk in chunks]
        assert [chunk.start for chunk in chunks] == [prefill.found, *ends[:-1]] and ends[-1] == 400
        assert (prefill.found, len(chunks)) == ((0, 4) if request_id == first else (384, 1))


def test_preemption_takes_the_blocks_back_before_they_are_others(group: EngineGroup) -> None:
    p, _ = group.pair(max_batched=128)
    plans = plans_of(p)
    request_id = p.add(prompt(400), PREFILL)
    run([p], lambda: any(plan.chunks for plan in plans))
    p.preempt(request_id)
    before = len(plans)
    run([p], lambda: p.answers[request_id].finish is not None)
    assert [stop.ended for plan in plans for stop in plan.stops] == [False]
    assert plans[before].stops, "with the first step that may give the blocks to another request"
    restarts = [chunk for plan in plans[before:] for chunk in plan.chunks]
    assert [chunk.restarts for chunk in restarts] == [True] + [False] * (len(restarts) - 1)
    run([p], lambda: any(plan.leases for plan in plans))
    (lease,) = [each for plan in plans for each in plan.leases]
    assert [block for chunk in restarts for block in ids(chunk.block_ids)] == ids(lease.block_ids)
