"""In-place fix-ups beside a copy of the same bytes and beside vLLM's: GB/s (bytes moved once), medians of one run.

    python benchmarks/kv_postprocess.py [--device cuda] [--mib N] [--rounds N] [--json FILE]

Every round runs the copy (contiguous, elsewhere), the fix-up and vLLM's in turn, so that a noisy neighbour meets all of
them. Where vLLM has no such case, or is not installed, "torch" is its way spelled out: gather, permute, scatter. On the
CPU single-threaded, as in a worker's transfer thread. Axes [B, H, N, C].
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import report
import torch
from timing import name_of, timed

from kvferry.kernels import kv_postprocess as ours

try:
    from vllm.distributed.kv_transfer.kv_connector import utils as vllm_utils
except ImportError:
    vllm_utils = None


@dataclass(frozen=True)
class Case:
    """A random half of a cache's blocks; ``content`` bf16 elements. ``relayout``: P has the other layout."""

    name: str
    layout: str
    ratio: int
    relayout: bool
    heads: int = 8
    tokens: int = 16
    content: int = 256


CASES = (
    Case("blksize_hnd_4_to_16", "HND", 4, False),
    Case("blksize_hnd_16_to_64", "HND", 4, False, tokens=64),
    Case("blksize_hnd_64_to_16", "HND", -4, False),
    Case("blksize_hnd_16_to_48", "HND", 3, False, tokens=48, heads=2),
    Case("layout_hnd_to_nhd_16", "NHD", 1, True),
    Case("layout_hnd_to_nhd_64", "NHD", 1, True, tokens=64),
    Case("layout_nhd_to_hnd_16", "HND", 1, True),
    Case("layout_hnd_to_nhd_48_content_100", "NHD", 1, True, tokens=48, heads=4, content=100),
    Case("layout_hnd_to_nhd_32_heads_128", "NHD", 1, True, tokens=128, heads=32),
    Case("both_hnd_16_to_nhd_64", "NHD", 4, True, tokens=64),
    Case("both_hnd_64_to_nhd_16", "NHD", -4, True),
    Case("both_nhd_16_to_hnd_64", "HND", 4, True, tokens=64),
)
MOVES = ("copy", "fix_up", "torch")


def gather_permute_scatter(cache: torch.Tensor, indices: torch.Tensor, case: Case) -> None:
    """vLLM's way, for the cases too that it does not have."""
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


class Bench:
    """The memory of a case, and its moves."""

    def __init__(self, case: Case, mib: int, device: torch.device) -> None:
        self.case = case
        block_bytes = case.heads * case.tokens * case.content * 2
        blocks = max(1, (mib << 20) // block_bytes // 4) * 4
        self.nbytes = blocks * block_bytes
        shape = (case.heads, case.tokens) if case.layout == "HND" else (case.tokens, case.heads)
        cache = torch.full((2 * blocks, *shape, case.content), 7, dtype=torch.bfloat16, device=device)
        if case.layout == "NHD":
            cache = cache.transpose(1, 2)
        indices = torch.randperm(2 * blocks, device=device)[:blocks]
        source = torch.full((self.nbytes,), 7, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        name = "blksize_and_layout" if case.relayout else "blksize"
        function = getattr(ours, f"kv_postprocess_{name}_on_receive")
        self.is_vllm = vllm_utils is not None and case.ratio > 0 and (case.layout == "NHD") == case.relayout
        torch_move: Callable[[], object] = lambda: gather_permute_scatter(cache, indices, case)  # noqa: E731
        if self.is_vllm:
            vllm_function = getattr(vllm_utils, f"kv_postprocess_{name}_on_receive")
            torch_move = lambda: vllm_function(cache, indices, case.ratio)  # noqa: E731
        self.moves: dict[str, Callable[[], object]] = {
            "copy": lambda: target.copy_(source),
            "fix_up": lambda: function(cache, indices, case.ratio),
            "torch": torch_move,
        }


def check(case: Case, device: torch.device) -> None:
    """That the two fix-ups agree, or a rate means nothing."""
    blocks = 4 * max(1, abs(case.ratio))
    shape = (case.heads, case.tokens) if case.layout == "HND" else (case.tokens, case.heads)
    cache = torch.randn(2 * blocks, *shape, case.content, device=device).to(torch.bfloat16)
    expected = cache.clone()
    both = [each if case.layout == "HND" else each.transpose(1, 2) for each in (cache, expected)]
    indices = torch.randperm(2 * blocks, device=device)[:blocks]
    name = "blksize_and_layout" if case.relayout else "blksize"
    getattr(ours, f"kv_postprocess_{name}_on_receive")(both[0], indices, case.ratio)
    gather_permute_scatter(both[1], indices, case)
    if not torch.equal(cache.view(torch.int16), expected.view(torch.int16)):
        raise SystemExit(f"{case.name}: the fix-up's bytes differ from those of gather, permute, scatter")


def measure(bench: Bench, rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of every move."""
    seconds: dict[str, list[float]] = {move: [] for move in MOVES}
    for turn in range(rounds + 2):
        for move in MOVES:
            taken = timed(bench.moves[move], device)
            if turn >= 2:  # the first two warm up
                seconds[move].append(taken)
    return {move: statistics.median(seconds[move]) for move in MOVES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mib", type=int, help="bytes that a fix-up moves; by default 64 on the CPU, 1024 on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write ratios, figures, rows and versions to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    mib = options.mib or (64 if device.type == "cpu" else 1024)

    ratios: dict[str, float] = {}
    rows: list[dict[str, object]] = []
    print(f"{'case':33} {'MiB':>6} {'copy':>8} {'fix-up':>8} {'torch':>8}  GB/s  fix-up/copy  fix-up/torch")
    for case in CASES:
        check(case, device)
        bench = Bench(case, mib, device)
        seconds = measure(bench, options.rounds, device)
        rate = {move: bench.nbytes / 1e9 / taken for move, taken in seconds.items()}
        contender = "vllm" if bench.is_vllm else "torch"
        ratios[f"{case.name}_vs_copy"] = round(rate["fix_up"] / rate["copy"], 3)
        ratios[f"{case.name}_vs_{contender}"] = round(rate["fix_up"] / rate["torch"], 3)
        rows.append(
            {"case": case.name, "device": name_of(device), "bytes": bench.nbytes, "contender": contender}
            | {f"{move}_gbps": value for move, value in rate.items()}
        )
        print(
            f"{case.name:33} {bench.nbytes / 2**20:6.0f} {rate['copy']:8.2f} {rate['fix_up']:8.2f} "
            f"{rate['torch']:8.2f}  {rate['fix_up'] / rate['copy']:16.2f} {rate['fix_up'] / rate['torch']:12.2f} "
            f"({contender})"
        )
    report.write(options.json, {"ratios": ratios, "figures": {}, "rows": rows})


if __name__ == "__main__":
    main()
