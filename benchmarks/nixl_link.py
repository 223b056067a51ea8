"""The plane ``nixl`` between two hosts whose link is slower than their memory, beside NIXL itself. No RDMA, no GPU.

    sudo .venv/bin/python benchmarks/nixl_link.py [--rates 1.25 3] [--turns 3] [--mib 256] [--json FILE]

Two network namespaces joined by a veth pair whose ends send at most so many GB/s (tc's token bucket filter): 1.25 is
an Ethernet of 10 Gb/s. In each turn ``rdma_check.py`` measures all contenders over the same TCP lanes of NIXL's UCX:
NIXL's WRITEs and READs of whole slots, the plane with scattered blocks, and NIXL's own descriptors for these. Over
loopback (``host_planes.py``) two cores do the work of the link, of both ends and of all copies, so that each copy takes
time from the link. Here the link is slower than the cores, as it is between hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import report
import shaped_link
from tables import NIXL, NIXL_PLANE

from examples.two_node.run_netns import two_hosts

ROOT = Path(__file__).resolve().parents[1]
PORT = 7300
SCRIPT = ROOT / "benchmarks" / "rdma_check.py"
PATIENCE_SECONDS = 600
COMPARED = {
    "nixl_plane_vs_raw_write": (f"{NIXL_PLANE}, 32 KiB", "nixl raw write"),
    "nixl_plane_vs_nixl_8k": (f"{NIXL_PLANE}, 8 KiB", f"{NIXL}, 8 KiB"),
}
"""Ratios of two contenders of one turn."""


def environment() -> dict[str, str]:
    """TCP lanes over the link."""
    paths = f"{ROOT / '.typing'}:{os.environ.get('PYTHONPATH', '')}"
    return os.environ | {"UCX_TLS": "cuda,tcp", "UCX_NET_DEVICES": shaped_link.DEVICE, "PYTHONPATH": paths}


def inside(namespace: str, *arguments: str) -> list[str]:
    """The command of ``rdma_check.py`` in a namespace, with a /sys of its own, where UCX looks for network devices."""
    return ["ip", "netns", "exec", namespace, sys.executable, str(SCRIPT), *arguments]


def turn(hosts: tuple[str, str, str, str], mib: int, rounds: int, folder: Path) -> dict[str, float]:
    """GB/s of each contender."""
    p, p_address, d, d_address = hosts
    serving = inside(p, "serve", p_address, str(PORT))
    with subprocess.Popen(serving, env=environment(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and server.stdout.readline().startswith("serving on")
            file = folder / "turn.json"
            file.unlink(missing_ok=True)
            sizes = ("--mib", str(mib), "--rounds", str(rounds), "--json", str(file))
            checking = inside(d, "check", d_address, p_address, str(PORT), *sizes)
            done = subprocess.run(
                checking, env=environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
            )
            if not file.exists():
                raise SystemExit(f"{' '.join(checking)}:\n{done.stdout}\n{done.stderr}")
        finally:
            server.terminate()
    found = json.loads(file.read_text())
    if found["wrong"]:
        raise SystemExit(f"bytes differ: {found['wrong']}")
    rates: dict[str, float] = found["gb_per_s"]
    return rates


def measure(rates: list[float], turns: int, mib: int, rounds: int) -> dict[str, Any]:
    """All turns of all links, which take turns."""
    seen: dict[float, list[dict[str, float]]] = {rate: [] for rate in rates}
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        for number in range(turns):
            for rate in rates:
                print(f"turn {number + 1} of {turns}: {rate} GB/s", file=sys.stderr, flush=True)
                for namespace in (hosts[0], hosts[2]):
                    shaped_link.shape(namespace, rate)
                seen[rate].append(turn(hosts, mib, rounds, Path(folder)))
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for rate, found in seen.items():
        for name in found[0]:
            values = [each[name] for each in found]
            middle = statistics.median(values)
            rows.append({"link_gb_per_s": rate, "contender": name, "gb_per_s": middle, "all": values})
        for name, (ours, theirs) in COMPARED.items():
            ratios[f"{name}_{rate:g}"] = statistics.median(each[ours] / each[theirs] for each in found)
    return {"ratios": ratios, "turns": turns, "rounds": rounds, "mib": mib, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.25, 3.0], help="GB/s of the link")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="transfers of each contender in a turn")
    parser.add_argument("--mib", type=int, default=256, help="MiB that one transfer moves")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    why_not = shaped_link.why_not()
    if why_not:
        raise SystemExit(f"no link of a chosen rate: {why_not}")
    result = measure(options.rates, options.turns, options.mib, options.rounds)
    for row in result["rows"]:
        print(f"link of {row['link_gb_per_s']:5} GB/s  {row['contender']:20}{row['gb_per_s']:8.2f} GB/s")
    for name, value in result["ratios"].items():
        print(f"{name:36}{value:6.2f}")
    report.write(options.json, result)


if __name__ == "__main__":
    main()
