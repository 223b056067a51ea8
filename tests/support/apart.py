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
    """The caller goes on as process 1 of a namespace of its own, with a /proc that shows it alone."""
    libc, uid = ctypes.CDLL(None, use_errno=True), os.geteuid()
    failed = libc.unshare(_NEW_MOUNTS | _NEW_PROCESSES | (_NEW_USERS if uid else 0))
    if uid and not failed:
        with open("/proc/self/uid_map", "w") as file:
            file.write(f"{uid} {uid} 1")
    if not failed and (child := os.fork()):
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    failed = failed or libc.prctl(_SET_DEATH_SIGNAL, _KILL)
    failed = failed or libc.mount(b"none", b"/", None, _SLAVE | _RECURSIVE, None)
    if failed or libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def need_namespaces() -> None:
    """Skip a test where no process namespace can be had."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", *(["--user"] if os.geteuid() else []), "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no process namespace can be had")
