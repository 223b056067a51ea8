"""The commands of the documentation: where they stand, and one shell that runs all of a page."""

from __future__ import annotations

import json
import os
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
RUN = (["kvferry", "plan"], ["kvferry", "keygen"], ["kvferry", "doctor"], ["-m", "kvferry.cli.plan.trace"])
"""What is run, besides curl: programs with their first argument, and modules of Python. Nothing asks a peer."""
ADDED = {"doctor": ["--no-self-test"]}
"""Its self-test takes half a minute and has tests of its own."""


@dataclass(frozen=True)
class Call:
    """One call of a program. ``environment``: what the page set for it. ``was_run``: not only noted."""

    program: str
    arguments: list[str]
    folder: Path
    environment: dict[str, str]
    was_run: bool = False

    def __str__(self) -> str:
        return shlex.join([self.program, *self.arguments])


def blocks(text: str, *languages: str) -> list[str]:
    return [block for language, block in BLOCK.findall(text) if language in languages]


def commands(block: str) -> list[str]:
    """What stands behind ``$ `` in a console block, each with its further lines, without the output between them."""
    found: list[str] = []
    complete = True
    for line in block.splitlines():
        if line.startswith("$ "):
            assert complete, f"a quote or a line that goes on has no end: {found[-1]}"
            found.append(line[2:])
        elif complete:
            continue
        else:
            found[-1] += "\n" + line
        complete = _complete(found[-1])
    assert complete, f"a quote or a line that goes on has no end: {found[-1]}"
    return found


def _complete(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\")


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


def model() -> str:
    """The ``config.json`` of docs/planning.md."""
    (block,) = blocks((ROOT / "docs" / "planning.md").read_text(), "json")
    return block


def run(lines: Sequence[str], folder: Path, addresses: Mapping[str, str], token: str = "") -> tuple[list[Call], str]:
    """Run commands in one bash, in a copy of the repository made of links; only stand-ins and a few tools are there.

    Args:
        addresses: stand-ins for servers, by the address that the commands name.
        token: ``$TOKEN`` of the commands.

    Returns:
        The calls of stand-ins, and what was wrong: the command that failed and the output, or nothing.
    """
    checkout, programs = folder / "checkout", folder / "bin"
    recorder.repository(checkout, ROOT)
    (checkout / "config.json").write_text(model())
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
        "calls": str(folder / "calls"), "repository": str(ROOT), "addresses": dict(addresses),
        "run": RUN, "added": ADDED, "curl": _tool("curl"),
    }  # fmt: skip
    environment = {
        "PATH": str(programs), "HOME": str(folder), "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
        "PYTHONPATH": str(ROOT / ".typing"), "LC_ALL": "C.UTF-8", "KVFERRY_RECORDER": str(folder / "told"),
    }  # fmt: skip
    told["environment"] = [*environment, "PWD", "OLDPWD", "SHLVL", "_"]
    (folder / "told").write_text(json.dumps(told))
    (folder / "calls").touch()
    prelude = ["set -euo pipefail", "trap 'echo \"this failed: $BASH_COMMAND\"' ERR", "kill() { :; }", "PID=0"]
    text = "\n".join([*prelude, f"TOKEN={token}", configuration(), *lines, "wait"])
    for shown, meant in PLACES.items():
        text = text.replace(shown, meant)
    done = subprocess.run(
        [_tool("bash"), "-c", text],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    calls = [Call(**(call | {"folder": Path(call["folder"])})) for call in map(json.loads, (folder / "calls").open())]
    return calls, "" if done.returncode == 0 else f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _tool(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed"
    return path
