"""The commands of the documentation: where they stand, and one shell that runs all of a page."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs import recorder

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*/README.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLACES = {"<this repository>": "https://repository.example/kvferry.git"}
"""What a page leaves to its reader."""
TOOLS = ("sh", "env", "dirname", "grep", "seq", "sleep")
"""Programs that are no stand-ins."""
STAND_INS = (
    "curl", "docker", "git", "kubectl", "kvferry", "ls", "make", "pip", "pre-commit", "python", "python3", "ray", "scp",
    "serve", "sudo", "vllm",
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call of a program. ``environment``: what the page set for it."""

    program: str
    arguments: list[str]
    folder: Path
    environment: dict[str, str]

    def __str__(self) -> str:
        return shlex.join([self.program, *self.arguments])


def commands(block: str) -> list[str]:
    """What stands behind ``$ `` in a console block, each with its further lines, without the output between them."""
    found: list[str] = []
    complete = True
    for line in block.splitlines():
        if complete and not line.startswith("$ "):
            continue
        if complete:
            found.append(line[2:])
        else:
            found[-1] += "\n" + line
        try:
            shlex.split(found[-1], comments=True)
            complete = not found[-1].endswith("\\")
        except ValueError:
            complete = False
    assert complete, f"a quote or a line that goes on has no end: {found[-1]}"
    return found


def of_page(text: str) -> list[str]:
    """All commands of a page, in order. A block in bash is one command."""
    found: list[str] = []
    for language, block in BLOCK.findall(text):
        found += commands(block) if language == "console" else [block] if language in ("bash", "sh") else []
    return found


def configuration() -> str:
    """The line of the README that sets ``CONFIG``, which other pages use."""
    (line,) = [line for line in of_page((ROOT / "README.md").read_text()) if line.startswith("CONFIG=")]
    return line


def run(lines: Sequence[str], folder: Path, addresses: Mapping[str, str]) -> tuple[list[Call], str]:
    """Run commands in one bash, in a copy of the repository made of links; only stand-ins and a few tools are there.

    ``addresses``: stand-ins for servers, by the address that the commands name.
    Returns the calls of stand-ins, and what was wrong: the command that failed and the output, or nothing.
    """
    checkout, programs = folder / "checkout", folder / "bin"
    recorder.repository(checkout, ROOT)
    for place in (programs, checkout / ".venv" / "bin"):
        place.mkdir(parents=True)
    stand_in = folder / "stand_in.py"
    stand_in.write_text(f"#!{sys.executable}\n" + Path(recorder.__file__).read_text())
    stand_in.chmod(0o755)
    for name in STAND_INS:
        (programs / name).symlink_to(stand_in)
    for name in ("python", "vllm", "kvferry"):
        (checkout / ".venv" / "bin" / name).symlink_to(stand_in)
    for name in TOOLS:
        (programs / name).symlink_to(_tool(name))
    told: dict[str, Any] = {
        "calls": str(folder / "calls"), "repository": str(ROOT), "addresses": dict(addresses), "curl": _tool("curl"),
    }  # fmt: skip
    environment = {
        "PATH": str(programs), "HOME": str(folder), "LC_ALL": "C.UTF-8", "KVFERRY_RECORDER": str(folder / "told"),
    }  # fmt: skip
    told["environment"] = [*environment, "PWD", "OLDPWD", "SHLVL", "_"]
    (folder / "told").write_text(json.dumps(told))
    (folder / "calls").touch()
    prelude = ["set -euo pipefail", "trap 'echo \"this failed: $BASH_COMMAND\"' ERR", "kill() { :; }", "PID=0"]
    text = "\n".join([*prelude, configuration(), *lines, "wait"])
    for shown, meant in PLACES.items():
        text = text.replace(shown, meant)
    command = [_tool("bash"), "-c", text]
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    calls = [Call(**(call | {"folder": Path(call["folder"])})) for call in map(json.loads, (folder / "calls").open())]
    return calls, "" if done.returncode == 0 else f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _tool(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed"
    return path
