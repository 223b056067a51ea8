"""GPUs and peer access. Whether other processes can map their memory the plane ``cuda_ipc`` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvferry.cli.doctor.findings import Finding, Machine, note, ok, warning

_NO_WAY = "planes through host memory are used between them; for NVLink or PCIe peer access choose other GPUs"


def gpu_findings(machine: Machine) -> Iterator[Finding]:
    """All GPUs that this process sees; one finding where there is none."""
    if not torch.cuda.is_available():
        yield no_gpu(machine, torch.version.cuda)
        return
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield ok(f"GPU {index}", f"{properties.name}, {properties.total_memory >> 30} GiB")
    yield from judge_peers(
        [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]
    )


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


def judge_peers(peers: Sequence[Sequence[bool]]) -> Iterator[Finding]:
    """``peers[i][j]``: GPU i reads the memory of GPU j."""
    without = [(i, [str(j) for j, reached in enumerate(row) if not reached]) for i, row in enumerate(peers)]
    for index, others in without:
        if others:
            yield warning("peer access", f"GPU {index} does not read the memory of GPU {', '.join(others)}", _NO_WAY)
    if len(peers) > 1 and not any(others for _, others in without):
        yield ok("peer access", f"each of {len(peers)} GPUs reads the memory of each other one")
