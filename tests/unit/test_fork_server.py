"""Programs that a fork server runs are as those that Python starts, and what it is to import is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


def test_arguments_environment_folder_output_and_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = (
        "import os, sys; print(sys.argv, os.environ['WORD'], os.getcwd()); print('e', file=sys.stderr); sys.exit(7)"
    )
    forked = fork_server().run("-c", script, "one", timeout=800, environment={"WORD": "given"})
    command = [sys.executable, "-c", script, "one"]
    started = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"WORD": "given"})
    assert (forked.returncode, forked.stdout, forked.stderr) == (started.returncode, started.stdout, started.stderr)
    (tmp_path / "program.py").write_text("import beside, sys; print(__name__, sys.argv[1:], beside.__name__)")
    (tmp_path / "beside.py").write_text("")
    forked = fork_server().run(str(tmp_path / "program.py"), "two", timeout=800)
    assert forked.stdout == "__main__ ['two'] beside\n", forked.stderr
    done = fork_server().run("-c", "raise ValueError('planted')", timeout=800)
    assert done.returncode == 1 and "ValueError: planted" in done.stderr


def test_pipes_signals_and_statuses_of_several_at_once() -> None:
    echo = "import sys\nfor line in sys.stdin: print(line.strip() + '!', flush=True)"
    programs = [fork_server().start("-c", echo, text=True) for _ in range(3)]
    for number, program in enumerate(programs):
        program.stdin.write(f"{number}\n")
        program.stdin.flush()
    assert [program.stdout.readline() for program in programs] == ["0!\n", "1!\n", "2!\n"]
    programs[0].kill()
    assert programs[0].wait(60) == -signal.SIGKILL and programs[1].poll() is None
    programs[1].stdin.close()
    assert programs[1].wait(60) == 0 and programs[2].poll() is None
    for program in programs:
        program.close()
    assert programs[2].poll() == -signal.SIGKILL


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
