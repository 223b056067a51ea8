"""The ways to move blocks that ``planes.py`` compares, by the names that its table has for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.planes.points import Point
from kvferry.transport.registry import plane_specs

NIXL, NIXL_PLANE = "nixl", "nixl plane"
"""NIXL's own way, and KVFerry's plane ``nixl``."""
NIXL_RAW = {"nixl raw read": "READ", "nixl raw write": "WRITE"}
"""NIXL's operations of 4 MiB in one piece."""
BULK = ("nixl_best", "peer_copy", "raw socket", "memcpy", *NIXL_RAW)
"""Ways that move contiguous bytes, from the start of one arena to that of the other."""
HOST, TCP = "host", "tcp"
"""Links on the CPU: each library chooses its transport, or UCX has TCP only."""


@dataclass(frozen=True)
class Contender:
    """A way to move, and the pair of processes that knows it. ``settings``: of our planes."""

    name: str
    kind: str
    link: str = HOST
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def pair(self) -> str:
        """The name of its pair of processes, which several contenders may share."""
        shared = {"plane": self.name, "channel": self.name}.get(self.kind, self.kind)
        return f"{shared} over {self.link}"

    @property
    def alone(self) -> bool:
        """Whether one process has both ends."""
        return self.kind in ("torch", "memcpy")

    def takes(self, point: Point) -> bool:
        return self.name != "torch" or not (point.tokens % point.p.block or point.tokens % point.d.block)

    def changes_form(self, point: Point) -> bool:
        """Whether the bytes lie in D's form afterwards, where P's is another; ceilings know no form."""
        return self.name != NIXL or not point.changes


def on_gpus() -> list[Contender]:
    """Whole hand-overs between worker halves, and what they are compared with."""
    planes = [
        Contender("nixl_plane" if spec.name == "nixl" else spec.name, "plane", settings={"plane": spec.name})
        for spec in plane_specs()
    ]
    rivals = {
        NIXL: "nixl", "nixl_best": "nixl", "torch": "torch", "kernel": "mapped", "peer_copy": "mapped",
    }  # fmt: skip
    return [*planes, *(Contender(name, kind) for name, kind in rivals.items())]


def channel(name: str, link: str = HOST, **settings: Any) -> Contender:
    """A plane of ours by its channels, without halves of a worker."""
    kind, plane = ("pull", name) if name == "cma" else ("channel", name.partition(",")[0])
    plane = "nixl" if name == NIXL_PLANE else plane
    return Contender(name, kind, link, {"plane": plane, "host": "127.0.0.1", "peer": "127.0.0.1"} | settings)


def on_host() -> list[Contender]:
    """Our planes between two processes in host memory, NIXL, and the ceilings."""
    same = [channel(name) for name in ("cma", "shm", "tcp", "ucx", "zmq")]
    lanes = [channel(name, TCP) for name in ("tcp", "ucx", "zmq", NIXL_PLANE)]
    raw = [Contender(name, "nixl", TCP) for name in (NIXL, *NIXL_RAW)]
    raw.append(Contender("raw socket", "raw socket", TCP))
    return [*same, Contender(NIXL, "nixl"), Contender("memcpy", "memcpy"), *lanes, *raw]


USUAL = ("cuda_ipc", "ucx", NIXL, "nixl_best", "torch", "kernel", "peer_copy")
"""On GPUs, where none is named."""


def chosen(known: Sequence[Contender], names: Sequence[str] | None) -> list[Contender]:
    """Contenders by name; all, or the usual ones of a GPU, where none is named."""
    if names is None:
        return [one for one in known if one.kind != "plane" or one.name in USUAL]
    if unknown := set(names) - {one.name for one in known}:
        listed = ", ".join(dict.fromkeys(one.name for one in known))
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} unknown; known are {listed}")
    return [one for one in known if one.name in names]
