"""``examples/kubernetes``: the manifests fit Kubernetes' schemas, vLLM's and KVFerry's commands, and one another."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
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
OBSERVABILITY = FOLDER.parent / "observability"
KUSTOMIZATIONS = {path.parent.name: path for path in FOLDER.parent.rglob("kustomization.yaml")}
KUSTOMIZED = {name: yaml.safe_load(path.read_text()) for name, path in KUSTOMIZATIONS.items()}
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


def pod(resource: Resource) -> Any:
    return resource["spec"]["template"]["spec"]


def containers(resource: Resource) -> Any:
    return pod(resource)["containers"]


def variables(container: Resource) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container["env"]}


def of_group() -> Iterator[Resource]:
    """The leader and the worker of the engine of several nodes, as Deployments."""
    (group,) = resources("leaderworkerset.yaml")
    for name in ("leaderTemplate", "workerTemplate"):
        template = group["spec"]["leaderWorkerTemplate"][name]
        spec = {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template}
        yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": group["metadata"], "spec": spec}


LEADER, WORKER = of_group()


def other_containers() -> Iterator[Resource]:
    """The engines of llm-d, of several nodes, and of the values of a chart, which itself adds ``vllm serve MODEL``."""
    for part in (*PATCHES.values(), LEADER, WORKER):
        (container,) = containers(part)
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


DEPLOYMENTS = {part["spec"]["selector"]["matchLabels"]["role"]: part for part in of_kind("Deployment")}
DEPLOYED = [container for part in DEPLOYMENTS.values() for container in containers(part)]
ENGINES = [*(container for container in DEPLOYED if "vllm" in container["command"]), *other_containers()]
HOOKS = [container["lifecycle"]["preStop"]["exec"]["command"] for container in ENGINES if "lifecycle" in container]
ROUTERS = [container["command"] for container in DEPLOYED if "router" in container["command"]]


def test_all_files_are_looked_at():
    """Also by Kustomize: each file is a resource or a patch, with an image that the Dockerfile's comment names."""
    named = {FOLDER / "leaderworkerset.yaml", FOLDER / "values-production-stack.yaml", *KUSTOMIZATIONS.values()}
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    for folder, found in KUSTOMIZED.items():
        fields = found.keys() - {"resources", "images", "patches", "configMapGenerator"}
        assert {name: found[name] for name in fields} == head, folder
        names = [*found.get("resources", ()), *(patch["path"] for patch in found.get("patches", ()))]
        named |= {KUSTOMIZATIONS[folder].parent / name for name in names if name.endswith(".yaml")}
    assert {*FOLDER.rglob("*.yaml"), OBSERVABILITY / "kustomization.yaml"} == named
    assert (len(ENGINES), len(HOOKS), len(ROUTERS), len(GATED)) == (8, 5, 1, 6)
    for role, found in zip(PATCHES, KUSTOMIZED["llm-d"]["patches"], strict=True):
        assert found == {"path": f"{role}.yaml", "target": {"kind": "Deployment", "name": f".*{role}"}}
    engine, router = (f"{image['name']}:{image['newTag']}" for image in KUSTOMIZED["kubernetes"]["images"])
    for container in (*DEPLOYED, *(containers(part)[0] for part in (*PATCHES.values(), LEADER, WORKER))):
        assert container["image"] == (router if container["command"] in ROUTERS else engine)
    comments = (FOLDER / "Dockerfile").read_text()
    assert f"Dockerfile -t {engine} ." in comments and f"--target router -t {router} ." in comments


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["kubernetes", "monitoring", "autoscaling"])
def test_kubectl_builds_the_files_and_a_configmap_that_grafana_finds(folder):
    command = ["kubectl", "kustomize", str(KUSTOMIZATIONS[folder].parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    boards = [each for each in built if each["kind"] == "ConfigMap"]
    assert len(built) > 1 and len(boards) == (folder == "monitoring")
    for board in boards:
        assert board["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert board["data"] == {"kvferry.json": (OBSERVABILITY / "grafana/dashboards/kvferry.json").read_text()}


ALL = [*(each for name in MANIFESTS for each in resources(name)), *PATCHES.values(), LEADER, WORKER]


@pytest.mark.parametrize("resource", ALL, ids=lambda resource: f"{resource['kind']} {resource['metadata']['name']}")
def test_the_schemas_of_kubernetes(resource):
    """What a patch leaves to llm-d's guide is filled in."""
    schemas = pytest.importorskip("kubernetes_validate", reason="its schemas are not installed: pip install .[test]")
    whole = copy.deepcopy(resource)
    if whole["kind"] == "Deployment":
        whole["spec"].setdefault("selector", {"matchLabels": {"role": "x"}})
        whole["spec"]["template"].setdefault("metadata", {"labels": {"role": "x"}})
    schemas.validate(whole, KUBERNETES, strict=True)
    (containers(whole)[0] if whole["kind"] == "Deployment" else whole["spec"])["imagge"] = "x"
    with pytest.raises(schemas.ValidationError):
        schemas.validate(whole, KUBERNETES, strict=True)


@pytest.mark.vllm
@pytest.mark.parametrize("container", ENGINES, ids=lambda container: container["name"])
def test_vllm_knows_each_flag_and_variable_and_kvferry_each_setting(container):
    from vllm import envs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    environment = variables(container)
    words = (word.replace(f"$({CONFIG})", environment[CONFIG]) for word in container["command"])
    program, command, *arguments = (re.sub(r"\$\(LWS_(GROUP_SIZE|WORKER_INDEX)\)", "1", word) for word in words)
    assert (program, command) == ("vllm", "serve")
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    config = vars(parsed.kv_transfer_config)
    assert config["kv_connector"] == "KVFerryConnector" and config["kv_load_failure_policy"] == "recompute"
    load_settings(config.get("kv_connector_extra_config") or {}, {})
    assert parsed.shutdown_timeout > 0, "vLLM would end leases and requests at once"
    known = {*ENVIRONMENT.values(), *envs.environment_variables, "POD_IP", CONFIG, "HF_HOME", "HF_TOKEN"}
    assert environment.keys() <= known
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
    environment = variables(gate)
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
    (container,) = containers(DEPLOYMENTS[role])
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    needed = option(hook, "timeout") + option(container["command"], "shutdown-timeout")
    for part in (DEPLOYMENTS[role], PATCHES[role], LEADER):
        (container,) = containers(part)
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        assert pod(part)["terminationGracePeriodSeconds"] > needed
        assert hook[2] == f"http://127.0.0.1:{option(container['command'] + container.get('args', []), 'port')}"
    for other in CHART:
        assert option(other["vllmConfig"]["extraArgs"], "shutdown-timeout") < 30, "its chart leaves a pod 30 seconds"


def test_names_ports_and_labels_fit():
    pods = {part["metadata"]["name"]: part["spec"]["template"] for part in of_kind("Deployment")}
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}
    assert pods.keys() == services.keys() == {"kvferry-prefill", "kvferry-decode", "kvferry-router"}
    for name, service in services.items():
        assert service["selector"].items() <= pods[name]["metadata"]["labels"].items()
        assert not service["selector"].items() <= WORKER["spec"]["selector"]["matchLabels"].items()
        ports = {port["name"]: port["containerPort"] for port in pods[name]["spec"]["containers"][0]["ports"]}
        (port,) = service["ports"]
        assert ports["http"] == (ports[port["targetPort"]] if "targetPort" in port else port["port"])
    for role in ("prefill", "decode"):
        assert services[f"kvferry-{role}"]["clusterIP"] == "None", "the router needs the address of each engine"
        assert f"--{role}=dns://kvferry-{role}:8000" in ROUTERS[0]
    assert len(of_kind("PodDisruptionBudget")) == len(pods)
    assert containers(WORKER)[0]["args"] == ["--headless"], "only the leader answers requests"
    monitor = resources("monitoring/pods.yaml")[0]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["honorLabels"] and monitor["podTargetLabels"] == ["role"]
    for part in (*of_kind("Deployment"), LEADER):
        assert monitor["selector"]["matchLabels"].items() <= part["spec"]["selector"]["matchLabels"].items()
        assert endpoint["port"] in [port["name"] for port in containers(part)[0]["ports"]]
    for part in (*of_kind("Deployment"), *of_kind("PodDisruptionBudget"), LEADER):
        assert part["spec"]["selector"]["matchLabels"] == pods[part["metadata"]["name"]]["metadata"]["labels"]


def test_only_engines_reach_control_and_data_ports():
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    peers, clients = policies["kvferry-engines"]["ingress"]
    selected = policies["kvferry-engines"]["podSelector"]
    roles = [part["spec"]["selector"]["matchLabels"]["role"] for part in (*of_kind("Deployment"), WORKER)]
    assert sorted(selected["matchExpressions"][0]["values"]) == sorted(set(roles) - {"router"})
    assert peers["from"] == [{"podSelector": selected}]
    assert [port["port"] for port in clients["ports"]] == [8000]
    for engine in (*of_kind("Deployment")[:2], LEADER, WORKER):
        control = int(variables(containers(engine)[0])["KVFERRY_SIDE_CHANNEL_PORT"])
        assert peers["ports"][0]["port"] <= control <= peers["ports"][0]["endPort"]


LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("part", [*of_kind("Deployment"), LEADER, WORKER], ids=lambda part: part["metadata"]["name"])
def test_no_pod_runs_as_root_and_each_writes_to_its_volumes_only(part):
    user, volumes = pod(part)["securityContext"], {each["name"]: each for each in pod(part).get("volumes", ())}
    assert user["runAsNonRoot"] and user["runAsUser"] and user["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*containers(part), *pod(part).get("initContainers", ())):
        assert container["securityContext"] == LOCKED
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container.get("volumeMounts", ())}
        if container["command"] not in ROUTERS:
            assert user["fsGroup"] == user["runAsGroup"], "the key is read by its group"
            assert all("emptyDir" in mounts[path] for path in ("/dev/shm", "/tmp", "/home/vllm"))
            assert "secret" in mounts[str(Path(variables(container)[KEY]).parent)]
            models = mounts[variables(container)["HF_HOME"]]["persistentVolumeClaim"]
            assert [models["claimName"]] == [claim["metadata"]["name"] for claim in of_kind("PersistentVolumeClaim")]


@pytest.mark.vllm
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_are_scaled_by_series_of_their_role_that_vllm_has(role):
    from vllm.v1.metrics import loggers

    (scaled,) = [each["spec"] for each in resources("autoscaling/engines.yaml") if role in each["metadata"]["name"]]
    assert scaled["scaleTargetRef"] == {"name": DEPLOYMENTS[role]["metadata"]["name"]}
    assert scaled["minReplicaCount"] == DEPLOYMENTS[role]["spec"]["replicas"] < scaled["maxReplicaCount"]
    client = of_kind("NetworkPolicy")[0]["spec"]["ingress"][1]["from"][1]["namespaceSelector"]["matchLabels"]
    for asked in (trigger["metadata"] for trigger in scaled["triggers"]):
        assert [asked["serverAddress"]] == [f"http://prometheus-operated.{name}:9090" for name in client.values()]
        assert float(asked["threshold"]) > 0 and asked["ignoreNullValues"] == "false"
        series = re.findall(r'(vllm:\w+)\{role="(\w+)"\}', asked["query"])
        assert len(series) == asked["query"].count("vllm:") > 0 and {each for _, each in series} == {role}
        assert all(f'"{name}"' in Path(loggers.__file__).read_text() for name, _ in series)
