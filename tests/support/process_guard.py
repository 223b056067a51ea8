"""Runs one command in a process group of its own and ends all of it when its launcher is gone, however it went.

vLLM's EngineCore and workers outlive the process that started them and spin on a core; a launcher killed by SIGKILL
cannot end them. So each engine gets this small parent: it holds the read end of a pipe whose write end only the
launcher has, and when that closes (or the command ends, or SIGTERM or SIGINT comes) it ends whatever is left of its
session and of its own descendants: SIGTERM first, SIGKILL after ``--grace`` seconds.

    python process_guard.py --pipe FD --grace 5 -- command ...     (started by engines.py; standard library only)
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

_PR_SET_CHILD_SUBREAPER = 36


class Child(Protocol):
    """What is guarded; a ``subprocess.Popen`` is one."""

    def poll(self) -> int | None: ...


def members() -> list[int]:
    """Process ids, without ours, that are of our session or descend from us (zombies not counted)."""
    me, stats = os.getpid(), {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    # after the name in parentheses: state, parent, group, session
                    state, above, _, group = file.read().rpartition(")")[2].split()[:4]
                stats[int(entry)] = (state, int(above), int(group))
    ours = {me}
    grown = True
    while grown:
        grown = False
        for pid, (_, parent, session) in stats.items():
            if pid not in ours and (parent in ours or session == me):
                ours.add(pid)
                grown = True
    return [pid for pid in ours if pid != me and pid in stats and stats[pid][0] not in "ZX"]


def end_all(grace: float) -> None:
    """End every member: SIGTERM, then SIGKILL to those left after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    _signal_all(signal.SIGTERM)
    while members() and time.monotonic() < deadline:
        time.sleep(0.05)
    while members():
        _signal_all(signal.SIGKILL)
        time.sleep(0.05)


def _signal_all(number: int) -> None:
    for pid in members():
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> int:
    """Run the command line's command; its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--grace", type=float, default=5.0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return guard(args.pipe, args.grace, lambda: subprocess.Popen(command, close_fds=True))


def guard(pipe: int, grace: float, start: Callable[[], Child]) -> int:
    """Run the child that ``start`` starts until it ends or ``pipe`` closes, then end the whole session; its status."""
    if os.getpgrp() != os.getpid():
        sys.exit("process_guard: needs start_new_session=True, because it ends its whole session")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come to us, not to init
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.append(True))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = start()
    while not stop and child.poll() is None:
        ready, _, _ = select.select([pipe, wake_read], [], [], 5.0)
        if pipe in ready and not os.read(pipe, 1):
            break
        if wake_read in ready:
            os.read(wake_read, 4096)
    end_all(grace)
    code = child.poll()
    return code if code is not None and code >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
