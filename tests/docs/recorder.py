"""Stands in for a program that a page of the documentation calls: notes the call. Only curl is run.

A link with the program's name points to this file. ``$KVFERRY_RECORDER`` names a file of JSON: where calls are noted,
the folder of the repository, and addresses of stand-ins.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def repository(folder: Path, root: Path) -> None:
    """A folder with links to what a checkout has, so that commands find its files and write none of theirs there."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if not path.name.startswith(".") and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)


def main() -> int:
    told: dict[str, Any] = json.loads(Path(os.environ["KVFERRY_RECORDER"]).read_text())
    program, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    if program == "sudo":
        os.execvp(arguments[0], arguments)
    environment = {name: value for name, value in os.environ.items() if name not in told["environment"]}
    call = {"program": program, "arguments": arguments, "folder": os.getcwd(), "environment": environment}
    with open(told["calls"], "a") as calls:  # one write of one line: calls in the background do not mix
        calls.write(json.dumps(call) + "\n")
    if program == "git":
        repository(Path(arguments[-1]), Path(told["repository"]))
    elif program == "curl":
        for shown, real in told["addresses"].items():
            arguments = [argument.replace(shown, real) for argument in arguments]
        os.execv(told["curl"], ["curl", "--fail", *arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main())
