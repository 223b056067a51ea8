"""Each command of the documentation is looked at: a command of no known kind is a fault, as is an option that its
program does not have.

The commands of a page run in one bash, with stand-ins for programs (pages.py). curl asks a real router before stand-ins
for engines.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvferry.cli.main import app
from kvferry.connector.config import ENVIRONMENT, load_settings
from kvferry.router.app import App
from tests.docs.pages import PAGES, ROOT, Call, of_page, run
from tests.router.stand_ins import decode_engine, make_router, prefill_engine, served
from tests.support.fork_server import fork_server

CODE = re.compile(r"`([^`\n]+)`")
COUNTED = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="MODEL",source="external_kv_transfer"} 511.0\n'
WITH_COMMANDS = [page for page in PAGES if of_page((ROOT / page).read_text())]
ELSEWHERE = {
    "docker build": ("", ""),
    "git clone": (".ci/run", "From a clean clone"),
    "kubectl": ("tests/examples/test_kubernetes.py", "kubernetes_validate"),
    "kvferry check": ("tests/router/test_check.py", '"check"'),
    "kvferry bench": ("tests/bench/test_command.py", '"bench"'),
    "kvferry doctor": ("tests/doctor/test_command.py", "doctor"),
    "kvferry drain": ("tests/engine/test_drain.py", "drain"),
    "kvferry keygen": ("tests/transport/test_control_keys.py", "keygen"),
    "kvferry plan": ("tests/planning/test_plan_command.py", "plan"),
    "kvferry router": ("tests/support/engines.py", '"router"'),
    "ls": ("", ""),
    "make demo": ("tests/examples/test_examples_run.py", "demo.py"),
    "make install": (".ci/run", "install"),
    "make test": (".ci/run", "test"),
    "pip install": (".ci/run", "install"),
    "pre-commit install": ("", ""),
    "python -m dynamo.vllm": ("tests/engine/test_vllm_proxies.py", "kvferry.connector.vllm.as_nixl"),
    "python benchmarks/planes/rdma_check.py": ("tests/transport/test_host.py", "rdma_check.py"),
    "python examples/two_node/run_netns.py": ("tests/examples/test_examples_run.py", "two_node/run_netns.py"),
    "ray start": ("tests/examples/test_ray_serve.py", "two_nodes.py"),
    "scp": ("", ""),
    "serve run": ("tests/examples/test_ray_serve.py", "examples.ray_serve.app"),
    "vllm bench serve": ("tests/engine/test_pair.py", "vllm bench serve"),
    "vllm serve": ("tests/support/engines.py", '"serve"'),
}
"""Commands that are only looked at here, by their first words: the file that runs them, and a text in it. No test runs
those without a file: they are none of ours, or need Docker."""


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """A router before stand-ins for engines, and a page of metrics, by the addresses of the documentation."""
    p, d = prefill_engine(), decode_engine()
    metrics = Starlette(routes=[Route("/metrics", lambda _: PlainTextResponse(COUNTED))])
    with served(p.app) as p_url, served(d.app) as d_url, served(metrics) as metrics_url:
        router = App(make_router([p_url], [d_url]))
        with served(router) as url:
            yield {"localhost:9000": url.removeprefix("http://"), "localhost:8002": metrics_url.removeprefix("http://")}


@pytest.fixture(scope="module")
def calls_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Call]]:
    """The calls of a page's commands, all of which ended well. Each page runs once."""

    @cache
    def ran(page: str) -> list[Call]:
        with servers() as addresses:
            folder = tmp_path_factory.mktemp(Path(page).stem)
            calls, wrong = run(of_page((ROOT / page).read_text()), folder, addresses)
        assert not wrong, wrong
        return calls

    return ran


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page(page: str, calls_of: Callable[[str], list[Call]]) -> None:
    assert calls_of(page)
    for call in calls_of(page):
        look_at(call)


@pytest.mark.vllm
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_flags_of_vllm(page: str, calls_of: Callable[[str], list[Call]]) -> None:
    for call in calls_of(page):
        if call.program == "vllm":
            look_at_vllm(call)
        if "--kv-transfer-config" in call.arguments:
            look_at_transfer_config(call)


def look_at(call: Call) -> None:
    """Raises AssertionError, with the reason, for a command that cannot be right or is of no known kind."""
    assert call.program == "curl" or elsewhere(call), f"nothing runs this command: {call}"
    known = {*ENVIRONMENT.values(), "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    unknown = [name for name in call.environment.keys() - known if not name.startswith(("OTEL_", "UCX_", "VLLM_"))]
    assert not unknown, f"{call}: {unknown}"
    load_settings({}, call.environment)
    if call.program in LOOKS:
        LOOKS[call.program](call)


def elsewhere(call: Call) -> str | None:
    """The first words of this command in the table."""
    words = [call.program.removesuffix("3"), *call.arguments]
    return next((known for n in (4, 3, 2, 1) if (known := " ".join(words[:n])) in ELSEWHERE), None)


def look_at_kvferry(call: Call) -> None:
    click_app: Any = typer.main.get_command(app)
    name, *arguments = call.arguments
    if "--help" not in arguments:
        click_app.commands[name].make_context(name, arguments)


def look_at_python(call: Call) -> None:
    first, *arguments = call.arguments
    if first == "-m":
        return
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    shown = help_of(first) | (help_of(first, arguments[0]) if flags - help_of(first) else set())
    assert flags <= shown, f"{call}: {flags - shown}"


@cache
def help_of(script: str, *subcommand: str) -> set[str]:
    done = fork_server().run(str(ROOT / script), *subcommand, "--help", timeout=800)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"--[a-z][\w-]*", done.stdout))


def look_at_make(call: Call) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in call.arguments:
        name, is_variable, _ = word.partition("=")
        pattern = rf"\$[({{]\(?(?:if|or)?\s*\$?\(?{name}\b" if is_variable else rf"^{name}:"
        assert re.search(pattern, text, re.MULTILINE), f"{call}: {word}"


def look_at_pip(call: Call) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    what, *packages = call.arguments
    assert what == "install"
    for package in packages:
        found = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?", package)
        assert found and found[1] in (".", "kvferry", "nixl", "pre-commit", "vllm"), f"{call}: {package}"
        assert set(filter(None, (found[2] or "").split(","))) <= extras.keys(), f"{call}: {package}"


def look_at_files(call: Call) -> None:
    """Files behind ``-f`` exist, what a Dockerfile among them copies, and what is behind ``-k`` for Kustomize."""
    for before, after in zip(call.arguments, call.arguments[1:], strict=False):
        assert before != "-k" or (ROOT / after / "kustomization.yaml").is_file(), f"{call}: {after}"
    named = [after for before, after in zip(call.arguments, call.arguments[1:], strict=False) if before == "-f"]
    for name in named:
        assert (ROOT / name).is_file(), f"{call}: {name}"
    for name in (name for name in named if name.endswith("Dockerfile")):
        copied = re.findall(r"^COPY (.+) \S+$", (ROOT / name).read_text(), re.MULTILINE)
        assert copied and all((ROOT / path).exists() for line in copied for path in line.split()), f"{call}: {copied}"


def look_at_serve(call: Call) -> None:
    """``serve run MODULE:FUNCTION``: the function exists and reads these arguments."""
    where, *arguments = call.arguments[1:]
    module, _, name = where.partition(":")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    texts = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    assert {argument.partition("=")[0] for argument in arguments} <= texts, f"{call}"


LOOKS: dict[str, Callable[[Call], None]] = {
    "kvferry": look_at_kvferry, "python": look_at_python, "python3": look_at_python, "make": look_at_make,
    "pip": look_at_pip, "docker": look_at_files, "kubectl": look_at_files, "serve": look_at_serve,
}  # fmt: skip


@cache
def vllm_parsers() -> dict[str, Any]:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    bench = FlexibleArgumentParser()
    add_cli_args(bench)
    return {"serve": make_arg_parser(FlexibleArgumentParser()), "bench": bench}


def look_at_vllm(call: Call) -> None:
    """vLLM's own parsers take the flags, and vLLM or KVFerry the environment."""
    from vllm import envs

    name, *arguments = call.arguments
    vllm_parsers()[name].parse_args(arguments[1:] if name == "bench" else arguments)
    named = {variable for variable in call.environment if variable.startswith("VLLM_")}
    assert not named - set(envs.environment_variables), f"{call}"


def look_at_transfer_config(call: Call) -> None:
    """vLLM takes the keys, its factory or plug-ins the connector, KVFerry its settings. Under MultiConnector, KVFerry
    is the first child, and vLLM's factory makes the others."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    config = json.loads(call.arguments[call.arguments.index("--kv-transfer-config") + 1])
    assert KVTransferConfig(**config).kv_load_failure_policy == "recompute"
    children = (
        config["kv_connector_extra_config"]["connectors"] if config["kv_connector"] == "MultiConnector" else [config]
    )
    ours, *others = (KVTransferConfig(**child) for child in children)
    module = ours.kv_connector_module_path
    assert ours.kv_connector == "KVFerryConnector" or module == "kvferry.connector.vllm.as_nixl", f"{call}"
    load_settings(ours.kv_connector_extra_config, call.environment)
    for other in others:
        KVConnectorFactory.get_connector_class(other)


def test_commands_that_are_only_looked_at_are_run_elsewhere(calls_of: Callable[[str], list[Call]]) -> None:
    for path, text in filter(all, ELSEWHERE.values()):
        assert text in (ROOT / path).read_text(), f"{path} has no {text!r}"
    used = {elsewhere(call) for page in WITH_COMMANDS for call in calls_of(page)}
    assert ELSEWHERE.keys() <= used, f"no page has these: {ELSEWHERE.keys() - used}"


@pytest.mark.parametrize("page", PAGES)
def test_kvferry_s_commands_in_running_text_have_their_options(page: str) -> None:
    click_app: Any = typer.main.get_command(app)
    for code in CODE.findall((ROOT / page).read_text()):
        found = re.match(r"kvferry ([a-z]+)\b(?!:)", code)
        if found:
            command = click_app.commands[found[1]]
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            assert set(re.findall(r"--[a-z][\w-]*", code)) <= {*known, "--help"}, code
