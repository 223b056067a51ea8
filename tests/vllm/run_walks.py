"""Hand-overs whose two legs are sent at once, at random, until there are enough: no token may be wrong.

    python tests/vllm/run_walks.py [--count N] [--seed S] [--planes cma ...] [--processes N] [--json FILE]
    python tests/vllm/run_walks.py --seed S --case N [--planes cma ...] [--fault NAME]
    make walk COUNT=10000 SEED=...

Real worker halves and scheduler halves below vLLM's scheduler, over real data planes; only the model is made up. Each
case is a P and a D, one walk of some 60 hand-overs, see ``named_walk.py``. A case that fails is printed with the
command that repeats it; what its threads do in which order may differ. ``--fault`` plants a fault, which must be seen.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".typing"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch  # noqa: E402

from benchmarks.harness import report  # noqa: E402
from tests.support.streaming_faults import FAULTS  # noqa: E402
from tests.vllm.engine_group import EngineGroup, Lines  # noqa: E402
from tests.vllm.named_walk import PLANES, Case, NamedWalk, draw  # noqa: E402
from tests.vllm.stepped_config import tiny_model  # noqa: E402


def walk(model: Any, case: Case) -> tuple[Counter[str], Counter[str], str]:
    """What became of the requests of one case, what happened, and why it has failed."""
    group, lines, failure = EngineGroup(model), Lines(), ""
    logger = logging.getLogger("vllm.kvferry")
    logger.addHandler(lines)
    made: NamedWalk | None = None
    try:
        made = NamedWalk(case, group)
        made.run()
        if lines("unexpected error"):
            raise AssertionError(f"logged: {lines('unexpected error')[0]}")
    except Exception as error:  # whatever it is, the other cases go on
        failure = f"{error!r}\n{traceback.format_exc()}"
    finally:
        logger.removeHandler(lines)
        for engine in group.engines:
            engine.close()
    return (made.outcomes, made.events, failure) if made is not None else (Counter(), Counter(), failure)


def _cases(job: tuple[int, int, int, int, tuple[str, ...], str]) -> dict[str, Any]:
    """The share of one process: every ``step``-th case from ``first`` on, until ``count`` hand-overs are done."""
    seed, first, step, count, planes, fault = job
    torch.set_num_threads(1)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    outcomes: dict[str, Counter[str]] = {plane: Counter() for plane in planes}
    events: Counter[str] = Counter()
    failed: list[str] = []
    done, number, said = 0, first, time.monotonic()
    with tempfile.TemporaryDirectory() as folder, FAULTS[fault]() if fault else nullcontext():
        model = tiny_model(Path(folder) / "tiny")
        while done < count and not (fault and failed):
            case = draw(seed, number, planes)
            of_case, happened, failure = walk(model, case)
            outcomes[case.plane] += of_case
            events += happened
            done += of_case.total()
            if failure:
                failed.append(f"{case}: {failure[:200]}")
                again = f"{sys.argv[0]} --seed {seed} --case {number} --planes {' '.join(planes)}"
                print(f"FAILED {case}\n{failure}\nrepeat: {again}", flush=True)
            if time.monotonic() > said + 30:
                said = time.monotonic()
                print(f"process {first}: {done} of {count} hand-overs, {len(failed)} cases failed", flush=True)
            number += step
    return {"outcomes": outcomes, "events": events, "failed": failed, "cases": (number - first) // step}


def total(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of all processes together, by plane."""
    rows = []
    for plane in results[0]["outcomes"]:
        counts: Counter[str] = sum((result["outcomes"][plane] for result in results), Counter())
        rows.append({"plane": plane, "handovers": counts.total(), "outcomes": dict(counts.most_common())})
    events: Counter[str] = sum((result["events"] for result in results), Counter())
    return {
        "rows": rows, "events": dict(events.most_common()), "cases": sum(result["cases"] for result in results),
        "failed": [line for result in results for line in result["failed"]],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="hand-overs of all processes together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--case", type=int, help="this one only, by its number")
    parser.add_argument("--planes", nargs="+", choices=PLANES, default=PLANES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fault", choices=FAULTS, default="")
    parser.add_argument("--json", type=Path, help="write the counts and versions to this file")
    options = parser.parse_args()
    planes = tuple(plane for plane in options.planes if plane != "ucx" or find_spec("ucxx"))
    processes = 1 if options.case is not None else options.processes
    share = 1 if options.case is not None else -(-options.count // processes)
    print(f"seed {options.seed}: {options.count} hand-overs over {', '.join(planes)}", flush=True)
    jobs = [
        (options.seed, n if options.case is None else options.case, processes, share, planes, options.fault)
        for n in range(processes)
    ]
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        together = total(pool.map(_cases, jobs, chunksize=1))
    seconds, handovers = time.monotonic() - began, sum(row["handovers"] for row in together["rows"])
    for row in together["rows"]:
        counts = ", ".join(f"{count} {what}" for what, count in row["outcomes"].items())
        print(f"{row['plane']:5} {row['handovers']:6} hand-overs: {counts}")
    print("; ".join(f"{count} {what}" for what, count in together["events"].items()))
    print(f"{handovers} hand-overs in {together['cases']} cases, {len(together['failed'])} failed, in {seconds:.0f} s")
    if options.json:
        document = {
            "figures": {"handovers": handovers, "seconds": round(seconds), "failed_cases": len(together["failed"])},
            **together,
            "arguments": {"count": options.count, "seed": options.seed, "processes": processes},
            "versions": report.versions(),
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(together["failed"]))


if __name__ == "__main__":
    sys.exit(main())
