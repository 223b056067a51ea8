"""A vLLM engine in copies of one process that has imported vLLM: server, engine core and workers import nothing.

``python -m tests.support.engine_process GRACE PATIENCE NETNS serve MODEL ...`` runs in a program of a fork server whose
preload is ``tests.support.preload_vllm``. ``PATIENCE``: seconds that a step waits for its loads. ``NETNS``: the network
namespace to run in, or empty. The program becomes
the guard process of the engine and ends it when the pipe on descriptor 3 closes. vLLM forks here where on the CPU it
starts processes anew, as it does by default on GPUs. The tests of examples start ``vllm serve`` by its command.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.models import registry

from kvferry.connector.step_loads import step_hold
from tests.support import process_guard

PIPE = 3
_CLONE_NEWNS, _MS_SLAVE, _MS_REC, _MNT_DETACH = 1 << 17, 1 << 19, 1 << 14, 2


class ForkedChild:
    """A child of this process, with what a guard process needs of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def import_nothing() -> None:
    """Let vLLM fork where it would start a process anew, and look at the class of a model in this process, for which it
    would start one; and let a process that waits for its peer sleep: vLLM's spins for a second, on a core that another
    engine needs."""
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forking
    registry._run_in_subprocess = lambda inspect: inspect()
    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.0,)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 20  # of two messages in a millisecond it may tell of the first alone


def enter_with_sysfs(namespace: str) -> None:
    """As ``ip netns exec`` does: UCX finds network devices by /sys."""
    from examples.two_node.run_netns import enter

    enter(namespace)
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None),
        libc.umount2(b"/sys", _MNT_DETACH),
        libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), f"/sys of {namespace}")


def main() -> None:
    grace, step_hold.PATIENCE_SECONDS, arguments = float(sys.argv[1]), float(sys.argv[2]), sys.argv[4:]
    os.setsid()
    if sys.argv[3]:
        enter_with_sysfs(sys.argv[3])
    sys.stdout.flush()
    engine = os.fork()
    if engine:
        sys.exit(process_guard.guard(PIPE, grace, lambda: ForkedChild(engine)))
    os.close(PIPE)
    import_nothing()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv = ["vllm", *arguments]
    vllm_main()


if __name__ == "__main__":
    main()
