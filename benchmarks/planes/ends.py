"""One process of ``planes.py``: an end of one way to move blocks, on the one GPU that it sees.

``python ends.py CONFIG``, a ``Config`` in JSON; one line per command on stdin, one per answer on stdout. Here are our
data planes as an engine drives them: a worker half per form of cache, time taken from the posting of the step to the
report of its last load, so with ask, grant, copy and commit. ``channels.py`` has the planes alone, ``baselines.py`` all
else.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import secrets
import sys
import time
import traceback
from collections import deque
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.planes.endpoints import Cache, Endpoint
from benchmarks.planes.points import Config, Form, Point, Side, num_blocks
from kvferry.connector.config import Settings
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
from kvferry.connector.worker.worker import WorkerHalf

SETTLE_SECONDS = 15.0
"""How long P may take to hear that its leases are over."""


WARNINGS: deque[str] = deque(maxlen=3)
"""The last lines that our library logged, which say why a hand-over failed."""


class PlaneEndpoint(Endpoint):
    """Real caches and worker halves, one per form."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.settings = Settings(lease_seconds=60.0, handover_timeout_seconds=240.0, **config.settings)
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

    def cache_of(self, point: Point, way: str, side: Side) -> Cache:
        return self.caches[self.form(point)]

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
        all_of_them = tuple(lease for some in leases for lease in some)
        self.leased[it.p].update(lease.request_id for lease in all_of_them)
        self.workers[it.p].post(StepPlan(leases=all_of_them, idle=True))
        return [[lease.token.hex() for lease in some] for some in leases]

    def synchronize(self) -> None:
        """Wait until D has released all leases."""
        end = time.monotonic() + SETTLE_SECONDS
        for form in self.leased:
            while self.leased[form]:
                self.leased[form] -= self.workers[form].take_results().sent
                if time.monotonic() > end:
                    left, self.leased[form] = len(self.leased[form]), set()
                    raise RuntimeError(f"{left} leases were not released within {SETTLE_SECONDS:g} s")
                time.sleep(5e-4)


class PlaneTarget(PlaneEndpoint):
    """D: loads."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.consumers = {form: secrets.token_bytes(16) for form in self.workers}
        self.peers: dict[str, dict[str, RankAddress]] = {}

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
                decode_engine=self.consumers[it.d],
                keeps=tuple(KeepLease(name, token, engine, False) for name, token, _ in named),
                loads=tuple(Load(name, token, engine, (ids,), ((0, it.tokens),)) for name, token, ids in named),
                idle=True,
            )
            started = time.perf_counter()
            self._load(worker, plan, set(names))
            found.append(time.perf_counter() - started)
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


def _end(config: Config) -> Endpoint:
    """Each kind loads only the libraries that it needs."""
    if config.device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.init()
    is_source = config.role == "source"
    if config.kind == "plane":
        return (PlaneSource if is_source else PlaneTarget)(config)
    if config.kind in ("channel", "pull"):
        from benchmarks.planes import channels

        kinds = {
            "channel": (channels.PlaneTarget, channels.PlaneSource), "pull": (channels.PullTarget, channels.PullSource),
        }  # fmt: skip
        return kinds[config.kind][is_source](config)
    from benchmarks.planes import baselines

    rivals: dict[str, type[Endpoint]] = {
        "nixl": baselines.NixlEndpoint, "mapped": baselines.MappedEndpoint,
        "raw sockets": baselines.SocketsRaw, "memcpy": baselines.Memcpy,
    }  # fmt: skip
    return rivals[config.kind](config)


def main() -> None:
    config = msgspec.json.decode(sys.argv[1], type=Config)
    torch.set_num_threads(1)
    log = logging.Handler(logging.WARNING)
    log.emit = lambda record: WARNINGS.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.kvferry").addHandler(log)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    end: Endpoint | None = None
    orders = FileIO(0)  # takes one line and no more: a source that works until the next must find it on stdin
    for line in iter(orders.readline, b""):
        order = json.loads(line)
        command = order.pop("do")
        WARNINGS.clear()
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
            said = "; ".join([f"{type(error).__name__}: {error}", *WARNINGS])
            print(json.dumps({"error": said}), file=answers, flush=True)
    if end is not None:
        end.close()


if __name__ == "__main__":
    main()
