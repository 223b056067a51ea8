"""The folders of the product: imports go downwards, one folder imports vLLM; private names are reached in one file."""

from __future__ import annotations

import ast
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.drain.pages import recorded
from tests.router.stand_ins import decode_engine, prefill_engine, router_process
from tests.support.served import eventually

ROOT = Path(__file__).resolve().parents[2]
BELOW = {
    "transport": "",
    "kernels": "transport",
    "geometry": "kernels transport",
    "binding": "geometry kernels transport",
    "wire": "geometry kernels transport",
    "pages": "wire geometry kernels transport",
    "step_loads": "pages wire geometry kernels transport",
    "prefill_side": "pages wire geometry kernels transport",
    "decode_side": "step_loads pages wire geometry kernels transport",
    "scheduler": "wire geometry transport.errors transport.limited_log",
    "worker": "prefill_side decode_side step_loads pages wire geometry kernels transport",
    "vllm": "scheduler worker step_loads wire geometry transport",
    "router": "transport",
    "cli": "router vllm worker prefill_side decode_side step_loads pages wire geometry binding kernels transport",
}
"""The folders and modules that a folder's modules import from, beside its own. The two sides do not know each other."""
CONFIG = "transport"
"""What connector/config.py imports from; every folder may import it."""
TOPS = ("connector", "cli", "transport", "kernels", "router")
MOST_FILES = 15


def modules() -> list[Path]:
    return sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))


def floor(parts: tuple[str, ...]) -> str:
    """The folder of a module by its path below the repository: "config" for connector/config.py."""
    return parts[1].removesuffix(".py") if parts[0] == "connector" and len(parts) > 1 else parts[0]


@cache
def trees() -> dict[str, ast.Module]:
    """The product's modules, parsed, by their paths below the repository."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in modules()}


def imported(tree: ast.Module) -> set[str]:
    """The modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{node.module}: imports are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_circle_of_folders() -> None:
    """In the order of ``BELOW`` each folder comes after those that it imports from."""
    names = list(BELOW)
    for name, below in BELOW.items():
        assert all(names.index(other.partition(".")[0]) < names.index(name) for other in below.split()), name


def test_imports_go_downwards() -> None:
    for file, tree in trees().items():
        own = floor(tuple(file.split("/")))
        allowed = (CONFIG if own in ("config", "__init__") else f"{BELOW[own]} config").split()
        for name in imported(tree):
            parts = tuple(name.split("."))
            if parts[0] == "kvferry" and parts[1:] not in ((), ("connector",)):
                named = {floor(parts[1:]), ".".join(parts[1:3])}
                assert not named.isdisjoint((own, *allowed)), f"{file} imports {name}"


def test_vllm_is_imported_in_one_folder() -> None:
    importing = [file for file, tree in trees().items() if "vllm" in {name.split(".")[0] for name in imported(tree)}]
    assert {Path(file).parent.as_posix() for file in importing} == {"connector/vllm"}


def test_folders_are_small() -> None:
    counts = Counter(path.relative_to(ROOT).parent.as_posix() for path in modules() if path.name != "__init__.py")
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


ROUTER_ONLY = """
import sys
from importlib.abc import MetaPathFinder
class Lacks(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("numpy", "torch", "triton", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacks())
from kvferry.cli.main import app
app(prog_name="kvferry")
"""
"""``kvferry`` where ``pip install 'kvferry[router]'`` has installed all that there is."""


def test_the_router_and_the_commands_beside_it_need_no_package_of_an_engine(tmp_path: Path) -> None:
    p, d = prefill_engine(), decode_engine()
    d.metrics = lambda: recorded("decode") + 'vllm:kv_cache_usage_perc{engine="0"} 0.0\n'

    def command(*words: str) -> tuple[int, str]:
        run = [sys.executable, "-c", ROUTER_ONLY, *words]
        done = subprocess.run(run, capture_output=True, text=True, timeout=800, check=False)
        return done.returncode, done.stdout + done.stderr

    with p.running() as p_url, d.running() as d_url:
        program = "-c", ROUTER_ONLY
        with router_process("--prefill", p_url, "--decode", d_url, program=program) as (site, process):
            eventually(lambda: site.healthy or process.poll(), "the router serves, or has ended")
            assert site.ask({"prompt": "x"}).json() == {"text": "from D"} and p.seen and d.seen
            status, said = command("check", site.url, "--json")
            assert status == 1 and json.loads(said)["handed_over"] is False
        assert command("drain", d_url, "--quiet", "0.1")[0] == 0
    assert command("keygen", str(tmp_path / "key"))[0] == 0 and (tmp_path / "key").exists()
    status, said = command("doctor")
    assert status == 1 and re.search("fault +torch ", said) and "Traceback" not in said
    for words in (["bench"], ["plan", "--model", "m", "--prefill-tokens-per-second", "9"]):
        status, said = command(*words)
        assert status == 2 and re.fullmatch(r"kvferry: .* needs \w+: pip install 'kvferry\[engine\]'\n", said), said


def test_no_public_class_name_exists_twice_and_those_of_the_glossary_exist() -> None:
    classes = Counter(node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef))
    assert len(classes) > 100
    assert [name for name, count in classes.items() if count > 1 and not name.startswith("_")] == []
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert len(named) > 15 and named <= classes.keys(), f"no such type: {sorted(named - classes.keys())}"


def test_no_deadline_goes_by_the_time_of_day() -> None:
    """The product reads no clock that somebody can set, so no message can carry its time either. Spans of a trace carry
    the time of day, and nothing else uses it."""
    clock = re.compile(r"\b(time\.time(_ns)?|time\.localtime|datetime\.now)\b|^import datetime", re.MULTILINE)
    reading = {path.relative_to(ROOT).as_posix() for path in modules() if clock.search(path.read_text())}
    assert reading == {"transport/tracing.py"}


def test_make_lint_checks_the_types_of_every_file() -> None:
    """What mypy takes for its sources, with the settings of pyproject.toml, are the Python files that git has."""
    show = "from mypy.main import process_options; print(*(s.path for s in process_options([])[0]), sep='\\n')"
    checked = subprocess.run(
        [sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = {ROOT / name for name in listed.split() if (ROOT / name).exists()}
    assert {(ROOT / name).resolve() for name in checked} >= wanted
    assert len(checked) == len(set(checked))


@pytest.mark.parametrize("fails", ["--ignore=tests/vllm", " tests/vllm", "nixl and", "nothing"])
def test_all_parts_run_whatever_becomes_of_the_others(tmp_path: Path, fails: str) -> None:
    runs, pytest_stand_in = tmp_path / "runs", tmp_path / "pytest"
    pytest_stand_in.write_text(
        f'#!/bin/sh\necho "$OMP_NUM_THREADS $2" >> {runs}\ncase "$*" in *"{fails}"*) exit 1;; esac\n'
    )
    pytest_stand_in.chmod(0o755)
    command = ["make", "--silent", "--assume-old=install", "test", f"PYTEST={pytest_stand_in}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=800, check=False)
    assert done.returncode == (0 if fails == "nothing" else 2)
    assert sorted(runs.read_text().splitlines()) == ["1 nixl and not engines", *2 * ["1 not engines and not nixl"]]


TABLE: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "binding_table.py"))
RENAMED = {
    "vllm_config": {"layout", "source", "config", "connector", "num_blocks"}, "available_memory": {"num_blocks"},
    "kv_cache_raw_tensors": {"raw"}, "attn_backends": {"layout"}, "block_tables": set(), "enable_cache": {"cache"},
}  # fmt: skip
"""Parameters of vLLM's functions that ours do not have, and the parameters that replace them."""


def test_every_row_is_there_and_takes_what_its_seed_takes() -> None:
    assert len({utility.name for utility in TABLE["UTILITIES"]}) == len(TABLE["UTILITIES"])
    for utility in TABLE["UTILITIES"]:
        ours = set(inspect.signature(TABLE["resolve"](utility)).parameters)
        (function,) = ast.parse(f"def {utility.seed}: ...").body
        assert isinstance(function, ast.FunctionDef)
        seed = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}
        assert seed
        for name in seed - ours:
            assert name in RENAMED and (not RENAMED[name] or RENAMED[name] & ours), (utility.name, name)


LISTED = {"_make_src_and_dst_indices", "_registry", "_token_to_req_indices_cache"}
"""Names of vLLM's: a utility that engines without vLLM call so, and two that only vLLM's objects have here."""
PATCHING = ("setattr", "getattr", "hasattr", "delattr", "object")
"""Calls whose second argument is a name."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in ("self", "cls", "super")


def defined(tree: ast.Module) -> Iterator[str]:
    """The private names of functions, classes, variables and attributes of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield from filter(is_private, [name])
            case ast.Name(id=name, ctx=ast.Store()):
                yield from filter(is_private, [name])
            case ast.Attribute(value=value, attr=name, ctx=ast.Store()) if is_own(value):
                yield from filter(is_private, [name])


def reached(tree: ast.Module) -> Iterator[str]:
    """The private names that a file reaches for in objects and modules that are not its own."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name) and not is_own(value):
                yield from () if ast.unparse(value) == "torch.cuda" else (name,)
            case ast.ImportFrom(module=str(module)) if module.startswith("kvferry."):
                yield from (alias.name for alias in node.names)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[_, ast.Constant(value=name), *_]
            ):
                yield from (name,) if called in PATCHING and isinstance(name, str) else ()


def test_no_private_name_of_the_product_is_reached_elsewhere() -> None:
    """Of those that no test and no benchmark has too. What does not name any is not parsed."""
    private = {name for tree in trees().values() for name in defined(tree)} - LISTED
    elsewhere = {
        path: ast.parse(path.read_text())
        for top in ("tests", "benchmarks")
        for path in sorted((ROOT / top).rglob("*.py"))
        if not private.isdisjoint(re.findall(r"\b_\w+", path.read_text()))
    }
    private -= {name for tree in elsewhere.values() for name in defined(tree)}
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path, tree in elsewhere.items()
        if path.name != "inside.py" and (names := private.intersection(reached(tree)))
    }
    assert found == {}, "look through tests/support/inside.py"
