"""Counters of hand-overs, leases and dropped messages, and levels. Pure: no vLLM, no clock. ``series`` lists what the
engine exports of them.

The figures are a plain dictionary, ``Figures``, because vLLM sends them from workers to the process that logs. Adding
two ``Figures`` is associative and exact: times are whole microseconds, also those of series in seconds. Each D rank
that took part counts a hand-over.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal, TypedDict, get_args

import numpy as np

MAX_SAMPLES = 4096
"""Hand-overs kept one by one between two collections. Only the sums of further hand-overs are kept."""
MAX_REASONS = 64
"""Different labels of one series. Further ones are counted as "other", so that no peer can make memory grow."""
MAX_PEERS = 32
"""P engines that are counted by name. Further ones are counted as "other"."""


class Samples(TypedDict):
    """Finished hand-overs of one plane, in parallel lists as vLLM's own connectors send them."""

    microseconds: list[int]
    nbytes: list[int]
    tokens: list[int]
    rest: list[int]
    """For the hand-overs beyond MAX_SAMPLES: their number, and the sums of their microseconds, bytes and tokens."""


class Figures(TypedDict):
    """All counts since the last collection, as values that JSON can hold."""

    finished: dict[str, Samples]
    """Finished hand-overs on D, by plane."""
    counts: dict[str, dict[str, int]]
    """By series of ``series.SERIES``, and by its labels, with a space between them."""
    peers: dict[str, dict[str, int]]
    """Hand-overs on D by P engine, and of each by ``PeerCount``."""
    levels: dict[str, dict[str, int]]
    """What there is now, by its source (a rank, or the scheduler) and by name. A later report of a source replaces the
    earlier one; different sources add up."""


FailureKind = Literal[
    "cancelled", "timeout", "expired", "denied", "other_prompt", "incompatible", "unreachable", "key", "not_allowed",
    "peer_lost", "plane", "data", "internal",
]  # fmt: skip
"""Why a hand-over failed, as a label from a short list, without a peer's name."""
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)
LoadFailure = FailureKind | Literal[""]
"""Empty where the load did not fail."""
LocalReason = Literal[
    "wrong_role", "no_p_named", "no_kvferry_params", "malformed", "other_release", "loopback", "other_prompt",
    "other_adapter", "embeddings", "window", "no_answer", "no_lease", "unreachable", "key", "not_allowed", "reset",
    "cached", "whole_prompt", "other_connector", "ended",
]  # fmt: skip
"""Why D began no load of a prompt of which the request names a P. docs/troubleshooting.md says what to do about each.
Nothing is wrong with the last four: D had the prompt in its prefix cache, had to compute all of it, another connector
below MultiConnector loads it, or the request ended before."""
PromptReason = LocalReason | FailureKind | Literal["", "no_params"]
PromptResult = Literal["loaded", "local", "failed", "plain"]
"""``local``: D began no load. ``plain``: the request names no P at all, so D was not to load."""
PROMPT_ENDS: tuple[tuple[PromptResult, str], ...] = (
    ("loaded", ""),
    *(("local", reason) for reason in get_args(LocalReason)),
    *(("failed", kind) for kind in FAILURE_KINDS),
    ("plain", "no_params"),
)
"""Each result with each of its reasons."""
PLAIN = "plain no_params"
PrefixResult = Literal["loaded", "local", "failed", "lent"]
"""``lent``: on a rank of P."""
LentEnd = Literal["read", "reused", "expired", "gone"]
"""``reused``: P's engine gave a block to another request while D read. ``gone``: it had before D began."""
PREFIX_ENDS: tuple[tuple[PrefixResult, str], ...] = (
    ("loaded", ""),
    *(("local", reason) for reason in get_args(LocalReason)),
    *(("failed", kind) for kind in FAILURE_KINDS),
    *(("lent", end) for end in get_args(LentEnd)),
)
LEASE_ENDS = ("released", "expired", "cap", "reset")
SENT_WHEN = ("computes", "leased")
PeerCount = Literal["done", "retried", "failed", "bytes", "microseconds"]
PEER_RESULTS: tuple[PeerCount, ...] = ("done", "retried", "failed")
OTHER = "other"


def no_figures() -> Figures:
    return Figures(finished={}, counts={}, peers={}, levels={})


def is_empty(figures: Figures) -> bool:
    return not any(figures.values())


def add(into: Figures, other: Figures) -> Figures:
    """Add ``other`` to ``into``, which is returned; ``other`` is left as it is."""
    for plane, samples in other["finished"].items():
        _extend(into["finished"].setdefault(plane, _no_samples()), samples)
    for series, counts in other["counts"].items():
        for labels, count in counts.items():
            _count(into, series, labels, count)
    for peer, counts in other["peers"].items():
        _count_peer(into["peers"], peer, counts)
    for source, levels in other["levels"].items():
        into["levels"][source] = dict(levels)
    return into


def levels(figures: Figures) -> dict[str, int]:
    """The levels of all sources, added up."""
    sums: dict[str, int] = {}
    for of_source in figures["levels"].values():
        for name, value in of_source.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def reduce(figures: Figures) -> dict[str, int | float]:
    """A few representative numbers for vLLM's log line. 1 MB is 2**20 bytes."""
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict, figures["counts"])
    prompts: dict[str, int | float] = {
        f"Prompts {end.replace(' ', ': ')}": n for end, n in sorted(counts["prompts"].items())
    }
    if figures == {**no_figures(), "counts": {"prompts": {PLAIN: counts["prompts"].get(PLAIN)}}}:
        return prompts
    all_samples = figures["finished"].values()
    times = [t for samples in all_samples for t in samples["microseconds"]]
    count, microseconds, nbytes, tokens = (
        sum(totals) for totals in zip((0, 0, 0, 0), *map(totals_of, all_samples), strict=True)
    )
    line: dict[str, int | float] = {"Num hand-overs": count}
    if count:
        line |= {
            "Avg hand-over time (ms)": round(microseconds / count / 1e3, 3),
            "P90 hand-over time (ms)": round(float(np.quantile(times, 0.9)) / 1e3, 3) if times else 0.0,
            "Avg MB per hand-over": round(nbytes / count / 2**20, 3),
            "Throughput (MB/s)": round(nbytes / 2**20 / (microseconds / 1e6), 3) if microseconds else 0,
            "Avg tokens per hand-over": round(tokens / count, 1),
        }
    failed, expired, sent = (counts[name] for name in ("num_failed_handovers", "num_expired_leases", "bytes_sent"))
    line["Num failed hand-overs"] = sum(failed.values())
    line |= {f"Failed ({kind})": n for kind, n in sorted(failed.items())}
    line |= prompts
    line |= {f"Prefixes {end.replace(' ', ': ')}": n for end, n in sorted(counts["prefix_reads"].items())}
    line["Num retries"] = sum(counts["num_retries"].values())
    line["Num plane changes"] = sum(counts["num_plane_changes"].values())
    line["Num leases released"] = sum(counts["num_released_leases"].values())
    line["Num leases expired"] = sum(expired.values())
    if nbytes := sum(sent.values()):
        line["MB sent"] = round(nbytes / 2**20, 3)
        line["Sent while computing (%)"] = round(100 * sent.get("computes", 0) / nbytes, 1)
    if streamed := counts["num_streamed_handovers"]:
        line["Num streamed hand-overs"] = sum(streamed.values())
        line["Block seconds before their end"] = round(sum(counts["streamed_block_seconds"].values()) / 1e6, 3)
    line["Num dropped messages"] = sum(counts["num_dropped_messages"].values())
    if stale := counts["num_stale_reads"]:
        line["Num stale reads"] = sum(stale.values())
    line |= {f"{_LEVEL_WORDS.get(name, name)} now": value for name, value in sorted(levels(figures).items()) if value}
    return line


_LEVEL_WORDS = {"leases": "Leases", "lease_blocks": "Leased blocks", "sending": "Reads sent"}


class HandoverStats:
    """The counts of one rank, or of a scheduler half. The transfer thread adds to them and the engine's thread takes
    them. Thread-safe; each call takes microseconds.

    ``levels``: what there is now, by name. One thread sets the values; the names stay after the first ``take``.
    """

    def __init__(self, source: str = "", levels: Mapping[str, int] | None = None) -> None:
        """``source``: whose levels these are, unique in the engine."""
        self._lock = threading.Lock()
        self._figures = no_figures()
        self._seen: dict[str, dict[str, int]] = {}
        self._peers: set[str] = set()
        self._source = source
        self._reported = False  # the last report of the levels was not of zeros
        self.levels = dict(levels or {})

    def finished(self, *, nbytes: int, milliseconds: float, plane: str, tokens: int, peer: str = OTHER) -> None:
        """Count a hand-over that is complete, committed and reported. From its first one on, ``peer`` is counted by
        its name: requests name P engines, and may name any."""
        microseconds = max(0, round(milliseconds * 1e3))
        with self._lock:
            samples = self._figures["finished"].setdefault(plane, _no_samples())
            _extend(samples, Samples(microseconds=[microseconds], nbytes=[nbytes], tokens=[tokens], rest=[0, 0, 0, 0]))
            if len(self._peers) < MAX_PEERS:
                self._peers.add(peer)
            done = {"done": 1, "bytes": nbytes, "microseconds": microseconds}
            _count_peer(self._figures["peers"], peer if peer in self._peers else OTHER, done)

    def streamed(self, *, blocks: int, milliseconds: float) -> None:
        """Count a hand-over of a prompt that P still computed, which has ended, and held D's blocks for this time."""
        self.count("num_streamed_handovers")
        self.count("streamed_block_seconds", by=round(blocks * milliseconds * 1e3))

    def failed(self, kind: FailureKind, peer: str | None = None) -> None:
        """Count a hand-over that failed, or an error of this rank: then without ``peer``."""
        self.count("num_failed_handovers", kind)
        if peer is not None:
            self._add_peer(peer, "failed")

    def retried(self, kind: FailureKind, peer: str = OTHER) -> None:
        """Count an attempt that failed, and that another attempt follows. ``peer``: of the one that failed."""
        self.count("num_retries", kind)
        self._add_peer(peer, "retried")

    def prompt(self, result: PromptResult, reason: PromptReason = "") -> None:
        """Count what became of a prompt. The pair is one of ``PROMPT_ENDS``."""
        self.count("prompts", f"{result} {reason}".rstrip())

    def prefix(self, result: PrefixResult, reason: PromptReason | LentEnd = "") -> None:
        """Count what became of the prefix of a request, or of one that was lent. The pair is one of ``PREFIX_ENDS``."""
        self.count("prefix_reads", f"{result} {reason}".rstrip())

    def lease_ended(self, reason: str) -> None:
        """Count a lease that has ended. ``reason``: one of ``LEASE_ENDS``."""
        if reason == "released":
            self.count("num_released_leases")
        else:
            self.count("num_expired_leases", reason)

    def sent(self, early: int, leased: int) -> None:
        """Count the bytes that P has sent of a read: ``early``, while P computed the prompt, and under its lease."""
        for when, nbytes in zip(SENT_WHEN, (early, leased), strict=True):
            if nbytes:
                self.count("bytes_sent", when, nbytes)

    def dropped(self, reason: str, count: int = 1) -> None:
        """Count messages that were not served. ``reason`` is a constant of this program, never a peer's text."""
        self.count("num_dropped_messages", reason, count)

    def count(self, series: str, labels: str = "", by: int = 1) -> None:
        """Add to a series of ``series.SERIES``; to one in seconds, microseconds. ``labels``: their values, with a space
        between them."""
        with self._lock:
            _count(self._figures, series, labels, by)

    def _add_peer(self, peer: str, result: PeerCount) -> None:
        with self._lock:
            _count_peer(self._figures["peers"], peer if peer in self._peers else OTHER, {result: 1})

    def dropped_so_far(self, source: str, totals: Mapping[str, int]) -> None:
        """Count messages that were not served, from totals that only grow, such as ``Listener.dropped``. ``source``
        names the owner of these totals."""
        with self._lock:
            seen = self._seen.setdefault(source, {})
            for reason, total in list(totals.items()):
                if total > seen.get(reason, 0):
                    _count(self._figures, "num_dropped_messages", reason, total - seen.get(reason, 0))
                    seen[reason] = total

    def new_life(self) -> None:
        """The levels, and the totals that ``dropped_so_far`` takes, begin at 0 again. No count is lost."""
        with self._lock:
            self._seen.clear()
            self.levels = dict.fromkeys(self.levels, 0)

    def take(self) -> Figures | None:
        """All counts since the last call, and the levels; ``None`` where there are none. Zeros are reported once."""
        if not (self._reported or any(self._figures.values()) or any(self.levels.values())):
            return None  # without the lock: what is counted meanwhile comes with the next call
        with self._lock:
            current = dict(self.levels)
            nonzero = any(current.values())
            if nonzero or self._reported:
                self._figures["levels"][self._source] = current
            self._reported = nonzero
            if is_empty(self._figures):
                return None
            taken, self._figures = self._figures, no_figures()
            return taken


def rank_stats(source: str = "") -> HandoverStats:
    """The counts of one rank, with its levels: ``sending``, reads of D ranks that P sends or waits to send."""
    return HandoverStats(source, {"sending": 0})


def _no_samples() -> Samples:
    return Samples(microseconds=[], nbytes=[], tokens=[], rest=[0, 0, 0, 0])


def totals_of(samples: Samples) -> tuple[int, int, int, int]:
    """The sums of hand-overs, microseconds, bytes and tokens."""
    count, microseconds, nbytes, tokens = samples["rest"]
    return (
        count + len(samples["microseconds"]),
        microseconds + sum(samples["microseconds"]),
        nbytes + sum(samples["nbytes"]),
        tokens + sum(samples["tokens"]),
    )


def _extend(into: Samples, other: Samples) -> None:
    """Keep the first MAX_SAMPLES of both in order, and the sums of all further samples."""
    columns: tuple[Literal["microseconds", "nbytes", "tokens"], ...] = ("microseconds", "nbytes", "tokens")
    room = max(0, MAX_SAMPLES - len(into["microseconds"]))
    over = [len(other["microseconds"][room:])]
    for name in columns:
        over.append(sum(other[name][room:]))
        into[name].extend(other[name][:room])
    into["rest"] = [sum(parts) for parts in zip(into["rest"], other["rest"], over, strict=True)]


def _count(figures: Figures, series: str, labels: str, by: int) -> None:
    counts = figures["counts"].setdefault(series, {})
    if labels not in counts and len(counts) >= MAX_REASONS:
        labels = OTHER
    counts[labels] = counts.get(labels, 0) + by


def _count_peer(peers: dict[str, dict[str, int]], peer: str, new: Mapping[str, int]) -> None:
    if peer not in peers and len(peers) - (OTHER in peers) >= MAX_PEERS:
        peer = OTHER
    counts = peers.setdefault(peer, {})
    for name, count in new.items():
        counts[name] = counts.get(name, 0) + count
