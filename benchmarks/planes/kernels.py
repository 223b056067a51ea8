"""The kernels beside a contiguous copy of the same bytes: GB/s (bytes moved once), medians of one run.

    python benchmarks/planes/kernels.py [--device cuda] [--rounds N] [--json FILE]

``pack``, ``unpack``: between scattered pages and a slot; ``direct``: from P's pages to D's, which may differ in layout,
block size and heads. ``fix-up``: in place, of pages whose bytes are in P's order (``kv_postprocess``), checked against
gather, permute and scatter. Every round runs all of them in turn, so that a noisy neighbour meets all. On the host
single-threaded, as a worker's transfer thread. Axes [L, B, H, N, C].
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import numpy as np
import torch

from benchmarks.harness import report
from kvferry.kernels import kv_postprocess
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages

TOKENS, CONTENT = 1024, 512
"""4 MiB a layer for 8 heads: K and V of 128 bfloat16 each per head and token."""
LAYERS = {"cpu": 16, "cuda": 256}


@dataclass(frozen=True)
class Side:
    """One side's cache: the copy takes the last ``heads`` of its ``all_heads``."""

    order: str = "HND"
    block: int = 16
    all_heads: int = 8
    content: int = CONTENT
    token: int = 0


@dataclass(frozen=True)
class Copy:
    """From P's form to D's; to and from a slot where there is no ``d``."""

    name: str
    p: Side
    d: Side | None = None
    heads: int = 8


HND, NHD = Side(), Side("NHD")
COPIES = (
    Copy("hnd", HND),
    Copy("nhd", NHD),
    Copy("mla", Side(all_heads=1, content=1152), heads=1),
    Copy("hnd_unaligned", Side(token=5)),
    Copy("hnd_2_of_8_heads", HND, heads=2),
    Copy("hnd_to_hnd", HND, HND),
    Copy("nhd_to_hnd", NHD, HND),
    Copy("hnd_to_nhd", HND, NHD),
    Copy("block_16_to_64", HND, Side(block=64)),
    Copy("block_64_to_16", Side(block=64), HND),
    Copy("block_48_to_32", Side(block=48), Side(block=32)),
    Copy("nhd_16_to_hnd_64", NHD, Side(block=64)),
    Copy("head_slice", HND, Side(all_heads=2), heads=2),
    Copy("head_merge", Side(all_heads=2), HND, heads=2),
)


@dataclass(frozen=True)
class FixUp:
    """Of a random half of a cache's blocks. ``ratio``: D's block size over P's, negative where P's is the larger one.
    ``relayout``: P has the other layout."""

    name: str
    layout: str
    ratio: int
    relayout: bool
    tokens: int = 16
    heads: int = 8
    content: int = CONTENT // 2


FIX_UPS = (
    FixUp("blksize_hnd_4_to_16", "HND", 4, False),
    FixUp("blksize_hnd_64_to_16", "HND", -4, False),
    FixUp("layout_hnd_to_nhd_16", "NHD", 1, True),
    FixUp("layout_nhd_to_hnd_16", "HND", 1, True),
    FixUp("both_hnd_16_to_nhd_64", "NHD", 4, True, tokens=64),
    FixUp("both_nhd_16_to_hnd_64", "HND", 4, True, tokens=64),
)


class Bench:
    """The moves, and the memory that they need: by name, the bytes that each moves and how."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rng = device, np.random.default_rng(0)
        self.moves: dict[str, tuple[int, Callable[[], object]]] = {}
        self._keep: list[torch.Tensor] = []
        for copy in COPIES:
            self._add_copy(copy)
        for fix_up in FIX_UPS:
            self._add_fix_up(fix_up)
        size = LAYERS[device.type] * 8 * TOKENS * CONTENT
        source, target = self._memory(size), self._memory(size)
        self.moves["copy"] = size, lambda: target.copy_(source)

    def _memory(self, size: int) -> torch.Tensor:
        memory = torch.full((size,), 7, dtype=torch.uint8, device=self.device)
        self._keep.append(memory)
        return memory

    def _pages(self, side: Side, heads: int) -> Pages:
        """One allocation per layer, of which the copy takes every other block in random order."""
        used = -(-(side.token + TOKENS) // side.block)
        row = side.block * side.content
        block_bytes = side.all_heads * row
        strides = (row, side.content) if side.order == "HND" else (side.content, side.all_heads * side.content)
        bases = [self._memory(2 * used * block_bytes).data_ptr() for _ in range(LAYERS[self.device.type])]
        return Pages(
            np.array(bases, dtype=np.int64), self.rng.permutation(2 * used)[:used].astype(np.int64), side.block,
            block_bytes, *strides, head=side.all_heads - heads, token=side.token,
        )  # fmt: skip

    def _add_copy(self, copy: Copy) -> None:
        layers, content = LAYERS[self.device.type], copy.p.content
        nbytes = layers * copy.heads * TOKENS * content
        sizes: dict[str, Any] = {"num_heads": copy.heads, "num_tokens": TOKENS, "content_bytes": content}
        sizes["device"] = self.device
        p = self._pages(copy.p, copy.heads)
        if copy.d is not None:
            d = self._pages(copy.d, copy.heads)
            self.moves[f"direct {copy.name}"] = nbytes, lambda: copy_pages(d, p, **sizes)
            return
        wire = wire_pages(self._memory(nbytes).data_ptr(), layers, copy.heads, TOKENS, content)
        self.moves[f"pack {copy.name}"] = nbytes, lambda: copy_pages(wire, p, **sizes)
        self.moves[f"unpack {copy.name}"] = nbytes, lambda: copy_pages(p, wire, **sizes)

    def _add_fix_up(self, fix_up: FixUp) -> None:
        block_bytes = fix_up.heads * fix_up.tokens * fix_up.content * 2
        blocks = LAYERS[self.device.type] * (4 << 20) // block_bytes
        shape = (fix_up.heads, fix_up.tokens) if fix_up.layout == "HND" else (fix_up.tokens, fix_up.heads)
        cache = torch.randn(2 * blocks, *shape, fix_up.content, device=self.device).to(torch.bfloat16)
        indices = torch.randperm(2 * blocks, device=self.device)[:blocks]
        name = "blksize_and_layout" if fix_up.relayout else "blksize"
        function = getattr(kv_postprocess, f"kv_postprocess_{name}_on_receive")
        expected = cache.clone()
        both = [each if fix_up.layout == "HND" else each.transpose(1, 2) for each in (cache, expected)]
        function(both[0], indices, fix_up.ratio)
        gather_permute_scatter(both[1], indices, fix_up)
        if not torch.equal(cache.view(torch.int16), expected.view(torch.int16)):
            raise SystemExit(f"{fix_up.name}: the fix-up's bytes differ from those of gather, permute, scatter")
        nbytes = blocks * block_bytes
        self.moves[f"fix-up {fix_up.name}"] = nbytes, lambda: function(both[0], indices, fix_up.ratio)
        self.moves[f"torch {fix_up.name}"] = nbytes, lambda: gather_permute_scatter(both[1], indices, fix_up)

    def seconds(self, go: Callable[[], object]) -> float:
        """From the call to the end of what it enqueued; on a GPU by events on the current stream."""
        if self.device.type == "cpu":
            started = time.perf_counter()
            go()
            return time.perf_counter() - started
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        go()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def gather_permute_scatter(cache: torch.Tensor, indices: torch.Tensor, case: FixUp) -> None:
    """As vLLM does it."""
    group, parts = max(1, -case.ratio), max(1, case.ratio)
    remote_tokens = case.tokens * group // parts
    memory = cache if case.layout == "HND" else cache.transpose(1, 2)
    received = memory.index_select(0, indices)
    if (case.layout == "HND") != case.relayout:
        remote = received.reshape(-1, case.heads, remote_tokens, case.content)
    else:
        remote = received.reshape(-1, remote_tokens, case.heads, case.content).transpose(1, 2)
    if parts > 1:
        local = remote.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2, 3)
    else:
        local = remote.unflatten(2, (group, -1)).transpose(1, 2).flatten(0, 1)
    cache.index_copy_(0, indices, local)


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(torch.device(options.device))
    seconds: dict[str, list[float]] = {name: [] for name in bench.moves}
    for turn in range(options.rounds + 2):
        for name, (_, go) in bench.moves.items():
            took = bench.seconds(go)
            if turn >= 2:  # the first two warm up
                seconds[name].append(took)
    rates = {name: nbytes / 1e9 / statistics.median(seconds[name]) for name, (nbytes, _) in bench.moves.items()}
    rows = [
        {"move": name, "bytes": bench.moves[name][0], "gb_per_s": rate, "of_copy": rate / rates["copy"]}
        for name, rate in rates.items()
    ]
    for row in rows:
        report.line(row)
    report.write(options.json, {"ratios": {}, "figures": {}, "device": options.device, "rows": rows})


if __name__ == "__main__":
    main()
