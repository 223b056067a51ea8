"""What ``gpu_planes.py`` shows: tables of its points, its ratios beside what they are to reach, and a plot.

The targets of the other GPU benchmarks are here too. Only the output of the benchmarks shows targets, not the docs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TARGETS: dict[str, tuple[str, float]] = {
    "cuda_ipc_vs_peer_copy": (">=", 0.93),
    "cuda_ipc_16sm_vs_peer_copy": (">=", 0.88),
    "cuda_ipc_64mib_vs_peer_copy": (">=", 0.65),
    "ucx_vs_peer_copy": (">=", 0.88),
    "ucx_vs_raw_ucxx": (">=", 0.95),
    "cuda_ipc_vs_nixl_8k": (">=", 50),
    "cuda_ipc_vs_nixl_32k": (">=", 50),
    "cuda_ipc_vs_nixl_best": (">=", 1.3),
    "pack_vs_device_copy": (">=", 0.9),
    "unpack_vs_device_copy": (">=", 0.9),
    "handover_ms_p50": ("<=", 0.5),
    "handover_ms_p99": ("<=", 1.5),
    "first_handover_ms": ("<=", 50),
    "cuda_ipc_gil_ms": ("<=", 1),
    "ucx_gil_ms": ("<=", 3),
}
"""On 2 x H200 over NVLink."""
HIDDEN = ("device_copy", "pack", "unpack", "ucx_moving")
"""Not in the plot: of one GPU, or parts of what is."""
E2E_TARGETS: dict[str, tuple[str, float]] = {
    "ttft_vs_nixl_fresh": ("<=", 1),
    "ttft_vs_nixl_scattered": ("<=", 1),
}
"""Of ``gpu_e2e.py``, there too."""
INTERFERENCE_TARGETS: dict[str, tuple[str, float]] = {"decode_slowdown_percent": ("<=", 5)}
"""Of ``interference.py``, there too."""


def reached(target: tuple[str, float], value: float) -> bool:
    sign, limit = target
    return value >= limit if sign == ">=" else value <= limit


def verdict(name: str, value: float) -> str:
    """The target and whether it is reached; empty where there is none."""
    target = (TARGETS | E2E_TARGETS | INTERFERENCE_TARGETS).get(name)
    if target is None:
        return ""
    sign, limit = target
    return f"{sign} {limit:g}  {'reached' if reached(target, value) else 'NOT REACHED'}"


def show(result: Mapping[str, Any], order: Sequence[str]) -> None:
    """Print the tables; ``order``: the contenders."""
    rows = {(row["point"], row["contender"]): row for row in result["rows"]}
    points = list(dict.fromkeys(row["point"] for row in result["rows"]))
    names = [name for name in order if any((point, name) in rows for point in points)]
    widths = [max(13, len(name) + 3) for name in names]
    head = f"{'':22}{'MiB':>8}" + "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    for title, cell in (("GB/s", _rate), ("ms, median / p99", _times)):
        print(f"\n{title}\n{head}")
        for point in points:
            mib = next(row["bytes"] for (at, _), row in rows.items() if at == point) / 2**20
            cells = [
                f"{cell(rows[point, name]) if (point, name) in rows else '':>{width}}"
                for name, width in zip(names, widths, strict=True)
            ]
            print(f"{point:22}{mib:8.1f}" + "".join(cells))
    print("\n* moves P's pieces to blocks of P's form: the change of form is still to be made, and is not in the time")
    _failures(result["failures"])
    print()
    on_gpus = result["device"] == "cuda"
    for kind in ("ratios", "figures"):
        for name, value in result[kind].items():
            print(f"{name:38}{value:10.3f}   {verdict(name, value) if on_gpus else ''}".rstrip())
    for missing in sorted(TARGETS.keys() - result["ratios"].keys() - result["figures"].keys()):
        print(f"{missing:38}{'-':>10}   not measured")
    for plane, chosen in result["ucx_transports"].items():
        for line in [line for line in chosen if "cuda" in line] or chosen:
            print(f"{plane}: {line}")


def _failures(failures: Sequence[Mapping[str, str]]) -> None:
    """One line for each error of each contender, with all points that it struck."""
    struck: dict[tuple[str, str], list[str]] = {}
    for failure in failures:
        struck.setdefault((failure["contender"], failure["error"]), []).append(failure["at"])
    for (contender, error), points in struck.items():
        print(f"FAILED: {contender} at {', '.join(points)}: {error[:400]}")


def _rate(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "failed"
    return f"{row['gb_per_s']:.1f}{'' if row['changes_form'] else '*'}"


def _times(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return "failed"
    digits = 2 if row["ms_p99"] < 100 else 0
    return f"{row['ms_p50']:.{digits}f}/{row['ms_p99']:.{digits}f}"


def plot(result: Mapping[str, Any], order: Sequence[str], path: Path) -> None:
    """GB/s by prompt length, and of the other points, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if "error" not in row]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(17, 6.5), width_ratios=(1, 1.6))
    names = [name for name in order if name not in HIDDEN and "in_a_row" not in name]
    others = list(dict.fromkeys(row["point"] for row in rows if not row["point"].startswith("tokens_")))
    colours = {name: pyplot.get_cmap("tab20")(n) for n, name in enumerate(names)}
    for n, name in enumerate(names):
        mine = {row["point"]: row for row in rows if row["contender"] == name}
        line = sorted((row["bytes"] / 2**20, row["gb_per_s"]) for at, row in mine.items() if at.startswith("tokens_"))
        if not mine:
            continue
        label = name if all(row["changes_form"] for row in mine.values()) else f"{name} (form unchanged)"
        left.plot([x for x, _ in line], [y for _, y in line], "o-", color=colours[name], label=label)
        at = [m + (n - len(names) / 2) * 0.8 / len(names) for m, point in enumerate(others) if point in mine]
        rates = [mine[point]["gb_per_s"] for point in others if point in mine]
        right.bar(at, rates, 0.8 / len(names), color=colours[name], align="edge")
    left.set(xscale="log", xlabel="MiB in one hand-over", ylabel="GB/s of payload")
    left.set_title("Llama-8B, scattered, block 16 to 64, NHD to HND")
    right.set(yscale="log", title="other points")
    right.set_xticks(range(len(others)), others, rotation=30, ha="right")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if left.lines:
        left.legend(fontsize="small", framealpha=0.6)
    gpus = result["versions"]["gpus"]
    figure.suptitle(f"Blocks from one GPU to the other, medians of {result['rounds']} rounds ({gpus})")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
