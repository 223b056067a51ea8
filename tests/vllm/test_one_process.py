"""An engine of one rank, which vLLM runs in the scheduler's process; of another release; a step without a hand-over."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import vllm
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput

import kvferry.connector.config
from kvferry.connector.scheduler.load_planner import RequestPhase
from kvferry.connector.step_loads import step_hold
from kvferry.connector.vllm import compat, hooks
from kvferry.connector.vllm.prometheus import KVFerryStats
from kvferry.connector.vllm.worker_meta import KVFerryWorkerMeta
from kvferry.connector.wire.step_plan import LoadEnd
from kvferry.connector.worker import worker
from kvferry.transport import wake
from kvferry.transport.wake import ShortSwitchInterval
from tests.handover.slow_copies import install
from tests.support.fork_server import ROOT
from tests.support.inside import steps_of
from tests.support.turns import LineCount
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import ROOM, Engine, EngineGroup, eventually, loaded, run, settle, tiny_model
from tests.vllm.test_rendezvous import begin, loads_all
from tests.vllm.test_step_loads import POLICIES, add

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
    loads_all(p, d, leg, request_id)


def test_where_nothing_is_asked_before_an_output_its_step_carries_the_reports(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lacks what the recovery needs: loads go beside the steps, also once the engine has waited for P."""
    monkeypatch.setattr(hooks, "can_recover", lambda scheduler: False)
    p, d = group.pair(one_process=True, max_batched=128, extra={"plane": "cma"})
    leg, request_id = begin(p, d, reads_early=False)
    d.step()
    p.finish(leg)
    loads_all(p, d, leg, request_id)


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
    assert not p.scheduler.has_requests() and p.stats[-1].data["counts"]["bytes_sent"]
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
        meta = KVFerryWorkerMeta(ends={"b": LoadEnd()})
        return ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=meta, **more))

    both = compat.with_report(of_step(), report).kv_connector_output
    assert (both.finished_recving, both.invalid_block_ids) == ({"a"}, {7})
    assert both.kv_connector_worker_meta.ends.keys() == {"a", "b"}
    figures = KVFerryStats(data={"counts": {"num_stale_reads": {"": 1}}})
    sent = KVConnectorOutput(finished_sending={"c"}, kv_connector_stats=figures)
    both = compat.with_report(of_step(kv_connector_stats=KVFerryStats(data=figures.data)), sent).kv_connector_output
    assert both.kv_connector_stats.data["counts"] == {"num_stale_reads": {"": 2}}
    assert both.kv_connector_worker_meta.ends.keys() == {"b"}


LENGTHS = (2, BLOCK + 1, 250)


def load(d: Engine, ids: Sequence[int], params: dict[str, Any]) -> int | None:
    """Tokens that vLLM counts as loaded. Fails where the first forward reads another prompt, or KV of D's own."""
    return loaded(None, d, d.add(ids, params, max_tokens=8)).external


def end(engine: Engine) -> dict[str, Any]:
    """What there was, when no request, load or lease is left."""
    settle(engine)
    failed, loads, leases = engine.failed | engine.fallen_loads, sum(engine.all_loads.values()), len(engine.leases)
    return {"loads": loads, "leases": leases, "prompts": dict(engine.prompts), "failed": len(failed)}


def serve(calls: Connection, folder: Path) -> None:
    """Does with an engine of the release that is imported here what the test says."""
    step_hold.PATIENCE_SECONDS = 60.0
    with mock.patch("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look()):
        engine = EngineGroup(tiny_model(folder / "tiny")).engine(1, extra=ROOM)
    calls.send(vllm.__version__)
    while True:
        function, *arguments = calls.recv()
        calls.send(function(engine, *arguments))


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Calls a function with an engine of the release that is installed."""
    if not Path(vllm.__file__).parents[1].name.startswith(".vllm-"):
        pytest.skip("make test-vllm, which runs another release than the one that is installed, runs this")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".typing"), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    ours, theirs = Pipe()
    command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(tmp_path)]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
    theirs.close()
    with process, ours:
        assert ours.recv() != vllm.__version__, "both engines would be of one release"

        def call(*what: Any) -> Any:
            ours.send(what)
            return ours.recv()

        yield call
        process.kill()


def test_engines_of_two_releases_hand_over(group: EngineGroup, other: Callable[..., Any]) -> None:
    engine = group.engine(0, extra=ROOM)

    def here(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(engine, *arguments)

    for seed, (p, d) in enumerate([(here, other), (other, here)]):
        for tokens in LENGTHS:
            ids = prompt(tokens, 10 * tokens + seed)
            assert d(load, ids, p(Engine.prefill, ids)) in (tokens - 1, tokens)
    for side in (here, other):
        assert side(end) == {"loads": 3, "leases": 3, "prompts": {"loaded": 3}, "failed": 0}


if __name__ == "__main__":
    with Connection(int(sys.argv[1])) as from_test:
        serve(from_test, Path(sys.argv[2]))
pytest.importorskip("vllm")
PRODUCT = str(Path(kvferry.connector.config.__file__).parent)
MAX_LINES = {False: 146, True: 163}
"""Of KVFerry in one step, both halves, ``True`` where the only rank runs in the scheduler's process: so many on Python
3.11. Without a reason in the same change this bound does not grow."""


@pytest.mark.parametrize("one_process", [False, True])
def test_a_step_that_hands_nothing_over_executes_few_lines(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, one_process: bool
) -> None:
    monkeypatch.setattr(wake, "HELD_UP_SECONDS", math.inf)  # a step has no hold-up of the host to tell
    engine: Engine = group.engine(0, ahead=1, one_process=one_process)
    engine.add(list(range(2, 40)), max_tokens=64)
    for _ in range(6):
        engine.step()
    counts = []
    for _ in range(8):
        with LineCount(PRODUCT) as lines:
            engine.step()
        counts.append(lines.count)
    settle(engine)
    assert 0 < max(counts) <= MAX_LINES[one_process], counts


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The interval of a process of its own: simulated ranks of other tests, which never end, may want it short."""
    monkeypatch.setattr(ShortSwitchInterval, "wanted", [])
    found = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    yield sys.getswitchinterval()
    sys.setswitchinterval(found)


def test_the_switch_interval_is_short_only_while_something_is_handed_over(group: EngineGroup, before: float) -> None:
    p, d = group.engine(0), group.engine(1)
    eventually(lambda: sys.getswitchinterval() == before)
    params = p.prefill(list(range(2, 60)))
    assert sys.getswitchinterval() < before, "P holds a lease"
    d.add(list(range(2, 60)), params)
    run([p, d], lambda: p.idle and d.idle)
    eventually(lambda: sys.getswitchinterval() == before)


def test_an_engine_that_has_ended_leaves_the_interval_alone(group: EngineGroup, before: float) -> None:
    p = group.engine(0)
    p.prefill(list(range(2, 60)))
    assert sys.getswitchinterval() < before
    for each in p.workers:
        each.connector.shutdown()
    eventually(lambda: sys.getswitchinterval() == before)
    p.prefill(list(range(2, 50)))
    assert sys.getswitchinterval() == before


def test_the_interval_is_restored_when_the_last_one_does(before: float) -> None:
    one, two = ShortSwitchInterval(1e-4), ShortSwitchInterval(2e-5)
    one.shorten()
    two.shorten()
    two.shorten()
    assert sys.getswitchinterval() == pytest.approx(2e-5)
    two.restore()
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    one.restore()
    one.restore()
    assert sys.getswitchinterval() == pytest.approx(before)
