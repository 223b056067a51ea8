"""How KVFerry is found, configured, refused, combined with other connectors, and measured inside vLLM."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.plugins import load_plugins_by_group

from kvferry.connector.vllm import compat, hooks, plugin
from kvferry.connector.vllm.adapter import KVFerryConnector
from kvferry.transport.errors import ConfigError
from tests.support.inside import scheduler_half, worker_half
from tests.vllm.labelled import HEAD_SIZE, HEADS, prompt
from tests.vllm.stepped import KVFERRY, Engine, EngineGroup, Lines, hand_over, settle

pytestmark = pytest.mark.vllm
IDS = prompt(100)


# --- found --------------------------------------------------------------------------------------------------------


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
    hand_over(p, d, IDS)
    settle(p, d)


@pytest.mark.usefixtures("unregistered")
def test_registered_twice_by_hand_and_by_plug_in() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name("KVFerryConnector") is KVFerryConnector


# --- refused ------------------------------------------------------------------------------------------------------


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
        ({"side_channel_host": "0.0.0.0"}, ("side_channel_host", "all interfaces")),
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


def test_a_misspelt_variable_and_the_default_failure_policy_are_warned_of(
    group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_KEYFILE", "/x")
    group.engine(1, policy="fail")
    assert len(lines("kv_load_failure_policy", "recompute")) == 1
    assert len(lines("KVFERRY_KEYFILE", "did you mean 'KVFERRY_KEY_FILE'")) == 1, "not by the worker too"
    group.engine(1, policy="recompute")
    assert len(lines("kv_load_failure_policy", "recompute")) == 1


def test_returned_experts_are_refused(monkeypatch: pytest.MonkeyPatch, group: EngineGroup) -> None:
    """With them vLLM 0.32 ends at the first prompt that D has loaded, and 0.33 has D load nothing."""
    config = group.engine(1).config
    monkeypatch.setattr(config.aux_output_config, "enable_return_routed_experts", True)
    with pytest.raises(ConfigError, match=r"no experts of the tokens that it loads; leave out --enable-return"):
        compat.check_options(config)


# --- measured -----------------------------------------------------------------------------------------------------


def figures(engine: Engine) -> list[dict[str, Any]]:
    """Figures as they reach the front end, in another process."""
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict())) for stats in engine.stats]


def log_line(engine: Engine) -> str:
    """vLLM's, of all its figures."""
    logged = KVConnectorLogging(engine.config.kv_transfer_config)
    for data in figures(engine):
        logged.observe(data)
    said: list[str] = []
    logged.log(lambda text, *args: said.append(text % args))
    (line,) = said
    return line


def test_figures_reach_vllms_log_line_and_prometheus(group: EngineGroup) -> None:
    p, d = group.pair()
    hand_over(p, d, IDS)
    doomed = p.prefill(prompt(60, 1))
    d.finish(d.add(prompt(50, 2), max_tokens=2), beside=[p])
    p.close()
    d.finish(d.add(prompt(60, 1), doomed))
    settle(d)
    registry = CollectorRegistry()

    def registered(kind: Any) -> Any:
        return type(kind.__name__, (kind,), {"__init__": functools.partialmethod(kind.__init__, registry=registry)})

    class Prom(KVConnectorProm):
        _gauge_cls, _counter_cls, _histogram_cls = map(registered, (Gauge, Counter, Histogram))

    prom = Prom(d.config, ["model_name", "engine"], {0: ["model", "0"]})
    for data in figures(d):
        prom.observe(data)
    assert log_line(d)
    rank = worker_half(d.workers[0]).rank_context
    assert rank is not None
    plane = {"model_name": "model", "engine": "0", "plane": rank.planes[0].name}
    assert registry.get_sample_value("vllm:kvferry_handover_time_seconds_count", plane) == 1
    nbytes = registry.get_sample_value("vllm:kvferry_bytes_transferred_sum", plane)
    assert nbytes is not None and nbytes >= 100 * 2 * HEADS * 2 * HEAD_SIZE * 4
    assert registry.get_sample_value("vllm:kvferry_tokens_total", plane) == 100
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    assert sum(each.value for each in samples if each.name == "vllm:kvferry_num_failed_handovers_total") == 1


def test_figures_pass_through_multiconnector(group: EngineGroup) -> None:
    """It looks its children up by name, also where they were given by module path."""
    p, d = group.engine(0), group.multi(1, KVFERRY)
    hand_over(p, d, IDS)
    settle(p, d)
    assert "KVFerryConnector" in log_line(d)


def test_a_local_of_another_kind_is_no_configuration() -> None:
    owner = VllmConfig.__new__(VllmConfig)
    object.__setattr__(owner, "kv_transfer_config", None)

    def looks_for(self: VllmConfig, kv_transfer_config: object) -> object:
        return hooks.find_config()

    ours = KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both")
    assert looks_for(owner, {"kv_role": "kv_both"}) is None and looks_for(owner, ours) == (owner, ours)
