"""How KVFerry is found, configured, refused, combined with other connectors and measured inside vLLM; odd params."""

from __future__ import annotations

import copy
import functools
import logging
import os
import socket
import subprocess
import sys
import typing
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.plugins import load_plugins_by_group

import kvferry.connector.vllm as package
from kvferry.connector.vllm import adapter, compat, hooks, plugin
from kvferry.connector.vllm.adapter import KVFerryConnector
from kvferry.router.request_bodies import WITH_P, changes_engine
from kvferry.transport.errors import ConfigError, KVFerryError
from kvferry.transport.planes import ucx
from tests.support.engines import free_port
from tests.support.inside import scheduler_half, worker_half
from tests.vllm.labelled import HEAD_SIZE, HEADS, prompt
from tests.vllm.stepped import KVFERRY, PREFILL, Engine, EngineGroup, Lines, Pair, hand_over, settle

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


ADAPTER = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": adapter.__name__}


class StandInModelRunner:
    execute_model = None

    def load_model(self, make: Callable[[], object]) -> None:
        make()


def flag(**settings: object) -> dict[str, object]:
    return {**ADAPTER, "kv_connector_extra_config": settings}


def make(flag: dict[str, object], ranks: int) -> None:
    """The configuration of an engine, which imports the adapter for the first time."""
    sys.modules.pop(adapter.__name__, None)
    VllmConfig(
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **flag),
        parallel_config=ParallelConfig(tensor_parallel_size=ranks, distributed_executor_backend="mp"),
    )
    assert adapter.__name__ in sys.modules


@pytest.mark.parametrize("version", ["0.9.2", "0.26.0", "0.31.1rc1.dev7+g1a2b"])
def test_an_older_vllm_is_refused(version: str) -> None:
    with pytest.raises(KVFerryError) as caught:
        package.check_release(version)
    assert str(caught.value) == f"vLLM is {version}, KVFerry expects 0.32 or later; pip install -U 'vllm>=0.32'"


@pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.1.dev2+g1a2b", "1.0", "0.1.dev1+g1a2b", "dev"])
def test_a_vllm_that_may_have_all_is_not_refused(version: str) -> None:
    package.check_release(version)


def test_an_older_vllm_is_refused_before_what_it_lacks_is_imported(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text('__version__ = "0.26.0"')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", "import kvferry.connector.vllm.as_nixl"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("kvferry.transport.errors.KVFerryError: vLLM is 0.26.0, KVFerry ")


def test_what_cannot_start_is_refused_before_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused where all is right, and in a worker that loads its model."""

    def multi(*children: dict[str, object]) -> dict[str, object]:
        connectors = [{**child, "kv_role": "kv_both"} for child in children]
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}

    monkeypatch.setattr(ucx, "find_spec", lambda name: None)
    monkeypatch.setattr(package, "adapter", adapter)
    for name in (adapter.__name__, "ucxx", "nixl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with socket.socket() as taken:
        port = 0
        while not port:  # the one before it is free, and stays ours
            before = free_port()
            with suppress(OSError):
                taken.bind(("127.0.0.1", before + 1))
                port = before + 1
        taken.listen()
        cases = [
            (flag(plan="tcp"), 1, "unknown setting 'plan' (did you mean 'plane'?)"),
            (multi(flag(lease_second=1)), 1, "'lease_second'"),
            (multi(flag(), flag()), 1, "connectors of MultiConnector: 2 are KVFerryConnector, expected one"),
            (flag(key_file=str(tmp_path / "none")), 1, "does not exist; make it with `kvferry keygen"),
            (flag(plane="ucx"), 1, "plane: 'ucx' cannot be used: ucx: ucxx is not installed; pip install"),
            (flag(plane="cuda_ipc"), 1, "it carries GPU memory, the caches lie in host memory"),
            (flag(plane="shm", encrypt=True, side_channel_host="192.0.2.1"), 1, "not an address of this"),
            (flag(side_channel_port=port), 1, f"port {port} of 127.0.0.1 is in use"),
            (flag(side_channel_port=port - 1), 2, f"port {port} of 127.0.0.1 is in use"),
            (flag(side_channel_port=65535), 2, "a rank would get port 65536"),
        ]
        for each, ranks, words in cases:
            with pytest.raises(KVFerryError) as refused:
                make(each, ranks)
            assert words in str(refused.value) and "\n" not in str(refused.value), each
        make(multi(flag(plane="tcp")), 1)
        StandInModelRunner().load_model(lambda: make(flag(side_channel_port=port), 1))
    assert not {"ucxx", "nixl"} & sys.modules.keys(), "the process may fork"


def local(d: Engine, request_id: str) -> None:
    """The request ends by itself, prefilled by D alone."""
    answer = d.finish(request_id)
    assert answer.finish == "length" and d.computed[request_id] == len(answer.prompt) and not d.loads[request_id]


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None, "kvferry": None}, {"other": 1}]
)
def test_none_at_all(pair: Pair, lines: Lines, params: Any) -> None:
    _, d = pair
    local(d, d.add(IDS, params))
    settle(d)
    assert not lines("req-")


def changed(*path: Any, value: object) -> Callable[[dict[str, Any]], object]:
    def change(params: dict[str, Any]) -> None:
        inner: Any = params
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


# The forms that a message can have are in tests/unit/test_config.py.
GARBAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "null values": lambda p: p.update({key: None for key in p} | {"do_remote_prefill": True}),
    "another connector's": lambda p: p.pop("kvferry") and p.update(remote_block_ids=[[1, 2]]),
    "another version": changed("kvferry", "v", value=99),
    "a list": changed("kvferry", value=[1, 2]),
    "more tokens than the prompt": changed("kvferry", "num_tokens", value=101),
    "another prompt": changed("kvferry", "prompt", value="0" * 32),
    "a line break": changed("kvferry", "engine_id", value="a\nERROR something else"),
    "a zero in an address": changed("kvferry", "ranks", 0, 2, value="127.0.0.1\0"),
    "a lease that is over": changed("kvferry", "lease_seconds", value=-1),
    "ranks that no engine of this model has": lambda p: p["kvferry"].update(
        tp_size=512, ranks=[[0, n, "127.0.0.1", 5, "00" * 16] for n in range(512)]
    ),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage(pair: Pair, lines: Lines, what: str) -> None:
    p, d = pair
    params = copy.deepcopy(p.prefill(IDS))
    GARBAGE[what](params)
    request_id = d.add(IDS, params)
    local(d, request_id)
    said = lines(request_id, "prefills locally")
    assert len(said) == 1 and "\n" not in said[0] and len(said[0]) < 600
    settle(d)


NOWHERE = ["no such host", "nowhere.invalid", "*", "0.0.0.0:1", "[::1", "a/../b", "x" * 255, "\u00e9", "%s", "@ipc"]


@pytest.mark.parametrize("host", NOWHERE)
def test_an_address_that_leads_nowhere(group: EngineGroup, lines: Lines, host: str) -> None:
    """It reaches the transfer thread: the load fails in time, the thread lives, and others are served."""
    p, d = group.pair(extra={"handover_timeout_seconds": 720.0})
    params = copy.deepcopy(p.prefill(IDS))
    params["kvferry"]["ranks"][0][2] = host
    bad = d.add(IDS, params)
    hand_over(p, d, prompt(60, 3))
    d.let_time_pass(100.0)  # a name server may be silent
    assert d.finish(bad, beside=[p]).finish == "length" and d.computed[bad] == 100
    settle(d)
    assert len(lines("hand-over of", bad, "failed")) == 1
    assert not lines("unexpected error")


def test_a_token_that_p_never_gave(group: EngineGroup, lines: Lines) -> None:
    p, d = group.pair(extra={"lease_seconds": 0.9})
    params = copy.deepcopy(p.prefill(IDS))
    params["kvferry"]["token"] = "ab" * 16
    request_id = d.add(IDS, params)
    d.finish(request_id, beside=[p])
    assert d.computed[request_id] == 100
    settle(p, d)
    assert len(lines("hand-over of", request_id, "denied", "unknown")) == 1


@pytest.mark.parametrize("value", [True, "yes", 1, [0]])
def test_odd_values_of_the_prefill_leg(pair: Pair, value: object) -> None:
    p, d = pair
    params = p.finish(p.add(IDS, PREFILL if value is True else {"do_remote_decode": value})).params
    d.finish(d.add(IDS, params), beside=[p])
    settle(p, d)


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_a_role_that_does_not_fit(group: EngineGroup, lines: Lines, role: str) -> None:
    engine = group.engine(1, role=role)
    params = PREFILL if role == "kv_consumer" else group.engine(0).prefill(IDS)
    request_id = engine.add(IDS, params)
    local(engine, request_id)
    assert engine.answers[request_id].params is None
    what, fit = ("hand its prompt over", "kv_producer") if role == "kv_consumer" else ("load its prompt", "kv_consumer")
    assert len(lines(request_id, what, f"kv_role is {role}", f"as {fit} or kv_both")) == 1
    settle(engine)


HARMLESS = """
    /openapi.json /docs /docs/oauth2-redirect /redoc /load /version /kv_event_sources /health /metrics /tokenize
    /detokenize /tokenizer_info /v1/decisions /v1/models /v1/systemone /ping /invocations /server_info /is_sleeping
    /is_paused /weight_info /get_world_size /v1/chat/completions /v1/chat/completions/batch /v1/responses
    /v1/responses/{response_id} /v1/responses/{response_id}/cancel /v1/completions /v1/messages
    /v1/messages/count_tokens /generative_scoring /is_scaling_elastic_ep /v1/chat/completions/render
    /v1/messages/render /v1/completions/render /v1/responses/render /v1/chat/completions/derender
    /v1/completions/derender /inference/v1/generate /v1/realtime /v1/audio/transcriptions /v1/audio/translations
    /pooling /classify /v1/embeddings /v2/embed /score /v1/score /rerank /v1/rerank /v2/rerank /v2/chat
"""


def names(of: Any) -> set[str]:
    return {of} if isinstance(of, str) else set().union(*map(names, typing.get_args(of)))


def test_a_path_of_vllm_is_harmless_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new one fails here until somebody has read what it does."""
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "1")
    level = logging.getLogger().level
    from fastapi import FastAPI
    from vllm import tasks
    from vllm.entrypoints.cli.launch import make_arg_parser
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.pooling.classify.api_router import router as classify
    from vllm.entrypoints.pooling.embed.api_router import router as embed
    from vllm.entrypoints.pooling.pooling.api_router import router as pooling
    from vllm.entrypoints.pooling.scoring.api_router import router as scoring
    from vllm.entrypoints.serve.profile.api_router import router as profile
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    arguments.enable_fault_tolerance = arguments.enable_tokenizer_info_endpoint = True
    app: FastAPI = build_app(arguments, tuple(names(tasks.SupportedTask)))
    for router in (classify, embed, pooling, scoring, profile):
        app.include_router(router)
    logging.getLogger().setLevel(level)  # which these imports have changed
    paths = {route.path for route in app.routes if hasattr(route, "path")}
    assert len(paths) > 60 and set(WITH_P) <= paths
    assert {path for path in paths if not changes_engine(path)} - set(HARMLESS.split()) == set()
    assert not [path for path in HARMLESS.split() if changes_engine(path)]
