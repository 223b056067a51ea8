"""Loads and configures UCXX. This module alone imports UCXX, and it has the UCX settings that KVFerry ships."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.rdma_ports import active_ports

DEFAULTS = {"TCP_TX_SEG_SIZE": "512k", "TCP_RX_SEG_SIZE": "512k"}
"""KVFerry's UCX settings. Each is used where the environment has no ``UCX_<name>``.

TCP segments of 512 KiB, not 8 KiB: 4.5 against 1.4 GB/s over loopback with messages of 4 MiB; 256 KiB to 1 MiB
measure alike, 128 KiB and 4 MiB are slower.
"""

_SIOCGIFADDR = 0x8915


def load_ucxx() -> Any:
    """UCXX's binding (``ucxx._lib.libucxx``).

    Raises:
        PlaneUnavailableError: it is not installed, does not load, or is too old.
    """
    # UCXX itself sets variables, and builds of UCX without CUDA warn about them.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx
        from ucxx._lib import libucxx
    except ModuleNotFoundError as error:
        raise PlaneUnavailableError(f"ucx: {error.name} is not installed; pip install 'kvferry[ucx]'") from None
    except (ImportError, OSError) as error:
        raise PlaneUnavailableError(f"ucx: UCXX does not load: {str(error).splitlines()[0]}") from None
    if not hasattr(libucxx.UCXEndpoint, "tag_recv_with_handle"):
        raise PlaneUnavailableError(f"ucx: UCXX {ucxx.__version__} is too old, 0.47 is the first that will do")
    return libucxx


def load_array() -> Any:
    """UCXX's ``Array``, the form in which UCXX takes memory. Raises PlaneUnavailableError as ``load_ucxx`` does."""
    load_ucxx()
    from ucxx._lib.arr import Array

    return Array


def settings_for(host: str, environ: Mapping[str, str], *, here: bool) -> dict[str, str]:
    """UCX settings (names without ``UCX_``) for a worker that peers reach at the local address ``host``. ``here``:
    these peers are on this host.

    UCX listens on every network device that it may use, and whoever reaches its TCP port writes the memory of this
    process. So for peers of this host it gets the loopback device; for others the device of ``host``, or, with RDMA
    hardware and a UCX that uses it, no TCP at all.

    Raises:
        PlaneUnavailableError: no device has the address ``host``, and the environment names none.
    """
    settings = dict(DEFAULTS)
    if here:
        settings["NET_DEVICES"] = "lo"
    elif uses_rdma(environ):
        settings["TLS"] = "^tcp"
    else:
        device = device_of(host)
        if device is None and not environ.get("UCX_NET_DEVICES"):
            raise PlaneUnavailableError(
                f"ucx: no network device is known by its address {host}; set UCX_NET_DEVICES to the device that peers "
                "reach, or UCX would listen on all of them"
            )
        settings["NET_DEVICES"] = device or ""
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
    return _has_rdma() and environ.get("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "").lower() == "true"


def _has_rdma() -> bool:
    return bool(active_ports())
