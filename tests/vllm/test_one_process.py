"""An engine of one rank, which vLLM runs in the scheduler's process: what ends is seen with the next output, not with
that of a step that is launched after it."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

from kvferry.connector.engine import worker
from kvferry.connector.engine.load_planner import RequestPhase
from kvferry.connector.vllm import compat, hooks
from kvferry.connector.vllm.prometheus import KVFerryStats
from kvferry.connector.vllm.worker_meta import KVFerryWorkerMeta, standing_loads
from kvferry.connector.wire.step_plan import LoadEnd
from tests.handover.slow_copies import install
from tests.support.inside import steps_of
from tests.vllm.labelled import prompt
from tests.vllm.stepped import EngineGroup, eventually, loaded, settle
from tests.vllm.test_step_loads import POLICIES, add
from tests.vllm.test_streamed_steps import begin, ends_well

pytestmark = pytest.mark.vllm
IDS = prompt(300, 9)
BESIDE = {"plane": "shm", "step_hold_seconds": 0.0}


@pytest.mark.parametrize(("one_process", "steps"), [(True, 2), (False, 3)])
def test_steps_from_the_end_of_a_load_to_its_forward(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, one_process: bool, steps: int
) -> None:
    """With a step in flight, as by default on GPUs: the one that was launched before the end, and those until then."""
    copies = install(monkeypatch)
    p, d = group.pair(runner=runner, ahead=1, one_process=one_process, num_blocks=61, extra=BESIDE)
    decoding = d.add(prompt(50, 3), max_tokens=60)
    d.step()
    copies[-1].gate.clear()
    name = add(p, d, IDS, max_tokens=5)
    eventually(lambda: (d.step(), copies[-1].running > 0)[1])

    def end() -> None:
        """While the device is at the step that was launched."""
        copies[-1].gate.set()
        eventually(lambda: bool(d.thread.results.loads))
        d.device = lambda: None

    d.device = end
    count = 0
    while not d.computed[name]:
        d.step()
        count += 1
    assert count == steps and steps_of(d).seen_at_once is one_process
    loaded(None, d, name)
    d.finish(decoding)
    settle(p, d)


@POLICIES
def test_a_load_that_fails_is_told_as_well(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, policy: str
) -> None:
    copies = install(monkeypatch)
    p, d = group.pair(runner=runner, policy=policy, ahead=1, one_process=True, num_blocks=61, extra=BESIDE)
    decoding = d.add(prompt(50, 3), max_tokens=60)
    d.step()
    name = add(p, d, IDS, max_tokens=5)
    copies[-1].error = "CUDA error: out of order"
    answer = d.finish(name)
    assert answer.finish == ("error" if policy == "fail" else "length")
    assert d.loads[name] == 1 and d.computed[name] >= (len(IDS) if policy == "recompute" else 0)
    d.finish(decoding)
    settle(p, d)
    assert d.prompts["failed internal"] == 1, "with its reason"


@pytest.mark.parametrize(("one_process", "steps"), [(True, 1), (False, 2)])
def test_an_idle_engine_waits_for_p_before_it_schedules(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, one_process: bool, steps: int
) -> None:
    """Both legs at once: after a step without tokens the engine sleeps for a millisecond."""
    p, d = group.pair(one_process=one_process, max_batched=128, extra={"plane": "cma"})
    leg, request_id = begin(p, d, reads_early=False)
    d.step()
    assert d.phase(request_id) is RequestPhase.AWAITED, "it has asked"
    monkeypatch.setattr(worker, "IDLE_WAIT_SECONDS", 600.0)
    p.finish(leg)
    count = 0
    while not d.all_loads[request_id]:
        d.step()
        count += 1
    assert count == steps
    ends_well(p, d, leg, request_id)


def test_where_nothing_is_asked_before_an_output_its_step_carries_the_reports(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lacks what the recovery needs: loads go beside the steps, also once the engine has waited for P."""
    monkeypatch.setattr(hooks, "can_recover", lambda scheduler: False)
    p, d = group.pair(one_process=True, max_batched=128, extra={"plane": "cma"})
    leg, request_id = begin(p, d, reads_early=False)
    d.step()
    p.finish(leg)
    ends_well(p, d, leg, request_id)


def test_figures_come_with_the_report(group: EngineGroup) -> None:
    """The last lease of P ends between the launch of a step and the look at its output, and P steps no more."""
    p, d = group.pair(one_process=True, extra={"plane": "shm"})
    params = p.prefill(IDS)

    def end(step: object) -> None:
        p.before_update = None
        d.finish(d.add(IDS, params, max_tokens=4))
        eventually(lambda: (d.step(), bool(p.thread.results.leases))[1])

    p.before_update = end
    p.step()
    assert not p.scheduler.has_requests() and p.stats[-1].data["sent"]
    settle(p, d)


def test_a_rank_is_only_that_of_its_own_engine(group: EngineGroup) -> None:
    """In a process of several engines, vLLM has the rank of the first one for all of them."""
    p, d = group.pair()
    with p.workers[0].group():
        for engine in (d, p):
            engine.introduce()
    assert steps_of(p).seen_at_once and not steps_of(d).seen_at_once


def test_what_a_step_carries_stays_in_its_output() -> None:
    """vLLM has one output for all steps of which there is nothing to tell: it stays as it is."""
    report = KVConnectorOutput(finished_recving={"a"}, invalid_block_ids={7})
    report.kv_connector_worker_meta = KVFerryWorkerMeta({}, ends={"a": LoadEnd()})
    one = compat.with_report(EMPTY_MODEL_RUNNER_OUTPUT, report)
    assert EMPTY_MODEL_RUNNER_OUTPUT.kv_connector_output is None
    assert one.kv_connector_output == report

    def of_step(**more: Any) -> ModelRunnerOutput:
        meta = KVFerryWorkerMeta({}, standing={"b": 1})
        return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=meta, **more))

    both = compat.with_report(of_step(), report).kv_connector_output
    assert (both.finished_recving, both.invalid_block_ids) == ({"a"}, {7})
    assert standing_loads(both.kv_connector_worker_meta) == {"b": 1}
    assert both.kv_connector_worker_meta.ends.keys() == {"a"}
    figures = KVFerryStats(data={"totals": {"stale_reads": 1}})
    sent = KVConnectorOutput(finished_sending={"c"}, kv_connector_stats=figures)
    both = compat.with_report(of_step(kv_connector_stats=KVFerryStats(data=figures.data)), sent).kv_connector_output
    assert both.kv_connector_stats.data["totals"] == {"stale_reads": 2}
    assert standing_loads(both.kv_connector_worker_meta) == {"b": 1}
