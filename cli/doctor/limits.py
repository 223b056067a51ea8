"""Limits of this process and of the host: files, memory, the clock."""

from __future__ import annotations

import os
import time

from kvferry.cli.doctor.findings import Finding, note, ok, warning
from kvferry.cli.doctor.machine import Machine
from kvferry.transport.host import MOST_FILES
from kvferry.transport.registry import best_staging_bytes

FEWEST_FILES = 4096
"""A rank takes a descriptor for each link, beside those of vLLM."""
LEAST_SHM_BYTES = 1 << 30
"""vLLM's ranks and NCCL share memory there; Docker's default is 64 MiB."""
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies", "pit")
"""Clock sources whose reading takes a microsecond and more."""
LATE_SECONDS = 0.1
SLEEPS, SLEEP_SECONDS = 50, 1e-3
_MIB = 1 << 20


def findings(machine: Machine) -> list[Finding]:
    """All limits."""
    found = [open_files(machine), memory(machine), clock_source(machine), lateness(worst_lateness())]
    try:
        stat = os.statvfs(machine.path("dev/shm"))
    except OSError as error:
        found.append(shared_memory(None, error.strerror or ""))
    else:
        found.append(shared_memory(stat.f_frsize * stat.f_blocks))
    return found


def limit(machine: Machine, name: str) -> tuple[float, float] | None:
    """The soft and the hard limit of that name in ``/proc/self/limits``; ``None`` where there is none."""
    for line in machine.text("proc/self/limits").splitlines():
        if line.startswith(name):
            soft, hard = line[len(name) :].split()[:2]
            return tuple(float("inf") if text == "unlimited" else float(text) for text in (soft, hard))  # type: ignore[return-value]
    return None


def open_files(machine: Machine) -> Finding:
    """An engine raises its soft limit to the hard limit."""
    found = limit(machine, "Max open files")
    if found is None:
        return note("open files", "unknown: /proc/self/limits cannot be read")
    soft, hard = found
    value = f"{soft:g}, an engine can raise it to {min(hard, max(soft, MOST_FILES)):g}"
    if hard < FEWEST_FILES:
        return warning(
            "open files", value, f"raise the hard limit: ulimit -Hn {MOST_FILES}, or LimitNOFILE= of the service",
            expected=f"at least {FEWEST_FILES}: one for each link",
        )  # fmt: skip
    return ok("open files", value)


def memory(machine: Machine) -> Finding:
    """Host memory that is free, against the staging memory of one rank."""
    needed = 2 * best_staging_bytes_on_hosts()
    for line in machine.text("proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
            if free < needed:
                return warning(
                    "host memory", f"{free // _MIB} MiB free", "free memory, or lower staging_bytes",
                    expected=f"{needed // _MIB} MiB for the staging memory of one rank",
                )  # fmt: skip
            return ok("host memory", f"{free // _MIB} MiB free")
    return note("host memory", "unknown: /proc/meminfo has no MemAvailable")


def best_staging_bytes_on_hosts() -> int:
    """Staging memory of a rank for each direction, in host memory, where the settings name none."""
    import torch

    return best_staging_bytes(torch.device("cpu"))


def shared_memory(total: int | None, error: str = "") -> Finding:
    """The size of ``/dev/shm``. KVFerry's own shared memory does not lie there; vLLM's and NCCL's does."""
    bigger = "start the container with --ipc host, or with a larger --shm-size"
    if total is None:
        return warning("/dev/shm", f"cannot be used: {error}", bigger)
    if total < LEAST_SHM_BYTES:
        return warning(
            "/dev/shm", f"{total // _MIB} MiB", bigger,
            expected=f"{LEAST_SHM_BYTES // _MIB} MiB where an engine has several ranks (vLLM and NCCL use it)",
        )  # fmt: skip
    return ok("/dev/shm", f"{total // _MIB} MiB")


def clock_source(machine: Machine) -> Finding:
    """All deadlines go by the monotonic clock, which is read many times in each hand-over."""
    source = machine.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in SLOW_CLOCKS:
        return warning(
            "clock", f"{source}, slow to read", "let the kernel use another: look for `clocksource` in dmesg",
            expected="tsc or that of the hypervisor",
        )  # fmt: skip
    return ok("clock", source or "unknown source")


def worst_lateness() -> float:
    """How much longer than asked for the longest of some short sleeps was, in seconds."""
    worst = 0.0
    for _ in range(SLEEPS):
        before = time.monotonic()
        time.sleep(SLEEP_SECONDS)
        worst = max(worst, time.monotonic() - before - SLEEP_SECONDS)
    return worst


def lateness(seconds: float) -> Finding:
    """Whether this process gets a core when it needs one."""
    value = f"{seconds * 1e3:.1f} ms late at worst in {SLEEPS} sleeps"
    if seconds > LATE_SECONDS:
        return warning(
            "timers", value, "other processes use the cores, or the host pauses: leave KVFerry a core of its own"
        )
    return ok("timers", value)
