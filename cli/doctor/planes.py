"""Which data planes this machine has, and why not the others; and a test of each between two processes."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from kvferry.cli.doctor.findings import Finding, Level, Machine, fault, note, ok, warning
from kvferry.cli.rank_pair import CacheForm, PairRank, RankPair
from kvferry.cli.terminal import FailedError
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

READER = """
import ctypes, sys
pid, address = map(int, sys.argv[1:])
libc, into, vector = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(7), ctypes.c_size_t * 2
ours, theirs = vector(ctypes.addressof(into), 7), vector(address, 7)
libc.process_vm_readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
done = libc.process_vm_readv(pid, ours, 1, theirs, 1, 0)
sys.exit(0 if done == 7 and into.raw == b"kvferry" else ctypes.get_errno() or 14)
"""


@dataclass(frozen=True)
class PlaneOnDevice:
    """A plane that this machine has for the memory of ``device``."""

    name: str
    device: torch.device

    def __str__(self) -> str:
        return f"{self.name}, {'host memory' if self.device.type == 'cpu' else 'GPU memory'}"


def findings(machine: Machine, settings: Settings, usable: list[PlaneOnDevice]) -> Iterator[Finding]:
    """Make every plane for host memory, and for the first GPU. ``usable``: gets those that this machine has."""
    devices = [CPU, torch.device("cuda", 0)] if torch.cuda.is_available() else [CPU]
    for device, spec in itertools.product(devices, plane_specs()):
        if spec.use(device) is None:
            continue
        plane = PlaneOnDevice(spec.name, device)
        why, lanes = look(spec, device, settings)
        if why:
            found = _missing(plane, why, settings)
        elif spec.name == "cma":
            found = cma_permission(read_between_processes(), machine.text(PTRACE_SCOPE))
        else:
            found = ok(str(plane), spec.link + (f"; lanes: {lanes}" if lanes else ""))
        yield found
        if found.level is Level.OK:
            usable.append(plane)
    if len(devices) == 1 and any(spec.name == settings.plane and spec.host is None for spec in plane_specs()):
        yield _missing(PlaneOnDevice(settings.plane, torch.device("cuda", 0)), "this machine has no GPU", settings)


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
    """Whether a new process may read the memory of this one with ``process_vm_readv``: 0, or the error number."""
    text = ctypes.create_string_buffer(b"kvferry")
    command = [sys.executable, "-S", "-c", READER, str(os.getpid()), str(ctypes.addressof(text))]
    try:
        return subprocess.run(command, timeout=CHILD_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return errno.ETIMEDOUT


def cma_permission(number: int, ptrace_scope: str) -> Finding:
    """What an error number of ``process_vm_readv`` means. ``ptrace_scope``: Yama's setting, empty without Yama."""
    if number == 0:
        return ok("cma, host memory", "one process reads the memory of another with process_vm_readv")
    why, allow = errno.errorcode.get(number, str(number)), "look at the user, and at the seccomp profile"
    if number in (errno.EPERM, errno.EACCES):
        allow = f"in a container: --cap-add SYS_PTRACE; else {allow}"
        if ptrace_scope not in ("", "0"):
            why, allow = f"ptrace_scope is {ptrace_scope}", "sysctl -w kernel.yama.ptrace_scope=0"
    value = f"process_vm_readv is refused: {why}; shm is used instead, which copies twice"
    return warning("cma, host memory", value, allow)


def lacking_planes(usable: Sequence[PlaneOnDevice]) -> Iterator[Finding]:
    """At least one plane for each kind of memory."""
    needed = {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
    for kind in sorted(needed - {plane.device.type for plane in usable}):
        memory = "host" if kind == "cpu" else "GPU"
        yield fault("data planes", f"none for {memory} memory", "mend one of the reasons above")


# --- self-test ------------------------------------------------------------------------------------------------------

PLANE_SECONDS = 60.0
"""Bound on the test of one plane, with the start of its processes."""
FORM = CacheForm()
"""64 MiB in pages of 32 KiB."""
ROUNDS = 3
"""Hand-overs that are measured; one before them connects the ranks and allocates staging memory."""
_REPORT = "report it with what `kvferry doctor` prints; until then set another plane"


def self_test(
    host: str, planes: Sequence[PlaneOnDevice], *, kind: type[PairRank] = PairRank,
    form: CacheForm = FORM, seconds: float = PLANE_SECONDS, rounds: int = ROUNDS,
) -> Iterator[Finding]:  # fmt: skip
    """A known pattern from one process to another over each plane, every byte checked, with its rate. A process that
    crashes, or that does not answer in time, is a fault of that plane only. ``host``: what the planes listen on."""
    with closing(RankPair(host, kind)) as pair:
        for plane in planes:
            what, deadline, wrong, moved = str(plane), time.monotonic() + seconds, 0, []
            try:
                pair.start(plane.name, plane.device, form, deadline)
                for _ in range(rounds + 1):
                    pair.fill(deadline)
                    moved.append(pair.hand_over(form.tokens, deadline))
                    wrong += pair.differing(form.tokens, deadline)
                pair.stop(deadline)
            except FailedError as error:
                pair.close()  # the next plane gets new processes
                yield fault(what, f"the hand-over failed: {error}", _REPORT, expected="every byte within the time")
                continue
            nbytes = moved[0][0]
            if wrong:
                value, do = f"{wrong} of {nbytes} bytes arrived wrong", f"do not use this plane; {_REPORT}"
                yield fault(what, value, do, expected="the bytes that were sent")
            else:
                rate = statistics.median(nbytes / seconds / 1e9 for _, seconds in moved[1:])
                yield ok(what, f"{rate:.2f} GB/s; each of {nbytes >> 20} MiB is right, in {rounds} hand-overs")
