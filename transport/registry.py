"""The registered data planes, one ``PlaneSpec`` each. Settings, preference order and docs take the names from here.

``python -m kvferry.transport.registry`` prints the registered planes as a Markdown table.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from kvferry.transport.errors import PlaneUnavailableError, did_you_mean

if TYPE_CHECKING:
    import torch

    from kvferry.transport.plane import Plane, PlaneContext

DEFAULT_SLOT_BYTES = 4 << 20
"""Large enough for the fixed cost of a message not to count: over shm, 128 MiB take 47 / 40 / 31 / 31 ms of D's
processor with slots of 1 / 2 / 4 / 8 MiB, though small slots stay in a core's cache."""
GPU_SLOT_BYTES = 8 << 20
"""The same for shm and tcp between GPUs, whose copies go past the caches of cores: over shm, 1 GiB between two H100
moves at 31 GB/s with slots of 4 MiB, of which P's thread takes as long for each as PCIe takes for two, and at 48 with
8 MiB."""


@dataclass(frozen=True)
class MemoryKind:
    """In place of a ``torch.device``, for those that ask without PyTorch."""

    type: str

    def __str__(self) -> str:
        return self.type


HOST, GPU = MemoryKind("cpu"), MemoryKind("cuda")


@dataclass(frozen=True)
class Use:
    """How a plane carries one kind of memory.

    Args:
        rank: the place in the order of preference, which is that of speed; the lowest comes first.
        slot_bytes: the default size of a staging slot; ``None``: a quarter of the staging memory, which is the bound.
        auto: whether KVFerry chooses the plane by itself; else only the setting ``plane`` does.
    """

    rank: int
    slot_bytes: int | None = DEFAULT_SLOT_BYTES
    auto: bool = True


@dataclass(frozen=True)
class PlaneSpec:
    """One data plane.

    Args:
        name: as in the setting ``plane``, in logs and metrics.
        plane: its class, ``module:Class``, a ``transport.plane.Plane``. It is imported when the plane is made.
        link: which P and D it joins, in a few words.
        summary: how it moves the bytes, in one sentence without a full stop.
        host: how it carries caches in host memory; ``None``: it does not.
        gpu: how it carries caches on GPUs; ``None``: it does not.
        extra: what ``pip`` must install for it; empty where KVFerry alone is enough.
        encrypts: it can encrypt what it sends to another host, and does where ``PlaneContext.encrypt`` asks for it.
        pulls: D reads P's pages by itself, as ``Plane.pulls`` says; for those who ask without PyTorch.
    """

    name: str
    plane: str
    link: str
    summary: str
    host: Use | None = None
    gpu: Use | None = None
    extra: str = ""
    encrypts: bool = False
    pulls: bool = False

    @property
    def memory(self) -> str:
        """The memory that it carries, in words."""
        return " and ".join(word for word, use in (("host", self.host), ("GPU", self.gpu)) if use is not None)

    def use(self, device: torch.device | MemoryKind) -> Use | None:
        """How it carries memory of ``device``; ``None``: it does not."""
        return self.host if device.type == "cpu" else self.gpu

    def load(self) -> type[Plane]:
        """Import the class.

        Raises:
            PlaneUnavailableError: the module or the class cannot be imported.
        """
        module, _, name = self.plane.partition(":")
        try:
            return cast("type[Plane]", getattr(import_module(module), name))
        except (ImportError, AttributeError) as error:
            raise PlaneUnavailableError(f"{self.plane} cannot be imported: {error}") from None


_PLANES = "kvferry.transport.planes"
_SPECS = (
    PlaneSpec(
        "cma", f"{_PLANES}.cma:CmaPlane", "same host, same user",
        "D reads P's pages with `process_vm_readv`, straight into its own: one pass, no work on P",
        host=Use(10), pulls=True,
    ),
    PlaneSpec(
        "cuda_ipc", f"{_PLANES}.cuda_ipc:CudaIpcPlane",
        "same host, same user, GPUs that reach each other, or one GPU for both",
        "D's kernel reads P's pages over NVLink and writes its own, form changed in the same pass; no work on P",
        gpu=Use(10), pulls=True,
    ),
    PlaneSpec(
        "shm", f"{_PLANES}.shm:ShmPlane", "same host, same user",
        "P packs into slots in shared memory, D unpacks from them",
        host=Use(20), gpu=Use(30, slot_bytes=GPU_SLOT_BYTES),
    ),
    PlaneSpec(
        "tcp", f"{_PLANES}.tcp:TcpPlane", "between hosts",
        "P's kernel gathers scattered pages into a stream, D's scatters it into its own: no copy between",
        host=Use(30), gpu=Use(40, slot_bytes=GPU_SLOT_BYTES), encrypts=True,
    ),
    PlaneSpec(
        "ucx", f"{_PLANES}.ucx:UcxPlane", "between hosts with RDMA hardware, and between GPUs of one host",
        "packed, sent as UCX messages, unpacked, all overlapped",
        # On a GPU the fixed cost of a message is the time that NVLink takes for 64 MiB: hence large slots, and D cuts a
        # small hand-over into smaller chunks. On one host UCX moves GPU memory over NVLink; ``Plane.slower_because``
        # names the exceptions. In host memory the UCX of the PyPI wheel has TCP only, slower than the tcp plane.
        host=Use(40, auto=False), gpu=Use(20, slot_bytes=None), extra="kvferry[ucx]",
    ),
    PlaneSpec(
        "nixl", f"{_PLANES}.nixl:NixlPlane", "between hosts with RDMA hardware",
        "P packs into registered slots, D reads each with one RDMA READ, and unpacks",
        # ``ucx`` comes first between the GPUs of one host, over NVLink, and where the user has told it to use a
        # system's UCX; between other hosts it has TCP only, and says so.
        host=Use(25), gpu=Use(25, slot_bytes=32 << 20), extra="kvferry[rdma]",
    ),
    PlaneSpec(
        "zmq", f"{_PLANES}.zmq:ZmqPlane", "anywhere", "packed, sent as encrypted ZMQ messages, unpacked",
        host=Use(50, auto=False), gpu=Use(50, auto=False), encrypts=True,
    ),
)  # fmt: skip
_OURS = {spec.name: spec for spec in _SPECS}


def plane_names() -> tuple[str, ...]:
    """The names of all planes, in alphabetical order. Imports no plane."""
    return tuple(sorted(_OURS))


def plane_spec(name: str) -> PlaneSpec:
    """The plane of that name. Raises PlaneUnavailableError: there is none."""
    if name not in _OURS:
        known = plane_names()
        raise PlaneUnavailableError(
            f"plane {name!r} is unknown, expected one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    return _OURS[name]


def plane_specs() -> tuple[PlaneSpec, ...]:
    """All planes, in alphabetical order."""
    return tuple(plane_spec(name) for name in plane_names())


def preferred_planes(device: torch.device | MemoryKind) -> tuple[str, ...]:
    """The planes for memory of ``device`` that KVFerry chooses by itself, the fastest first."""
    uses = [(use.rank, spec.name) for spec in plane_specs() if (use := spec.use(device)) is not None and use.auto]
    return tuple(name for _, name in sorted(uses))


def best_staging_bytes(device: torch.device | MemoryKind) -> int:
    """The bound on the staging memory where the user sets none."""
    return (256 if device.type == "cpu" else 512) << 20


def best_slot_bytes(name: str, device: torch.device | MemoryKind, staging_bytes: int) -> int:
    """The size of a staging slot where the user sets none. Raises PlaneUnavailableError for an unknown plane."""
    use = plane_spec(name).use(device)
    bound = DEFAULT_SLOT_BYTES if use is None else use.slot_bytes
    return staging_bytes // 4 if bound is None else min(bound, staging_bytes // 4)


def plane_class(name: str, device: torch.device | MemoryKind, *, encrypt: bool) -> type[Plane]:
    """The class of the data plane of that name.

    Raises:
        PlaneUnavailableError: no plane has that name, or it does not carry this memory, or not in this way.
    """
    spec = plane_spec(name)
    if spec.use(device) is None:
        where = "in host memory" if device.type == "cpu" else f"on {device}"
        raise PlaneUnavailableError(f"it carries {spec.memory} memory, the caches lie {where}")
    plane = spec.load()
    if encrypt and not (spec.encrypts or plane.same_host):
        raise PlaneUnavailableError("it does not encrypt, and the setting encrypt is on")
    return plane


def make_plane(name: str, context: PlaneContext) -> Plane:
    """Make the data plane of that name.

    Raises:
        PlaneUnavailableError: as ``plane_class``, or this machine cannot use it; the message gives the reason.
    """
    return plane_class(name, context.memory.device, encrypt=context.encrypt)(context)


def planes_table() -> str:
    """All registered planes as a Markdown table."""
    rows = ["| plane | link | memory | install | how |", "|---|---|---|---|---|"]
    for spec in plane_specs():
        extra = f"`pip install '{spec.extra}'`" if spec.extra else ""
        rows.append(f"| `{spec.name}` | {spec.link} | {spec.memory} | {extra} | {spec.summary} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(planes_table())
