"""What a change of layout, block size or heads costs over an identity copy of the same bytes.

    python benchmarks/layout_change.py [--device cuda] [--rounds N] [--json FILE]

Both sides are paged caches with scattered blocks. ``staged``: packed into a slot and unpacked from it, as hand-overs
do, 4 MiB at a time on the host and 64 MiB on a GPU. ``direct``: from pages to pages in one call, as where D maps P's
memory. A ratio is the change's time over the time of an identity copy of as many bytes, from P's form to the same form;
each round runs all of them in turn, and the ratio is the median over rounds. Axes [L, B, H, N, C]; on the host
single-threaded, as a transfer thread.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from timing import name_of, timed

from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages

TOKENS, CONTENT = 1024, 512
"""4 MiB a layer for 8 heads: K and V of 128 bfloat16 each per head and token."""
LAYERS = {"cpu": (16, 1), "cuda": (256, 16)}
"""In all and per slot."""
TARGET = 1.10


@dataclass(frozen=True)
class Side:
    """One side's cache: the box has ``heads`` of its ``all_heads``."""

    order: str = "HND"
    block: int = 16
    all_heads: int = 8


@dataclass(frozen=True)
class Change:
    """From P's form to D's, and the change that it is compared with."""

    name: str
    p: Side
    d: Side
    identity: str
    heads: int = 8


HND, NHD = Side(), Side("NHD")
CHANGES = (
    Change("hnd", HND, HND, "hnd"),
    Change("nhd", NHD, NHD, "hnd"),
    Change("hnd_block_64", Side(block=64), Side(block=64), "hnd"),
    Change("hnd_block_48", Side(block=48), Side(block=48), "hnd"),
    Change("hnd_2_heads", Side(all_heads=2), Side(all_heads=2), "hnd_2_heads", heads=2),
    Change("nhd_to_hnd", NHD, HND, "nhd"),
    Change("hnd_to_nhd", HND, NHD, "hnd"),
    Change("block_16_to_64", HND, Side(block=64), "hnd"),
    Change("block_64_to_16", Side(block=64), HND, "hnd_block_64"),
    Change("block_48_to_32", Side(block=48), Side(block=32), "hnd_block_48"),
    Change("nhd_16_to_hnd_64", NHD, Side(block=64), "nhd"),
    Change("head_slice", HND, Side(all_heads=2), "hnd_2_heads", heads=2),
    Change("head_merge", Side(all_heads=2), HND, "hnd_2_heads", heads=2),
)


class Bench:
    """The memory of a change, and its two moves."""

    def __init__(self, change: Change, rng: np.random.Generator, device: torch.device) -> None:
        self.change, self.device = change, device
        self.layers, some = LAYERS[device.type]
        self.nbytes = self.layers * change.heads * TOKENS * CONTENT
        self._keep: list[torch.Tensor] = []
        p, d = (self._pages(side, rng) for side in (change.p, change.d))
        slot = self._memory(self.nbytes // self.layers * some).data_ptr()
        wire = wire_pages(slot, some, change.heads, TOKENS, CONTENT)
        slots = [slice(first, first + some) for first in range(0, self.layers, some)]
        parts = [(replace(p, bases=p.bases[part]), replace(d, bases=d.bases[part])) for part in slots]
        sizes: dict[str, Any] = {
            "num_heads": change.heads,
            "num_tokens": TOKENS,
            "content_bytes": CONTENT,
            "device": device,
        }

        def staged() -> None:
            for theirs, ours in parts:
                copy_pages(wire, theirs, **sizes)
                copy_pages(ours, wire, **sizes)

        self.moves: dict[str, Callable[[], object]] = {"staged": staged, "direct": lambda: copy_pages(d, p, **sizes)}

    def _memory(self, size: int) -> torch.Tensor:
        memory = torch.full((size,), 7, dtype=torch.uint8, device=self.device)
        self._keep.append(memory)
        return memory

    def _pages(self, side: Side, rng: np.random.Generator) -> Pages:
        """One allocation per layer, of which the box takes every other block in random order."""
        used = -(-TOKENS // side.block)
        row = side.block * CONTENT
        block_bytes = side.all_heads * row
        head_stride, token_stride = (row, CONTENT) if side.order == "HND" else (CONTENT, side.all_heads * CONTENT)
        return Pages(
            bases=np.array(
                [self._memory(2 * used * block_bytes).data_ptr() for _ in range(self.layers)], dtype=np.int64
            ),
            block_ids=rng.permutation(2 * used)[:used].astype(np.int64),
            block_size=side.block,
            block_stride=block_bytes,
            head_stride=head_stride,
            token_stride=token_stride,
            head=side.all_heads - self.change.heads,
        )


def measure(benches: list[Bench], rounds: int, device: torch.device) -> dict[tuple[str, str], list[float]]:
    """Seconds of every round, by change and move; "copy" is a contiguous one of as many bytes."""
    source, target = (torch.full((benches[0].nbytes,), 7, dtype=torch.uint8, device=device) for _ in range(2))
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 2):
        active_loads: list[tuple[tuple[str, str], Callable[[], object]]]
        active_loads = [((b.change.name, move), go) for b in benches for move, go in b.moves.items()]
        active_loads.append((("copy", "direct"), lambda: target.copy_(source)))
        for key, go in active_loads:
            taken = timed(go, device)
            if turn >= 2:  # the first two warm up
                seconds.setdefault(key, []).append(taken)
    return seconds


def ratio(seconds: dict[tuple[str, str], list[float]], change: Change, move: str) -> float:
    """Median over rounds of the change's time over its identity's."""
    pairs = zip(seconds[change.name, move], seconds[change.identity, move], strict=True)
    return statistics.median(mine / identity for mine, identity in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write ratios, figures, rows and versions to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)

    device, rng = torch.device(options.device), np.random.default_rng(0)
    benches = [Bench(change, rng, device) for change in CHANGES]
    seconds = measure(benches, options.rounds, device)
    ratios: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    print(f"{'change':30} {'MiB':>5} {'staged':>7} {'direct':>7} GB/s   over identity: {'staged':>7} {'direct':>7}")
    for bench in benches:
        change, nbytes = bench.change, bench.nbytes
        rates = {m: nbytes / 1e9 / statistics.median(seconds[change.name, m]) for m in ("staged", "direct")}
        costs = {m: ratio(seconds, change, m) for m in rates}
        if change.name != change.identity:
            suffix = "_vs_hnd" if change.p == change.d else "_vs_identity"  # what P's form costs by itself
            ratios[f"{change.name}{suffix}"] = round(costs["staged"], 3)
            ratios[f"{change.name}_direct{suffix}"] = round(costs["direct"], 3)
        rows.append({"change": change.name, "device": name_of(device), "bytes": nbytes}
                    | {f"{m}_gbps": rates[m] for m in rates} | {f"{m}_cost": costs[m] for m in costs})  # fmt: skip
        print(
            f"{change.name:30} {nbytes / 2**20:5.0f} {rates['staged']:7.2f} {rates['direct']:7.2f} "
            f"{'':21}{costs['staged']:7.2f} {costs['direct']:7.2f}"
        )
    copy = benches[0].nbytes / 1e9 / statistics.median(seconds["copy", "direct"])
    worst = max((name for name in ratios if name.endswith("_vs_identity")), key=lambda name: ratios[name])
    print(f"contiguous copy {copy:.2f} GB/s; worst {worst} {ratios[worst]:.2f}, target {TARGET:.2f}")
    report.write(options.json, {"ratios": ratios, "figures": {"copy_gbps": copy}, "rows": rows})


if __name__ == "__main__":
    main()
