"""How KVFerry is found, configured, refused, combined with other connectors, and measured inside vLLM."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.plugins import load_plugins_by_group

from kvferry.connector.vllm import compat, plugin
from kvferry.connector.vllm.adapter import KVFerryConnector
from kvferry.transport.errors import ConfigError
from tests.support.inside import scheduler_half, worker_half
from tests.vllm.engine_group import PATIENT, EngineGroup, Lines
from tests.vllm.labelled import BLOCK, HEAD_SIZE, HEADS, prompt
from tests.vllm.stepped import Engine, prefill, run, settle

pytestmark = pytest.mark.vllm
IDS = prompt(100)


def hand_over(p: Engine, d: Engine, ids: list[int] = IDS) -> str:
    request_id = d.add(ids, prefill(p, ids), max_tokens=3)
    run([p, d], lambda: d.answers[request_id].finish is not None)
    return request_id


# --- found ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory._registry.pop("KVFerryConnector", None)


@pytest.mark.usefixtures("unregistered")
def test_by_name_alone_through_the_entry_point(group: EngineGroup) -> None:
    """``{"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}`` is all that a user types."""
    load_plugins_by_group("vllm.general_plugins")["kvferry"]()
    p, d = group.pair(module=None)
    assert isinstance(d.connector, KVFerryConnector)
    assert d.origins[hand_over(p, d)].theirs == 99
    settle(p, d)


@pytest.mark.usefixtures("unregistered")
def test_registered_twice_by_hand_and_by_plug_in() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVFerryConnector") is KVFerryConnector


# --- refused ----------------------------------------------------------------------------------------------------


def refusal(group: EngineGroup, kind: type[Exception], **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        group.engine(1, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"slot_byte": 1 << 20}, ("slot_byte", "did you mean 'slot_bytes'")),
        ({"plane": "rdma"}, ("plane", "rdma")),
        ({"lease_seconds": -1}, ("lease_seconds", "-1")),
        ({"side_channel_host": "0.0.0.0"}, ("side_channel_host", "all interfaces")),
        ({"side_channel_port": 1 << 20}, ("side_channel_port",)),
        ({"staging_bytes": 1 << 20, "slot_bytes": 1 << 20}, ("staging_bytes", "slots")),
    ],
)
def test_settings_that_cannot_be(group: EngineGroup, extra: dict[str, Any], words: tuple[str, ...]) -> None:
    text = refusal(group, ConfigError, extra=extra)
    assert all(word in text for word in words)


def test_a_port_in_use(group: EngineGroup) -> None:
    first = group.engine(0)
    port = scheduler_half(first).ranks[0].port
    assert str(port) in refusal(group, ConfigError, extra={"side_channel_port": port})


def test_the_default_failure_policy_is_warned_of(group: EngineGroup, lines: Lines) -> None:
    group.engine(1, policy="fail")
    assert len(lines("kv_load_failure_policy", "recompute")) == 1
    group.engine(1, policy="recompute")
    assert len(lines("kv_load_failure_policy", "recompute")) == 1


def test_026_with_several_groups_is_refused(monkeypatch: pytest.MonkeyPatch, group: EngineGroup) -> None:
    engine = group.engine(1)
    engine.kv_config.kv_cache_groups *= 2
    compat.check_config(engine.config, engine.kv_config)
    monkeypatch.setattr(compat, "HAS_TRANSFER_RESULTS", False)
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        compat.check_config(engine.config, engine.kv_config)


def test_026_with_a_window_is_refused(monkeypatch: pytest.MonkeyPatch, group: EngineGroup) -> None:
    """Its failed loads are told by block, and it goes on from the first of them, over the null blocks before."""
    engine = group.engine(1, window=64)
    engine.kv_config.kv_cache_groups = engine.kv_config.kv_cache_groups[1:]
    compat.check_config(engine.config, engine.kv_config)
    monkeypatch.setattr(compat, "HAS_TRANSFER_RESULTS", False)
    with pytest.raises(ConfigError, match=r"load of a sliding_window cache fails; run vLLM 0.32"):
        compat.check_config(engine.config, engine.kv_config)


# --- beside other connectors ------------------------------------------------------------------------------------

KVFERRY = {
    "kv_connector": "KVFerryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm.adapter",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"slot_bytes": 64 << 10, "staging_bytes": 1 << 20, **PATIENT},
}


def multi(group: EngineGroup, origin: int, *, first: bool, **bystander: Any) -> Engine:
    other = {
        "kv_connector": "Bystander",
        "kv_connector_module_path": "tests.vllm.bystander",
        "kv_role": "kv_both",
        "kv_connector_extra_config": bystander,
    }
    children = [KVFERRY, other] if first else [other, KVFERRY]
    return group.engine(origin, connector="MultiConnector", module=None, extra={"connectors": children})


@pytest.mark.parametrize("first", [True, False])
def test_as_one_of_several_children(group: EngineGroup, first: bool) -> None:
    p, d = multi(group, 0, first=first), multi(group, 1, first=first)
    assert d.origins[hand_over(p, d)].theirs == 99
    aborted = d.add(prompt(200, 1), prefill(p, prompt(200, 1)))
    d.step()
    d.abort(aborted)
    settle(p, d)
    assert d.stats, "figures pass through"


def test_another_child_is_chosen_to_load(group: EngineGroup) -> None:
    """P must hear of it: nothing of its lease will be read."""
    p, d = group.engine(0), multi(group, 1, first=False, offers=BLOCK)
    request_id = hand_over(p, d)
    assert d.connector.sub_connectors[0].chosen == 1 and not d.loads
    assert d.origins[request_id].theirs == BLOCK
    settle(p, d)


def test_chosen_before_another_child(group: EngineGroup) -> None:
    p, d = group.engine(0), multi(group, 1, first=True, offers=BLOCK)
    assert d.origins[hand_over(p, d)].theirs == 99
    assert d.connector.sub_connectors[1].chosen == 0
    settle(p, d)


def test_another_child_takes_the_handshake(group: EngineGroup, lines: Lines) -> None:
    """MultiConnector passes on what its first child tells; without our addresses nothing can be handed over."""
    p = multi(group, 0, first=False, greets=True)
    assert len(lines("list KVFerryConnector first")) == 1
    request_id = p.add(IDS, {"do_remote_decode": True})
    run([p], lambda: p.answers[request_id].finish is not None)
    assert p.answers[request_id].params is None
    settle(p)
    p = multi(group, 0, first=True, greets=True)
    assert prefill(p, IDS)


# --- measured ---------------------------------------------------------------------------------------------------


def figures(engine: Engine) -> list[dict[str, Any]]:
    """Figures as they reach the front end, in another process."""
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())) for stats in engine.stats]


def test_figures_reach_vllms_log_line_and_prometheus(group: EngineGroup) -> None:
    p, d = group.pair()
    hand_over(p, d)
    doomed = prefill(p, prompt(60, 1))
    settled_with_a_step = d.add(prompt(50, 2), max_tokens=2)
    run([p, d], lambda: d.answers[settled_with_a_step].finish is not None)
    p.close()
    request_id = d.add(prompt(60, 1), doomed)
    run([d], lambda: d.answers[request_id].finish is not None)
    settle(d)
    logged = KVConnectorLogging(d.config.kv_transfer_config)
    registry = CollectorRegistry()

    class Prom(KVConnectorProm):
        _gauge_cls = functools.partial(Gauge, registry=registry)
        _counter_cls = functools.partial(Counter, registry=registry)
        _histogram_cls = functools.partial(Histogram, registry=registry)

    prom = Prom(d.config, ["model_name", "engine"], {0: ["model", "0"]})
    for data in figures(d):
        logged.observe(data)
        prom.observe(data)
    said: list[str] = []
    logged.log(lambda text, *args: said.append(text % args))
    assert len(said) == 1
    labels = {"model_name": "model", "engine": "0"}
    rank = worker_half(d.workers[0]).rank_context
    assert rank is not None
    plane = {**labels, "plane": rank.planes[0].name}
    assert registry.get_sample_value("vllm:kvferry_handover_time_seconds_count", plane) == 1
    nbytes = registry.get_sample_value("vllm:kvferry_bytes_transferred_sum", plane)
    assert nbytes is not None and nbytes >= 100 * 2 * HEADS * 2 * HEAD_SIZE * 4
    assert registry.get_sample_value("vllm:kvferry_tokens_total", plane) == 100
    failed = [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "vllm:kvferry_num_failed_handovers_total"
    ]
    assert sum(failed) == 1


def test_figures_pass_through_multiconnector(group: EngineGroup) -> None:
    """It looks its children up by name, also where they were given by module path."""
    p, d = group.engine(0), multi(group, 1, first=True)
    hand_over(p, d)
    settle(p, d)
    logged = KVConnectorLogging(d.config.kv_transfer_config)
    for data in figures(d):
        logged.observe(data)
    said: list[str] = []
    logged.log(lambda text, *args: said.append(text % args))
    assert len(said) == 1 and "KVFerryConnector" in said[0]


def test_one_line_per_hand_over(group: EngineGroup, lines: Lines) -> None:
    p, d = group.pair()
    request_id = hand_over(p, d)
    settle(p, d)
    (line,) = lines("hand-over of", request_id)
    assert "100 tokens" in line and "bytes" in line and "ms" in line
