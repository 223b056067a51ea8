"""The settings of UCX for the planes ``ucx`` and ``nixl``: RDMA ports, lanes, network devices; which plane has UCX.

A process has one UCX: that of the plane ``ucx`` or that of ``nixl``. Each of the two planes brings a UCX. The second
one in a process gets no cache of registrations, and UCX 1.21 without it ends the process when a peer dies in the middle
of a message (``ucs_rcache_region_invalidate``). A rank that may have both planes has the one with RDMA; where neither
or both have it, ``ucx``.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvferry.transport.errors import PlaneUnavailableError, TransportError

DEVICES = Path("/sys/class/infiniband")
RDMA_LANES = frozenset(
    ["ib", *(f"{kind}{how}" for kind in ("rc", "ud", "dc") for how in ("", "_x", "_v", "_mlx5", "_verbs"))]
)
"""What ``UCX_TLS`` may list of RDMA."""
DEFAULTS = {"TCP_TX_SEG_SIZE": "512k", "TCP_RX_SEG_SIZE": "512k"}
"""KVFerry's UCX settings, each where the environment has no ``UCX_<name>``. TCP segments of 512 KiB, not 8 KiB: 4.5
against 1.4 GB/s over loopback with messages of 4 MiB; 256 KiB to 1 MiB measure alike, others are slower."""
PACKAGES = ("nixl_cu13", "nixl_cu12")
_SIOCGIFADDR = 0x8915
_MUTEX = {"UCX_USE_MT_MUTEX": "y"}
"""Our thread and NIXL's share UCX's worker. With UCX's default, a spinlock, one of them spins while the other one is in
UCX, or waits there for a core: READs of 4 MiB over TCP then take 16 ms of D's cores for 64 MiB, with a mutex 12 ms."""
GPU_DEVICE = Path("/dev/nvidiactl")
_PEERMEM = Path("/sys/module/nvidia_peermem")
_DRIVER = Path("/proc/driver/nvidia/version")


@contextlib.contextmanager
def failing_as(kind: type[TransportError], what: str, hint: str = "") -> Iterator[None]:
    """UCXX and NIXL raise a dozen types of exceptions, which all mean that they refuse: here they become ``kind``."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {error}{hint}") from None


def active_ports() -> list[str]:
    """The ports of RDMA devices that are up, each as UCX names it: ``mlx5_0:1``. Empty where the host has none."""
    found = []
    for state in sorted(DEVICES.glob("*/ports/*/state")):
        try:
            text = state.read_text()
        except OSError:  # the device has just gone
            continue
        if "ACTIVE" in text.split():
            found.append(f"{state.parent.parent.parent.name}:{state.parent.name}")
    return found


def settings_for(host: str, environ: Mapping[str, str], *, here: bool) -> dict[str, str]:
    """UCX settings (names without ``UCX_``) for a worker that peers reach at the local address ``host``. ``here``:
    these peers are on this host.

    UCX listens on every network device that it may use, and whoever reaches its TCP port writes the memory of this
    process. So for peers of this host it gets the loopback device; for others the device of ``host``, or, with RDMA
    hardware and a UCX that uses it, no TCP at all. Raises PlaneUnavailableError: no device has the address ``host``,
    and the environment names none."""
    settings = dict(DEFAULTS)
    if here:
        settings["NET_DEVICES"] = "lo"
    elif uses_rdma(environ):
        settings["TLS"] = "^tcp"
    else:
        settings["NET_DEVICES"] = environ.get("UCX_NET_DEVICES") or _device("ucx", host)
    if ":" in host and "NET_DEVICES" in settings:
        settings["TCP_AF_PRIO"] = "inet6,inet"
    return {name: value for name, value in settings.items() if not environ.get(f"UCX_{name}")}


def lanes_to(host: str, environ: Mapping[str, str], *, here: bool, on_gpu: bool) -> str:
    """How UCX moves the bytes with ``settings_for`` the same arguments, for logs; the same words as of plane ``nixl``.
    ``on_gpu``: the slots lie on a GPU."""
    if lanes := environ.get("UCX_TLS", ""):
        return f"UCX_TLS={lanes}"
    if here and on_gpu:
        return "CUDA IPC"
    settings = settings_for(host, environ, here=here)
    if "TLS" in settings:
        return f"RDMA on {environ.get('UCX_NET_DEVICES') or ', '.join(active_ports())}"
    return f"TCP on {environ.get('UCX_NET_DEVICES') or settings.get('NET_DEVICES', 'all devices')}"


def _device(plane: str, host: str) -> str:
    """``device_of``. Raises PlaneUnavailableError where it is unknown."""
    device = device_of(host)
    if device is None:
        raise PlaneUnavailableError(
            f"{plane}: no network device is known by its address {host}; set UCX_NET_DEVICES to the device that peers "
            "reach, or UCX would listen on all of them"
        )
    return device


def device_of(host: str) -> str | None:
    """The network device that carries the local address ``host``; ``None`` where it is unknown."""
    try:
        address = ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0])
    except (OSError, ValueError):
        return None
    if address.version == 6:
        return _device_of_ipv6(address.packed.hex())
    if address.is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # a device without an IPv4 address
                continue
            if found[20:24] == address.packed:
                return name
    return None


def _device_of_ipv6(digits: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if line.startswith(digits)), None)


def uses_rdma(environ: Mapping[str, str]) -> bool:
    """Whether there is RDMA hardware and the user has asked for the system's UCX, which can use it."""
    return bool(active_ports()) and environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() == "true"


class Lanes(NamedTuple):
    """How UCX moves the bytes. ``kind``: the same word on both sides, or they do not meet. ``settings``: variables of
    UCX, by name. ``shown``: for logs. ``rdma``: by RDMA. ``gpu_slots``: whether they carry a GPU's memory."""

    kind: str
    settings: Mapping[str, str]
    shown: str
    rdma: bool
    gpu_slots: bool


def choose_lanes(host: str, environ: Mapping[str, str]) -> Lanes:
    """The lanes of a process whose peers reach it at the local address ``host``: RDMA, or what ``UCX_TLS`` lists.

    TCP is used only where ``UCX_TLS`` lists it. Raises PlaneUnavailableError: no RDMA port is up, and ``UCX_TLS`` lists
    no other lane."""
    listed = environ.get("UCX_TLS", "")
    names = {name.strip() for name in listed.split(",")}
    if listed and not listed.startswith("^") and "all" not in names:
        settings = _unless_set(environ, _MUTEX) | {"UCX_TLS": listed}
        if "tcp" in names:
            if not environ.get("UCX_NET_DEVICES"):
                settings["UCX_NET_DEVICES"] = _device("nixl", host)
            settings |= _unless_set(environ, {f"UCX_{name}": value for name, value in DEFAULTS.items()})
        rdma = bool(names & RDMA_LANES) and "tcp" not in names
        on_gpu = "cuda_ipc" in names or "cuda" in names
        return Lanes(listed, settings, f"UCX_TLS={listed}", rdma, on_gpu)
    ports = active_ports()
    if not ports:
        raise PlaneUnavailableError("nixl: no RDMA port is up on this host")
    if listed.startswith("^") and {"rc", "ib"} & {name.strip() for name in listed[1:].split(",")}:
        raise PlaneUnavailableError(f"nixl: UCX_TLS={listed} excludes RDMA; let it list the lanes to use")
    cuda = ",cuda" if GPU_DEVICE.exists() else ""
    shown = f"RDMA on {environ.get('UCX_NET_DEVICES') or ', '.join(ports)}"
    settings = _unless_set(environ, _MUTEX) | {"UCX_TLS": f"rc{cuda}"}
    return Lanes("rdma", settings, shown, True, bool(cuda) and _has_gpudirect())


def _unless_set(environ: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of ours, without those that the user has set."""
    return {name: value for name, value in settings.items() if not environ.get(name)}


def _has_gpudirect() -> bool:
    """Whether a NIC can reach a GPU's memory: by NVIDIA's module, or by the open kernel driver's dma-buf."""
    try:
        return _PEERMEM.exists() or "Open Kernel Module" in _DRIVER.read_text()
    except OSError:
        return False


def nixl_release() -> tuple[str, str]:
    """NIXL's package, and its release. Raises PlaneUnavailableError where it is not installed."""
    for package in PACKAGES:
        if find_spec(package) is not None:
            with contextlib.suppress(PackageNotFoundError):
                return package, version(package)
    raise PlaneUnavailableError("nixl: NIXL is not installed; pip install 'kvferry[rdma]'")


def refuse_nixl(host: str, environ: Mapping[str, str], others: Collection[str]) -> None:
    """Raises PlaneUnavailableError: the process has the UCX of the plane ``ucx``; or the reason why it could not have
    ``nixl`` anyway, which says more. ``others``: ``PlaneContext.others`` of ``nixl``, ``host`` its local address."""
    if "ucx" in others:
        nixl_release()
        choose_lanes(host, environ)
        raise PlaneUnavailableError("nixl: a process can have one UCX, and has that of the plane ucx")


def refuse_ucx(host: str, environ: Mapping[str, str], others: Collection[str]) -> None:
    """Raises PlaneUnavailableError: ``nixl`` will have RDMA, and this UCX has none. The arguments are as there."""
    if "nixl" not in others or uses_rdma(environ):
        return
    try:
        nixl_release()
        rdma = choose_lanes(host, environ).rdma
    except PlaneUnavailableError:
        return
    if rdma:
        raise PlaneUnavailableError("ucx: a process can have one UCX, and nixl's has RDMA")
