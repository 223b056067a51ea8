"""How much slower a decode loop gets while hand-overs run, on D and on P, per number of SMs that a copy may take.

    python benchmarks/interference.py [--plane cuda_ipc] [--sms 8,16,24,32,64,132] [--json FILE] [--plot PNG]
    python benchmarks/interference.py --device cpu

P and D are processes of their own (``decode_engine.py``), P on the first GPU of ``--devices``, D on the second. Both
decode all the time: 64 sequences of 2048 tokens on the layers of Llama-3-8B in bf16, without CUDA graphs. Hand-overs of
8192 tokens, 1 GiB between scattered blocks of 16 tokens, arrive not at all, ``--rate`` times a second, or one after the
other; each round takes these three, and then in the opposite order. ``decode_slowdown_percent`` is of the mean time of
a step, from wall-clock times of the engine's thread, which the steps beside a hand-over move; of the median it stands
beside. Four a second bring what 64 such sequences need that are answered in 400 steps of 10 ms each: 16 prompts a
second of 256 MiB. With ``--device cpu`` the model is a toy, no SMs are counted, and the figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report

from kvferry.connector.config import Settings

SMS = (8, 16, 24, 32, 64, 132)
LEAD_SECONDS = 0.03
"""Decoding before a segment counts: longer than a step."""
WARM_UP_SECONDS = 0.1
SIDES = {"d": "D", "p": "P"}


class Process:
    """One side, driven by JSON lines."""

    def __init__(self, role: str, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("decode_engine.py")), role, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def tell(self, do: str, **arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with status {self.process.wait()}")
        said = json.loads(line)
        if "error" in said:
            raise SystemExit(said["error"])
        return said["answer"]

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Mode:
    """What was seen in one way of arriving: milliseconds of the steps per round and side, and of the hand-overs their
    bytes and milliseconds; ``seconds`` of all segments."""

    per_second: float | None
    steps: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    handovers: list[tuple[int, float]] = field(default_factory=list)
    planes: set[str] = field(default_factory=set)
    seconds: float = 0.0


class Pair:
    """Both sides."""

    def __init__(self, devices: list[str], stack: ExitStack) -> None:
        self.sides = {role: Process(role, device) for role, device in zip("pd", devices, strict=True)}
        for side in self.sides.values():
            stack.callback(side.close)
        for side in self.sides.values():
            side.answer()

    def open(self, settings: dict[str, Any]) -> None:
        """Start the workers, make the handshake, and see that a hand-over brings the right bytes."""
        address = self.sides["p"].ask("open", settings=settings)
        self.sides["d"].ask("open", settings=settings)
        self.sides["d"].ask("peer", address_of_p=address)
        warm = Mode(None)
        self.segment(WARM_UP_SECONDS, warm, {role: [] for role in self.sides})
        last = len(self.sides["d"].ask("targets")) - 1  # which D takes first
        if self.sides["d"].ask("digest", target=last) != self.sides["p"].ask("digest", target=0):
            raise SystemExit("D holds other bytes than P handed over")

    def segment(self, seconds: float, mode: Mode, steps: dict[str, list[float]]) -> None:
        begin = time.monotonic() + LEAD_SECONDS
        for side in self.sides.values():
            side.tell("segment", begin=begin, seconds=seconds, per_second=mode.per_second)
        for role, side in self.sides.items():
            seen = side.answer()
            steps[role].extend(seen["steps"])
            if role == "d":
                mode.seconds += seen["seconds"]
                for plane, samples in seen["finished"].items():
                    mode.planes.add(plane)
                    times = [microseconds / 1e3 for microseconds in samples["microseconds"]]
                    mode.handovers.extend(zip(samples["nbytes"], times, strict=True))

    def close_workers(self) -> None:
        for role in "dp":
            self.sides[role].ask("close")


def measure(pair: Pair, sms: int | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one cap, one for each way of arriving and each side."""
    cap = {} if sms is None else {"copy_sms": sms}
    pair.open({"plane": options.plane, **options.settings, **cap})
    modes = {"none": Mode(0.0), "rate": Mode(options.rate), "back_to_back": Mode(None)}
    for _ in range(options.rounds):
        steps: dict[str, dict[str, list[float]]] = {name: {role: [] for role in SIDES} for name in modes}
        for name in [*modes, *reversed(modes)]:
            pair.segment(options.seconds, modes[name], steps[name])
        for name, mode in modes.items():
            for role in SIDES:
                mode.steps[role].append(steps[name][role])
    pair.close_workers()
    return [row(sms, name, modes[name], modes["none"], role) for role in SIDES for name in modes]


def row(sms: int | None, name: str, mode: Mode, without: Mode, role: str) -> dict[str, Any]:
    steps = sorted(ms for of_round in mode.steps[role] for ms in of_round)
    base = sorted(ms for of_round in without.steps[role] for ms in of_round)
    by_round = [
        slowdown(statistics.median(ours), statistics.median(theirs))
        for ours, theirs in zip(mode.steps[role], without.steps[role], strict=True)
    ]
    moved = sum(nbytes for nbytes, _ in mode.handovers)
    alone = [nbytes / 1e6 / ms for nbytes, ms in mode.handovers]
    return {
        "sms": sms,
        "side": SIDES[role],
        "arriving": name,
        "steps": len(steps),
        "step_ms_p50": round(statistics.median(steps), 3),
        "step_ms_p99": round(percentile(steps, 0.99), 3),
        "step_ms_mean": round(statistics.fmean(steps), 3),
        "slowdown_percent": slowdown(statistics.median(steps), statistics.median(base)),
        "slowdown_percent_low": min(by_round),
        "slowdown_percent_high": max(by_round),
        "slowdown_percent_mean": slowdown(statistics.fmean(steps), statistics.fmean(base)),
        "slowdown_percent_p99": slowdown(percentile(steps, 0.99), percentile(base, 0.99)),
        "handovers": len(mode.handovers),
        "planes": sorted(mode.planes),
        "handover_ms_p50": round(statistics.median(ms for _, ms in mode.handovers), 3) if alone else None,
        "gb_per_s_of_one": round(statistics.median(alone), 2) if alone else None,
        "gb_per_s_moved": round(moved / 1e9 / mode.seconds, 2),
    }


def slowdown(ours: float, theirs: float) -> float:
    return round(100 * (ours / theirs - 1), 2)


def percentile(ordered: list[float], fraction: float) -> float:
    return ordered[round(fraction * (len(ordered) - 1))]


def plot(path: Path, rows: list[dict[str, Any]], title: str) -> None:
    """Slow-down over the cap on D and on P, and what the hand-overs reached."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    for panel, side in zip(panels, SIDES.values(), strict=False):
        for name, colour in (("rate", "tab:blue"), ("back_to_back", "tab:red")):
            found = [r for r in rows if r["side"] == side and r["arriving"] == name]
            labels = [str(r["sms"]) for r in found]
            for column, style in (("slowdown_percent", "-o"), ("slowdown_percent_mean", "--x")):
                text = f"{name}, {'median' if style == '-o' else 'mean'}"
                panel.plot(labels, [r[column] for r in found], style, color=colour, label=text)
        panel.set(title=f"decode loop on {side}", xlabel="SMs that a copy may take", ylabel="slow-down, %")
        panel.axhline(0, color="grey", linewidth=0.5)
        panel.legend()
    found = [r for r in rows if r["side"] == "D" and r["arriving"] != "none"]
    for name, column in (("rate", "gb_per_s_of_one"), ("back_to_back", "gb_per_s_moved")):
        ours = [r for r in found if r["arriving"] == name]
        panels[2].plot([str(r["sms"]) for r in ours], [r[column] for r in ours], "-o", label=f"{name}, {column}")
    panels[2].set(title="hand-overs meanwhile", xlabel="SMs that a copy may take", ylabel="GB/s", ylim=(0, None))
    panels[2].legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--devices", default="0,1", help="the GPUs of P and of D; the same twice: both on one")
    parser.add_argument("--plane", help="cuda_ipc on GPUs, auto on the CPU")
    parser.add_argument("--settings", type=json.loads, default={}, help="more settings of both sides, in JSON")
    parser.add_argument("--sms", help=f"{','.join(map(str, SMS))} on GPUs; the default cap is always among them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each of the six segments of a round")
    parser.add_argument("--rate", type=float, default=4.0, help="hand-overs a second, of those that arrive at a rate")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    gpu = options.device == "cuda"
    options.plane = options.plane or ("cuda_ipc" if gpu else "auto")
    default = Settings().copy_sms if gpu else None
    given = [int(number) for number in options.sms.split(",")] if options.sms else SMS
    caps = sorted({*given, default}) if gpu else [None]
    devices = [f"cuda:{number}" for number in options.devices.split(",")] if gpu else ["cpu", "cpu"]

    rows = []
    with ExitStack() as stack:
        pair = Pair(devices, stack)
        for cap in caps:
            for found in measure(pair, cap, options):
                rows.append(found)
                print("  ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    of = {(row["sms"], row["side"], row["arriving"]): row for row in rows}
    busy, rare = of[default, "D", "back_to_back"], of[default, "D", "rate"]
    figures = {
        "decode_slowdown_percent": rare["slowdown_percent_mean"],
        "decode_slowdown_percent_median": rare["slowdown_percent"],
        "decode_slowdown_percent_back_to_back": busy["slowdown_percent_mean"],
        "decode_slowdown_percent_on_p": of[default, "P", "rate"]["slowdown_percent_mean"],
        "decode_slowdown_percent_on_p_back_to_back": of[default, "P", "back_to_back"]["slowdown_percent_mean"],
        "handover_gb_per_s_at_a_rate": rare["gb_per_s_of_one"],
        "handover_gb_per_s_back_to_back": busy["gb_per_s_moved"],
    }
    print("  ".join(f"{name} {value}" for name, value in figures.items()))
    setup = {"device": options.device, "plane": options.plane, "default_sms": default, "rate": options.rate}
    setup["seconds"] = round(time.monotonic() - started, 1)
    report.write(options.json, {"ratios": {}, "figures": figures, "setup": setup, "rows": rows})
    if options.plot is not None:
        plot(options.plot, rows, f"{options.plane}, {options.rate:g} hand-overs of 1 GiB a second, or back to back")


if __name__ == "__main__":
    main()
