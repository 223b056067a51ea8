"""The commands of the documentation: where they stand, and one shell that runs all of a page."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs import recorder
from tests.support.fork_server import fork_server

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
RUN = (["kvferry", "plan"], ["kvferry", "keygen"], ["kvferry", "doctor"])
"""What is run, besides curl: programs with their first argument. Nothing asks a peer."""
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


MODULE = """
import os, runpy, sys
os.chdir({cwd!r})
sys.argv = {args!r}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@contextmanager
def runner(path: Path) -> Iterator[None]:
    """Runs the modules that stand-ins ask for, in copies of a process that has made all slow imports."""
    with socket.create_server(str(path), family=socket.AF_UNIX) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        data, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                        order = json.loads(data)
                        program = fork_server().start_with(
                            tuple(files), "-c", MODULE.format(**order), environment=order["environ"]
                        )
                        for file in files:
                            os.close(file)
                        connection.send(str(program.wait(800)).encode())

        thread = threading.Thread(target=serve, name="runner")
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def run(lines: Sequence[str], folder: Path, addresses: Mapping[str, str]) -> tuple[list[Call], str]:
    """Run commands in one bash, in a copy of the repository made of links; only stand-ins and a few tools are there.

    ``addresses``: stand-ins for servers, by the address that the commands name.
    Returns the calls of stand-ins, and what was wrong: the command that failed and the output, or nothing.
    """
    checkout, programs = folder / "checkout", folder / "bin"
    recorder.repository(checkout, ROOT)
    page = (ROOT / "docs" / "planning.md").read_text()
    (checkout / "config.json").write_text(next(block for name, block in BLOCK.findall(page) if name == "json"))
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
        "runner": str(folder / "runner"), "run": RUN, "added": ADDED, "curl": _tool("curl"),
    }  # fmt: skip
    environment = {
        "PATH": str(programs), "HOME": str(folder), "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
        "PYTHONPATH": str(ROOT / ".typing"), "LC_ALL": "C.UTF-8", "KVFERRY_RECORDER": str(folder / "told"),
    }  # fmt: skip
    told["environment"] = [*environment, "PWD", "OLDPWD", "SHLVL", "_"]
    (folder / "told").write_text(json.dumps(told))
    (folder / "calls").touch()
    prelude = ["set -euo pipefail", "trap 'echo \"this failed: $BASH_COMMAND\"' ERR", "kill() { :; }", "PID=0"]
    text = "\n".join([*prelude, configuration(), *lines, "wait"])
    for shown, meant in PLACES.items():
        text = text.replace(shown, meant)
    command = [_tool("bash"), "-c", text]
    with runner(folder / "runner"):
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=800, check=False
        )
    calls = [Call(**(call | {"folder": Path(call["folder"])})) for call in map(json.loads, (folder / "calls").open())]
    return calls, "" if done.returncode == 0 else f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _tool(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"{name} is not installed"
    return path
