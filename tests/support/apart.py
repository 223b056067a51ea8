"""A process namespace of one's own, as containers have."""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest

_NEW_MOUNTS, _NEW_USERS, _NEW_PROCESSES = 1 << 17, 1 << 28, 1 << 29  # sched.h
_SLAVE, _RECURSIVE = 1 << 19, 1 << 14  # mount.h
_SET_DEATH_SIGNAL, _KILL = 1, 9  # prctl.h


def leave() -> None:
    """The caller goes on in a namespace of its own, whose process 1 waits for it, with a /proc that shows them alone.
    It keeps its number."""
    libc, uid, pid = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getpid()
    failed = libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES | (_NEW_USERS if uid else 0))
    if uid and not failed:
        with open("/proc/self/uid_map", "w") as file:
            file.write(f"{uid} {uid} 1")
    if not failed:
        _go_on_as_child(libc)  # the first process of the namespace
        failed = libc.mount(b"none", b"/", None, _SLAVE | _RECURSIVE, None)
    if failed or libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(pid - 1))
    _go_on_as_child(libc)


def _go_on_as_child(libc: ctypes.CDLL) -> None:
    """Fork. The parent ends as its child does, which ends with it."""
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    libc.prctl(_SET_DEATH_SIGNAL, _KILL)


def need_namespaces() -> None:
    """Skip a test where no process namespace can be had."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", *(["--user"] if os.geteuid() else []), "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no process namespace can be had")
