"""RDMA devices, and what keeps the planes ``nixl`` and ``ucx`` from them. Their lanes the data planes say."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator

from kvferry.cli.doctor.findings import Finding, Machine, note, ok, warning
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.planes.ucx_settings import nixl_release


def findings(machine: Machine) -> Iterator[Finding]:
    devices = machine.names("sys/class/infiniband")
    if not devices:
        do = "nothing to do without RDMA hardware; between hosts `tcp` is used"
        yield note("RDMA", "no device: /sys/class/infiniband is empty", do)
        return
    yield from (_device(machine, name) for name in devices)
    try:
        release = " ".join(nixl_release())
    except PlaneUnavailableError:
        yield warning(
            "RDMA", f"NIXL is not installed, and {', '.join(devices)} is there", "pip install 'kvferry[rdma]'"
        )
        return
    pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if refused := no_permission(machine):
        allow = "start the container with --device /dev/infiniband, or add the user to the group of these files"
        yield warning("RDMA", f"no permission: {refused}", allow)
    elif pinned != resource.RLIM_INFINITY:
        expected = "unlimited: RDMA registers the staging memory"
        yield warning("RDMA", f"locked memory is limited to {pinned / 1024:g} KiB", "ulimit -Hl unlimited",
                      expected=expected)  # fmt: skip
    else:
        yield ok("RDMA", f"{release}: {', '.join(devices)} can be opened; the lanes of nixl are above")


def _device(machine: Machine, name: str) -> Finding:
    """One device, by its ports."""
    folder = f"sys/class/infiniband/{name}/ports"
    states = {port: machine.text(f"{folder}/{port}/state").partition(": ")[2] for port in machine.names(folder)}
    ports = ", ".join(
        f"port {port} {state or 'unknown'} ({machine.text(f'{folder}/{port}/link_layer')})"
        for port, state in states.items()
    )
    if "ACTIVE" in states.values():
        return ok(name, ports)
    return warning(name, ports or "no port", "connect it, or start its driver and subnet manager", expected="ACTIVE")


def no_permission(machine: Machine) -> str:
    """Why the device files of RDMA cannot be opened; empty where one can."""
    files = [name for name in machine.names("dev/infiniband") if name.startswith("uverbs")]
    if not files:
        return "/dev/infiniband has no uverbs file"
    reasons = []
    for name in files:
        try:
            os.close(os.open(machine.root / "dev/infiniband" / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
            return ""
        except OSError as error:
            reasons.append(f"/dev/infiniband/{name}: {errno.errorcode.get(error.errno or 0, '')} {error.strerror}")
    return "; ".join(reasons)
