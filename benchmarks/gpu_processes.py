"""One process of ``gpu_planes.py``: an end of one way to move blocks, on the one GPU that it sees.

``python gpu_contenders.py CONFIG``, a ``Config`` in JSON; one line per command on stdin, one per answer on stdout.
Here are our data planes, as an engine drives them: a worker half per form of cache, time taken from the posting of the
step to the report of its last load, so with ask, grant, copy and commit. The others are in ``gpu_rivals``.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import sys
import threading
import time
import traceback
from collections import deque
from typing import Any

import msgspec
import torch
from gpu_baselines import LocalEndpoint, MappedEndpoint, NixlEndpoint, TorchEndpoint, UcxxRawEndpoint
from gpu_caches import Cache
from gpu_cases import Config, Form, Point, Side, num_blocks
from gpu_endpoints import Endpoint
from gpu_methods import MOVING

from kvferry.connector.config import Settings
from kvferry.connector.engine.worker import WorkerHalf
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    Load,
    PeerEngine,
    RankAddress,
    StepPlan,
    pack_ids,
)
from tests.support.inside import sends_of

SETTLE_SECONDS = 15.0
"""How long P may take to hear that its leases are over."""


class Warnings(logging.Handler):
    """The last lines that our library logged, which say why a hand-over failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=3)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


WARNINGS = Warnings()


class PlaneEndpoint(Endpoint):
    """Real caches and worker halves, one per form."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = Settings(
            lease_seconds=60.0, handshake_timeout_seconds=20.0, transfer_timeout_seconds=20.0, **config.settings
        )
        self.caches: dict[Form, Cache] = {}
        self.workers: dict[Form, WorkerHalf] = {}
        self.count = 0
        for form, blocks in num_blocks(config.points, self.side).items():
            cache = self.caches[form] = Cache.own(form, blocks, self.device)
            cache.fill(self.generator)
            self.workers[form] = self._worker(cache)
        self.tables = {point.name: self._tables(point) for point in config.points}

    def form(self, point: Point) -> Form:
        return point.p if self.side == "p" else point.d

    def _worker(self, cache: Cache) -> WorkerHalf:
        form = cache.form
        layers = tuple(f"model.layers.{n}.attn" for n in range(form.layers))
        info = RankInfo(f"engine-{self.side}", 0, 1, 0, 1, {"architectures": "Noise"})
        worker = WorkerHalf(self.settings, info, [LayerGroup(form.kind, layers, form.block, form.heads)])
        worker.register({name: cache.tensor(n) for n, name in enumerate(layers)}, cache.num_blocks)
        return worker

    def _tables(self, point: Point) -> list[bytes]:
        """Block ids of each hand-over, as the engine packs them."""
        form = self.form(point)
        return [pack_ids(ids.tolist()) for ids in point.tables(self.side, form, self.caches[form].num_blocks)]

    def scrub(self, point: str, way: str) -> None:
        self.caches[self.form(self.points[point])].fill(self.generator)

    def digest(self, point: str, way: str, side: Side) -> str:
        it = self.points[point]
        cache = self.caches[self.form(it)]
        return cache.digest(it.tables(self.side, cache.form, cache.num_blocks), it.tokens)

    def name(self) -> str:
        self.count += 1
        return f"{self.side}{self.count}"

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()


def _key(form: Form) -> str:
    return msgspec.json.encode(form).decode()


class PlaneSource(PlaneEndpoint):
    """P: grants leases; what D then reads is its own affair."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.leased: dict[Form, set[str]] = {form: set() for form in self.workers}
        self.starts: list[float] = []
        for worker in self.workers.values():
            self._note_starts(worker)

    def _note_starts(self, worker: WorkerHalf) -> None:
        """When P begins with the data of a read that it was asked for."""
        assert worker._transfer_thread is not None
        pushes = sends_of(worker._transfer_thread)
        begin = pushes.begin

        def noted(*args: Any) -> Any:
            self.starts.append(time.perf_counter())
            return begin(*args)

        pushes.begin = noted

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        addresses = {_key(form): worker.address for form, worker in self.workers.items()}
        return msgspec.json.encode(addresses).decode()

    def serve(self, point: str, way: str, repeats: int) -> list[list[str]]:
        """Tokens of the leases, per repeat one of each hand-over."""
        it = self.points[point]
        leases = [
            [LeaseGrant(self.name(), secrets.token_bytes(16), it.tokens, (ids,)) for ids in self.tables[point]]
            for _ in range(repeats)
        ]
        self.starts.clear()
        all_of_them = tuple(lease for some in leases for lease in some)
        self.leased[it.p].update(lease.request_id for lease in all_of_them)
        self.workers[it.p].post(StepPlan(leases=all_of_them, idle=True))
        return [[lease.token.hex() for lease in some] for some in leases]

    def synchronize(self) -> list[float]:
        """When it began with each hand-over whose data it was asked for."""
        end = time.monotonic() + SETTLE_SECONDS
        for form in self.leased:
            while self.leased[form]:
                self.leased[form] -= self.workers[form].take_results().sent
                if time.monotonic() > end:
                    left, self.leased[form] = len(self.leased[form]), set()
                    raise RuntimeError(f"{left} leases were not released within {SETTLE_SECONDS:g} s")
                time.sleep(5e-4)
        return self.starts


class PlaneTarget(PlaneEndpoint):
    """D: loads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.consumers = {form: secrets.token_bytes(16) for form in self.workers}
        self.peers: dict[str, dict[str, RankAddress]] = {}
        self.spinning: threading.Event | None = None

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        assert blob is not None
        self.peers[peer] = msgspec.json.decode(blob, type=dict[str, RankAddress])
        return None

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        it = self.points[point]
        worker, address = self.workers[it.d], self.peers[peer][_key(it.p)]
        engine = PeerEngine("engine-p", 1, 1, self.settings.lease_seconds, (address,))
        found = []
        for tokens in ticket:
            names = [self.name() for _ in tokens]
            named = list(zip(names, map(bytes.fromhex, tokens), self.tables[point], strict=True))
            plan = StepPlan(
                consumer=self.consumers[it.d],
                keeps=tuple(KeepLease(name, token, engine, False) for name, token, _ in named),
                loads=tuple(Load(name, token, engine, (ids,), ((0, it.tokens),)) for name, token, ids in named),
                idle=True,
            )
            started = time.perf_counter()
            self._load(worker, plan, set(names))
            ended = time.perf_counter()
            found.append(ended if way.endswith(MOVING) else ended - started)
        self._check_plane(worker)
        return found

    def _load(self, worker: WorkerHalf, plan: StepPlan, waiting: set[str]) -> None:
        failed: set[str] = set()
        worker.post(plan)
        while waiting:
            results = worker.take_results()
            waiting -= results.received
            failed |= results.failed
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(plan.loads)} hand-overs failed")

    def _check_plane(self, worker: WorkerHalf) -> None:
        assert worker.rank_context is not None
        figures = worker.rank_context.stats.take()
        used = set() if figures is None else set(figures["finished"])
        if used != {self.settings.plane}:
            raise RuntimeError(f"moved over {sorted(used)}, {self.settings.plane} was asked for")

    def spin(self, on: bool) -> None:
        """A thread that never lets the GIL go by itself, as long as it is on."""
        if self.spinning is not None:
            self.spinning.set()
            self.spinning = None
        if on:
            over = self.spinning = threading.Event()

            def run() -> None:
                count = 0
                while not over.is_set():
                    for _ in range(10_000):
                        count += 1

            threading.Thread(target=run, daemon=True).start()


KINDS: dict[str, type[Endpoint]] = {
    "nixl": NixlEndpoint,
    "mapped": MappedEndpoint,
    "ucxx_raw": UcxxRawEndpoint,
    "torch": TorchEndpoint,
    "local": LocalEndpoint,
}


def _end(config: Config) -> Endpoint:
    if config.device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    if config.kind == "plane":
        return (PlaneSource if config.role == "source" else PlaneTarget)(config)
    return KINDS[config.kind](config)


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=Config)
    torch.set_num_threads(1)
    logging.getLogger("vllm.kvferry").addHandler(WARNINGS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    end: Endpoint | None = None
    for line in sys.stdin:
        order = json.loads(line)
        command = order.pop("do")
        WARNINGS.lines.clear()
        try:
            if command == "open":
                end, answer = _end(config), None
                gc.collect()
                gc.freeze()  # as vLLM does: a full collection of what its libraries make takes 70 ms
            else:
                answer = getattr(end, command)(**order)
            print(json.dumps({"answer": answer}), file=answers, flush=True)
        except Exception as error:
            traceback.print_exc()
            said = "; ".join([f"{type(error).__name__}: {error}", *WARNINGS.lines])
            print(json.dumps({"error": said}), file=answers, flush=True)
    if end is not None:
        end.close()


if __name__ == "__main__":
    main()
