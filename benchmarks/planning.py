"""Time to plan one hand-over and to pack its indices: what is spent before the first byte moves.

D's rank: the plan of all its sources, its completeness, D's kernel blocks, spans cut into messages. Then one P rank:
block ids packed for the wire, kernel blocks, spans checked and cut into messages (P's ranks work side by side, the
slowest counts). Beside it, in the same run: a memcpy of as many bytes as the hand-over has, and the list of one
address per (layer, block) and side that descriptor-based transfers build.

Then what one D rank computes and holds for P and D of up to 64 ranks each: its sources' geometries, its plan, and at
which P ranks it releases, with nothing cached.

    python benchmarks/planning.py [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import report
import torch

from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.spans import check_spans, chunks
from kvferry.connector.geometry.topology import TpKVTopology, head_sources, release_maps
from kvferry.connector.geometry.view import CacheView, kernel_block_ids, view_of

BLOCKS, LAYERS, HEADS, CONTENT, SLOT = 8192, 80, 8, 512, 4 << 20
ROUNDS = 15


@dataclass(frozen=True)
class Case:
    """Tensor-parallel sizes, P's pipeline stages, tokens per block and per kernel block."""

    name: str
    d_tp: int
    p_tp: int
    p_pp: int = 1
    d_block: int = 16
    p_block: int = 16
    kernel_block: int = 16
    shuffled: bool = False


CASES = (
    Case("tp 8 from 8", 8, 8),
    Case("tp 8 from 4, pp 2", 8, 4, p_pp=2),
    Case("tp 3 from 2", 3, 2),
    Case("tp 1 from 8", 1, 8),
    Case("tp 1 from 1", 1, 1),
    Case("blocks 64 in kernel blocks of 16", 8, 8, d_block=64, p_block=64),
    Case("layers in another order", 8, 8, shuffled=True),
)


def rank(case: Case, tp: tuple[int, int], pp: tuple[int, int], block: int) -> RankGeometry:
    layers = [f"model.layers.{i}.self_attn.attn" for i in range(pp[0] * LAYERS // pp[1], (pp[0] + 1) * LAYERS // pp[1])]
    if case.shuffled and block == case.p_block and pp[1] == case.p_pp and tp[1] == case.p_tp:
        layers = layers[::-1]
    start, count = TpKVTopology.head_interval(*tp, HEADS)
    region = RegionGeometry(
        kind="full", layers=tuple(layers), block_size=block, head_start=start, num_heads=count,
        total_heads=HEADS, content_bytes=CONTENT, dtype="bfloat16",
    )  # fmt: skip
    return RankGeometry(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1],
        head_counts=(HEADS,), regions=(region,),
    )  # fmt: skip


def view(geometry: RankGeometry, pages: int, kernel_block: int) -> CacheView:
    """A view of a cache that is described and never touched."""
    (region,) = geometry.regions
    ratio = region.block_size // kernel_block
    tensor = torch.empty(
        (pages * ratio, region.num_heads, kernel_block, CONTENT // 2), dtype=torch.bfloat16, device="meta"
    )
    return view_of(dict.fromkeys(region.layers, tensor), region.block_size, pages)


def plan_all(
    local: RankGeometry, remotes: Mapping[tuple[int, int], RankGeometry], tokens: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[PlannedSpan, ...]]:
    """What D's consumer computes: the topology names P's ranks, each is planned, and nothing may be missing."""
    form = next(iter(remotes.values()))
    ranks = TpKVTopology.between(local, form).source_ranks()
    places = [(stage, rank) for stage in range(form.pp_size) for rank in ranks]
    plans = {place: plan_reads(local, remotes[place], tokens) for place in places}
    check_complete(local, [item for spans in plans.values() for item in spans], tokens)
    return plans


class HandOver:
    """One D rank and its sources, with scattered blocks for ``BLOCKS`` kernel blocks of tokens."""

    def __init__(self, case: Case) -> None:
        rng = np.random.default_rng(0)
        self.tokens = BLOCKS * case.kernel_block
        self.local = rank(case, (0, case.d_tp), (0, 1), case.d_block)
        self.remotes = {
            (s, r): rank(case, (r, case.p_tp), (s, case.p_pp), case.p_block)
            for s in range(case.p_pp)
            for r in range(case.p_tp)
        }
        for remote in self.remotes.values():
            compatible(self.local, remote)
        d_pages, p_pages = self.tokens // case.d_block, self.tokens // case.p_block
        self.ours = view(self.local, 2 * d_pages, case.kernel_block)
        self.theirs = {place: view(r, 2 * p_pages, case.kernel_block) for place, r in self.remotes.items()}
        self.d_ids = rng.permutation(2 * d_pages)[:d_pages].tolist()
        self.p_ids = rng.permutation(2 * p_pages)[:p_pages].tolist()
        self.messages = 0
        self.nbytes = LAYERS * self.local.regions[0].num_heads * self.tokens * CONTENT

    def plan_d(self) -> None:
        """What D's rank computes."""
        self.plans = plan_all(self.local, self.remotes, [(0, self.tokens)])
        kernel_block_ids(self.ours, self.d_ids)
        self.messages = sum(
            len(chunks(item.span, CONTENT, SLOT, self.remotes[place].regions[0].block_size))
            for place, planned in self.plans.items()
            for item in planned
        )

    def plan_p(self, place: tuple[int, int]) -> None:
        """What one P rank computes."""
        packed = np.asarray(self.p_ids, dtype="<i4").tobytes()
        kernel_block_ids(self.theirs[place], np.frombuffer(packed, dtype="<i4"))
        geometry = self.remotes[place]
        spans = [item.span for item in self.plans[place]]
        check_spans(spans, geometry, self.tokens)
        for span in spans:
            chunks(span, CONTENT, SLOT, geometry.regions[0].block_size)

    def plan(self) -> tuple[float, float]:
        """Milliseconds on D and on the slowest P rank."""
        on_d = timed(self.plan_d)
        return on_d, max(timed(partial(self.plan_p, place)) for place in self.plans)

    def descriptors(self) -> None:
        """One address per (layer, block) on each side."""
        for cache, ids in ((self.ours, self.d_ids), (next(iter(self.theirs.values())), self.p_ids)):
            blocks = kernel_block_ids(cache, ids)
            bases = np.arange(LAYERS, dtype=np.int64) << 32
            addresses = (bases[:, None] + blocks * cache.block_stride).reshape(-1)
            assert len(addresses) == LAYERS * BLOCKS


class Scale:
    """One D rank that faces P ranks in any number. ``heads``: one for every rank of the largest engine."""

    SIZES = (1, 4, 16, 64)

    def __init__(self, p_tp: int, d_tp: int) -> None:
        self.p_tp, self.d_tp, self.heads = p_tp, d_tp, max(self.SIZES)
        self.d_rank = d_tp // 2
        local = self._rank(self.d_rank, d_tp)
        self.local, self.tokens = local, [(0, 8192)]
        self.form = self._rank(0, p_tp)
        self.reads = TpKVTopology.between(local, self.form).sources()
        encode = msgspec.msgpack.encode
        self._encoded = [encode(self._rank(read.p_rank, p_tp)) for read in self.reads]

    def _rank(self, rank: int, size: int) -> RankGeometry:
        start, count = TpKVTopology.head_interval(rank, size, self.heads)
        region = RegionGeometry(
            kind="full", layers=tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)), block_size=16,
            head_start=start, num_heads=count, total_heads=self.heads, content_bytes=CONTENT, dtype="bfloat16",
        )  # fmt: skip
        return RankGeometry(
            tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1,
            head_counts=(self.heads,), regions=(region,),
        )  # fmt: skip

    def plan(self) -> object:
        """All that the rank computes; what it keeps is returned."""
        release_maps.cache_clear()
        head_sources.cache_clear()
        topology = TpKVTopology.between(self.local, self.form)
        reads = topology.sources()
        remotes = {
            (0, read.p_rank): msgspec.msgpack.decode(encoded, type=RankGeometry)
            for read, encoded in zip(reads, self._encoded, strict=True)
        }
        plans = plan_all(self.local, remotes, self.tokens)
        releases = topology.release_ranks()
        expected = [topology.expected_consumers(rank) for rank in releases]
        return remotes, plans, releases, expected

    def measure(self) -> tuple[float, float]:
        """Milliseconds, and KiB at most."""
        milliseconds = statistics.median(timed(self.plan) for _ in range(ROUNDS))
        release_maps.cache_clear()
        head_sources.cache_clear()
        tracemalloc.start()
        kept = self.plan()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert kept
        return milliseconds, peak / 1024


def scale() -> tuple[list[dict[str, object]], dict[str, float]]:
    """Rows by (P ranks, D ranks), and cost at 64 x 64 over 1 x 1, per D rank and per source of it."""
    rows: list[dict[str, object]] = []
    found: dict[tuple[int, int], tuple[float, float]] = {}
    print(f"\none D rank, {LAYERS} layers, {max(Scale.SIZES)} KV heads: ms and KiB, by ranks of P (down) and D")
    print(f"{'P':>4}", *(f"{f'D {d}':>16}" for d in Scale.SIZES))
    for p in Scale.SIZES:
        for d in Scale.SIZES:
            case = Scale(p, d)
            ms, kib = found[p, d] = case.measure()
            rows.append({"p_tp": p, "d_tp": d, "sources": len(case.reads), "ms": ms, "peak_kib": kib})
        print(f"{p:4}", *(f"{found[p, d][0]:8.2f}{found[p, d][1]:8.0f}" for d in Scale.SIZES))
    most, one = found[64, 64], found[1, 1]
    fan_in = [value / len(Scale(64, 1).reads) for value in found[64, 1]]
    ratios = {
        "planning_64x64_vs_1x1": most[0] / one[0],
        "planning_memory_64x64_vs_1x1": most[1] / one[1],
        "planning_64_sources_each_vs_1x1": fan_in[0] / one[0],
        "planning_memory_64_sources_each_vs_1x1": fan_in[1] / one[1],
    }
    print(", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    return rows, ratios


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def measure(case: Case, source: torch.Tensor, target: torch.Tensor) -> dict[str, float | str]:
    hand_over = HandOver(case)
    hand_over.plan()
    rounds = [
        (*hand_over.plan(), timed(hand_over.descriptors), timed(lambda: target.copy_(source))) for _ in range(ROUNDS)
    ]
    on_d, on_p, descriptors, copy = (statistics.median(column) for column in zip(*rounds, strict=True))
    plan = on_d + on_p
    memcpy = copy * hand_over.nbytes / source.numel()
    return {
        "case": case.name,
        "GiB": hand_over.nbytes / (1 << 30),
        "messages": hand_over.messages,
        "d_ms": on_d,
        "p_ms": on_p,
        "plan_ms": plan,
        "descriptor_list_ms": descriptors,
        "memcpy_ms": memcpy,
        "plan_vs_memcpy": plan / memcpy,
    }


def main() -> None:
    """Prints the table; ``--json FILE`` writes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write ratios, figures, rows and versions here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    rows = [measure(case, source, target) for case in CASES]
    print(
        f"{BLOCKS} blocks, {LAYERS} layers, {HEADS} KV heads x {CONTENT} bytes, messages of {SLOT >> 20} MiB; "
        f"medians of {ROUNDS}"
    )
    heading = (
        ("GiB", 6),
        ("messages", 9),
        ("D ms", 6),
        ("P ms", 6),
        ("plan ms", 8),
        ("descr. ms", 10),
        ("plan/memcpy", 12),
    )
    print(f"{'case':34}", *(f"{name:>{width}}" for name, width in heading))
    for row in rows:
        print(
            f"{row['case']:34} {row['GiB']:6.1f} {row['messages']:9} {row['d_ms']:6.2f} {row['p_ms']:6.2f} "
            f"{row['plan_ms']:8.2f} {row['descriptor_list_ms']:10.2f} {row['plan_vs_memcpy']:12.5f}"
        )
    typical, largest = rows[0], max(rows, key=lambda row: float(row["plan_ms"]))
    figures = {"planning_ms": typical["plan_ms"], "planning_ms_worst_case": largest["plan_ms"]}
    print(f"planning_ms {typical['plan_ms']:.2f} (worst case {largest['plan_ms']:.2f}), target 5")
    scaled, ratios = scale()
    ratios |= {"planning_vs_memcpy": float(typical["plan_vs_memcpy"])}
    report.write(args.json, {"ratios": ratios, "figures": figures, "rows": rows, "scale": scaled})


if __name__ == "__main__":
    main()
