"""GPUs: peer access, and memory that other processes can map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvferry.cli.doctor.findings import Finding, Machine, note, ok, warning
from kvferry.cli.doctor.host import MIB
from kvferry.transport import cuda
from kvferry.transport.errors import TransportError

_NO_WAY = "planes through host memory are used between them; for NVLink or PCIe peer access choose other GPUs"


@dataclass(frozen=True)
class GpuFacts:
    """What was read from the driver. ``peers[i][j]``: GPU i reads the memory of GPU j. ``no_handle``: by GPU, why
    PyTorch's memory has no IPC handle; empty where it has one."""

    names: Sequence[str]
    peers: Sequence[Sequence[bool]]
    no_handle: Sequence[str]


def gpu_findings(machine: Machine) -> Iterator[Finding]:
    """All GPUs that this process sees; one finding where there is none."""
    if torch.cuda.is_available():
        yield from judge_gpus(read_gpus(), machine.environ)
    else:
        yield no_gpu(machine, torch.version.cuda)


def no_gpu(machine: Machine, built_for: str | None) -> Finding:
    """Why there is no GPU. ``built_for``: the CUDA release of this PyTorch."""
    devices = [name for name in machine.names("dev") if name.startswith("nvidia") and name[6:].isdigit()]
    driver = machine.text("proc/driver/nvidia/version").partition("\n")[0]
    if built_for is None:
        if devices or driver:
            install = "install PyTorch and vLLM for CUDA, if these engines are to use the GPUs"
            return warning("GPUs", "this PyTorch is built without CUDA, and an NVIDIA GPU is there", install)
        return note("GPUs", "none; this PyTorch is built without CUDA")
    if driver and not devices:
        return warning("GPUs", "a driver is loaded, and no /dev/nvidia* is here", "start the container with --gpus all")
    if devices:
        right = "look at nvidia-smi: is the driver new enough for this PyTorch, is CUDA_VISIBLE_DEVICES right?"
        return warning("GPUs", f"{', '.join(devices)} cannot be used by CUDA {built_for}", right)
    return note("GPUs", "none: no /dev/nvidia* and no driver")


def read_gpus() -> GpuFacts:
    """Ask the driver. Makes a context on every GPU."""
    count = torch.cuda.device_count()
    names, no_handle = [], []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        names.append(f"{properties.name}, {properties.total_memory >> 30} GiB")
        no_handle.append(_no_handle(torch.device("cuda", index)))
    peers = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    return GpuFacts(names, peers, no_handle)


def _no_handle(device: torch.device) -> str:
    try:
        cuda.bind_context(device)
        memory = torch.zeros(2 * MIB, dtype=torch.uint8, device=device)
        base, _ = cuda.address_range(memory.data_ptr())
        cuda.ipc_handle(base)
    except (TransportError, RuntimeError) as error:  # RuntimeError: of PyTorch, such as a full GPU
        return str(error).splitlines()[0]
    return ""


def judge_gpus(facts: GpuFacts, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Findings of what was read."""
    for index, name in enumerate(facts.names):
        yield ok(f"GPU {index}", name)
    all_reached = len(facts.peers) > 1
    for index, row in enumerate(facts.peers):
        if others := [str(j) for j, reached in enumerate(row) if not reached]:
            all_reached = False
            yield warning("peer access", f"GPU {index} does not read the memory of GPU {', '.join(others)}", _NO_WAY)
    if all_reached:
        yield ok("peer access", f"each of {len(facts.peers)} GPUs reads the memory of each other one")
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(variable, "").lower().replace(" ", ""):
            reason = "expandable_segments is on: a KV cache then has no IPC handle, and cuda_ipc is not used"
            yield warning(variable, reason, "remove expandable_segments:True where the engine prefills")
    for index, why in enumerate(facts.no_handle):
        if why:
            yield warning(f"IPC memory of GPU {index}", why, "without it cuda_ipc is not used from this GPU")
    if not any(facts.no_handle):
        yield ok("IPC memory", "other processes can map PyTorch's memory on every GPU")
