"""Which data planes there are, and how one is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.plane import CPU, ConfigureSocket, Plane

PLANE_NAMES = ("cma", "cuda_ipc", "shm", "tcp", "ucx", "zmq")


@dataclass(frozen=True)
class PlaneMemory:
    """What the planes of a process carry: ``ranges``, address and bytes of each, on ``device`` (with its index).
    ``synchronize`` blocks until the copies that were started there are done."""

    device: torch.device
    ranges: Sequence[tuple[int, int]] = ()
    synchronize: Callable[[], None] = lambda: None


HOST = PlaneMemory(CPU)


def preferred_planes(device: torch.device) -> tuple[str, ...]:
    """The planes for memory of ``device``, the fastest first. Which of tcp and ucx that is between hosts depends on
    what UCX can use: the one of the PyPI wheel has TCP only, and is slower there (benchmarks/host_planes.py); a system
    UCX on RDMA hardware is faster. On one host UCX moves GPU memory over NVLink; ``Plane.slower_because`` names the
    exceptions.
    """
    from kvferry.transport.planes.ucx_library import uses_rdma

    if device.type != "cpu":
        return ("cuda_ipc", "ucx", "shm", "tcp", "zmq")
    return ("cma", "shm", "ucx", "tcp", "zmq") if uses_rdma(os.environ) else ("cma", "shm", "tcp", "ucx", "zmq")


def best_staging_bytes(device: torch.device) -> int:
    """The bound on the staging memory where the user names none."""
    return (256 if device.type == "cpu" else 512) << 20


def best_slot_bytes(name: str, device: torch.device, staging_bytes: int) -> int:
    """The size of a staging slot where the user names none.

    What a message costs beside its bytes, on P and on D, is as long as NVLink takes for 64 MiB, so on GPUs slots are as
    large as leaves four of them; a small hand-over is cut finer (``reads.Reads``).
    """
    return staging_bytes // 4 if name == "ucx" and device.type != "cpu" else min(4 << 20, staging_bytes // 4)


def make_plane(
    name: str,
    *,
    host: str,
    slot_bytes: int,
    staging_bytes: int,
    configure_socket: ConfigureSocket | None = None,
    memory: PlaneMemory = HOST,
) -> Plane:
    """The data plane called ``name``.

    Args:
        name: one of ``PLANE_NAMES``.
        host: the local address to listen on; nothing listens on any other.
        slot_bytes: size of a staging slot, that is of the largest message.
        staging_bytes: bound on the staging memory, for each direction.
        configure_socket: called with every ZMQ socket before it binds or connects.
        memory: what is to be carried.

    Raises:
        PlaneUnavailableError: the plane cannot be had on this machine, and why.
    """
    on_gpu = memory.device.type != "cpu"
    if name == "ucx":
        from kvferry.transport.planes.ucx import UcxPlane

        return UcxPlane(host, slot_bytes, staging_bytes, memory.device)
    if name == "shm":
        from kvferry.transport.planes.shm import ShmPlane

        return ShmPlane(slot_bytes, staging_bytes, memory.device)
    if name == "zmq":
        from kvferry.transport.planes.zmq import ZmqPlane

        return ZmqPlane(host, slot_bytes, staging_bytes, configure_socket, memory.device)
    if name == "tcp":
        from kvferry.transport.planes.tcp import TcpPlane

        return TcpPlane(host, slot_bytes, staging_bytes, memory.device)
    if name == "cma":
        from kvferry.transport.planes.cma import CmaPlane

        if on_gpu:
            raise PlaneUnavailableError(f"it reads host memory, the caches lie on {memory.device}")
        return CmaPlane()
    if name == "cuda_ipc":
        if not on_gpu:
            raise PlaneUnavailableError("it reads GPU memory, the caches lie in host memory")
        from kvferry.transport.planes.cuda_ipc import CudaIpcPlane

        return CudaIpcPlane(memory.device, memory.ranges, memory.synchronize)
    raise PlaneUnavailableError(f"plane {name!r} is unknown, expected one of {', '.join(PLANE_NAMES)}")
