"""The Prometheus series of an engine: names, types, labels and meanings. Pure. ``vllm/prometheus.py`` exports them, and
``docs/generate.py`` makes the table of ``docs/observability.md`` of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Literal, NamedTuple

from kvferry.connector.wire.metrics import (
    FAILURE_KINDS,
    LEASE_ENDS,
    MAX_PEERS,
    OTHER,
    PEER_RESULTS,
    PREFIX_ENDS,
    PROMPT_ENDS,
    SENT_WHEN,
)

PREFIX = "vllm:kvferry_"
TIME_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds."""
BYTES_BUCKETS = tuple(float(1 << shift) for shift in range(16, 38, 2))
"""64 KiB to 64 GiB."""
STAGES = ("awaiting_prompt", "awaiting_blocks", "loading")


class Series(NamedTuple):
    """One series. ``labels``: beside vLLM's own. ``first``: their values that exist from the start on: a rate needs the
    zero before the first event; empty where they come with events. ``buckets``: of a histogram. ``setting``: without it
    none exists from the start on."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    first: Sequence[tuple[str, ...]] = ()
    buckets: Sequence[float] = ()
    setting: str = ""


def _each(*values: Sequence[str]) -> list[tuple[str, ...]]:
    return list(product(*values))


SERIES = (
    Series(
        "prompts", "counter",
        "on D: what became of the prompt of each request, counted once for an engine: `loaded` from a P, computed here "
        "(`local`) though the request names a P, `failed` on the way, or `plain`: the request names no P",
        ("result", "reason"), PROMPT_ENDS,
    ),
    Series(
        "prefix_reads", "counter",
        "what became of each request that names `sources` of its prefix: `loaded` from one, not begun (`local`), or "
        "`failed` on the way; and on each rank that was read, how a prefix was `lent`",
        ("result", "reason"), PREFIX_ENDS, setting="prefix_reads",
    ),
    Series(
        "prefix_tokens_read", "counter", "tokens of prefixes that were read from other engines", setting="prefix_reads"
    ),
    Series("prefix_tokens_wasted", "counter", "tokens of prefixes whose read failed", setting="prefix_reads"),
    Series(
        "prefix_wait_seconds", "counter", "for how long requests waited for the answers of sources",
        setting="prefix_reads",
    ),
    Series(
        "handover_time_seconds", "histogram", "on D: time of a hand-over, from the request to the report",
        ("plane",), buckets=TIME_BUCKETS,
    ),
    Series(
        "bytes_transferred", "histogram", "on D: bytes of a hand-over, for each rank", ("plane",), buckets=BYTES_BUCKETS
    ),
    Series("tokens", "counter", "on D: tokens that were loaded", ("plane",)),
    Series("num_failed_handovers", "counter", "on D: hand-overs that failed", ("reason",), _each(FAILURE_KINDS)),
    Series(
        "num_retries", "counter", "on D: attempts that failed and that another one followed", ("reason",),
        _each(FAILURE_KINDS),
    ),
    Series(
        "num_plane_changes", "counter", "on D: links that took another plane because this one broke", ("plane",)
    ),
    Series(
        "num_stale_reads", "counter",
        "on D: reads from one rank of P that were complete, but the lease had ended; their bytes were not used",
    ),
    Series(
        "step_wait_seconds", "counter", "on D: for how long engine threads have waited for loads inside steps"
    ),
    Series(
        "num_missing_hooks", "counter",
        "on D: engines whose loads all go beside the steps, because KVFerry cannot wrap the method of vLLM's scheduler",
    ),
    Series(
        "requests", "gauge",
        "on D: requests that wait for P to tell of the prompt (`awaiting_prompt`), for blocks of D "
        "(`awaiting_blocks`), or for their load beside the steps (`loading`)",
        ("stage",), _each(STAGES),
    ),
    Series(
        "peer_handovers", "counter",
        f"on D: hand-overs that are `done` or `failed`, and `retried` attempts, by the first 8 characters of P's "
        f"engine id; P engines have a name from their first complete hand-over on, at most {MAX_PEERS}, all others are "
        f"`{OTHER}`",
        ("peer", "result"), _each((OTHER,), PEER_RESULTS),
    ),
    Series("peer_bytes", "counter", "on D: bytes loaded, by P engine", ("peer",), _each((OTHER,))),
    Series(
        "peer_seconds", "counter", "on D: time of the complete hand-overs by P engine, added up", ("peer",),
        _each((OTHER,)),
    ),
    Series(
        "num_streamed_handovers", "counter",
        "on D: hand-overs of prompts that P still computed when D took blocks for them",
    ),
    Series(
        "streamed_block_seconds", "counter",
        "on D: for how long the blocks of these hand-overs were held until their end, added up over the blocks",
    ),
    Series("leases", "gauge", "on P: leases that are held"),
    Series("lease_blocks", "gauge", "on P: blocks that leases hold; a block of two leases counts twice"),
    Series(
        "lease_block_seconds", "counter", "on P: for how long leases held blocks, added up over the blocks"
    ),
    Series(
        "num_expired_leases", "counter", "on P: leases that P ended itself: `expired`, `cap`, or `reset`", ("reason",),
        _each(LEASE_ENDS[1:]),
    ),
    Series("num_released_leases", "counter", "on P: leases that D released, counted by each rank"),
    Series(
        "reads_sending", "gauge",
        "on P: reads of D's ranks that P sends, or waits to send; none where D reads P's memory itself",
    ),
    Series(
        "bytes_sent", "counter", "on P: bytes sent while it `computes` the prompt, or when it is `leased`", ("when",),
        _each(SENT_WHEN),
    ),
    Series("num_dropped_messages", "counter", "control messages and connections that were refused", ("reason",)),
    Series(
        "thread_delay_seconds", "counter",
        "for how long the transfer threads could not run, where it was much: the host is overloaded, or was paused",
    ),
)  # fmt: skip


def series_table() -> str:
    """The table of ``docs/observability.md``, in Markdown."""
    lines = ["| series | type | labels | meaning |", "|---|---|---|---|"]
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels)
        lines.append(f"| `{PREFIX}{series.name}` | {series.kind} | {labels} | {series.meaning} |")
    return "\n".join(lines)
