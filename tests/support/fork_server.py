"""Python programs that start in milliseconds: each runs in a copy of a process that has made all slow imports.

A program that imports PyTorch needs 2 s of a core before its first line. The server pays this once. At each fork it
has one thread, no CUDA context and no ZMQ context (``check_idle``), so that a copy differs from a process that was
started by itself in three points only: the imports are there, hashes of strings are those of the other copies, and at
its end, after threads and exit functions, modules are not taken apart.

Programs that need environment variables at import or another user start by themselves.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import itertools
import json
import mmap
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
"""Patience with a server that imports on a loaded machine."""


# --- the tests' end -------------------------------------------------------------------------------------------------


class Program:
    """One running program, with the interface of ``subprocess.Popen``. Threads may share it."""

    stdin: IO[Any]
    stdout: IO[Any]

    def __init__(self, args: tuple[str, ...], *pipes: IO[Any]) -> None:
        """``pipes``: to its stdin and from its stdout, if there are any."""
        self.args, self._pipes = args, pipes
        if pipes:
            self.stdin, self.stdout = pipes
        self.pid = 0
        self.returncode: int | None = None
        self.started, self.ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        assert self.returncode is not None, f"the fork server ended while {self.args[:2]} ran"
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End it, whatever state it is in, and close the pipes."""
        self.kill()
        self.wait(START_SECONDS)
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForkServer:
    """The process that forks. ``preload``: a module whose import makes all slow imports."""

    def __init__(self, preload: str = "tests.support.preload", environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / ".typing"), variables.get("PYTHONPATH")]))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno()), preload],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=variables,
                cwd=ROOT,
            )
        self._socket, self._owner = ours, os.getpid()
        self._programs: dict[int, Program] = {}
        self._numbers = itertools.count()
        threading.Thread(target=self._listen, daemon=True).start()
        atexit.register(self.close)

    def start(self, *args: str, text: bool = False, environment: Mapping[str, str] | None = None) -> Program:
        """Run ``python *args``: ``-c PROGRAM``, ``-m MODULE`` or a file, each with arguments. Pipes to stdin and from
        stdout; stderr is that of the tests. ``environment``: variables to add."""
        kind = "" if text else "b"
        to_child, our_stdin = os.pipe()
        our_stdout, from_child = os.pipe()
        program = Program(args, os.fdopen(our_stdin, f"w{kind}"), os.fdopen(our_stdout, f"r{kind}"))
        try:
            self._request(program, (to_child, from_child), environment)
        finally:
            os.close(to_child)
            os.close(from_child)
        return program

    def run(self, *args: str, timeout: float, environment: Mapping[str, str] | None = None) -> Any:
        """The same, to its end: a ``subprocess.CompletedProcess`` with stdout and stderr as text.

        Raises:
            subprocess.TimeoutExpired: it was ended because it took longer than ``timeout`` seconds.
        """
        with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
            with Program(args) as program:
                self._request(program, (nothing.fileno(), out.fileno(), error.fileno()), environment)
                code = program.wait(timeout)
            out.seek(0), error.seek(0)
            return subprocess.CompletedProcess(list(args), code, out.read(), error.read())

    def start_with(self, files: tuple[int, ...], *args: str, environment: Mapping[str, str] | None = None) -> Program:
        """The same without pipes: ``files`` become its descriptors 0, 1, 2 and so on."""
        program = Program(args)
        self._request(program, files, environment)
        return program

    def _request(self, program: Program, files: tuple[int, ...], environment: Mapping[str, str] | None) -> None:
        number = next(self._numbers)
        self._programs[number] = program
        request = {"number": number, "args": program.args, "environment": dict(environment or {}), "cwd": os.getcwd()}
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        assert program.started.wait(START_SECONDS) and program.pid, "the fork server did not start the program"

    def _listen(self) -> None:
        """Take what the server reports: of each program its process id, then its exit status."""
        while data := self._socket.recv(1 << 10):
            report = json.loads(data)
            program = self._programs[report["number"]]
            if "pid" in report:
                program.pid = report["pid"]
                program.started.set()
            else:
                program.returncode = report["status"]
                program.ended.set()
                del self._programs[report["number"]]
        for program in self._programs.values():
            program.started.set(), program.ended.set()

    def close(self) -> None:
        """End the server and all programs that still run. Nothing in a fork of the tests."""
        if os.getpid() != self._owner:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        atexit.unregister(self.close)


_servers: dict[str, ForkServer] = {}


def fork_server(preload: str = "tests.support.preload", environment: Mapping[str, str] | None = None) -> ForkServer:
    """The server of this test process with these imports, started in ``environment`` when it is first needed."""
    if preload not in _servers:
        _servers[preload] = ForkServer(preload, environment)
    return _servers[preload]


# --- the server's end -----------------------------------------------------------------------------------------------


def check_idle() -> None:
    """Nothing runs that a fork would tear apart."""
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    zmq, torch = sys.modules.get("zmq"), sys.modules.get("torch")
    assert zmq is None or zmq.Context._instance is None, "an import has made a ZMQ context"
    assert torch is None or not torch.cuda.is_initialized(), "an import has initialized CUDA"


def serve(requests: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each request and report the ends of the programs. In a copy: its request, and the descriptors for
    stdin, stdout and, if given, stderr. None when the tests are over."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd: process id, number of the request
    poll = select.poll()
    poll.register(requests, select.POLLIN)

    def report(**values: int) -> None:
        with suppress(BrokenPipeError):
            requests.send(json.dumps(values).encode())

    while True:
        for ready, _ in poll.poll():
            if ready != requests.fileno():
                pid, number = running.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                report(number=number, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            data, files, _, _ = socket.recv_fds(requests, 1 << 20, 8)
            if not data:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            check_idle()
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                requests.close()
                for descriptor in running:
                    os.close(descriptor)
                return request, files
            for descriptor in files:
                os.close(descriptor)
            report(number=request["number"], pid=pid)
            handle = os.pidfd_open(pid)
            running[handle] = pid, request["number"]
            poll.register(handle, select.POLLIN)


def become(request: dict[str, Any], pipes: list[int]) -> None:
    """Take the program's pipes, environment and folder, and an address space that is not laid out as in other copies:
    an address of P that were taken for one of D must not be right by chance."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, len(pipes)) for descriptor in pipes]
    for number, (received, descriptor) in enumerate(zip(pipes, above, strict=True)):
        if received >= len(pipes):
            os.close(received)
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    os.chdir(request["cwd"])
    sys.modules["_kvferry_layout"] = layout = ModuleType("_kvferry_layout")
    layout.taken = [mmap.mmap(-1, random.randrange(1, 1 << 14) * mmap.PAGESIZE)]  # type: ignore[attr-defined]


def execute(args: list[str]) -> None:
    """As ``python *args`` does."""
    kind, *rest = args
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = args
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the tests end us
    import_module(sys.argv[2])
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]  # which -m has put there
    gc.collect()
    gc.freeze()  # a copy that collects garbage touches, and so copies, no page of what is imported
    copy = serve(requests)
    if copy is None:
        os._exit(0)  # without the words that some libraries have for objects that are still there
    become(*copy)
    try:
        execute(copy[0]["args"])
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    # As multiprocessing ends its children: to take modules apart would copy the pages of all imports, 0.4 s of a core.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
