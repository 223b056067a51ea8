"""Which data planes this machine has, and why not the others."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvferry.cli.doctor.findings import Finding, fault, note, ok, warning
from kvferry.cli.doctor.machine import Machine
from kvferry.connector.config import AUTO, Settings
from kvferry.transport.channels import CPU
from kvferry.transport.errors import KVFerryError
from kvferry.transport.plane import PlaneContext, PlaneMemory
from kvferry.transport.registry import PlaneSpec, make_plane, plane_specs

_SLOT_BYTES, _STAGING_BYTES, _MEMORY_BYTES = 64 << 10, 1 << 20, 1 << 20
_ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737)."""
PTRACE_SCOPE = "proc/sys/kernel/yama/ptrace_scope"
CHILD_SECONDS = 20.0

_TARGET = """
import ctypes, os, sys
text = ctypes.create_string_buffer(b"kvferry")
print(os.getpid(), ctypes.addressof(text), flush=True)
sys.stdin.read()
"""
_READER = """
import ctypes, os, sys
pid, address = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
into = ctypes.create_string_buffer(7)
ours, theirs = Vector(ctypes.addressof(into), 7), Vector(address, 7)
try:
    read = libc.process_vm_readv
except AttributeError:
    sys.exit(38)
read.restype = ctypes.c_ssize_t
done = read(pid, ctypes.byref(ours), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0))
sys.exit(0 if done == 7 and into.raw == b"kvferry" else ctypes.get_errno() or 14)
"""


@dataclass(frozen=True)
class PlaneOnDevice:
    """A plane that this machine has for the memory of ``device``."""

    name: str
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name}, {'host memory' if self.device.type == 'cpu' else 'GPU memory'}"


def findings(machine: Machine, settings: Settings) -> tuple[list[Finding], list[PlaneOnDevice]]:
    """Make every registered plane for host memory, and for the first GPU.

    Returns:
        Findings; and the planes that this machine has.
    """
    devices = [CPU, torch.device("cuda", 0)] if torch.cuda.is_available() else [CPU]
    found: list[Finding] = []
    usable: list[PlaneOnDevice] = []
    for device in devices:
        for spec in plane_specs():
            if spec.use(device) is None:
                continue
            plane = PlaneOnDevice(spec.name, device)
            why, lanes = look(spec, device, settings)
            if why:
                found.append(_missing(plane, why, settings))
                continue
            if spec.name == "cma":
                permission = cma_permission(read_between_processes(), machine.text(PTRACE_SCOPE))
                found.append(permission)
                if permission.do:
                    continue
            else:
                found.append(ok(str(plane), spec.link + (f"; lanes: {lanes}" if lanes else "")))
            usable.append(plane)
    return found, usable


def look(spec: PlaneSpec, device: torch.device, settings: Settings) -> tuple[str, str]:
    """Why a rank with these settings cannot have this plane, empty where it can; and its lanes to other hosts."""
    memory = torch.zeros(_MEMORY_BYTES, dtype=torch.uint8, device=device)
    ranges = PlaneMemory(device, ((memory.data_ptr(), memory.numel()),))
    context = PlaneContext(settings.side_channel_host, _SLOT_BYTES, _STAGING_BYTES, ranges, settings.encrypt)
    try:
        plane = make_plane(spec.name, context)
        try:
            plane.offer()
            return plane.cannot_serve, plane.lanes_to(_ELSEWHERE)
        finally:
            plane.close()
    except KVFerryError as error:
        return str(error).removeprefix(f"{spec.name}: "), ""


def _missing(plane: PlaneOnDevice, why: str, settings: Settings) -> Finding:
    if settings.plane == plane.name:
        return fault(str(plane), why, f"the engine will not start with plane={plane.name}: mend this, or name another")
    if settings.plane != AUTO:
        return note(str(plane), why)
    return note(str(plane), why, "nothing to do if the other planes are enough")


# --- cma ------------------------------------------------------------------------------------------------------------


def read_between_processes() -> int:
    """Whether one new process may read the memory of another with ``process_vm_readv``: 0, or the error number."""
    command = [sys.executable, "-S", "-c"]
    with subprocess.Popen([*command, _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdout is not None and target.stdin is not None
        try:
            arguments = target.stdout.readline().split()
            reader = subprocess.run([*command, _READER, *arguments], timeout=CHILD_SECONDS, check=False)
            return reader.returncode
        except subprocess.TimeoutExpired:
            return errno.ETIMEDOUT
        finally:
            with suppress(OSError):
                target.stdin.close()


def cma_permission(number: int, ptrace_scope: str) -> Finding:
    """What an error number of ``process_vm_readv`` means. ``ptrace_scope``: Yama's setting, empty without Yama."""
    what = "cma, host memory"
    if number == 0:
        return ok(what, "one process reads the memory of another with process_vm_readv")
    slower = "shm is used instead, which copies twice"
    if number in (errno.EPERM, errno.EACCES):
        if ptrace_scope not in ("", "0"):
            return warning(
                what, f"no permission: ptrace_scope is {ptrace_scope}; {slower}",
                "sysctl -w kernel.yama.ptrace_scope=0", expected="0",
            )  # fmt: skip
        return warning(
            what, f"no permission (EPERM), and ptrace_scope does not forbid it; {slower}",
            "in a container: --cap-add SYS_PTRACE; else look at the user, and at the seccomp profile",
        )  # fmt: skip
    reason = f"{errno.errorcode.get(number, number)} {os.strerror(number) if number > 0 else ''}".strip()
    return warning(what, f"process_vm_readv fails: {reason}; {slower}", "the seccomp profile, or the kernel, lacks it")


def lacking_planes(usable: Sequence[PlaneOnDevice]) -> list[Finding]:
    """At least one plane for each kind of memory."""
    kinds = {plane.device.type for plane in usable}
    needed = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    return [
        fault("data planes", f"none for {'host' if kind == 'cpu' else 'GPU'} memory", "mend one of the reasons above")
        for kind in sorted(needed - kinds)
    ]
