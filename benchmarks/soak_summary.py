"""The tables of the documentation about the soak, the walks and the fuzzing, made from benchmarks/results/."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tables import load, table

QUANTITIES = {
    "descriptors": "descriptors", "threads": "threads", "mappings": "mappings", "rss_mib": "resident memory, MiB",
    "pss_mib": "proportional memory, MiB", "sessions": "sessions", "links": "links", "leases": "leases",
    "blocks": "blocks in use",
}  # fmt: skip


def _machine(result: dict[str, Any]) -> str:
    versions = result["versions"]
    return f"{versions['cpus']} cores ({versions['cpu']}), Python {versions['python']}, pyzmq {versions['pyzmq']}"


def soak() -> str:
    """What the processes that lived for the whole run held, and what became of the hand-overs."""
    result = load("soak")
    figures, outcomes, faults = result["figures"], result["outcomes"], result["faults"]
    by_quantity: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in result["rows"]:
        by_quantity[row["quantity"]].append(row)
    rows = []
    for quantity, title in QUANTITIES.items():
        most = max(by_quantity[quantity], key=lambda row: row["growth"])
        cells = [f"{most[name]:.0f}" for name in ("warm", "end")]
        rows.append([title, f"`{most['process']}`", *cells, f"{most['growth']:+.1f}", f"{most['bound']:.0f}"])
    ends = ", ".join(
        f"`{plane}` {counts['loaded']:,} loaded, {counts.get('failed', 0)} failed, "
        f"{counts.get('aborted', 0) + counts.get('aborted before the load', 0):,} given up"
        for plane, counts in outcomes.items()
    )
    return "\n\n".join(
        [
            f"{figures['seconds']:.0f} s, {figures['handovers']:,} hand-overs, {figures['failures']} failures of the "
            f"test. Machine: {_machine(result)}, with other work on it. `make soak`: engines of both halves without a "
            f"model, a P and a D for each plane. Faults: {figures['restarts']} restarts by SIGKILL, {faults['stop']} "
            f"stops of up to 3 s, {faults['throws of the stranger']:,} connections of a stranger. {ends}.",
            "The processes that lived for the whole run; of each quantity, the process that grew most after the "
            "warm-up, which is grey in the plot. Growth is the median slope times the time.",
            table(["quantity", "process", "after the warm-up", "at the end", "growth", "bound"], rows),
            "P remembers 65,536 leases and 32,768 reads that have ended. Until these tables are full, its memory grows "
            "by some hundred bytes with each hand-over.",
            "![What the processes held](../benchmarks/results/soak.png)",
            f"First hand-over from a P that was started again, after its port was open: median "
            f"{figures['recovery_p_s_median']:.2f} s, longest {figures['recovery_p_s_max']:.2f} s of "
            f"{figures['recovery_p_count']}; into a D that was started again: {figures['recovery_d_s_median']:.2f} s, "
            f"{figures['recovery_d_s_max']:.2f} s of {figures['recovery_d_count']}. {figures['bursts_of_cancels']} "
            "times 300 loads were given up at once: all blocks were back after "
            f"{figures['burst_blocks_back_s_max']:.2f} s at most, without new traffic. Longest turn of a transfer "
            f"thread: {figures['longest_turn_ms']:.0f} ms of the processor.",
        ]
    )


def walks() -> str:
    """What became of the requests whose legs were sent at once, by plane."""
    result = load("walks")
    figures, events = result["figures"], result["events"]
    outcomes = dict.fromkeys(name for row in result["rows"] for name in row["outcomes"])
    titles = {
        "while P computed": "loaded while P computed", "after P's lease": "loaded after P's lease",
        "load failed": "load failed, D computed", "no load": "nothing loaded", "ended first": "client or D gone",
    }  # fmt: skip
    rows = [
        [f"`{row['plane']}`", f"{row['handovers']:,}", *(f"{row['outcomes'].get(name, 0):,}" for name in titles)]
        for row in result["rows"]
    ]
    assert set(outcomes) <= titles.keys()
    happened = ", ".join(f"{name} {count:,} times" for name, count in events.items())
    return "\n\n".join(
        [
            f"{figures['handovers']:,} hand-overs in {result['cases']} cases, {figures['failed_cases']} of which "
            f"failed, in {figures['seconds']:,} s, seed {result['arguments']['seed']}. Machine: {_machine(result)}, "
            "with other work on it. `make walk`: both legs of each request are sent at once, at two engines with "
            "vLLM's scheduler, KVFerry's two halves and real data planes; the model is made up. Each forward of D "
            "compares all KV that it reads. The forms of P and D are drawn: ranks, block sizes, layouts, runners, "
            "asynchronous scheduling, drafts, a sliding window beside full attention. P computes 1 to 512 tokens in a "
            "step.",
            table(["plane", "requests of D", *titles.values()], rows),
            f"Where nothing was loaded, D had the tokens in its prefix cache, or P did not hand the prompt over. Also: "
            f"{happened}.",
        ]
    )


def fuzz() -> str:
    """Inputs, and the worst of them, by decoder and port."""
    result = load("fuzz")
    figures = result["figures"]
    rows = [
        [row["name"], f"{row['inputs']:,}", f"{row['worst_ms']:.1f}", f"{row['worst_mib']:.1f}", str(row["failures"])]
        for row in result["rows"]
    ]
    return "\n\n".join(
        [
            f"{figures['inputs']:,} inputs, {figures['failures']} failures, {figures['seconds']:.0f} s, seed "
            f"{result['arguments']['seed']}. Machine: {_machine(result)}, with other work on it. `make fuzz`. Time: of "
            "the processor, for one input of a decoder, or for one turn of the transfer thread of the engine behind a "
            "port. Memory: growth of the process at its peak, over all inputs. UCX's port is left out: who reaches it "
            "can write memory of the engine.",
            table(["decoder or port", "inputs", "worst, ms", "worst, MiB", "failures"], rows),
        ]
    )
