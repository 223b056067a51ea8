"""The table of docs/planning.md: how far predictions were off, from benchmarks/results/plan_accuracy.json."""

from __future__ import annotations

from tables import load, table

HEAD = [
    "plane", "p50 within 10 %", "p50, the same measured twice", "p50, median error", "p95 within 20 %",
    "p95, the same measured twice", "p95, median error",
]  # fmt: skip


def accuracy() -> str:
    """By plane, the shares within the bounds and the median errors, in percent."""
    result = load("plan_accuracy")
    figures, versions = result["figures"], result["versions"]
    predicted = [row for row in result["rows"] if not row["fitted"]]
    rows = []
    for plane in sorted({row["plane"] for row in predicted}, key=lambda name: (name.endswith("/gpu"), name)):
        cells = [f"`{plane}`"]
        for percentile, bound in (("p50", 10), ("p95", 20)):
            for what, digits in ((f"within_{bound}", 0), (f"repeats_within_{bound}", 0), ("median_error", 1)):
                name = f"{plane}_{percentile}_{what}" + ("_percent" if "within" in what else "")
                cells.append(f"{100 * figures[name]:.{digits}f} %" if name in figures else "not measured")
        rows.append(cells)
    hosts, gpus = (sum(row["plane"] == plane for row in predicted) for plane in ("cma/host", "cuda_ipc/gpu"))
    return "\n\n".join(
        [
            f"How far predictions were off, of {hosts} cases of each plane in host memory, on {versions['cpus']} cores "
            f"({versions['cpu']}) with little other load, and of {gpus} cases of each plane of GPUs, between two "
            "GPUs of one host: the share of the cases whose predicted time was so close to the measured one, and the "
            "median error. The costs were fitted to none of these cases. *The same measured twice*: the share of the "
            "cases in which one half of the rounds was so close to the other half; a half has fewer hand-overs, so "
            "its percentiles scatter more.",
            table(HEAD, rows),
            "[plan_accuracy.json](../benchmarks/results/plan_accuracy.json) has all cases, "
            "[plan_accuracy.py](../benchmarks/plan_accuracy.py) measures them.",
        ]
    )
