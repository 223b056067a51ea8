"""vLLM's side of the contract: the connector interface of each supported release, and the order of its calls.

``python tests/vllm/test_contract.py`` prints the interface of the vLLM that is imported, for a new release.
"""

from __future__ import annotations

import copy
import inspect
import json
import multiprocessing
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator as TheirAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry.connector.step_loads.step_loads import StepLoads, StepOutcome
from kvferry.connector.vllm import compat
from kvferry.connector.vllm.adapter import KVFerryConnector
from kvferry.connector.vllm.worker_meta import KVFerryWorkerMeta, load_ends
from kvferry.connector.wire.step_plan import Load, LoadEnd, PeerEngine, pack_ids
from kvferry.connector.worker.aggregator import KVOutputAggregator
from kvferry.transport.errors import ConfigError
from tests.support.inside import scheduler_half
from tests.vllm.labelled import prompt
from tests.vllm.releases import COMPILED, RELEASE
from tests.vllm.stepped import KVFERRY, Engine, EngineGroup, hand_over, loaded, run, settle

pytestmark = pytest.mark.vllm
API = Path(__file__).with_name("connector_api") / f"{'.'.join(map(str, RELEASE))}.json"
IDS = prompt(100)


def surface() -> dict[str, str]:
    """Public methods of vLLM's connector classes, with their parameters and types."""
    found = {}
    for base in (KVConnectorBase_V1, SupportsHMA):
        for name, member in inspect.getmembers(base):
            if name.startswith("_") or not (callable(member) or isinstance(member, property)):
                continue
            found[f"{base.__name__}.{name}"] = "property" if isinstance(member, property) else signature(member)
    return found


def signature(member: Any) -> str:
    return str(inspect.signature(member)).replace("vllm.distributed.kv_transfer.kv_connector.v1.", "")


@pytest.mark.skipif(not API.exists(), reason=f"no list of the interface of vLLM {vllm.__version__}")
def test_vllms_connector_interface_is_the_one_we_know() -> None:
    """An upgrade that adds, drops or changes a method shall be read before it is trusted."""
    assert surface() == json.loads(API.read_text())


def test_our_methods_take_what_vllm_passes() -> None:
    for base in (KVConnectorBase_V1, SupportsHMA):
        for name in (full.partition(".")[2] for full in surface() if full.startswith(f"{base.__name__}.")):
            theirs, ours = getattr(base, name), getattr(KVFerryConnector, name)
            assert isinstance(theirs, property) == isinstance(ours, property), name
            if not isinstance(ours, property):
                parameters = list(inspect.signature(theirs).parameters)
                assert list(inspect.signature(ours).parameters)[: len(parameters)] == parameters, name
    assert not inspect.isabstract(KVFerryConnector)


def test_the_hooks_that_kvferry_overrides_are_vllms() -> None:
    """A method of a name that no release has is never called."""
    later = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"} if RELEASE < (0, 33) else set()
    known = {name.partition(".")[2] for name in surface()}
    ours = {name for name in vars(KVFerryConnector) if not name.startswith("_")}
    assert ours - known == later | {"stepping_alone", "before_step"}


def test_what_differs_between_releases_is_known() -> None:
    assert compat.TELLS_OF_SLEEP is (RELEASE >= (0, 33))


def test_what_is_left_out_with_a_release_exists_and_is_told() -> None:
    """A name that no test has leaves nothing out."""
    tests = {path.stem: path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}
    known = {*tests, *re.findall(r"^def (test_\w+)", "".join(tests.values()), re.MULTILINE)}
    assert known >= COMPILED.keys()
    page = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    assert not [name for name in COMPILED if f"::{name}`" not in page]


def moves(p: Engine, d: Engine) -> None:
    """A hand-over, of a prompt of which neither has anything."""
    for engine in (p, d):
        engine.scheduler.reset_prefix_cache()
    request_id = hand_over(p, d, IDS, max_tokens=3)
    assert d.all_loads[request_id] == 1
    settle(p, d)


# --- sleep mode ---------------------------------------------------------------------------------------------------


def sleep(engine: Engine) -> None:
    """What vLLM's workers do when the engine goes to sleep: the pages are gone."""
    for worker in engine.workers:
        worker.connector.unregister_kv_caches()
        for cache in worker.caches.values():
            cache.fill_(-1.0)


def wake(engine: Engine) -> None:
    """As 0.33's workers, and then its engine core, which tells the scheduler the workers' addresses anew."""
    for worker in engine.workers:
        worker.connector.restore_kv_caches()
    engine.introduce()


@pytest.mark.parametrize("tp", [1, 2])
def test_engines_sleep_and_wake(group: EngineGroup, tp: int) -> None:
    p, d = group.engine(0, tp=tp), group.engine(1)
    moves(p, d)
    other = prompt(100, 1)
    doomed = p.prefill(other)
    sleep(p)
    run([p], lambda: p.idle)  # its leases have ended
    request_id = d.add(other, doomed, max_tokens=3)
    d.finish(request_id)
    assert d.computed[request_id] >= len(other), "on D, from the start"
    wake(p)
    moves(p, d)
    sleep(d)
    wake(d)
    moves(p, d)


def test_caches_may_be_registered_anew(group: EngineGroup) -> None:
    """The former life of the rank ends, and the model runner's method is wrapped once."""

    class PretendModelRunner:
        def execute_model(self, step: Any) -> None: ...

        def register(self, worker: Any) -> Any:
            worker.connector.register_kv_caches(worker.caches)
            return self.execute_model

    p, d = group.engine(0), group.engine(1)
    moves(p, d)
    runner, (worker,) = PretendModelRunner(), p.workers
    threads = threading.active_count()
    wrapped = runner.register(worker)
    assert wrapped != type(runner).execute_model.__get__(runner)
    assert runner.register(worker) is wrapped and threading.active_count() <= threads
    p.introduce()
    moves(p, d)


def test_sleep_mode_is_refused_where_vllm_does_not_tell_of_it(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = group.engine(0)
    monkeypatch.setattr(engine.config.model_config, "enable_sleep_mode", True)
    if compat.TELLS_OF_SLEEP:
        assert KVFerryConnector.supports_sleep_mode(engine.config.kv_transfer_config)
        compat.check_config(engine.config, engine.kv_config)
        monkeypatch.setattr(compat, "TELLS_OF_SLEEP", False)
    with pytest.raises(ConfigError, match=r"leave out --enable-sleep-mode, or run vLLM 0\.33"):
        compat.check_config(engine.config, engine.kv_config)


@pytest.mark.skipif(RELEASE < (0, 33), reason="sleep mode reaches connectors from vLLM 0.33 on")
def test_multiconnector_passes_sleep_on(group: EngineGroup) -> None:
    p, d = group.multi(0, KVFERRY), group.multi(1, KVFERRY)
    kind = KVConnectorFactory.get_connector_class(p.config.kv_transfer_config)
    assert kind.supports_sleep_mode(p.config.kv_transfer_config)
    moves(p, d)
    sleep(p)
    wake(p)
    moves(p, d)


def test_the_class_is_found_by_the_name_that_others_know(group: EngineGroup) -> None:
    p, d = (
        group.engine(origin, connector="NixlConnector", module="kvferry.connector.vllm.as_nixl") for origin in (0, 1)
    )
    kind = KVConnectorFactory.get_connector_class(p.config.kv_transfer_config)
    assert issubclass(kind, KVFerryConnector) and kind.__name__ == "NixlConnector"
    moves(p, d)


# --- drain --------------------------------------------------------------------------------------------------------


def test_a_draining_p_serves_the_leases_that_it_holds(group: EngineGroup) -> None:
    p, d = group.pair()
    half = scheduler_half(p)
    held = p.prefill(IDS)
    assert half.leases_held == 1
    half.drain()
    assert p.finish(p.add(prompt(60, 1), {"do_remote_decode": True})).params is None, "D prefills it"
    loaded(p, d, d.add(IDS, held, max_tokens=2))
    settle(p, d)
    assert half.leases_held == 0, "now the engine may end"
    half.stop_draining()
    assert p.prefill(prompt(60, 2))


# --- fault tolerance ----------------------------------------------------------------------------------------------


def test_a_step_that_failed_is_in_flight_no_longer(group: EngineGroup) -> None:
    """0.33 goes on after a worker has failed: no output comes of its step, and the reports of others come in one of its
    own. Each step still counts once."""
    d = group.engine(1)
    steps = scheduler_half(d).steps
    assert steps is not None
    d.step()
    d.scheduler.schedule()  # its output never comes
    d.scheduler.update_from_output(SchedulerOutput.make_empty(), ModelRunnerOutput([], {}, []))
    assert steps.count == 1, "an output that is none of our steps' says nothing"
    d.step()
    assert steps.count == 0


def test_a_salvaged_report_says_in_the_next_step_which_loads_stood() -> None:
    """It leaves the worker that failed when its loads are final, and is merged with the reports of the next step."""
    load = Load("inside", bytes(16), PeerEngine("p", 1, 1, 1.0, ()), (pack_ids([1]),), ((0, 16),), now=True)
    (posted,) = StepLoads().post([load])
    posted.begun()
    outcome = StepOutcome([posted], lambda: True, lambda: None)
    report = KVConnectorOutput(kv_connector_worker_meta=KVFerryWorkerMeta({}, outcome))
    assert not report.is_empty(), "vLLM salvages it"
    ended = threading.Timer(0.05, posted.ended, (LoadEnd(),))
    ended.start()
    here, there = multiprocessing.Pipe()
    here.send(report)
    report = there.recv()
    ended.join()
    ours, theirs = KVOutputAggregator(1), TheirAggregator(1)
    for aggregator in (ours, theirs):
        if not hasattr(aggregator, "ft_defer_kv_connector_outputs"):
            continue
        aggregator.ft_defer_kv_connector_outputs([copy.deepcopy(report), None])
        merged = aggregator.aggregate([ModelRunnerOutput([], {}, [], kv_connector_output=KVConnectorOutput())])
        assert merged is not None and merged.kv_connector_output is not None
        assert load_ends(merged.kv_connector_output.kv_connector_worker_meta) == {"inside": LoadEnd()}


def test_cuda_graphs_of_the_whole_forward_stay() -> None:
    assert not KVFerryConnector.requires_piecewise_for_cudagraph({})


if __name__ == "__main__":
    print(json.dumps(surface(), indent=1, sort_keys=True))
