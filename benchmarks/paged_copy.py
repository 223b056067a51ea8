"""Pack and unpack on host memory beside memcpy of the same bytes: GB/s (bytes moved once), medians of one run.

    python benchmarks/paged_copy.py [--rounds N] [--json FILE]

Single-threaded, as in a worker's transfer thread. Every round runs memcpy, pack and unpack of every case in turn, so
that a noisy neighbour meets all of them. The cases with "to" go from pages to pages. Axes [L, B, H, N, C].
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch

from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A box of layers x heads x tokens x content in pages of one layout, in runs of ``run`` contiguous bytes."""

    name: str
    run: int
    layers: int
    heads: int
    tokens: int
    content: int
    block_size: int = 16
    order: str = "HND"
    token: int = 0
    all_heads: int = 0
    to_block_size: int = 0


CASES = (
    Case("hnd", 8192, 32, 8, 512, 512),
    Case("hnd_chunk", 8192, 32, 8, 64, 512),
    Case("hnd_1_layer", 8192, 1, 8, 2048, 512),
    Case("hnd_4_layers", 8192, 4, 8, 512, 512),
    Case("hnd_80_layers", 8192, 80, 1, 400, 512),
    Case("hnd_tail", 8192, 32, 8, 123, 512),
    Case("hnd_bf16_k_only", 4096, 32, 8, 256, 256),
    Case("mla", 18432, 61, 1, 1000, 1152),
    Case("mla_1_layer", 18432, 1, 1, 4000, 1152),
    Case("nhd", 512, 32, 8, 256, 512, order="NHD"),
    Case("nhd_1_layer", 512, 1, 8, 2048, 512, order="NHD"),
    Case("hnd_head_slice", 8192, 32, 2, 512, 512, all_heads=8),
    Case("hnd_unaligned", 8192, 32, 8, 250, 512, token=5),
    Case("hnd_1_token_blocks_8_byte_aligned", 520, 32, 8, 250, 520, 1),
    Case("hnd_16_to_64", 8192, 32, 8, 256, 512, to_block_size=64),
    Case("hnd_48_to_32_unaligned", 8192, 32, 8, 250, 512, 48, token=7, to_block_size=32),
)
ONE_BLOCK = Case("one_block", 2048, 4, 2, 16, 128)


class Bench:
    """The memory of a case, and its three moves."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        self.case = case
        self.nbytes = case.layers * case.heads * case.tokens * case.content
        self._keep: list[torch.Tensor] = []
        pages = self._pages(case.block_size, case.token, rng)
        if case.to_block_size:
            other = self._pages(case.to_block_size, 0, rng)
        else:
            wire = self._memory(self.nbytes)
            other = wire_pages(wire.data_ptr(), case.layers, case.heads, case.tokens, case.content)
        sizes: dict[str, Any] = {
            "num_heads": case.heads,
            "num_tokens": case.tokens,
            "content_bytes": case.content,
            "device": CPU,
        }
        dst, src = self._memory(self.nbytes).data_ptr(), self._memory(self.nbytes).data_ptr()
        self.moves: dict[str, Callable[[], object]] = {
            "memcpy": lambda: ctypes.memmove(dst, src, self.nbytes),
            "pack": lambda: copy_pages(other, pages, **sizes),
            "unpack": lambda: copy_pages(pages, other, **sizes),
        }

    def _memory(self, size: int) -> torch.Tensor:
        memory = torch.full((size,), 7, dtype=torch.uint8)
        self._keep.append(memory)
        return memory

    def _pages(self, block_size: int, token: int, rng: np.random.Generator) -> Pages:
        """Pages of layers that were allocated one by one, of which the box takes every other block in random order."""
        case = self.case
        heads = case.all_heads or case.heads
        block_bytes = heads * block_size * case.content
        used = -(-(token + case.tokens) // block_size)
        bases = [self._memory(2 * used * block_bytes).data_ptr() for _ in range(case.layers)]
        row, column = block_size * case.content, case.content
        if case.order == "NHD":
            row, column = case.content, heads * case.content
        return Pages(
            bases=np.array(bases, dtype=np.int64),
            block_ids=rng.permutation(2 * used)[:used].astype(np.int64),
            block_size=block_size,
            block_stride=block_bytes,
            head_stride=row,
            token_stride=column,
            head=heads - case.heads,
            token=token,
        )


def measure(cases: tuple[Case, ...], rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds of every move of every case."""
    rng = np.random.default_rng(0)
    benches = [Bench(case, rng) for case in cases]
    seconds: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 2):
        for bench in benches:
            for move, go in bench.moves.items():
                started = time.perf_counter()
                go()
                if turn >= 2:  # the first two warm up
                    seconds.setdefault((bench.case.name, move), []).append(time.perf_counter() - started)
    return {
        case.name: {move: statistics.median(seconds[case.name, move]) for move in ("memcpy", "pack", "unpack")}
        for case in cases
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write ratios, figures, rows and versions to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)

    medians = measure(CASES, options.rounds)
    ratios: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    print(
        f"{'case':24} {'run':>6} {'MiB':>6} {'memcpy':>8} {'pack':>8} {'unpack':>8}  GB/s   pack/memcpy unpack/memcpy"
    )
    for case in CASES:
        seconds = medians[case.name]
        nbytes = case.layers * case.heads * case.tokens * case.content
        rate = {move: nbytes / 1e9 / taken for move, taken in seconds.items()}
        for move in ("pack", "unpack"):
            ratios[f"{move}_{case.name}_vs_memcpy"] = round(rate[move] / rate["memcpy"], 3)
        rows.append(
            {"case": case.name, "run_bytes": case.run, "bytes": nbytes} | {f"{m}_gbps": r for m, r in rate.items()}
        )
        print(
            f"{case.name:33} {case.run:6} {nbytes / 2**20:6.1f} {rate['memcpy']:8.2f} {rate['pack']:8.2f} "
            f"{rate['unpack']:8.2f}  {rate['pack'] / rate['memcpy']:16.2f} {rate['unpack'] / rate['memcpy']:13.2f}"
        )
    small = measure((ONE_BLOCK,), 2000)["one_block"]
    figures = {f"{move}_one_block_us": round(small[move] * 1e6, 1) for move in ("pack", "unpack")}
    print("  ".join(f"{name} {value}" for name, value in figures.items()))
    report.write(options.json, {"ratios": ratios, "figures": figures, "rows": rows})


if __name__ == "__main__":
    main()
