"""Why the planes ``nixl`` and ``ucx`` have no RDMA here: nothing installed, no InfiniBand built in, no device, no
permission, or another lane chosen."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.cli.doctor.findings import Finding, Level, Machine, note, ok, warning
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.planes.ucx import load_ucxx
from kvferry.transport.planes.ucx_settings import RDMA_LANES, nixl_release

SYSTEM_UCX = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
_IB_MODULE = "libuct_ib"
_BY_NIXL = "pip install 'kvferry[rdma]'"
_OF_A_SYSTEM = (
    f"{_BY_NIXL}, for the plane nixl; or install a UCX with InfiniBand on the system, and set {SYSTEM_UCX}=true"
)


@dataclass(frozen=True)
class UcxBuild:
    """The UCX that this process has loaded. ``infiniband``: its folder of transports has InfiniBand's."""

    version: str
    path: str
    infiniband: bool

    @property
    def source(self) -> str:
        """Where it comes from."""
        return "the UCX of the PyPI wheel" if "/site-packages/" in self.path else self.path


def loaded_ucx() -> UcxBuild:
    """Load UCX, and look at the library that was taken. Raises PlaneUnavailableError: it cannot be had."""
    load_ucxx()
    import ucxx

    mapped = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split()[-1] for line in mapped if "/libucp.so" in line), "")
    return UcxBuild(".".join(map(str, ucxx.get_ucx_version())), path, has_infiniband(Path(path).parent))


def has_infiniband(folder: Path) -> bool:
    """Whether the UCX in ``folder`` has its InfiniBand transports as modules, or built into its library."""
    return any(name.startswith(_IB_MODULE) for name in Machine(root=folder).names("ucx"))


def findings(machine: Machine) -> list[Finding]:
    """UCX, the RDMA devices, and whether they come together."""
    build, nixl = None, ""
    with suppress(PlaneUnavailableError):  # the section of the planes says why
        build = loaded_ucx()
    with suppress(PlaneUnavailableError):
        nixl = " ".join(nixl_release())
    return judge(machine, build, nixl)


def judge(machine: Machine, build: UcxBuild | None, nixl: str = "") -> list[Finding]:
    """As ``findings``, of a UCX that was looked at before, and of NIXL's package and release, empty where it is not
    installed."""
    devices = machine.names("sys/class/infiniband")
    found = [ok("UCX", f"{build.version}, {build.source}")] if build is not None else []
    ports = [_device(machine, name) for name in devices]
    found += ports
    over_ucx = _over_ucx(machine, build, devices)
    if not devices:
        return [*found, over_ucx]
    over_nixl = _over_nixl(machine, nixl, ports)
    if not over_nixl.do and over_ucx.do:
        over_ucx = note("RDMA over ucx", over_ucx.value, "nothing to do: nixl has RDMA")
    return [*found, over_nixl, over_ucx]


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


def _over_nixl(machine: Machine, nixl: str, ports: list[Finding]) -> Finding:
    what, devices = "RDMA over nixl", ", ".join(found.what for found in ports)
    up = ", ".join(found.what for found in ports if found.level is Level.OK)
    if not nixl:
        return warning(what, f"NIXL is not installed, and {devices} is there", _BY_NIXL)
    if not up:
        return warning(what, f"no RDMA port of {devices} is up", "connect it, or start its subnet manager")
    return _obstacle(machine, what) or ok(what, f"{nixl}: {up} can be used")


def _over_ucx(machine: Machine, build: UcxBuild | None, devices: list[str]) -> Finding:
    what = "RDMA over ucx"
    if not devices:
        reason = "no device: /sys/class/infiniband is empty"
        if build is not None and not build.infiniband:
            reason += f"; and no InfiniBand built in: {build.source} has no {_IB_MODULE}"
        return note(what, reason, "nothing to do without RDMA hardware; between hosts `tcp` is used")
    if build is None:
        return warning(what, f"no UCX, and {', '.join(devices)} is there", "pip install 'kvferry[ucx]'")
    if not build.infiniband:
        return warning(what, f"no InfiniBand built in: {build.source} has no {_IB_MODULE}", _OF_A_SYSTEM)
    obstacle = _obstacle(machine, what)
    if obstacle is None and machine.environ.get(SYSTEM_UCX, "").lower() != "true":
        return warning(what, f"another lane is chosen: {SYSTEM_UCX} is not set, so KVFerry tells UCX to use TCP",
                       f"set {SYSTEM_UCX}=true")  # fmt: skip
    return obstacle or ok(what, f"{', '.join(devices)} can be used")


def _obstacle(machine: Machine, what: str) -> Finding | None:
    """What keeps any UCX from the RDMA devices; ``None`` where nothing does."""
    if refused := no_permission(machine):
        allow = "start the container with --device /dev/infiniband, or add the user to the group of these files"
        return warning(what, f"no permission: {refused}", allow)
    if lane := chosen_lane(machine.environ):
        other = "unset it, or let it name the RDMA transport and device"
        return warning(what, f"another lane is chosen: {lane}", other)
    pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if pinned != resource.RLIM_INFINITY:
        value = f"locked memory is limited to {pinned / 1024:g} KiB"
        expected = "unlimited: RDMA registers the staging memory"
        return warning(what, value, "ulimit -Hl unlimited", expected=expected)
    return None


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


def chosen_lane(environ: Mapping[str, str]) -> str:
    """The variable by which the user keeps UCX from RDMA; empty where there is none."""
    lanes = environ.get("UCX_TLS", "")
    named = {name.strip().lstrip("^") for name in lanes.split(",") if name.strip()}
    excludes = lanes.startswith("^")
    if named and (bool(named & {"ib", "rc", "ud", "dc"}) if excludes else not named & (RDMA_LANES | {"all"})):
        return f"UCX_TLS={lanes}"
    devices = environ.get("UCX_NET_DEVICES", "")
    if devices and devices != "all" and ":" not in devices:  # RDMA devices have a port: mlx5_0:1
        return f"UCX_NET_DEVICES={devices}"
    return ""
