"""What a soak found: verdicts, failures and figures."""

from __future__ import annotations

import statistics
from typing import Any

from tests.soak import flatness
from tests.soak.driver import Soak


def verdicts(soak: Soak) -> list[flatness.Verdict]:
    return [
        verdict
        for engine in soak.lasting
        for verdict in flatness.judge(
            engine.name,
            [sample for sample in soak.samples.get(engine.name, ()) if sample["at"] <= soak.lasted],
            soak.lasted,
            soak.restarts,
        )
    ]


def failures(soak: Soak) -> list[str]:
    """Everything that must not be."""
    grown = [
        f"{v.process}: {v.quantity} {v.warm:g} to {v.end:g}, growth {v.growth:g}, bound {v.bound:g}"
        for v in verdicts(soak)
        if not v.flat
    ]
    slow = [
        f"recovery of {side} took {max(found):.2f} s, limit {soak.recovery_limit:g} s"
        for side, found in soak.recovery.items()
        if found and max(found) > soak.recovery_limit
    ]
    return [*soak.violations, *grown, *slow]


def figures(soak: Soak) -> dict[str, float]:
    loaded = sum(counts["loaded"] for counts in soak.by_plane.values())
    found: dict[str, float] = {
        "seconds": soak.lasted,
        "handovers": sum(sum(counts.values()) for counts in soak.by_plane.values()),
        "loaded": loaded,
        "restarts": soak.restarts,
        "longest_turn_ms": max((s["turn_ms"] for part in soak.samples.values() for s in part), default=0.0),
        "bursts_of_cancels": len(soak.bursts),
        "cancelled_in_bursts": soak.counts["aborted in a burst"],
        "burst_blocks_back_s_max": max(soak.bursts, default=0.0),
    }
    for side, times in soak.recovery.items():
        if times:
            found[f"recovery_{side.lower()}_s_median"] = statistics.median(times)
            found[f"recovery_{side.lower()}_s_max"] = max(times)
            found[f"recovery_{side.lower()}_count"] = len(times)
    return {name: round(value, 4) for name, value in found.items()}


def document(soak: Soak) -> dict[str, Any]:
    return {
        "figures": figures(soak) | {"failures": len(failures(soak))},
        "outcomes": {plane: dict(counts.most_common()) for plane, counts in soak.by_plane.items()},
        "faults": {
            name: count for name, count in sorted(soak.counts.items())
            if name.startswith(("restart", "stop", "throws"))
        },
        "rows": [
            {"process": v.process, "quantity": v.quantity, "warm": v.warm, "end": v.end, "growth": v.growth,
             "bound": v.bound}
            for v in verdicts(soak)
        ],
    }  # fmt: skip
