"""What the connector costs an engine's step that hands nothing over: microseconds of the engine's threads.

    python benchmarks/idle_step.py [--json FILE] [--steps 400] [--rounds 6]

Two engines of vLLM's own objects in one process, one with KVFerry and one without a connector: asynchronous scheduler,
KV cache manager, the model runner's calls to its connector, and KVFerry's two halves with its transfer thread. Each
decodes ``--requests`` requests; the forward is empty. Both step in turn, and each pair of steps gives one difference.
A third engine has a connector that does nothing (``empty_connector.py``), and takes turns with KVFerry's in the same
way: what vLLM does where it has any connector is in the first difference and not in the second. A step is: schedule,
the plan by pickle to the worker as to a process of its own, the calls around the forward, the output by pickle back,
the look at the output.

``hooks``: the time inside KVFerry's methods alone, taken in rounds of its own, by name. ``layer``: of both hooks of one
attention layer, with vLLM's wrapper around it; a model that runs under full CUDA graphs does not call them.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import report
from comparison import difference_interval
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from tests.support.tiny_model import ModelSpec, build_model
from tests.vllm.labelled import BLOCK, CONTENT, HEADS, LAYERS
from tests.vllm.stepped import Engine
from tests.vllm.stepped_config import engine_config, model_config

ROOT = Path(__file__).resolve().parent.parent
LIMIT_US = 30
"""For KVFerry's own part."""
PROMPT = 16
MODEL_LAYERS = 32
SCHEDULER_HOOKS = ("build_connector_meta", "update_connector_output")
WORKER_HOOKS = (
    "bind_connector_metadata", "start_load_kv", "wait_for_save", "get_transfer_results", "get_finished",
    "get_block_ids_with_load_errors", "get_kv_connector_stats", "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta", "clear_connector_metadata",
)  # fmt: skip


def travel(sent: Any) -> Any:
    """As between vLLM's processes, which trust each other."""
    return pickle.loads(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL))  # noqa: S301


class Side:
    """One engine: its scheduler, and its worker's connector or None. ``layers``: attention layers of the forward."""

    def __init__(self, scheduler: Any, connector: Any, engine: Engine) -> None:
        self.scheduler, self.connector, self.layers = scheduler, connector, 0
        self._layer = maybe_transfer_kv_layer(lambda layer_name: None)
        self._names, self._hasher = engine.layers, engine._hasher
        self._outputs: deque[tuple[Any, Any]] = deque()
        self._ids: list[str] = []
        self.runner = Runner(self)
        if hasattr(connector, "_start_with"):
            connector._start_with(self.runner)

    def begin(self, requests: int, tokens: int) -> None:
        """Add requests that decode so many tokens, and prefill them."""
        for number in range(requests):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True)
            ids = [2 + number, *range(2, 1 + PROMPT)]
            request = Request(f"r{number}", ids, params, None, block_hasher=self._hasher)
            self._ids.append(request.request_id)
            self.scheduler.add_request(request)
        for _ in range(3):
            self.step()

    def end(self) -> None:
        self.scheduler.finish_requests(self._ids, RequestStatus.FINISHED_ABORTED)
        self._ids.clear()
        while self.scheduler.has_unfinished_requests() or self._outputs:
            self.step()
            if not self.scheduler.has_unfinished_requests():
                while self._outputs:
                    self.scheduler.update_from_output(*self._outputs.popleft())

    def step(self) -> float:
        """Seconds of one step."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector  # of a process that has one engine
        began = time.perf_counter()
        step = self.scheduler.schedule()
        result = self.runner.execute_model(travel(step))
        self._outputs.append((step, travel(result)))
        if len(self._outputs) > 1:
            self.scheduler.update_from_output(*self._outputs.popleft())
        return time.perf_counter() - began

    def forward(self, step: Any) -> Any:
        around = KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(step)
        with around as carried:
            for number in range(self.layers):
                self._layer(self._names[number % len(self._names)])
        names = list(step.num_scheduled_tokens)
        index = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, index, [[5] for _ in names], kv_connector_output=carried)


class Runner:
    """Stands for the model runner, whose ``execute_model`` KVFerry wraps."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.side.forward(scheduler_output)


def other_config(engine: Engine, model: Any, connector: KVTransferConfig | None) -> Any:
    """As that of ``engine``, with another connector, or without one."""
    config = engine_config(
        model, role="kv_both", policy="recompute", extra={}, tp=1, max_batched=256, connector="KVFerryConnector",
        module=None, ahead=True, drafts=0, scheduling="fcfs", dp_rank=None, block=BLOCK, dcp=1, interleave=1,
    )  # fmt: skip
    config.kv_transfer_config = connector
    config.cache_config.num_gpu_blocks = engine.num_blocks
    return config


def other_side(engine: Engine, model: Any, connector: KVTransferConfig | None = None) -> Side:
    """An engine as ``engine``, with another connector, or without one."""
    config = other_config(engine, model, connector)
    structured = StructuredOutputManager(config)
    scheduler = AsyncScheduler(config, engine.kv_config, structured, block_size=BLOCK, log_stats=True)
    worker = None
    if connector is not None:
        worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, engine.kv_config)
    return Side(scheduler, worker, engine)


EMPTY = KVTransferConfig(
    kv_connector="EmptyConnector", kv_connector_module_path="empty_connector", kv_role="kv_both", engine_id="empty"
)


def paired(with_it: Side, without: Side, steps: int, requests: int) -> list[tuple[float, float]]:
    """Seconds of a step with the connector and of one without, one after the other."""
    for side in (with_it, without):
        side.begin(requests, steps + 16)
    found = []
    for number in range(steps):
        if number % 2:
            found.append((with_it.step(), without.step()))
        else:
            second = without.step()
            found.append((with_it.step(), second))
    for side in (with_it, without):
        side.end()
    return found


@contextmanager
def timed_hooks(scheduler_side: Any, worker_side: Any) -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of KVFerry's methods, by name; the clock's own time is in each."""
    found: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        seconds = found[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - began)

        return call

    sides = [(scheduler_side, SCHEDULER_HOOKS), (worker_side, WORKER_HOOKS)]
    for connector, names in sides:
        for name in names:
            setattr(connector, name, timed(name, getattr(connector, name)))
    try:
        yield found
    finally:
        for connector, names in sides:
            for name in names:
                delattr(connector, name)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    spec = ModelSpec(
        layers=LAYERS, hidden=32, heads=HEADS, kv_heads=HEADS, head_dim=CONTENT // 2, intermediate=32, vocabulary=300,
        max_tokens=1024,
    )  # fmt: skip
    model = model_config(build_model(args.folder / "model", spec))
    blocks = 2 + args.requests * (2 + (PROMPT + args.steps + 32) // BLOCK)
    engine = Engine(model, 0, ahead=1, num_blocks=blocks)
    try:
        worker = engine.workers[0]
        with worker._layers():
            ours = Side(engine.scheduler, worker.connector, engine)
            plain, empty = other_side(engine, model), other_side(engine, model, EMPTY)
            for other in (plain, empty):
                paired(ours, other, min(50, args.steps), args.requests)  # warm
            rounds, over_empty = [], []
            for _ in range(args.rounds):
                rounds.append(paired(ours, plain, args.steps, args.requests))
                over_empty.append(paired(ours, empty, args.steps, args.requests))
            ours.layers = plain.layers = MODEL_LAYERS
            with_layers = [paired(ours, plain, args.steps, args.requests) for _ in range(max(1, args.rounds // 2))]
            ours.layers = plain.layers = 0
            with timed_hooks(engine.connector, worker.connector) as hooks:
                paired(ours, plain, args.steps, args.requests)
        loads, leases = sum(engine.all_loads.values()), sum(engine.leases.values())
        assert not loads and not leases, "a step that hands nothing over was to be measured"
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        engine.close()
    return result_of(rounds, over_empty, with_layers, hooks, args)


def result_of(
    rounds: list[list[tuple[float, float]]],
    over_empty: list[list[tuple[float, float]]],
    with_layers: list[list[tuple[float, float]]],
    hooks: dict[str, list[float]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    differences = [(a - b) * 1e6 for pairs in rounds for a, b in pairs]
    low, high = difference_interval(differences, [0.0])
    over = [(a - b) * 1e6 for pairs in over_empty for a, b in pairs]
    over_low, over_high = difference_interval(over, [0.0])
    in_layers = statistics.median((a - b) * 1e6 for pairs in with_layers for a, b in pairs)
    by_hook = {name: round(statistics.median(seconds) * 1e6, 2) for name, seconds in hooks.items() if seconds}
    step = statistics.median(differences)
    rows = [
        {
            "round": number,
            "with_us": round(statistics.median(a for a, _ in pairs) * 1e6, 2),
            "without_us": round(statistics.median(b for _, b in pairs) * 1e6, 2),
            "difference_us": round(statistics.median(a - b for a, b in pairs) * 1e6, 2),
        }
        for number, pairs in enumerate(rounds)
    ]
    figures = {
        "idle_step_us": round(step, 2),
        "idle_step_low_us": low,
        "idle_step_high_us": high,
        "over_empty_us": round(statistics.median(over), 2),
        "over_empty_low_us": over_low,
        "over_empty_high_us": over_high,
        "idle_step_without_us": round(statistics.median(row["without_us"] for row in rows), 2),
        "hooks_scheduler_us": round(sum(by_hook.get(name, 0) for name in SCHEDULER_HOOKS), 2),
        "hooks_worker_us": round(sum(by_hook.get(name, 0) for name in WORKER_HOOKS), 2),
        "layer_us": round((in_layers - step) / MODEL_LAYERS, 2),
    }
    how = {"steps": args.steps, "rounds": args.rounds, "requests": args.requests}
    return {"ratios": {}, "figures": figures, "hooks_us": by_hook, "rows": rows, **how}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=400, help="pairs of steps in one round, 440 at most")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=8, help="that decode, 8 at most")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "idle_step", help="for the model")
    args = parser.parse_args()
    if not (1 <= args.steps <= 440 and args.rounds >= 1 and 1 <= args.requests <= 8):
        given = f"--steps {args.steps}, --rounds {args.rounds}, --requests {args.requests}"
        parser.error(f"{given}: expected steps from 1 to 440, 1 round or more, requests from 1 to 8")
    result = measure(args)
    for row in result["rows"]:
        print("round {round}: {with_us} us with, {without_us} us without, difference {difference_us} us".format(**row))
    for name, value in (result["hooks_us"] | result["figures"]).items():
        print(f"{name:36}{value:9.2f}")
    verdict = "reached" if result["figures"]["over_empty_us"] <= LIMIT_US else "NOT REACHED"
    print(f"over_empty_us <= {LIMIT_US}  {verdict}")
    report.write(args.json, result)


if __name__ == "__main__":
    main()
