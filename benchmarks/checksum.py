"""What the setting ``checksum`` costs: each data plane with and without it, in pairs of one run.

    python benchmarks/checksum.py [--mib 64] [--rounds 15] [--kib 8 16 32 64] [--planes shm tcp zmq] [--json FILE]
    python benchmarks/checksum.py --device cuda [--slot-mib 64 128 256] [--rounds 15] [--json FILE]

On the CPU: real scattered KV blocks of 8 to 64 KiB through the planes on which P sends, as in ``host_planes.py``: two
processes for each contender, time from D's request to the last byte in its place. Each pair moves the same bytes once
without and once with checksums, one after the other, the first of them in turn. The ratio is the median over all pairs
of GB/s with divided by GB/s without. The time on a core of P and of D is given too: the busier of the two bounds the
throughput where each has a core of its own, and other work on the machine changes it less than the throughput.

On a GPU: one GPU packs the scattered pages of a rank into a slot, and unpacks the slot, by the kernels of the product,
with and without checksums, in turn; medians of times by CUDA events. The added time is also given as a share of the
time that the slot takes over NVLink (370 GB/s, ``gpu_planes.py``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import report
import torch

if TYPE_CHECKING:
    from host_planes import Pair

NVLINK_GB_PER_S = 370.0
TAG = 1 << 32 | 7


def on_core(pair: Pair) -> tuple[float, float]:
    """Seconds that P and D have run on a core so far, all threads of each."""
    tasks = (Path(f"/proc/{end.process.pid}/task").glob("*/schedstat") for end in (pair.source, pair.target))
    source, target = (sum(int(task.read_text().split()[0]) for task in of_end) / 1e9 for of_end in tasks)
    return source, target


def on_host(planes: list[str], kib: list[int], mib: int, rounds: int) -> dict[str, Any]:
    """Rates of each plane and block size."""
    from host_planes import Pair  # here, because the form for a GPU needs torch and Triton only

    config = {
        "mib": mib, "kib": kib, "layers": 32, "slot_bytes": 4 << 20, "staging_bytes": 256 << 20,
    }  # fmt: skip
    seconds: dict[tuple[str, int, bool], list[float]] = defaultdict(list)
    of_cores: dict[tuple[str, int, bool], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        for plane in planes:
            pairs = {on: Pair(plane, "host", config | {"checksum": on}, stack) for on in (False, True)}
            for pair in pairs.values():
                for size in kib:
                    pair.move(size)
                    pair.check(size)
            for turn in range(rounds):
                print(f"{plane}: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
                for size in kib:
                    for on in (False, True) if turn % 2 else (True, False):
                        before = on_core(pairs[on])
                        seconds[plane, size, on].append(pairs[on].move(size))
                        after = on_core(pairs[on])
                        of_cores[plane, size, on].append((after[0] - before[0], after[1] - before[1]))
    rows: list[dict[str, Any]] = []
    for plane in planes:
        for size in kib:
            without, with_checksum = seconds[plane, size, False], seconds[plane, size, True]
            rows.append(
                {
                    "plane": plane,
                    "block_kib": size,
                    "gb_per_s_without": (mib << 20) / statistics.median(without) / 1e9,
                    "gb_per_s_with": (mib << 20) / statistics.median(with_checksum) / 1e9,
                    "ratio": statistics.median(a / b for a, b in zip(without, with_checksum, strict=True)),
                    "core_ratio": busier(of_cores[plane, size, False]) / busier(of_cores[plane, size, True]),
                    "core_seconds_without": of_cores[plane, size, False],
                    "core_seconds_with": of_cores[plane, size, True],
                    "seconds_without": without,
                    "seconds_with": with_checksum,
                }
            )
    ratios = {
        f"{plane}_{name}": statistics.geometric_mean(row[name] for row in rows if row["plane"] == plane)
        for plane in planes
        for name in ("ratio", "core_ratio")
    }
    return {"device": "cpu", "mib": mib, "rounds": rounds, "ratios": ratios, "rows": rows}


def busier(of_cores: list[tuple[float, float]]) -> float:
    """Median seconds on a core, of P or of D, whichever takes longer."""
    return max(statistics.median(end) for end in zip(*of_cores, strict=True))


class Slot:
    """Scattered pages, bf16, HND, blocks of 16 tokens, 8 heads x 128 of K and V; and a slot to pack them into."""

    HEADS, CONTENT, BLOCK = 8, 512, 16

    def __init__(self, mib: int, device: torch.device) -> None:
        from kvferry.kernels.paged_copy import Pages
        from kvferry.kernels.paged_copy_triton import DevicePages

        self.nbytes, self.layers = mib << 20, 16
        block_bytes = self.HEADS * self.BLOCK * self.CONTENT
        self.tokens = self.nbytes // self.layers // (self.HEADS * self.CONTENT)
        blocks = 2 * self.tokens // self.BLOCK
        self.pages = torch.randint(0, 256, (self.layers, blocks, block_bytes), dtype=torch.uint8, device=device)
        self.wire = torch.empty(self.nbytes + 8, dtype=torch.uint8, device=device)
        self.verdict = torch.full((1,), -1, dtype=torch.int64, pin_memory=True)
        ids = np.random.default_rng(1).permutation(blocks)[: self.tokens // self.BLOCK].astype(np.int64)
        bases = self.pages.data_ptr() + np.arange(self.layers, dtype=np.int64) * blocks * block_bytes
        sides = Pages(bases, ids, self.BLOCK, block_bytes, self.BLOCK * self.CONTENT, self.CONTENT)
        self.device_pages = DevicePages(
            sides, num_heads=self.HEADS, num_tokens=self.tokens, content_bytes=self.CONTENT, device=device
        )

    def copy(self, *, to_wire: bool, checksum: bool, sms: int | None) -> None:
        """Enqueue the pack or the unpack of the whole slot."""
        from kvferry.kernels.checksum import WireCheck

        check = WireCheck("sum64", TAG, 0 if to_wire else self.verdict.data_ptr()) if checksum else None
        self.device_pages.copy(
            self.wire.data_ptr(), to_wire=to_wire, layer=0, num_layers=self.layers, token=0, num_tokens=self.tokens,
            sms=sms, check=check,
        )  # fmt: skip

    def verify(self) -> None:
        """What the kernels write is what the host computes, they accept it, and they find one wrong bit."""
        from kvferry.kernels.checksum import checksum

        self.copy(to_wire=True, checksum=True, sms=None)
        self.copy(to_wire=False, checksum=True, sms=None)
        torch.cuda.synchronize()
        wire = self.wire.cpu().numpy()
        theirs = int.from_bytes(wire[self.nbytes :].tobytes(), "little")
        assert theirs == checksum("sum64", wire.ctypes.data, self.nbytes, TAG), "the kernel's is not the host's"
        assert int(self.verdict[0]) == 0, "the kernel refuses what fits"
        self.wire[self.nbytes // 3] ^= 1
        self.copy(to_wire=False, checksum=True, sms=20)
        torch.cuda.synchronize()
        assert int(self.verdict[0]) == 1, "the kernel accepts a wrong bit"


def on_gpu(slots: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of pack and unpack."""
    device = torch.device("cuda", 0)
    rows = []
    for mib in slots:
        slot = Slot(mib, device)
        slot.verify()
        for sms in (None, 20):
            for to_wire in (True, False):
                times: dict[bool, list[float]] = {False: [], True: []}
                for turn in range(rounds + 2):
                    for on in (False, True) if turn % 2 else (True, False):
                        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                        torch.cuda.synchronize()
                        torch.cuda._sleep(200_000)  # both launches are enqueued before the first of them runs
                        start.record()
                        slot.copy(to_wire=to_wire, checksum=on, sms=sms)
                        end.record()
                        torch.cuda.synchronize()
                        if turn >= 2:
                            times[on].append(start.elapsed_time(end))
                without, with_checksum = statistics.median(times[False]), statistics.median(times[True])
                link_ms = (mib << 20) / NVLINK_GB_PER_S / 1e6
                rows.append(
                    {
                        "mib": mib,
                        "sms": sms,
                        "copy": "pack" if to_wire else "unpack",
                        "ms_without": without,
                        "ms_with": with_checksum,
                        "link_ms": link_ms,
                        "added_share_of_link": (with_checksum - without) / link_ms,
                        "all_ms_without": times[False],
                        "all_ms_with": times[True],
                    }
                )
        del slot
    ratios = {
        f"{row['copy']}_{row['mib']}_mib_{row['sms'] or 'all'}_sms_added_share_of_link": row["added_share_of_link"]
        for row in rows
    }
    return {"device": "cuda", "rounds": rounds, "ratios": ratios, "rows": rows}


def show(result: dict[str, Any]) -> None:
    if result["device"] == "cpu":
        print(f"{'plane':8}{'blocks':>10}{'without':>12}{'with':>12}{'ratio':>8}{'by time on a core':>20}")
        for row in result["rows"]:
            rates = f"{row['gb_per_s_without']:7.2f} GB/s{row['gb_per_s_with']:7.2f} GB/s"
            print(f"{row['plane']:8}{row['block_kib']:6} KiB{rates}{row['ratio']:8.2f}{row['core_ratio']:20.2f}")
        for name, ratio in result["ratios"].items():
            print(f"{name}: {ratio:.2f}")
        return
    for row in result["rows"]:
        share = f"{row['added_share_of_link']:.1%} of {row['link_ms']:.3f} ms on NVLink"
        print(
            f"{row['copy']:8}{row['mib']:5} MiB {row['sms'] or 'all':>4} SMs {row['ms_without']:8.4f} ms without "
            f"{row['ms_with']:8.4f} ms with, added {share}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mib", type=int, default=64, help="MiB that one transfer moves")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kib", type=int, nargs="+", default=[8, 16, 32, 64], help="block sizes")
    parser.add_argument("--planes", nargs="+", default=["shm", "tcp", "zmq"])
    parser.add_argument("--slot-mib", type=int, nargs="+", default=[64, 128, 256], help="slots on a GPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda":
        result = on_gpu(options.slot_mib, options.rounds)
    else:
        result = on_host(options.planes, options.kib, options.mib, options.rounds)
    show(result)
    report.write(options.json, result)


if __name__ == "__main__":
    main()
