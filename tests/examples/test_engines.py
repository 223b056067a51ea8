"""The launcher of engines: nothing that it started outlives it, however it ends."""

from __future__ import annotations

import importlib.util
import json
import os
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


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def started(folder: Path) -> list[int]:
    """The processes that have written their numbers."""
    with suppress(OSError, ValueError):
        return [int(line) for line in (folder / "pids").read_text().split()]
    return []


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT", "raise"])
def test_no_process_outlives_the_launcher(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(engines.ROOT / ".typing"), str(tmp_path), STUBBORN, end]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: len(started(tmp_path)) == 3, 300), "the stand-in did not start"
        if end != "raise":
            launcher.send_signal(getattr(signal, end))
        launcher.wait(300)
        assert wait_for(lambda: not running(started(tmp_path)), 300), f"still there: {running(started(tmp_path))}"
    finally:
        for pid in running(started(tmp_path)):
            os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait()


def test_close_ends_all_and_only_its_own(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"], start_new_session=True)
    try:
        with ServerGroup(tmp_path, grace=0.3) as group:
            server = group.spawn("a", [sys.executable, "-c", STUBBORN, f"{tmp_path}/pids"], host="x", port=1)
            assert wait_for(lambda: len(started(tmp_path)) == 3, 300)
            group.stop(server)
            assert not running(started(tmp_path)) and not group.servers
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("seen", [False, True])
def test_close_ends_an_engine_whose_guard_process_was_killed(tmp_path: Path, seen: bool) -> None:
    """``seen``: somebody has looked at the guard process since its end, so that the system has forgotten it."""
    program = STUBBORN.replace("os.setsid()", "pass")
    try:
        with ServerGroup(tmp_path, grace=0.3) as group:
            server = group.spawn("a", [sys.executable, "-c", program, f"{tmp_path}/pids"], host="x", port=1)
            assert wait_for(lambda: len(started(tmp_path)) == 3, 300)
            os.kill(server.process.pid, signal.SIGKILL)
            assert wait_for(lambda: not seen or not server.alive, 300)
            assert len(running(started(tmp_path))) == 3, "the engine ended by itself: the test shows nothing"
        assert wait_for(lambda: not running(started(tmp_path)), 300), f"still there: {running(started(tmp_path))}"
    finally:
        for pid in running(started(tmp_path)):
            os.kill(pid, signal.SIGKILL)


def test_an_engine_that_dies_is_told_with_its_first_error_and_its_end(tmp_path: Path) -> None:
    program = "print('ValueError: the cause'); [print('later', i) for i in range(99)]; raise SystemExit(3)"
    with ServerGroup(tmp_path) as group:
        group.spawn("bad", [sys.executable, "-c", program], host="127.0.0.1", port=1)
        with pytest.raises(EngineError, match=r"(?s)bad ended with code 3.*the cause.*later 98"):
            group.wait_ready(300)


def test_an_engine_that_never_answers_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    with ServerGroup(tmp_path, say=said.append) as group:
        group.spawn("mute", [sys.executable, "-c", "import time; time.sleep(3000)"], host="127.0.0.1", port=1)
        with pytest.raises(EngineError, match=r"mute did not answer on http://127.0.0.1:1/health within 10 s"):
            group.wait_ready(10)
    assert any("mute: starting" in line for line in said)


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_no_vllm_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    """The real thing: EngineCore and its workers spin on a core where nobody ends them."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.support.engines import ServerGroup
from tests.support.tiny_model import ModelSpec, build_model
folder = Path(sys.argv[2])
with ServerGroup(folder / "logs") as group:
    engine = group.engine("only", build_model(folder / "model", ModelSpec(layers=1)), connector=None)
    group.wait_ready()
    print("session", engine.process.pid, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(engines.ROOT / ".typing"), str(tmp_path)]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    session = 0
    try:
        assert launcher.stdout is not None
        session = next(int(line.split()[1]) for line in launcher.stdout if line.startswith("session"))
        family = _session(session)
        assert len(family) >= 3, f"expected guard process, server, EngineCore and worker, found {family}"
        launcher.kill()
        launcher.wait()
        assert wait_for(lambda: not running(family) and not _session(session), 300), _session(session)
    finally:
        launcher.kill()
        for pid in _session(session):
            os.kill(pid, signal.SIGKILL)


def _session(session: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and session and fields[0] not in "ZX":
                    found.append(int(entry))
    return found


def test_network_namespaces_without_root_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = engines.ROOT / "examples" / "two_node" / "run_netns.py"
    spec = importlib.util.spec_from_file_location("run_netns", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["run_netns.py"])
    assert example.main() == 2
    said = capsys.readouterr()
    assert len((said.out + said.err).splitlines()) == 1 and "root" in said.out


@pytest.mark.parametrize("arguments", [[], ["model"]])
@pytest.mark.parametrize("script", ["prefill.sh", "decode.sh", "router.sh"])
def test_scripts_say_what_they_need(script: str, arguments: list[str]) -> None:
    command = [str(engines.ROOT / "examples" / "two_node" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 2 and done.stderr.startswith("usage:") and len(done.stderr.splitlines()) == 1


def test_scripts_make_the_command_that_the_readme_shows() -> None:
    """prefill.sh with `echo` in place of vllm: the JSON must survive the shell."""
    command = [str(engines.ROOT / "examples" / "two_node" / "decode.sh"), "some/model", "10.0.0.1", "--dtype", "auto"]
    environment = {**os.environ, "VLLM": "printf %s\\n", "PORT": "8001"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800, env=environment)
    said = done.stdout.split("\n")
    text = done.stdout.partition("--kv-transfer-config\n")[2].partition("\n--dtype")[0]
    config = json.loads(text)
    expected = engines.transfer_config("KVFerryConnector", {"side_channel_host": "10.0.0.1"})
    assert config == expected and said[:4] == ["serve", "some/model", "--host", "10.0.0.1"] and "8001" in said
