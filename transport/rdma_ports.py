"""The RDMA ports of this host, and UCX's names for RDMA."""

from __future__ import annotations

from pathlib import Path

_DEVICES = Path("/sys/class/infiniband")
RDMA_LANES = frozenset(
    ["ib", *(f"{kind}{how}" for kind in ("rc", "ud", "dc") for how in ("", "_x", "_v", "_mlx5", "_verbs"))]
)
"""What ``UCX_TLS`` may list of RDMA."""


def active_ports() -> list[str]:
    """The ports of RDMA devices that are up, each as UCX names it: ``mlx5_0:1``. Empty where the host has none."""
    found = []
    for state in sorted(_DEVICES.glob("*/ports/*/state")):
        try:
            text = state.read_text()
        except OSError:  # the device has just gone
            continue
        if "ACTIVE" in text.split():
            found.append(f"{state.parent.parent.parent.name}:{state.parent.name}")
    return found
