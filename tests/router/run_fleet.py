"""A router before 2 P and 2 D under `vllm bench serve`, among clients that leave, lie or stall.

    python tests/router/run_fleet.py [--crowds 4] [--json FILE]

vLLM engines on the CPU with a small model. The router has the usual limit of 1,024 descriptors. While the honest load
runs, 1,000 bad clients come at a time (``tests/support/bad_clients.py``), and those that stall stay until the honest
requests have ended. After the last crowds the router's memory and descriptors must be what they were after the first;
no engine may hold a block or have had a lease that ended by time; every honest request must have its whole answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from tests.support.bad_clients import Crowd
from tests.support.engines import ROUTER_PATIENCE, free_port, python_path, vllm_command
from tests.support.fleet import GROWTH_MIB, SPARE, Process, grown_mib, router_of, under_the_usual_limit
from tests.support.served import PatientServerGroup, ended_leases, eventually, no_block_held
from tests.support.server import EngineError, Server, metric_sum
from tests.support.tiny_model import ModelSpec, build_model

ROOT = Path(__file__).resolve().parents[2]
CROWD = 1000
REQUESTS, TOKENS, OUTPUT, BESIDE = 200, 60, 8, 8
"""Honest ones in each crowd."""


class Fleet:
    """The engines, and a router before them."""

    def __init__(self, group: PatientServerGroup, folder: Path) -> None:
        self.group, self.model = group, build_model(folder / "model", ModelSpec(layers=2))
        options: dict[str, Any] = {"max_model_len": 256, "kv_bytes": False}
        self.engines = {
            role: [group.engine(f"{role} {number}", self.model, **options) for number in range(2)]
            for role in ("prefill", "decode")
        }
        group.wait_ready()
        port = free_port()
        command = [sys.executable, "-m", "kvferry.cli.main", "router", "--port", str(port)]
        command += ROUTER_PATIENCE
        command += [part for role, each in self.engines.items() for one in each for part in (f"--{role}", one.url)]
        self.router = group.spawn(
            "router",
            under_the_usual_limit(command),
            host="127.0.0.1",
            port=port,
            environment={"PYTHONPATH": python_path()},
        )
        group.wait_ready()

    def bench(self, number: int) -> tuple[Server, Path]:
        """`vllm bench serve` as it begins, and where it writes its result."""
        result = self.group.logs / f"bench-{number}.json"
        command = [*vllm_command(), "bench", "serve", "--backend", "openai", "--base-url", self.router.url]
        command += ["--model", "model", "--tokenizer", str(self.model), "--seed", str(number), "--ignore-eos"]
        command += ["--dataset-name", "random", "--random-input-len", str(TOKENS), "--random-output-len", str(OUTPUT)]
        command += ["--num-prompts", str(REQUESTS), "--max-concurrency", str(BESIDE), "--temperature", "0"]
        command += ["--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]
        name = f"bench-{number}"
        return self.group.spawn(name, [*command, "--disable-tqdm"], host="127.0.0.1", port=0, environment={}), result


async def crowded(fleet: Fleet, number: int) -> tuple[dict[str, Any], Crowd]:
    """The result of `vllm bench serve` beside a crowd. Raises EngineError: it failed."""
    begun = answered(fleet.router)
    bench, path = fleet.bench(number)
    while bench.alive and await asyncio.to_thread(answered, fleet.router) < begun + BESIDE:
        await asyncio.sleep(0.2)
    crowd = Crowd(fleet.router.host, fleet.router.port, CROWD, seed=number * CROWD)
    running = asyncio.ensure_future(crowd.run())
    while bench.alive:
        await asyncio.sleep(0.2)
    await crowd.until_only_stalling_are_left()
    crowd.over.set()
    await running
    if bench.process.returncode:
        raise EngineError(f"vllm bench serve ended with {bench.process.returncode}:\n{bench.log_tail()}")
    return json.loads(path.read_text()), crowd


def answered(router: Server) -> int:
    return int(metric_sum(router.metrics(), "kvferry_router_requests_total", status="200") or 0)


def measure(folder: Path, crowds: int) -> dict[str, Any]:
    began = time.monotonic()
    with PatientServerGroup(folder / "logs") as group:
        fleet = Fleet(group, folder)
        process, rows = router_of(fleet.router), []
        completed, refused, kinds = 0, 0, Counter[str]()
        for number in range(crowds):
            result, crowd = asyncio.run(crowded(fleet, number))
            completed, refused = completed + result["completed"], refused + len(crowd.refused)
            kinds += Counter(crowd.ended)
            quiet(fleet, process)
            rows.append({
                "crowd": number, "honest": result["completed"], "failed": result["failed"],
                "resident_mib": round(process.resident_mib(), 1), "descriptors": process.descriptors(),
                "peak_mib": round(process.peak_mib(), 1),
            })  # fmt: skip
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
        expired = sum(ended_leases(p)[1] for p in fleet.engines["prefill"])
        status, log = process.status(), fleet.router.log_text()
    figures = {
        "honest_answered": completed, "honest_lost": crowds * REQUESTS - completed,
        "bad_clients": kinds.total(), "refused": refused,
        "growth_mib": round(grown_mib([row["resident_mib"] for row in rows]), 1),
        "peak_mib": rows[-1]["peak_mib"], "growth_descriptors": rows[-1]["descriptors"] - rows[0]["descriptors"],
        "leases_that_ended_by_time": expired, "faults_of_the_router": log.count("Traceback"),
    }  # fmt: skip
    seconds = round(time.monotonic() - began)
    return {"ratios": {}, "figures": figures, "rows": rows, "kinds": kinds, "status": status, "seconds": seconds}


def quiet(fleet: Fleet, process: Process) -> None:
    """Wait until no request is in flight and no block is held."""
    eventually(lambda: not any(engine["requests"] for engine in process.status()["engines"]), "no leg is on its way")
    no_block_held(*(engine for each in fleet.engines.values() for engine in each))


def faults(figures: dict[str, float]) -> list[str]:
    must_be_0 = ("honest_lost", "refused", "leases_that_ended_by_time", "faults_of_the_router")
    bounds = dict.fromkeys(must_be_0, 0) | {"growth_mib": GROWTH_MIB, "growth_descriptors": SPARE}
    return [f"{name} {figures[name]:g}, at most {bound}" for name, bound in bounds.items() if figures[name] > bound]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--crowds", type=int, default=4, help=f"of {CROWD} bad clients")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "router_fleet", help="model and logs")
    args = parser.parse_args()
    try:
        result = measure(args.folder, args.crowds)
    except (EngineError, AssertionError) as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    for name, value in result["figures"].items():
        print(f"{name:30}{value:>12.6g}")
    report.write(args.json, result)
    found = faults(result["figures"])
    for what in found:
        print(f"FAILED  {what}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
