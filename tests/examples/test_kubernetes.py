"""``examples/kubernetes``: the manifests fit Kubernetes' schemas, vLLM's and KVFerry's commands, and one another."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from kvferry.cli.doctor.findings import Level
from kvferry.cli.doctor.flag import judge
from kvferry.cli.main import app
from kvferry.connector.config import ENVIRONMENT, load_settings

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
KUBERNETES = "1.33"
VALUES = sorted(path.name for path in FOLDER.glob("values-*.yaml"))
KUSTOMIZED = {path.parent.name: yaml.safe_load(path.read_text()) for path in FOLDER.rglob("kustomization.yaml")}
MANIFESTS = sorted(KUSTOMIZED["kubernetes"]["resources"])
PATCHES = {role: yaml.safe_load((FOLDER / "llm-d" / f"{role}.yaml").read_text()) for role in ("prefill", "decode")}
"""Over llm-d's Deployments."""
Resource = dict[str, Any]
KEY, CONFIG = "KVFERRY_KEY_FILE", "KV_TRANSFER_CONFIG"
CHART = yaml.safe_load((FOLDER / "values-production-stack.yaml").read_text())["servingEngineSpec"]["modelSpec"]


def resources(name: str) -> list[Resource]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


def of_kind(kind: str) -> list[Resource]:
    return [resource for name in MANIFESTS for resource in resources(name) if resource["kind"] == kind]


def pod(resource: Resource) -> Resource:
    found: Resource = resource["spec"]["template"]["spec"]
    return found


def containers(resource: Resource) -> list[Resource]:
    found: list[Resource] = pod(resource)["containers"]
    return found


def other_containers() -> Iterator[Resource]:
    """The engines of llm-d, and of the values of a chart, which itself adds ``vllm serve MODEL``."""
    for patch in PATCHES.values():
        (container,) = containers(patch)
        yield container | {"command": [*container["command"], *container["args"]]}
    for engine in CHART:
        yield engine | {"command": ["vllm", "serve", "MODEL", *engine["vllmConfig"]["extraArgs"]]}


def gated_pods() -> Iterator[tuple[Resource, Resource]]:
    """What vLLM's production-stack makes of the values for its chart, too."""
    for part in (*of_kind("Deployment"), *PATCHES.values()):
        if "initContainers" in pod(part):
            yield pod(part), containers(part)[0]
    for engine in CHART:
        gate = engine["initContainer"]
        image, gpus = f"{engine['repository']}:{engine['tag']}", {"limits": {"nvidia.com/gpu": engine["requestGPU"]}}
        made = {"image": image, "volumeMounts": engine["extraVolumeMounts"], "resources": gpus}
        gates = [gate | {"volumeMounts": gate["extraVolumeMounts"]}]
        yield {"initContainers": gates, "volumes": engine["extraVolumes"]}, engine | made


DEPLOYED = [container for part in of_kind("Deployment") for container in containers(part)]
ENGINES = [*(container for container in DEPLOYED if "vllm" in container["command"]), *other_containers()]
HOOKS = [container["lifecycle"]["preStop"]["exec"]["command"] for container in ENGINES if "lifecycle" in container]
ROUTERS = [container["command"] for container in DEPLOYED if "router" in container["command"]]


def test_all_files_are_looked_at():
    """Also by Kustomize: each file is a resource or a patch, with an image that the Dockerfile's comment names."""
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml")} - set(VALUES)
    named = {"kustomization.yaml", "llm-d/kustomization.yaml", *MANIFESTS, "llm-d/prefill.yaml", "llm-d/decode.yaml"}
    assert there == named and VALUES == ["values-production-stack.yaml"]
    assert (len(ENGINES), len(HOOKS), len(ROUTERS), len(GATED)) == (6, 4, 1, 6)
    for role, found in zip(PATCHES, KUSTOMIZED["llm-d"]["patches"], strict=True):
        assert found == {"path": f"{role}.yaml", "target": {"kind": "Deployment", "name": f".*{role}"}}
    engine, router = (f"{image['name']}:{image['newTag']}" for image in KUSTOMIZED["kubernetes"]["images"])
    for container in (*DEPLOYED, *map(containers_of_one, PATCHES.values())):
        assert container["image"] == (router if container["command"] in ROUTERS else engine)
    comments = (FOLDER / "Dockerfile").read_text()
    assert f"Dockerfile -t {engine} ." in comments and f"--target router -t {router} ." in comments


def containers_of_one(resource: Resource) -> Resource:
    (found,) = containers(resource)
    return found


@pytest.mark.parametrize("folder", KUSTOMIZED)
def test_kustomize_knows_each_field(folder):
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    found = KUSTOMIZED[folder]
    assert head.items() <= found.items() and found.keys() - head.keys() <= {"resources", "images", "patches"}


def test_patches_are_of_deployments():
    """What a patch leaves to the guide is filled in."""
    schemas = pytest.importorskip("kubernetes_validate", reason="its schemas are not installed: pip install .[test]")
    for role, patch in PATCHES.items():
        whole = copy.deepcopy(patch)
        whole["spec"]["selector"] = {"matchLabels": {"role": role}}
        whole["spec"]["template"]["metadata"] = {"labels": {"role": role}}
        schemas.validate(whole, KUBERNETES, strict=True)
        containers(whole)[0]["imagge"] = "x"
        with pytest.raises(schemas.ValidationError):
            schemas.validate(whole, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_schemas_of_kubernetes(name):
    schemas = pytest.importorskip("kubernetes_validate", reason="its schemas are not installed: pip install .[test]")
    for resource in resources(name):
        schemas.validate(resource, KUBERNETES, strict=True)
        spoilt = copy.deepcopy(resource)
        spoilt["spec"]["replicaz"] = 2
        with pytest.raises(schemas.ValidationError):
            schemas.validate(spoilt, KUBERNETES, strict=True)


@pytest.mark.vllm
@pytest.mark.parametrize("container", ENGINES, ids=lambda container: container["name"])
def test_vllm_knows_each_flag_and_variable_and_kvferry_each_setting(container):
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    environment = {variable["name"]: variable.get("value", "") for variable in container["env"]}
    program, command, *arguments = (word.replace(f"$({CONFIG})", environment[CONFIG]) for word in container["command"])
    assert (program, command) == ("vllm", "serve")
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    transfer = parsed.kv_transfer_config
    transfer = json.loads(transfer) if isinstance(transfer, str) else transfer
    config = transfer if isinstance(transfer, dict) else vars(transfer)
    assert config["kv_connector"] == "KVFerryConnector" and config["kv_load_failure_policy"] == "recompute"
    load_settings(config.get("kv_connector_extra_config") or {}, {})
    assert parsed.shutdown_timeout > 0, "vLLM would end leases and requests at once"
    assert environment.keys() <= {*ENVIRONMENT.values(), *envs.environment_variables, "POD_IP", CONFIG}
    assert {"KVFERRY_SIDE_CHANNEL_HOST", "KVFERRY_SIDE_CHANNEL_PORT", KEY} <= environment.keys()


GATED = list(gated_pods())


@pytest.mark.parametrize(("spec", "engine"), GATED, ids=[engine["name"] for _, engine in GATED])
def test_a_gate_looks_at_what_the_engine_gets(spec, engine):
    """At its flag, its environment, its key and its GPUs, before vLLM starts; the key is a file of root's."""
    (gate,) = spec["initContainers"]
    assert gate["env"] == engine["env"] and gate["volumeMounts"] == engine["volumeMounts"]
    assert gate["image"] == engine["image"] and f"--config=$({CONFIG})" in gate["command"]
    tp = [word.partition("=")[2] for word in engine.get("args", ()) if word.startswith("--tensor-parallel-size")]
    gpus = engine["resources"] if not tp else {"limits": {"nvidia.com/gpu": int(tp[0])}}
    assert gate["resources"] == gpus
    environment = {variable["name"]: variable.get("value", "") for variable in gate["env"]}
    (found,), _ = judge(json.loads(environment[CONFIG]))
    assert found.level is Level.OK and "KVFERRY_SECRET_KEY" not in environment
    (folder,) = [mount for mount in gate["volumeMounts"] if environment[KEY].startswith(mount["mountPath"] + "/")]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == folder["name"]]
    assert volume["secret"] == {"secretName": "kvferry-key", "defaultMode": 0o400}
    made = (FOLDER / "README.md").read_text()
    assert f"create secret generic kvferry-key --from-file={Path(environment[KEY]).name}" in made


GATES = [spec["initContainers"][0]["command"] for spec, _ in GATED]


@pytest.mark.parametrize("command", [*HOOKS, *ROUTERS, *GATES], ids=lambda command: " ".join(command[:2]))
def test_kvferry_knows_its_commands(command):
    program, name, *arguments = command
    commands: Any = typer.main.get_command(app)
    assert program == "kvferry"
    commands.commands[name].make_context(name, arguments)


def option(command: list[str], name: str) -> int:
    (found,) = [word for word in command if word.startswith(f"--{name}=")]
    return int(found.partition("=")[2])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_pod_has_time_to_drain_and_to_end(role):
    (engine,) = [part for part in of_kind("Deployment") if part["metadata"]["name"] == f"kvferry-{role}"]
    (container,) = containers(engine)
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    needed = option(hook, "timeout") + option(container["command"], "shutdown-timeout")
    assert engine["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed
    assert hook[2] == f"http://127.0.0.1:{option(container['command'], 'port')}"
    assert PATCHES[role]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > needed
    (inside,) = containers(PATCHES[role])
    hook = inside["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[2] == f"http://127.0.0.1:{option(inside['args'], 'port')}"
    for other in CHART:
        assert option(other["vllmConfig"]["extraArgs"], "shutdown-timeout") < 30, "its chart leaves a pod 30 seconds"


def test_names_ports_and_labels_fit():
    pods = {part["metadata"]["name"]: part["spec"]["template"] for part in of_kind("Deployment")}
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}
    assert pods.keys() == services.keys() == {"kvferry-prefill", "kvferry-decode", "kvferry-router"}
    for name, service in services.items():
        assert service["selector"].items() <= pods[name]["metadata"]["labels"].items()
        ports = {port["name"]: port["containerPort"] for port in pods[name]["spec"]["containers"][0]["ports"]}
        (port,) = service["ports"]
        assert ports["http"] == (ports[port["targetPort"]] if "targetPort" in port else port["port"])
    for role in ("prefill", "decode"):
        assert services[f"kvferry-{role}"]["clusterIP"] == "None", "the router needs the address of each engine"
        assert f"--{role}=dns://kvferry-{role}:8000" in ROUTERS[0]
    for part in (*of_kind("Deployment"), *of_kind("PodDisruptionBudget")):
        assert part["spec"]["selector"]["matchLabels"] == pods[part["metadata"]["name"]]["metadata"]["labels"]


def test_only_engines_reach_control_and_data_ports():
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    peers, clients = policies["kvferry-engines"]["ingress"]
    selected = policies["kvferry-engines"]["podSelector"]
    roles = [part["spec"]["template"]["metadata"]["labels"]["role"] for part in of_kind("Deployment")]
    assert sorted(selected["matchExpressions"][0]["values"]) == sorted(set(roles) - {"router"})
    assert peers["from"] == [{"podSelector": selected}]
    assert [port["port"] for port in clients["ports"]] == [8000]
    for engine in of_kind("Deployment")[:2]:
        control = int({e["name"]: e.get("value") for e in containers(engine)[0]["env"]}["KVFERRY_SIDE_CHANNEL_PORT"])
        assert peers["ports"][0]["port"] <= control <= peers["ports"][0]["endPort"]
