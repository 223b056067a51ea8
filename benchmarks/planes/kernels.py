"""The kernels beside a contiguous copy of the same bytes: GB/s (bytes moved once), medians of one run.

    python benchmarks/planes/kernels.py [--device cuda] [--rounds N] [--json FILE]

``pack``, ``unpack``: between scattered pages and a slot; ``direct``: from P's pages to D's, which may differ in layout,
block size and heads. ``fix-up``: in place, of pages whose bytes are in P's order (``kv_postprocess``). Every round runs
all of them in turn, so that a noisy neighbour meets all. On the host single-threaded, as a worker's transfer thread.
Axes [L, B, H, N, C].
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import numpy as np
import torch

from benchmarks.harness import report
from benchmarks.planes.endpoints import Cache
from benchmarks.planes.points import Form
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from tests.kernels.kv_postprocess_cases import Case, fix_up

TOKENS, CONTENT = 1024, 512
"""4 MiB a layer for 8 heads: K and V of 128 bfloat16 each per head and token."""
LAYERS = {"cpu": 16, "cuda": 256}


HND = Form(content=CONTENT, order="HND")
NHD, BLOCK_64, TWO_HEADS = replace(HND, order="NHD"), replace(HND, block=64), replace(HND, heads=2)


@dataclass(frozen=True)
class Copy:
    """From P's form to D's, of the last heads where one side has more; to and from a slot where there is no ``d``."""

    p: Form
    d: Form | None = None
    heads: int = 8
    token: int = 0


COPIES = {
    "hnd": Copy(HND),
    "nhd": Copy(NHD),
    "mla": Copy(replace(HND, heads=1, content=1152), heads=1),
    "hnd_unaligned": Copy(HND, token=5),
    "hnd_2_of_8_heads": Copy(HND, heads=2),
    "hnd_to_hnd": Copy(HND, HND),
    "nhd_to_hnd": Copy(NHD, HND),
    "hnd_to_nhd": Copy(HND, NHD),
    "block_16_to_64": Copy(HND, BLOCK_64),
    "block_64_to_16": Copy(BLOCK_64, HND),
    "block_48_to_32": Copy(replace(HND, block=48), replace(HND, block=32)),
    "nhd_16_to_hnd_64": Copy(NHD, BLOCK_64),
    "head_slice": Copy(HND, TWO_HEADS, heads=2),
    "head_merge": Copy(TWO_HEADS, HND, heads=2),
}
FIX_UPS = {
    "blksize_hnd_4_to_16": Case("blksize", tokens=16, ratio=4),
    "blksize_hnd_64_to_16": Case("blksize", tokens=16, ratio=-4),
    "layout_hnd_to_nhd_16": Case("blksize_and_layout", "NHD", tokens=16),
    "layout_nhd_to_hnd_16": Case("blksize_and_layout", tokens=16),
    "both_hnd_16_to_nhd_64": Case("blksize_and_layout", "NHD", tokens=64, ratio=4),
    "both_nhd_16_to_hnd_64": Case("blksize_and_layout", tokens=64, ratio=4),
}
"""Of a random half of a cache's blocks, with 8 heads and 256 elements of content."""


class Bench:
    """The moves, and the memory that they need: by name, the bytes that each moves and how."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rng = device, np.random.default_rng(0)
        self.moves: dict[str, tuple[int, Callable[[], object]]] = {}
        self._keep: list[Any] = []
        for name, copy in COPIES.items():
            self._add_copy(name, copy)
        for name, case in FIX_UPS.items():
            self._add_fix_up(name, case)
        size = LAYERS[device.type] * 8 * TOKENS * CONTENT
        source, target = self._memory(size), self._memory(size)
        self.moves["copy"] = size, lambda: target.copy_(source)

    def _memory(self, size: int) -> torch.Tensor:
        memory = torch.full((size,), 7, dtype=torch.uint8, device=self.device)
        self._keep.append(memory)
        return memory

    def _pages(self, form: Form, heads: int, token: int) -> Pages:
        """Every other block of a cache, in random order."""
        used = -(-(token + TOKENS) // form.block)
        cache = Cache.own(replace(form, layers=LAYERS[self.device.type]), 2 * used, self.device)
        cache.fill(torch.Generator(self.device))  # memory that nobody has written is faster to read
        self._keep.append(cache)
        pages = cache.pages(self.rng.permutation(2 * used)[:used].astype(np.int64))
        return replace(pages, head=form.heads - heads, token=token)

    def _add_copy(self, name: str, copy: Copy) -> None:
        layers, content = LAYERS[self.device.type], copy.p.content
        nbytes = layers * copy.heads * TOKENS * content
        sizes: dict[str, Any] = {"num_heads": copy.heads, "num_tokens": TOKENS, "content_bytes": content}
        sizes["device"] = self.device
        p = self._pages(copy.p, copy.heads, copy.token)
        if copy.d is not None:
            d = self._pages(copy.d, copy.heads, copy.token)
            self.moves[f"direct {name}"] = nbytes, lambda: copy_pages(d, p, **sizes)
            return
        wire = wire_pages(self._memory(nbytes).data_ptr(), layers, copy.heads, TOKENS, content)
        self.moves[f"pack {name}"] = nbytes, lambda: copy_pages(wire, p, **sizes)
        self.moves[f"unpack {name}"] = nbytes, lambda: copy_pages(p, wire, **sizes)

    def _add_fix_up(self, name: str, case: Case) -> None:
        blocks = LAYERS[self.device.type] * (4 << 20) // (8 * case.tokens * CONTENT)
        inner = (8, case.tokens) if case.layout == "HND" else (case.tokens, 8)
        cache = torch.randn(2 * blocks, *inner, CONTENT // 2, device=self.device).to(torch.bfloat16)
        heads_first = cache if case.layout == "HND" else cache.transpose(1, 2)
        indices = torch.randperm(2 * blocks, device=self.device)[:blocks]
        nbytes = blocks * 8 * case.tokens * CONTENT
        self.moves[f"fix-up {name}"] = nbytes, lambda: fix_up(case, heads_first, indices)

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


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu"))
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
    report.write(options.json, {"device": options.device, "rows": rows})


if __name__ == "__main__":
    main()
