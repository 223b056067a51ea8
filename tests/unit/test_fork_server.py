"""Programs that a fork server runs are as those that Python starts, and what it is to import is there."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer, fork_server


def test_what_was_to_be_imported_is_there() -> None:
    """Before the program's first line, without a thread, CUDA or a ZMQ context."""
    script = (
        "import os, sys; there = set(sys.modules); import tests.support.preload; print(set(sys.modules) - there)\n"
        "print(len(os.listdir('/proc/self/task')), 'torch' in there, sys.modules['zmq'].Context._instance)\n"
    )
    done = fork_server().run("-c", script, timeout=800)
    assert done.stdout.splitlines() == ["set()", "1 True None"], done.stderr


def test_address_spaces_are_laid_out_anew() -> None:
    script = "import ctypes; print(ctypes.addressof(ctypes.create_string_buffer(64 << 20)))"
    assert len({fork_server().run("-c", script, timeout=800).stdout for _ in range(3)}) == 3


def test_programs_end_by_their_time_limit_and_with_their_server(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        fork_server().run("-c", "import time; time.sleep(600)", timeout=0.2)
    (tmp_path / "no_imports.py").write_text("")
    server = ForkServer("no_imports", {"PYTHONPATH": str(tmp_path)})
    program = server.start("-c", "print('up', flush=True); import time; time.sleep(600)", text=True)
    assert program.stdout.readline() == "up\n"
    server.close()
    assert program.stdout.read() == ""
    deadline = time.monotonic() + 60
    while state_of(program.pid) not in ("", "Z", "X"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """The kernel's letter for it, empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
