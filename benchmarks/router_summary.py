"""The tables of the documentation about odd requests and bad clients, made from benchmarks/results/."""

from __future__ import annotations

from tables import load, table

WAYS = {
    "equal": "equal", "equal but for rounding": "but for rounding", "equal when its events are joined": "events joined",
    "the router's own error": "the router's own error", "different": "different",
}  # fmt: skip


def odd_requests() -> str:
    """How many answers through a router are those of D alone, by path; and those that are not."""
    result = load("odd_requests")
    figures, versions = result["figures"], result["versions"]
    rows = [
        [f"`{path}`", str(sum(answers.values())), *(str(answers.get(way, 0)) for way in WAYS)]
        for path, answers in result["answers"].items()
    ]
    parts = [
        f"{figures['requests']} requests, {figures['asked']} answers, {figures['differences']} differences. Machine: "
        f"{versions['cpus']} cores ({versions['cpu']}), vLLM {versions['vllm']}. "
        "`python benchmarks/odd_requests.py`: the official client asks D alone, and a router that asks P and D at once "
        "or one after the other, with and without a stream. Equal: byte for byte, but for ids and times. Rounding: of "
        "log probabilities, by 0.001 at most. Events joined: D itself had put several tokens into one event.",
        table(["path", "answers", *WAYS.values()], rows),
    ]
    names = dict.fromkeys(row["name"] + (", streamed" if row["streamed"] else "") for row in result["rows"])
    return "\n\n".join([*parts, f"Different: {'; '.join(names)}."] if names else parts)


def router_fleet() -> str:
    """Honest requests among bad clients, and the router's memory and descriptors after each crowd."""
    result = load("router_fleet")
    figures, versions = result["figures"], result["versions"]
    names = ("honest", "failed", "resident_mib", "descriptors")
    rows = [[str(row[name]) for name in names] for row in result["rows"]]
    return "\n\n".join(
        [
            f"2 P and 2 D of vLLM {versions['vllm']} on {versions['cpus']} cores ({versions['cpu']}), "
            "`vllm bench serve`, and 1,000 clients at a time that leave, lie or stall: "
            f"`python benchmarks/router_fleet.py`. {figures['honest_lost']} honest requests lost, "
            f"{figures['leases_that_ended_by_time']:g} leases ended by time. After each crowd:",
            table(["honest answers", "failed", "router's memory, MiB", "its descriptors"], rows),
        ]
    )
