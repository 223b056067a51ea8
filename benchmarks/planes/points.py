"""What ``planes.py`` moves, and by which ways: points, from which form of cache into which, and contenders. Axes
[L, B, H, N, C].

Plain data: the processes of a contender are told of it as JSON and come to the same block tables by themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.transport.planes.tcp import MOST_FLOWS
from kvferry.transport.registry import plane_specs

Ids = NDArray[np.int64]
Side = Literal["p", "d"]

SPARE = 2
"""A cache holds so many times the blocks that are moved."""


@dataclass(frozen=True)
class Form:
    """One side's cache; ``content`` in bytes, K and V together, ``order`` that of tokens and heads in a block."""

    layers: int = 32
    heads: int = 8
    content: int = 512
    block: int = 16
    order: Literal["NHD", "HND"] = "NHD"
    kind: Literal["full", "mla"] = "full"

    @property
    def block_bytes(self) -> int:
        """Of one layer, which lie together: the piece that moves without a change of form."""
        return self.heads * self.block * self.content

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return self.layers * self.heads * self.content


@dataclass(frozen=True)
class Point:
    """``handovers`` prompts of ``tokens`` each, at once, in scattered blocks, from P's form into D's."""

    name: str
    p: Form
    d: Form
    tokens: int
    handovers: int = 1

    @property
    def nbytes(self) -> int:
        return self.handovers * self.tokens * self.p.token_bytes

    @property
    def changes(self) -> bool:
        """Whether D's form is another than P's."""
        return self.p != self.d

    def tables(self, side: Side, form: Form, num_blocks: int) -> list[Ids]:
        """Block ids of each hand-over in a cache of this form, int64, no block twice."""
        each = -(-self.tokens // form.block)
        seed = zlib.crc32(f"{self.name} {side} {form}".encode())
        ids = np.random.default_rng(seed).permutation(num_blocks)
        return [ids[n * each : (n + 1) * each].astype(np.int64) for n in range(self.handovers)]


class Config(msgspec.Struct, frozen=True):
    """What a process is started with. ``settings``: of our planes."""

    kind: str
    role: Literal["source", "target"]
    device: Literal["cpu", "cuda"]
    points: tuple[Point, ...]
    settings: dict[str, Any] = {}


def num_blocks(points: Iterable[Point], side: Side) -> dict[Form, int]:
    """The forms that one side needs caches of, and their blocks."""
    found: dict[Form, int] = {}
    for point in points:
        form = point.p if side == "p" else point.d
        needed = SPARE * point.handovers * -(-point.tokens // form.block)
        found[form] = max(found.get(form, 0), needed)
    return found


def cache_bytes(forms: dict[Form, int]) -> int:
    """Of the largest of these caches."""
    return max(form.layers * form.block_bytes * blocks for form, blocks in forms.items())


LLAMA = Form()
LLAMA_D = replace(LLAMA, block=64, order="HND")
ONE_BLOCK, FIRST = "tokens_16", "first"


def _both(name: str, form: Form) -> Point:
    return Point(name, form, form, 8192)


def _changed(name: str, form: Form) -> Point:
    """As Llama's: block 16 to 64 and NHD to HND."""
    return Point(name, form, replace(form, block=64, order="HND"), 8192)


CORE = (
    *(Point(f"tokens_{tokens}", LLAMA, LLAMA_D, tokens) for tokens in (16, 128, 512, 1024, 8192, 32768)),
    _changed("llama_70b_tp4", replace(LLAMA, layers=80, heads=2)),
    _changed("mla", Form(layers=61, heads=1, content=1152, kind="mla")),
    _both("identity_16", LLAMA),
    _both("identity_32", replace(LLAMA, block=32)),
    _both("identity_64", replace(LLAMA, block=64)),
    _both("pieces_8k", replace(LLAMA, layers=80, heads=1)),
    _both("pieces_32k", replace(LLAMA, heads=4)),
    Point("at_once_4", LLAMA, LLAMA_D, 1024, handovers=4),
    Point("at_once_16", LLAMA, LLAMA_D, 1024, handovers=16),
)
"""Llama-8B at several lengths (16 tokens are one block), then every other factor alone. Pieces of 8 KiB are the blocks
of a 70B model at TP8, those of 32 KiB of Llama-8B at TP2."""

FIRST_POINT = Point(FIRST, LLAMA, LLAMA_D, 4096)
"""What the first hand-over to a new peer moves: its caches are 32 allocations of 32 MiB."""


def small(points: Sequence[Point]) -> tuple[Point, ...]:
    """The same with few layers and tokens, to try the hand-overs of GPUs on a CPU."""
    return tuple(
        replace(
            point, p=replace(point.p, layers=2), d=replace(point.d, layers=2),
            tokens=min(point.tokens, max(64, point.tokens // 32)),
        )
        for point in points
    )  # fmt: skip


def host_points(mib: int, sizes: Sequence[int]) -> tuple[Point, ...]:
    """By block size in KiB: so many MiB of scattered blocks, each one run of bytes, the same form on P and D."""
    found = []
    for kib in sizes:
        heads = max(1, kib // 8)
        form = Form(heads=heads, content=(kib << 10) // heads // 16, order="HND")
        blocks = (mib << 20) // (form.layers * form.block_bytes)
        found.append(Point(f"{kib} KiB", form, form, blocks * form.block))
    return tuple(found)


# --- contenders, by the names that the table of planes.py has for them ------------------------------------------------

NIXL, NIXL_PLANE = "nixl", "nixl plane"
"""NIXL's own way, and KVFerry's plane ``nixl``."""
NIXL_RAW = {"nixl raw read": "READ", "nixl raw write": "WRITE"}
"""NIXL's operations of 4 MiB in one piece."""
RAW_SOCKETS = "raw sockets"
"""As many as the plane ``tcp`` has flows."""
BULK = ("nixl_best", "peer_copy", "raw socket", RAW_SOCKETS, "memcpy", *NIXL_RAW)
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
        shared = self.name if self.kind in ("plane", "channel", RAW_SOCKETS) else self.kind
        return f"{shared} over {self.link}"

    @property
    def alone(self) -> bool:
        """Whether one process has both ends."""
        return self.kind == "memcpy"

    def changes_form(self, point: Point) -> bool:
        """Whether the bytes lie in D's form afterwards, where P's is another; ceilings know no form."""
        return self.name != NIXL or not point.changes


def gpu_contenders() -> list[Contender]:
    """Whole hand-overs between worker halves, and what they are compared with."""
    planes = [
        Contender("nixl_plane" if spec.name == "nixl" else spec.name, "plane", settings={"plane": spec.name})
        for spec in plane_specs()
    ]
    rivals = {
        NIXL: "nixl", "nixl_best": "nixl", "kernel": "mapped", "peer_copy": "mapped",
        RAW_SOCKETS: RAW_SOCKETS,
    }  # fmt: skip
    return [*planes, *(Contender(name, kind) for name, kind in rivals.items())]


def channel(name: str, link: str = HOST, **settings: Any) -> Contender:
    """A plane of ours by its channels, without halves of a worker."""
    kind, plane = ("pull", name) if name == "cma" else ("channel", name.partition(",")[0])
    plane = "nixl" if name == NIXL_PLANE else plane
    return Contender(name, kind, link, {"plane": plane, "host": "127.0.0.1", "peer": "127.0.0.1"} | settings)


def host_contenders() -> list[Contender]:
    """Our planes between two processes in host memory, NIXL, and the ceilings."""
    same = [channel(name) for name in ("cma", "shm", "tcp", "ucx", "zmq")]
    lanes = [channel(name, TCP) for name in ("tcp", "ucx", "zmq", NIXL_PLANE)]
    lanes.append(channel("tcp, flows", TCP, flows=MOST_FLOWS))
    raw = [Contender(name, "nixl", TCP) for name in (NIXL, *NIXL_RAW)]
    raw.append(Contender("raw socket", RAW_SOCKETS, TCP, {"flows": 1}))
    raw.append(Contender(RAW_SOCKETS, RAW_SOCKETS, TCP, {"flows": MOST_FLOWS}))
    return [*same, Contender(NIXL, "nixl"), Contender("memcpy", "memcpy"), *lanes, *raw]


USUAL = ("cuda_ipc", "ucx", NIXL, "nixl_best", "kernel", "peer_copy")
"""On GPUs, where none is named."""


def chosen(known: Sequence[Contender], names: Sequence[str] | None) -> list[Contender]:
    """Contenders by name; all, or the usual ones of a GPU, where none is named."""
    if names is None:
        return [one for one in known if one.name in USUAL or one.kind not in ("plane", RAW_SOCKETS) or one.link == TCP]
    if unknown := set(names) - {one.name for one in known}:
        listed = ", ".join(dict.fromkeys(one.name for one in known))
        raise SystemExit(f"--only: {', '.join(sorted(unknown))} unknown; known are {listed}")
    return [one for one in known if one.name in names]
