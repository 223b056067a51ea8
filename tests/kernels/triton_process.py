"""Triton decides at import whether it interprets, so tests of kernels run each in a process of its own."""

from __future__ import annotations

from tests.support.fork_server import fork_server

PRELUDE = """
import os, sys
assert "triton" not in sys.modules, "it has decided"
"""


def python(script: str, *arguments: str, interpret: bool) -> list[list[str]]:
    """Words of each line that the script prints."""
    choice = 'os.environ["TRITON_INTERPRET"] = "1"' if interpret else 'os.environ.pop("TRITON_INTERPRET", None)'
    done = fork_server().run("-c", f"{PRELUDE}{choice}\n{script}", *arguments, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.split() for line in done.stdout.splitlines()]
