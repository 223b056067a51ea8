"""Whether KVFerry's plane ``nixl`` uses the RDMA between two hosts well. For somebody who has two hosts with RDMA.

    host 10.0.0.1$ python benchmarks/planes/rdma_check.py serve 10.0.0.1 7300
    host 10.0.0.2$ python benchmarks/planes/rdma_check.py check 10.0.0.2 10.0.0.1 7300 [--json FILE]

The first command serves until Ctrl-C. Whoever reaches its port can start a measurement, and give bytes to NIXL's native
parser: use a network of your own. Both hosts need this checkout, and ``pip install '.[rdma]' nixl``.

It prints the lanes of both hosts; rates in turn of NIXL's WRITEs and READs of whole slots, of the plane with scattered
blocks, and of NIXL's own descriptors for these, all in host memory and over the same lanes; and a verdict. The
exit status is 0 if the plane is fit: it has RDMA, at least 0.9 of the raw WRITEs, and 3 times NIXL's own descriptors at
8 KiB. ``UCX_TLS=cuda,tcp`` on both sides tries the script without RDMA.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import msgspec

from benchmarks.harness import report
from benchmarks.planes.points import NIXL, NIXL_PLANE, NIXL_RAW, Config, Contender, channel, host_points
from benchmarks.planes.process import HERE, Orders, Process, ProcessError, introduce, move, verify
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.planes.ucx_settings import choose_lanes, nixl_release

SIZES = (8, 32)
OF_RAW, OF_NIXL = 0.9, 3.0
"""What the plane must reach of raw WRITEs, and of NIXL's own descriptors at 8 KiB."""
PATIENCE_SECONDS = 300


def lanes_of(host: str) -> dict[str, str]:
    """The environment that the plane chooses at this address."""
    return {"OMP_NUM_THREADS": "1"} | dict(choose_lanes(host, os.environ).settings)


def serve(host: str, port: int) -> None:
    """Start a source for each connection, which then is its stdin and stdout."""
    print(f"serving on {host}:{port}; lanes: {choose_lanes(host, os.environ).shown}", flush=True)
    with socket.create_server((host, port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb", buffering=0) as lines:
                wanted = msgspec.json.decode(lines.readline(1 << 16), type=Config)
                if wanted.kind not in ("nixl", "channel") or wanted.settings.get("plane", "nixl") != "nixl":
                    continue
                facts = {"lanes": choose_lanes(host, os.environ).shown, "release": " ".join(nixl_release())}
                connection.sendall(json.dumps(facts).encode() + b"\n")
                config = msgspec.structs.replace(wanted, settings=wanted.settings | {"host": host})
                command = [sys.executable, str(HERE / "ends.py"), msgspec.json.encode(config).decode()]
                fd = connection.fileno()
                subprocess.run(command, stdin=fd, stdout=fd, env=os.environ | lanes_of(host), check=False)


class Source(Orders):
    """P's end, on the other host."""

    def __init__(self, config: Config, peer: tuple[str, int]) -> None:
        super().__init__(config, socket.create_connection(peer, timeout=PATIENCE_SECONDS))
        self.send(msgspec.json.encode(config) + b"\n")
        self.facts = json.loads(self.receive(PATIENCE_SECONDS))

    def receive(self, seconds: float) -> bytes:
        return super().receive(PATIENCE_SECONDS)


def check(host: str, peer: tuple[str, int], mib: int, rounds: int) -> dict[str, Any]:
    """Measure one contender after the other: the other host serves one at a time."""
    lanes, points = choose_lanes(host, os.environ), host_points(mib, SIZES)
    rates: dict[str, float] = {}
    wrong: list[str] = []
    ours = channel(NIXL_PLANE, host=host, peer=peer[0])
    for one in (*(Contender(name, "nixl") for name in (*NIXL_RAW, NIXL)), ours):
        config = Config(one.kind, "target", "cpu", points, one.settings)
        source = Source(msgspec.structs.replace(config, role="source"), peer)
        target = Process(config, "", lanes_of(host))
        try:
            for end in (source, target):
                end.tell("open")
            for end in (source, target):
                end.answer()
            introduce(source, target)
            for point in points[-1:] if one.name in NIXL_RAW else points:
                name = one.name if one.name in NIXL_RAW else f"{one.name}, {point.name}"
                try:
                    verify(source, target, one.name, point.name)
                except ProcessError as error:
                    wrong.append(f"{name}: {error}")
                times = [second for _ in range(rounds) for second in move(source, target, one.name, point.name, 1)]
                rates[name] = point.nbytes / statistics.median(times) / 1e9
        finally:
            target.end()
            for end in (target, source):
                end.close()
    best = max(rate for name, rate in rates.items() if name.startswith(NIXL_PLANE))
    return {
        "lanes": {"here": lanes.shown, "there": source.facts["lanes"]},
        "releases": {"here": " ".join(nixl_release()), "there": source.facts["release"]},
        "rdma": lanes.rdma,
        "gb_per_s": rates,
        "of_raw_writes": best / rates["nixl raw write"],
        "of_nixl_8k": rates[f"{NIXL_PLANE}, 8 KiB"] / rates[f"{NIXL}, 8 KiB"],
        "wrong": wrong,
    }


def verdict(result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = list(result["wrong"])
    if not result["rdma"]:
        found.append(f"no RDMA: the lanes are {result['lanes']['here']}")
    if result["of_raw_writes"] < OF_RAW:
        found.append(f"{result['of_raw_writes']:.2f} of the raw WRITEs, expected {OF_RAW}")
    if result["of_nixl_8k"] < OF_NIXL:
        found.append(f"{result['of_nixl_8k']:.2f} times NIXL's own descriptors at 8 KiB, expected {OF_NIXL:g}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    serving, checking = commands.add_parser("serve"), commands.add_parser("check")
    for command in (serving, checking):
        command.add_argument("host", help="the address of this host on the network to measure")
        if command is checking:
            command.add_argument("peer", help="the address of the host that serves")
        command.add_argument("port", type=int)
    checking.add_argument("--mib", type=int, default=256)
    checking.add_argument("--rounds", type=int, default=7)
    checking.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        if options.command == "serve":
            serve(options.host, options.port)
        result = check(options.host, (options.peer, options.port), options.mib, options.rounds)
    except PlaneUnavailableError as error:
        print(f"not fit: {error}")
        return 1
    except KeyboardInterrupt:
        return 0
    for side in ("here", "there"):
        print(f"lanes {side}: {result['lanes'][side]}; {result['releases'][side]}")
    for name, rate in result["gb_per_s"].items():
        print(f"{name:24}{rate:8.2f} GB/s")
    faults = verdict(result)
    print("fit" if not faults else "not fit: " + "; ".join(faults))
    report.write(options.json, result)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
