"""The generated parts of docs/testing.md about the soak, the walks and the fuzzing, from benchmarks/results/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.harness.tables import Columns, load, machine, page, table

QUANTITIES = {
    "descriptors": "descriptors", "threads": "threads", "mappings": "mappings", "rss_mib": "resident memory, MiB",
    "pss_mib": "proportional memory, MiB", "sessions": "sessions", "links": "links", "leases": "leases",
    "blocks": "blocks in use",
}  # fmt: skip


def shared(result: dict[str, Any]) -> str:
    return f"{machine(result, ('pyzmq',)).removesuffix('.')}, with other work on it."


def soak() -> str:
    """What the processes that lived for the whole run held, and what became of the hand-overs."""
    result = load("soak")
    figures, outcomes, faults = result["figures"], result["outcomes"], result["faults"]
    most = [
        max((row for row in result["rows"] if row["quantity"] == quantity), key=lambda row: row["growth"])
        for quantity in QUANTITIES
    ]
    columns: Columns = {
        "quantity": lambda row: QUANTITIES[row["quantity"]], "process": "`{process}`",
        "after the warm-up": "{warm:.0f}", "at the end": "{end:.0f}", "growth": "{growth:+.1f}", "bound": "{bound:.0f}",
    }  # fmt: skip
    ends = ", ".join(
        f"`{plane}` {counts['loaded']:,} loaded, {counts.get('failed', 0)} failed, "
        f"{counts.get('aborted', 0) + counts.get('aborted before the load', 0):,} given up"
        for plane, counts in outcomes.items()
    )
    return page(
        f"{figures['seconds']:.0f} s, {figures['handovers']:,} hand-overs, {figures['failures']} failures of the test. "
        f"{shared(result)} `make soak`: engines of both halves without a model, a P and a D for each plane. Faults: "
        f"{figures['restarts']} restarts by SIGKILL, {faults['stop']} stops of up to 3 s, "
        f"{faults['throws of the stranger']:,} connections of a stranger. {ends}.",
        "The processes that lived for the whole run; of each quantity, the process that grew most after the warm-up. "
        "Growth is the median slope times the time.",
        table(most, columns),
        "P remembers 65,536 leases and 32,768 reads that have ended. Until these tables are full, its memory grows by "
        "some hundred bytes with each hand-over.",
        f"First hand-over from a P that was started again, after its port was open: median "
        f"{figures['recovery_p_s_median']:.2f} s, longest {figures['recovery_p_s_max']:.2f} s of "
        f"{figures['recovery_p_count']}; into a D that was started again: {figures['recovery_d_s_median']:.2f} s, "
        f"{figures['recovery_d_s_max']:.2f} s of {figures['recovery_d_count']}. {figures['bursts_of_cancels']} times "
        f"300 loads were given up at once: all blocks were back after {figures['burst_blocks_back_s_max']:.2f} s at "
        f"most, without new traffic. Longest turn of a transfer thread: {figures['longest_turn_ms']:.0f} ms of the "
        "processor.",
    )


def walks() -> str:
    """What became of the requests whose legs were sent at once, by plane."""
    result = load("walks")
    figures = result["figures"]
    titles = {
        "loaded while P computed": "while P computed", "loaded after P's lease": "after P's lease",
        "load failed, D computed": "load failed", "nothing loaded": "no load", "client or D gone": "ended first",
    }  # fmt: skip
    assert {name for row in result["rows"] for name in row["outcomes"]} <= set(titles.values())

    def count(name: str) -> Callable[[Any], str]:
        return lambda row: f"{row['outcomes'].get(name, 0):,}"

    columns: Columns = {
        "plane": "`{plane}`", "requests of D": "{handovers:,}",
        **{head: count(name) for head, name in titles.items()},
    }  # fmt: skip
    happened = ", ".join(f"{name} {count:,} times" for name, count in result["events"].items())
    return page(
        f"{figures['handovers']:,} hand-overs in {result['cases']} cases, {figures['failed_cases']} of which failed, "
        f"in {figures['seconds']:,} s, seed {result['arguments']['seed']}. {shared(result)} `make walk`: both legs of "
        "each request are sent at once, at two engines with vLLM's scheduler, KVFerry's two halves and real data "
        "planes; the model is made up. Each forward of D compares all KV that it reads. The forms of P and D are "
        "drawn: ranks, block sizes, layouts, runners, asynchronous scheduling, drafts, a sliding window beside full "
        "attention. P computes 1 to 512 tokens in a step.",
        table(result["rows"], columns),
        "Where nothing was loaded, D had the tokens in its prefix cache, or P did not hand the prompt over. Also: "
        f"{happened}.",
    )


def fuzz() -> str:
    """Inputs, and the worst of them, by decoder and port."""
    result = load("fuzz")
    figures = result["figures"]
    columns: Columns = {
        "decoder or port": "{name}", "inputs": "{inputs:,}", "worst, ms": "{worst_ms:.1f}",
        "worst, MiB": "{worst_mib:.1f}", "failures": "{failures}",
    }  # fmt: skip
    return page(
        f"{figures['inputs']:,} inputs, {figures['failures']} failures, {figures['seconds']:.0f} s, seed "
        f"{result['arguments']['seed']}. {shared(result)} `make fuzz`. Time: of the processor, for one input of a "
        "decoder, or for one turn of the transfer thread of the engine behind a port. Memory: growth of the process at "
        "its peak, over all inputs. UCX's port is left out: who reaches it can write memory of the engine.",
        table(result["rows"], columns),
    )
