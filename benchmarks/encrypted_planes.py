"""KV bytes between two processes over TCP, plain and encrypted: which plane encrypts at what cost.

    python benchmarks/encrypted_planes.py [--mib 64] [--rounds 15] [--json FILE]

The contenders of ``host_planes.py`` that go between hosts, over loopback, scattered blocks of 8 to 64 KiB: ``tcp``,
``tcp`` with the setting ``encrypt`` (AES-256-GCM), and ``zmq`` (CURVE). They take turns; the ratio is the median over
all turns of GB/s encrypted divided by GB/s of the plain ``tcp`` of the same turn. Whether this kernel offers TLS of its
own is noted, not measured.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import report
from host_planes import Pair

PLAIN, AES, CURVE = "tcp", "tcp, encrypt", "zmq"
TCP_ULP = 31
"""A socket option of Linux, in no module of Python."""


def kernel_tls() -> str:
    """Whether the kernel encrypts TCP connections by itself, in words."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        try:
            ours.setsockopt(socket.IPPROTO_TCP, TCP_ULP, b"tls")
        except OSError as error:
            return f"not offered: {error.strerror}"
    return "offered"


def measure(kib: list[int], mib: int, rounds: int) -> dict[str, Any]:
    config = {
        "mib": mib, "kib": kib, "layers": 32, "slot_bytes": 4 << 20, "staging_bytes": 256 << 20,
    }  # fmt: skip
    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        pairs = {
            name: Pair(name.split(",")[0], "host", config | {"encrypt": name == AES}, stack)
            for name in (PLAIN, AES, CURVE)
        }
        for number in range(rounds + 1):
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
            for size in kib:
                for name, pair in list(pairs.items())[:: 1 if number % 2 else -1]:
                    seconds = pair.move(size)
                    if number == 0:  # to warm up
                        pair.check(size)
                    else:
                        rates[name, size].append((mib << 20) / seconds / 1e9)
    rows = []
    for name in pairs:
        for size in kib:
            ratios = [ours / plain for ours, plain in zip(rates[name, size], rates[PLAIN, size], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "plane": name, "kib": size, "gb_per_s": round(statistics.median(rates[name, size]), 3),
                    "of_plain": round(statistics.median(ratios), 3), "p25": round(low, 3), "p75": round(high, 3),
                }
            )  # fmt: skip
    every = {
        name: statistics.median(
            ours / plain for size in kib for ours, plain in zip(rates[name, size], rates[PLAIN, size], strict=True)
        )
        for name in (AES, CURVE)
    }
    of_plain = {"aes_of_plain": round(every[AES], 3), "curve_of_plain": round(every[CURVE], 3)}
    return {"ratios": of_plain, "rows": rows, "mib": mib, "rounds": rounds, "kernel_tls": kernel_tls()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kib", type=int, nargs="+", default=[8, 16, 32, 64])
    args = parser.parse_args()
    result = measure(args.kib, args.mib, args.rounds)
    for row in result["rows"]:
        print("  ".join(f"{value!s:>12}" for value in row.values()))
    print(result["ratios"], "the kernel's TLS:", result["kernel_tls"])
    report.write(args.json, result)


if __name__ == "__main__":
    main()
