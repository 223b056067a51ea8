"""Beside vLLM's ExampleConnector and OffloadingConnector in MultiConnector no token is wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.request import RequestStatus

from kvferry.connector.vllm import compat
from kvferry.connector.wire.messages import Ask
from kvferry.connector.wire.step_plan import StepResults
from kvferry.connector.worker.worker import WorkerHalf
from kvferry.transport.errors import ConfigError
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.paused_transfer import PausedTransfer
from tests.vllm.stepped import (
    KVFERRY,
    PATIENT,
    PREFILL,
    ROOM,
    Engine,
    EngineGroup,
    Lines,
    hand_over,
    loaded,
    run,
    settle,
)

pytestmark = pytest.mark.vllm
IDS = prompt(100)
STORED = 98 // BLOCK * BLOCK
"""The example connector keeps the whole blocks before the last two tokens."""
ORDER = pytest.mark.parametrize("first", [True, False], ids=["kvferry-first", "kvferry-second"])
AHEAD = pytest.mark.parametrize("ahead", [0, 1], ids=["in-step", "a-step-ahead"])


def multi(group: EngineGroup, origin: int, store: Path, *, first: bool, **kwargs: Any) -> Engine:
    ours = KVFERRY | {"kv_connector_extra_config": ROOM | PATIENT}
    example = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }  # fmt: skip
    return group.multi(origin, *((ours, example) if first else (example, ours)), **kwargs)


def files(store: Path) -> int:
    return len(list(store.glob("*/*.safetensors")))


@ORDER
def test_a_reset_reaches_both(group: EngineGroup, tmp_path: Path, first: bool) -> None:
    p = multi(group, 0, tmp_path, first=first)
    p.prefill(IDS)
    assert not p.scheduler.reset_prefix_cache(reset_connector=True)
    run([p], lambda: p.idle)
    assert p.scheduler.reset_prefix_cache(reset_connector=True)


@ORDER
@AHEAD
def test_d_loads_what_is_not_stored(group: EngineGroup, tmp_path: Path, first: bool, ahead: int) -> None:
    p, d = group.engine(0, ahead=ahead), multi(group, 1, tmp_path, first=first, ahead=ahead)
    assert d.loads[hand_over(p, d, IDS, max_tokens=4)] == 1
    aborted = d.add(prompt(200, 1), p.prefill(prompt(200, 1)))
    d.step()
    d.abort(aborted)
    settle(p, d)
    assert d.stats, "figures pass through"


@ORDER
@AHEAD
def test_d_has_the_choice(group: EngineGroup, tmp_path: Path, lines: Lines, first: bool, ahead: int) -> None:
    """The first child that has something is taken; where that is the store, P is released, and at once."""
    p, d = group.engine(0, ahead=ahead), multi(group, 1, tmp_path, first=first, ahead=ahead)
    stored = d.add(IDS, max_tokens=4)
    d.finish(stored)
    assert d.computed[stored] == 103 and files(tmp_path) == len(d.layers)
    assert d.scheduler.reset_prefix_cache()
    for cache in d.workers[0].caches.values():
        cache.fill_(-1.0)
    request_id = hand_over(p, d, IDS, 99 if first else 0, max_tokens=4)
    settle(p, d)
    assert d.origins[request_id].ours == (0 if first else STORED) and d.loads[request_id] == first
    assert d.computed[request_id] == (4 if first else 100 - STORED + 3)
    assert not lines("expired")


def test_another_child_takes_the_handshake(
    group: EngineGroup, tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector passes on what its first child tells; without our addresses nothing can be handed over."""
    greeting = KVConnectorHandshakeMetadata()
    monkeypatch.setattr(ExampleConnector, "get_handshake_metadata", lambda self: greeting)
    p = multi(group, 0, tmp_path, first=False)
    assert len(lines("list KVFerryConnector first")) == 1
    assert p.finish(p.add(IDS, PREFILL)).params is None
    settle(p)
    assert multi(group, 0, tmp_path, first=True).prefill(IDS)


STORE: dict[str, Any] = {
    "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "HostStoreSpec", "spec_module_path": "tests.support.host_store", "cpu_bytes_to_use": 1 << 22,
    },
}  # fmt: skip


def beside_store(
    group: EngineGroup, origin: int = 1, *, first: bool = True, store: Any = STORE, **kwargs: Any
) -> Engine:
    ours = KVFERRY | {"kv_connector_extra_config": ROOM | PATIENT | {"plane": "tcp"}}
    return group.multi(origin, *((ours, store) if first else (store, ours)), **kwargs)


def copiers(engine: Engine) -> list[Any]:
    children = [worker.connector.sub_connectors for worker in engine.workers]
    return [
        child.connector_worker.worker for each in children for child in each if isinstance(child, OffloadingConnector)
    ]


def hold(engine: Engine, held: bool) -> None:
    for copier in copiers(engine):
        copier.held = held


def stored(engine: Engine) -> None:
    """Step until the store has made the copies that it began."""
    hold(engine, held=False)
    for _ in range(3):
        engine.step()
    run([engine], lambda: at_rest(engine), 60.0)


def at_rest(engine: Engine) -> bool:
    """No request is left, all blocks are free, and the store makes no copy. Its loads are not counted."""
    nothing = not engine.scheduler.requests and engine.free_blocks == engine.baseline
    return nothing and not any(copier.jobs for copier in copiers(engine))


def forget(engine: Engine) -> None:
    """Only the store has what was computed and loaded."""
    assert engine.scheduler.reset_prefix_cache()
    for worker in engine.workers:
        for cache in worker.caches.values():
            cache.fill_(-1.0)


def store(engine: Engine, ids: Sequence[int]) -> None:
    """Have the engine compute a prompt, and only its store keep it."""
    engine.finish(engine.add(ids))
    stored(engine)
    forget(engine)


def found_right(engine: Engine, ids: Sequence[int], least: int = 1) -> None:
    """What the store has of a prompt is right, and is so much."""
    forget(engine)
    name = engine.add(ids, max_tokens=4)
    engine.finish(name)
    assert engine.origins[name].ours + engine.origins[name].theirs >= least, "the store had less"
    stored(engine)


@ORDER
@AHEAD
def test_both_load(group: EngineGroup, first: bool, ahead: int) -> None:
    """What P has, the store keeps when it was loaded; what only the store has is loaded from it."""
    p, d = group.engine(0, ahead=ahead), beside_store(group, first=first, ahead=ahead)
    hand_over(p, d, IDS, max_tokens=4)
    stored(d)
    found_right(d, IDS, 96)
    store(d, prompt(100, 1))
    name = d.add(prompt(100, 1), p.prefill(prompt(100, 1)), max_tokens=4)
    d.finish(name, beside=[p])
    assert d.origins[name].ours == (0 if first else 96)
    settle(p)


@AHEAD
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_blocks_of_a_copy_under_way(group: EngineGroup, runner: str, ahead: int) -> None:
    """vllm#46951: the store copies the blocks of a prompt after its request has ended. Blocks are few, so a load is
    given them, and the store must have ended its copy before the load writes."""
    p, d = group.engine(0), beside_store(group, num_blocks=10, runner=runner, ahead=ahead)
    params = p.prefill(prompt(100, 1))
    hold(d, held=True)
    own = d.add(IDS)
    other = d.add(prompt(100, 1), params)
    loaded(p, d, other)
    assert d.answers[own].finish is not None
    stored(d)
    found_right(d, IDS, 96)
    found_right(d, prompt(100, 1), 96)


@ORDER
@pytest.mark.parametrize("how", ["loaded", "aborted", "failed"])
def test_nothing_is_stored_of_a_load_under_way(group: EngineGroup, first: bool, how: str) -> None:
    """vllm#35092: a store must not keep blocks that P's KV has not reached."""
    p, d = group.engine(0, extra={"plane": "tcp"}), beside_store(group, first=first)
    params = p.prefill(IDS)
    pause = PausedTransfer(p, Ask)
    name = d.add(IDS, params)
    beside = d.add(prompt(60, 2), max_tokens=20)
    d.finish(beside, beside=[p])
    assert d.status(name) is RequestStatus.WAITING_FOR_REMOTE_KVS
    if how == "aborted":
        d.abort(name)
    if how == "failed":
        d.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(4):
        d.step()
    pause.open()
    if how != "aborted":
        d.finish(name, beside=[p])
    run([p, d], lambda: p.idle and at_rest(d), 60.0)
    stored(d)
    found_right(d, IDS, 0 if how == "aborted" else 96)


def test_a_store_that_cannot_be_kept_apart_is_refused(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release may keep its copies in another way."""
    config = beside_store(group).config
    compat.check_children(config)
    monkeypatch.setattr(OffloadingConnectorScheduler, "update_state_after_alloc", lambda *allocated: None)
    with pytest.raises(ConfigError, match="leave one of the two out"):
        compat.check_children(config)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_child_reports_what_it_did_not_load(group: EngineGroup, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#50546, LMCache#4355: a store loads what MultiConnector gave to KVFerry, and reports it; once while P's KV is
    under way, once when it is there."""
    p, d = group.engine(0, extra={"plane": "tcp"}), beside_store(group, tp=tp)
    told: set[str] = set()
    monkeypatch.setattr(OffloadingConnector, "get_finished", lambda self, finished: (set(), {*told}))
    params = p.prefill(IDS)
    pause = PausedTransfer(p, Ask)
    name = d.add(IDS, params, max_tokens=8)
    d.step()
    told.add(name)
    d.step()
    d.step()
    told.clear()
    d.finish(d.add(prompt(60, 2), max_tokens=20), beside=[p])
    assert d.status(name) is RequestStatus.WAITING_FOR_REMOTE_KVS
    pause.open()
    run([p, d], lambda: bool(d.answers[name].tokens), 60.0)
    told.add(name)
    d.step()
    told.clear()
    loaded(p, d, name)


def test_after_a_reset_another_s_report_frees_no_block(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose cache was reset reports its loads at once, and our rank has not ended its own yet."""
    told: set[str] = set()
    silent: list[bool] = []
    take = WorkerHalf.take_results
    monkeypatch.setattr(WorkerHalf, "take_results", lambda self: StepResults() if silent else take(self))
    monkeypatch.setattr(OffloadingConnector, "get_finished", lambda self, finished: (set(), {*told}))
    p, d = group.engine(0, extra={"plane": "tcp"}), beside_store(group)
    params = p.prefill(IDS)
    pause = PausedTransfer(p, Ask)
    name = d.add(IDS, params, max_tokens=4)
    d.step()
    silent.append(True)
    d.scheduler.reset_prefix_cache(reset_connector=True)
    told.add(name)
    for _ in range(3):
        d.step()
        assert d.free_blocks < d.baseline and d.status(name) is RequestStatus.WAITING_FOR_REMOTE_KVS
    told.clear()
    silent.clear()
    pause.open()
    run([p, d], lambda: p.idle and not d.scheduler.requests and d.free_blocks == d.baseline, 60.0)
    assert d.answers[name].finish == "length"


@pytest.mark.parametrize("seed", range(3))
def test_at_random(group: EngineGroup, seed: int) -> None:
    """Prompts that begin alike, few blocks, copies that end late, requests that end early: every token is right, and
    nothing is left."""
    rng = random.Random(seed)
    p = group.engine(0, extra={"plane": "tcp"}, num_blocks=161)
    d = beside_store(
        group, num_blocks=30, scheduling="priority", ahead=seed % 3, runner=("v1", "v2")[seed % 2], tp=1 + seed % 2
    )
    names: list[str] = []
    for _ in range(200):
        turn = rng.random()
        if turn < 0.25 and len(d.scheduler.requests) < 6:
            ids = prompt(450, rng.randrange(4))[: rng.choice((17, 60, 100, 130, 200, 300))]
            params = p.prefill(ids) if rng.random() < 0.7 else None
            names.append(d.add(ids, params, max_tokens=rng.choice((1, 3, 20)), priority=rng.randrange(3)))
        elif turn < 0.3 and names:
            d.abort(rng.choice(names))
        elif turn < 0.31:
            d.scheduler.reset_prefix_cache(reset_connector=True)
        elif turn < 0.4:
            hold(d, held=rng.random() < 0.5)
        p.step()
        d.step()
    hold(d, held=False)
    run([p, d], lambda: p.idle and at_rest(d), 60.0)
    assert d.loads.total()
