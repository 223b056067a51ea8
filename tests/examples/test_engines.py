"""The launcher of engines: nothing that it started outlives it, however it ends."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import engines
from tests.support.engines import ServerGroup
from tests.support.server import EngineError

# An "engine" as bad as vLLM's: it ignores SIGTERM, has a child that does too, and one that left the session.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
    with open(sys.argv[1], "a") as file:
        print(os.getpid(), file=file, flush=True)
    time.sleep(600)
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file, flush=True)
time.sleep(600)
"""

LAUNCHER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.engines import ServerGroup
with ServerGroup(Path(sys.argv[2]), grace=0.3) as group:
    group.spawn("bad", [sys.executable, "-c", sys.argv[3], sys.argv[2] + "/pids"], host="127.0.0.1", port=1)
    print("started", flush=True)
    if sys.argv[4] == "raise":
        pids = Path(sys.argv[2]) / "pids"
        while not pids.exists() or len(pids.read_text().split()) < 3:
            time.sleep(0.05)
        raise RuntimeError("planted")
    time.sleep(600)
"""


def running(pids: list[int]) -> list[int]:
    left = []
    for pid in pids:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                left.append(pid)
    return left


def wait_for(condition) -> bool:
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def kill_all(pids: list[int], process: subprocess.Popen) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


def started(folder: Path) -> list[int]:
    """The processes that have written their numbers."""
    with suppress(OSError, ValueError):
        return [int(line) for line in (folder / "pids").read_text().split()]
    return []


@pytest.mark.parametrize("end", ["SIGKILL", "SIGINT", "raise"])
def test_no_process_outlives_the_launcher(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(engines.ROOT / ".typing"), str(tmp_path), STUBBORN, end]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: len(started(tmp_path)) == 3), "the stand-in did not start"
        if end != "raise":
            launcher.send_signal(getattr(signal, end))
        launcher.wait(300)
        assert wait_for(lambda: not running(started(tmp_path))), f"still there: {running(started(tmp_path))}"
    finally:
        kill_all(running(started(tmp_path)), launcher)


@pytest.mark.parametrize("seen", [False, True])
def test_close_ends_an_engine_whose_guard_process_was_killed_and_nothing_else(tmp_path: Path, seen: bool) -> None:
    """``seen``: somebody has looked at the guard process since its end, so that the system has forgotten it."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"], start_new_session=True)
    program = STUBBORN.replace("os.setsid()", "pass")
    try:
        with ServerGroup(tmp_path, grace=0.3) as group:
            server = group.spawn("a", [sys.executable, "-c", program, f"{tmp_path}/pids"], host="x", port=1)
            assert wait_for(lambda: len(started(tmp_path)) == 3)
            os.kill(server.process.pid, signal.SIGKILL)
            assert wait_for(lambda: not seen or not server.alive)
            assert len(running(started(tmp_path))) == 3, "the engine ended by itself: the test shows nothing"
        assert wait_for(lambda: not running(started(tmp_path))), f"still there: {running(started(tmp_path))}"
        assert other.poll() is None
    finally:
        kill_all(running(started(tmp_path)), other)


def test_an_engine_that_dies_or_never_answers_is_told(tmp_path: Path) -> None:
    program = "print('ValueError: the cause'); [print('later', i) for i in range(99)]; raise SystemExit(3)"
    with ServerGroup(tmp_path) as group:
        group.spawn("bad", [sys.executable, "-c", program], host="127.0.0.1", port=1)
        with pytest.raises(EngineError, match=r"(?s)bad ended with code 3.*the cause.*later 98"):
            group.wait_ready(300)
    with ServerGroup(tmp_path) as group:
        group.spawn("mute", [sys.executable, "-c", "import time; time.sleep(3000)"], host="127.0.0.1", port=1)
        with pytest.raises(EngineError, match=r"mute did not answer on http://127.0.0.1:1/health within 1 s"):
            group.wait_ready(1)


def test_network_namespaces_without_root_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = runpy.run_path(str(engines.ROOT / "examples" / "two_node" / "run_netns.py"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["run_netns.py"])
    assert example["main"]() == 2
    said = capsys.readouterr()
    assert len((said.out + said.err).splitlines()) == 1 and "root" in said.out


@pytest.mark.parametrize("script", ["prefill.sh", "decode.sh", "router.sh"])
def test_scripts_say_what_they_need(script: str) -> None:
    for arguments in ([], ["model"]):
        command = [str(engines.ROOT / "examples" / "two_node" / script), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith(f"usage: {command[0]} ")


def test_scripts_make_the_command_that_the_readme_shows() -> None:
    """With `printf` in place of vllm: the JSON must survive the shell."""
    command = [str(engines.ROOT / "examples" / "two_node" / "decode.sh"), "some/model", "10.0.0.1", "--dtype", "auto"]
    environment = {**os.environ, "VLLM": "printf %s\\n", "PORT": "8001"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800, env=environment)
    config = json.loads(done.stdout.partition("--kv-transfer-config\n")[2].partition("\n--dtype")[0])
    assert config == engines.transfer_config("KVFerryConnector", {"side_channel_host": "10.0.0.1"})
    assert done.stdout.startswith("serve\nsome/model\n--host\n10.0.0.1\n") and "\n8001\n" in done.stdout
