"""The ways to move blocks that ``gpu_planes.py`` compares, by the names that its table has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_cases import Point

from kvferry.connector.config import Settings
from kvferry.transport.registry import plane_specs

MAX_MEMCPYS = 16 << 10
KERNEL_SMS = (16, Settings().copy_sms, 32)
"""Caps under which the copy is measured, beside the one of an idle engine."""
MOVING = "_moving"
"""End of a way's name: a hand-over over a plane by which P pushes, from P's first step for its data on."""
IN_A_ROW = "_in_a_row"
"""End of a way's name: several without a pause, so that the steps before a launch are in none of their time."""


@dataclass(frozen=True)
class Method:
    """A way to move, as the table calls it, and the pair of processes that knows it. ``settings``: of our planes."""

    name: str
    pair: str
    settings: tuple[tuple[str, Any], ...] = ()
    gpu_only: bool = False

    def takes(self, point: Point, main: Point) -> bool:
        """Whether it can be asked for this point, ``main`` being the one of 8k tokens."""
        if self.pair == "local":
            return point == main
        if self.name.endswith("sm"):
            return (point.p, point.d) == (main.p, main.d)
        if self.name.endswith((IN_A_ROW, MOVING)):
            return (point.p, point.d) == (main.p, main.d) and point.tokens >= main.tokens
        if self.name == "memcpy_async":
            return point.pieces <= MAX_MEMCPYS
        if self.name == "torch":
            return not point.tokens % point.p.block and not point.tokens % point.d.block
        return True

    def changes_form(self, point: Point) -> bool:
        """Whether the bytes lie in D's form afterwards, where P's is another; ceilings know no form."""
        return self.name not in ("nixl", "memcpy_async") or not point.changes


NIXL_PLANE = "nixl_plane"
"""KVFerry's plane ``nixl``; ``nixl`` is NIXL's own way. Without RDMA: ``UCX_TLS=cuda,tcp`` for both."""
PLANES = tuple(
    Method(
        NIXL_PLANE if spec.name == "nixl" else spec.name,
        "plane",
        (("plane", spec.name),),
        gpu_only=spec.host is None,
    )
    for spec in plane_specs()
)
UCX_MOVING = Method(f"ucx{MOVING}", "plane", (("plane", "ucx"),))
RIVALS = (
    Method("nixl", "nixl"),
    Method("nixl_best", "nixl"),
    Method("memcpy_async", "mapped", gpu_only=True),
    Method("torch", "torch"),
    Method("kernel", "mapped", gpu_only=True),
    *(Method(f"kernel_{sms}sm", "mapped", gpu_only=True) for sms in KERNEL_SMS),
    Method("peer_copy", "mapped", gpu_only=True),
    *(Method(f"{way}{IN_A_ROW}", "mapped", gpu_only=True) for way in ("kernel", "peer_copy")),
    Method("ucxx_raw", "ucxx_raw"),
    Method("device_copy", "local"),
    Method("pack", "local"),
    Method("unpack", "local"),
)
USUAL_PLANES = {"cuda": ("cuda_ipc", "ucx"), "cpu": ("cma", "shm", "ucx")}


def chosen(names: list[str] | None, device: str) -> list[Method]:
    """Contenders by name, all that the device has where none is named."""
    known = {contender.name: contender for contender in (*PLANES, UCX_MOVING, *RIVALS)}
    if names is None:
        usual = (*USUAL_PLANES[device], UCX_MOVING.name, *(contender.name for contender in RIVALS))
        return [known[name] for name in usual if device == "cuda" or not known[name].gpu_only]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--only: {', '.join(unknown)} unknown; known are {', '.join(known)}")
    return [known[name] for name in names]
