"""Where a prompt is prefilled: on P always, on D always, or as ``kvferry router`` decides.

    python benchmarks/router/where_to_prefill.py --json FILE                  # simulated engines, half a minute
    python benchmarks/router/where_to_prefill.py --device cuda --json FILE    # engines of vLLM on two GPUs, 10 minutes
    python benchmarks/router/where_to_prefill.py --device cpu --json FILE     # on the CPU, an hour

Conversations are 300 requests of a part of Mooncake's conversation trace (https://github.com/kvcache-ai/Mooncake,
FAST25-release/traces/conversation_trace.jsonl, Apache-2.0), whose times are stretched to a rate; they are whole
multiples of 3 s there, and spread evenly within these here. Turns are random: short ones of 60 to 300 tokens, long ones
of 500 to 3,000, and 20 to 200 of the answer.

Beside the three policies, as many engines that each prefill and decode: aggregated.

Simulated: the router's own choice between engines in virtual time, ``simulated_engines.py``; hand-overs take what
``kvferry plan`` says of a Llama-3.1-8B. The way to choose was found with other parts of the trace, other random turns
and other rates.

Real: one P, one D, a router before them for each policy, and two aggregated engines without a connector on the same
GPUs, which get half of the conversations each. They take turns, and the others idle meanwhile. Lengths of conversations
are divided by ``shrink`` of ``real_engines.py``. Before each turn the prefix caches are emptied; first requests, by
which engines meet and the router learns, do not count. The client takes the time of each chunk of the stream; here
``gap_p99_ms`` is that of the mean gaps of answers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from benchmarks.router.loads import LOADS, POLICIES
from benchmarks.router.simulated_engines import Handover, Simulation, Speed
from kvferry.cli.plan.handover import Deployment, Pair, plan_handover
from kvferry.cli.plan.model import model_shape
from kvferry.cli.plan.time_model import default_calibration, work_of

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
LINKS: dict[str, tuple[str, int | None, float]] = {
    "NVLink": ("cuda_ipc/gpu", None, inf),
    "25 Gbit/s": ("tcp/host", 1 << 20, 3.125e9),
    "10 Gbit/s": ("tcp/host", 1 << 20, 1.25e9),
}
"""By name: the plane of the calibration, the bytes of its messages, and those of a second."""
H100 = Speed(step=0.0058, per_sequence=0.00003, rate=28_000)
SPEEDS = {
    "alike": (Speed(), Speed()),
    "P twice as fast": (Speed(rate=40_000), Speed()),
    "D half as fast": (Speed(), Speed(rate=10_000)),
    "D twice as fast": (Speed(), Speed(rate=40_000)),
    "H100": (H100, H100),
}
"""Of P and of D, in prefill."""


class Case(NamedTuple):
    """``part``: of the trace, or of all random turns. ``engines``: P and D."""

    load: str
    rate: float
    part: int = 1
    engines: tuple[int, int] = (1, 1)
    link: str = "NVLink"
    speeds: str = "alike"


SIMULATED = [
    *(Case("conversations", rate, part) for part, rate in ((1, 0.2), (1, 0.6), (1, 1.0), (2, 0.8))),
    Case("conversations", 2.2, 1, (2, 2)),
    Case("conversations", 1.8, 2, (3, 1)),
    *(Case("conversations", 0.6, 2, link=link) for link in LINKS if link != "NVLink"),
    *(Case("conversations", 0.6, 2, speeds=speeds) for speeds in SPEEDS if speeds != "alike"),
    *(Case("short turns", rate, number) for number, rate in enumerate((3, 12, 25, 60), 1)),
    Case("short turns", 25, 6, (2, 2)),
    Case("short turns", 12, 7, link="10 Gbit/s"),
    *(Case("short turns", 12, 8, speeds=speeds) for speeds in ("D half as fast", "H100")),
    Case("long turns", 3, 9),
]


def handover_over(link: str) -> Handover:
    plane, slot, bytes_per_second = LINKS[link]
    pair = Pair(model_shape(LLAMA, "auto"), Deployment(), Deployment(), slot)
    costs = default_calibration().costs(plane)

    @cache
    def times(tokens: int) -> tuple[float, float]:
        work = work_of(plan_handover(pair, tokens), costs, bytes_per_second)
        return costs.each_seconds + work.seconds, costs.fixed_seconds

    return times


def simulate() -> Iterator[dict[str, Any]]:
    for case in SIMULATED:
        handover = handover_over(case.link)
        trace = LOADS[case.load](case.rate, part=case.part)
        found = {
            policy: Simulation(policy, *case.engines, SPEEDS[case.speeds], handover).run(trace)
            for policy in (*POLICIES, "aggregated")
        }
        yield {
            "load": case.load, "requests_per_second": case.rate, "engines": "{} + {}".format(*case.engines),
            "link": case.link, "speeds": case.speeds, "policies": found,
        }  # fmt: skip


def to_better(row: dict[str, Any], figure: str = "ttft_ms") -> float:
    """The decided figure, over that of always or never, whichever has the earlier first tokens."""
    of = row["policies"]
    better = min(POLICIES[:2], key=lambda policy: of[policy]["ttft_ms"])
    return round(of["decide"][figure] / of[better][figure], 3)


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--device", choices=("simulated", "cpu", "cuda"), default="simulated")
    parser.add_argument("--folder", type=Path, default=report.ROOT / ".bench" / "where", help="for model and logs")
    args = parser.parse_args()
    if args.device == "simulated":
        found = simulate()
    else:
        from benchmarks.router.real_engines import measure  # it imports torch

        found = measure(args)
    done: list[dict[str, Any]] = []
    for row in found:
        done.append(row)
        row |= {"ttft_to_better": to_better(row), "gap_to_better": to_better(row, "gap_ms")}
        firsts = ", ".join(f"{policy} {of['ttft_ms']:.1f}" for policy, of in row["policies"].items())
        gaps = ", ".join(f"{policy} {of['gap_ms']:.2f}" for policy, of in row["policies"].items())
        print(f"{row['load']} {row['requests_per_second']:g}/s: TTFT ms {firsts}; gap ms {gaps}", flush=True)
    figures = {
        "worst_ttft_to_better": max(row["ttft_to_better"] for row in done),
        "within_5_percent": sum(row["ttft_to_better"] <= 1.05 for row in done),
        "rows": len(done),
    }
    print(figures)
    report.write(args.json, {"ratios": {}, "figures": figures, "device": args.device, "rows": done})


if __name__ == "__main__":
    main()
