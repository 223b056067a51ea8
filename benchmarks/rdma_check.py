"""Whether KVFerry's plane ``nixl`` uses the RDMA between two hosts well. For somebody who has two hosts with RDMA.

    host 10.0.0.1$ python benchmarks/rdma_check.py serve 10.0.0.1 7300
    host 10.0.0.2$ python benchmarks/rdma_check.py check 10.0.0.2 10.0.0.1 7300 [--json FILE]

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
from collections import defaultdict
from pathlib import Path
from typing import Any

import report
from tables import NIXL, NIXL_PLANE, NIXL_RAW

from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.planes.ucx_settings import choose_lanes, nixl_release

HERE = Path(__file__).resolve().parent
SIZES = (8, 32)
OF_RAW, OF_NIXL = 0.9, 3.0
"""What the plane must reach of raw WRITEs, and of NIXL's own descriptors at 8 KiB."""
PATIENCE_SECONDS = 300


def environ(host: str) -> dict[str, str]:
    """The environment of a process on the lanes that the plane chooses at this address."""
    return os.environ | {"OMP_NUM_THREADS": "1"} | dict(choose_lanes(host, os.environ).settings)


def program(kind: str, role: str, config: dict[str, Any]) -> list[str]:
    return [sys.executable, str(HERE / "host_processes.py"), kind, role, json.dumps(config)]


def serve(host: str, port: int) -> None:
    """Start a source for each connection, which then is its stdin and stdout."""
    print(f"serving on {host}:{port}; lanes: {choose_lanes(host, os.environ).shown}", flush=True)
    with socket.create_server((host, port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb", buffering=0) as lines:
                wanted = json.loads(lines.readline(1 << 16))
                if wanted["kind"] not in (NIXL, NIXL_PLANE, *NIXL_RAW):
                    continue
                facts = {"lanes": choose_lanes(host, os.environ).shown, "release": " ".join(nixl_release())}
                connection.sendall(json.dumps(facts).encode() + b"\n")
                command = program(wanted["kind"], "source", wanted["config"] | {"host": host})
                fd = connection.fileno()
                subprocess.run(command, stdin=fd, stdout=fd, env=environ(host), check=False)


class Contender:
    """One way to move the blocks: a source on the other host, a target here."""

    def __init__(self, kind: str, config: dict[str, Any], peer: tuple[str, int]) -> None:
        self.kind = kind
        self.source = socket.create_connection(peer, timeout=PATIENCE_SECONDS)
        self.lines = self.source.makefile("rb")
        self.source.sendall(json.dumps({"kind": kind, "config": config}).encode() + b"\n")
        self.theirs = json.loads(self.lines.readline())
        self.target = subprocess.Popen(
            program(kind, "target", config), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ(config["host"])
        )
        blob = self._source(do="exchange", blob=None)
        while blob is not None:
            blob = self._target(do="exchange", blob=blob)
            if blob is not None:
                blob = self._source(do="exchange", blob=blob)

    def move(self, kib: int) -> float:
        """Seconds of one transfer."""
        self._tell_source(do="move", kib=kib)
        seconds: float = self._target(do="move", kib=kib)
        self._tell_source(do="nothing")
        self._answer(self.lines)
        self._answer(self.lines)
        return seconds

    def right(self, kib: int) -> bool:
        """Whether the blocks on D are those on P."""
        return bool(self._source(do="digest", kib=kib) == self._target(do="digest", kib=kib))

    def close(self) -> None:
        self.target.kill()
        self.target.wait()
        self.source.shutdown(socket.SHUT_RDWR)
        self.lines.close()
        self.source.close()

    def _tell_source(self, **command: Any) -> None:
        self.source.sendall(json.dumps(command).encode() + b"\n")

    def _source(self, **command: Any) -> Any:
        self._tell_source(**command)
        return self._answer(self.lines)

    def _target(self, **command: Any) -> Any:
        assert self.target.stdin is not None
        self.target.stdin.write(json.dumps(command).encode() + b"\n")
        self.target.stdin.flush()
        return self._answer(self.target.stdout)

    def _answer(self, lines: Any) -> Any:
        line = lines.readline()
        if not line:
            raise SystemExit(f"{self.kind}: one end has ended; its messages are above, or on the other host")
        return json.loads(line)


def check(host: str, peer: tuple[str, int], mib: int, rounds: int) -> dict[str, Any]:
    """Measure one contender after the other: the other host serves one at a time."""
    config = {
        "mib": mib, "kib": list(SIZES), "layers": 32, "slot_bytes": 4 << 20, "staging_bytes": 256 << 20,
        "host": host, "peer": peer[0],
    }  # fmt: skip
    lanes = choose_lanes(host, os.environ)
    rates: dict[str, float] = {}
    wrong: list[str] = []
    for kind in (*NIXL_RAW, NIXL_PLANE, NIXL):
        contender = Contender(kind, config, peer)
        theirs = contender.theirs
        try:
            seconds: dict[str, list[float]] = defaultdict(list)
            for number in range(rounds + 1):
                for kib in (0,) if kind in NIXL_RAW else SIZES:
                    took = contender.move(kib)
                    name = kind if not kib else f"{kind}, {kib} KiB"
                    if number:
                        seconds[name].append(took)
                    elif kib and not contender.right(kib):
                        wrong.append(name)
        finally:
            contender.close()
        rates |= {name: (mib << 20) / statistics.median(times) / 1e9 for name, times in seconds.items()}
    best = max(rate for name, rate in rates.items() if name.startswith(NIXL_PLANE))
    return {
        "lanes": {"here": lanes.shown, "there": theirs["lanes"]},
        "releases": {"here": " ".join(nixl_release()), "there": theirs["release"]},
        "rdma": lanes.rdma,
        "gb_per_s": rates,
        "of_raw_writes": best / rates["nixl raw write"],
        "of_nixl_8k": rates[f"{NIXL_PLANE}, 8 KiB"] / rates[f"{NIXL}, 8 KiB"],
        "wrong": wrong,
    }


def verdict(result: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    found = [f"{name}: bytes differ" for name in result["wrong"]]
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
    serving.add_argument("host", help="the address of this host on the network to measure")
    serving.add_argument("port", type=int)
    checking.add_argument("host", help="the address of this host on the network to measure")
    checking.add_argument("peer", help="the address of the host that serves")
    checking.add_argument("port", type=int)
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
