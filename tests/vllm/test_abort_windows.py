"""A request is aborted, on D or on P, at every stage of its hand-over: no hang, no leak, no byte out of place."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from kvferry.connector.decode_side import link
from kvferry.connector.decode_side.fetch import FetchState, ReadPhase
from kvferry.connector.wire import messages
from kvferry.connector.worker import worker
from tests.support.inside import leases_of
from tests.vllm.labelled import prompt
from tests.vllm.paused_transfer import PausedTransfer, in_phase, job_of, no_board
from tests.vllm.stepped import PREFILL, Engine, EngineGroup, Lines, Pair, eventually, hand_over, loaded, run, settle

pytestmark = pytest.mark.vllm
IDS = prompt(400)


@pytest.fixture(autouse=True)
def no_idle_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the step that starts a load would wait for its end, and there would be no window."""
    monkeypatch.setattr(worker, "IDLE_WAIT_SECONDS", 0.0)


def loading(d: Engine, params: object) -> str:
    """A request of D that has its blocks, and whose load starts."""
    request_id = d.add(IDS, params)
    d.step()
    assert d.status(request_id) is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request_id


def test_while_no_block_is_free(pair: Pair) -> None:
    p, d = pair
    running = d.add(prompt(450, seed=3), max_tokens=60)
    d.step()
    request_id = d.add(IDS, p.prefill(IDS))
    d.step()
    assert d.status(request_id) is RequestStatus.WAITING, "no room for it yet"
    d.abort(request_id)
    d.step()
    run([p], lambda: p.idle)  # released at once, not when D has room
    d.finish(running)
    settle(p, d)


STAGES: dict[str, tuple[Callable[[Engine, Engine], PausedTransfer], FetchState | ReadPhase]] = {
    "handshaking": (lambda p, d: PausedTransfer(p, messages.Hello), FetchState.CONNECTING),
    "attaching": (lambda p, d: PausedTransfer(p, messages.Attach), FetchState.CONNECTING),
    "asked": (lambda p, d: PausedTransfer(p, messages.Ask), ReadPhase.ASKED),
    "granted": (lambda p, d: PausedTransfer(p, reader=d, chunks=0), ReadPhase.MOVING),
    "in flight": (lambda p, d: PausedTransfer(p, reader=d, chunks=1), ReadPhase.MOVING),
    "committing": (lambda p, d: PausedTransfer(p, messages.Commit), FetchState.COMMITTING),
}


@pytest.mark.parametrize("stage", STAGES)
def test_while(pair: Pair, group: EngineGroup, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    p, d = pair
    if stage == "asked":  # nobody asks who reads posted grants
        p, d = group.pair(ahead=1, extra={"plane": "shm"})
    elif stage == "committing":  # P need not be asked about what it has pushed
        monkeypatch.setattr(link, "BoardReader", no_board)
        p, d = group.pair(ahead=1, extra={"plane": "cma"})
    make, phase = STAGES[stage]
    params = p.prefill(IDS)
    p.step()  # the lease reaches the worker
    paused = make(p, d)
    request_id = loading(d, params)
    in_phase(d, request_id, phase, lambda job: stage != "in flight" or job.nbytes > 0)
    if stage == "in flight":
        read = job_of(d, request_id).reads[0]
        assert read.tags or read.writes, "more is to come"
    d.abort(request_id)
    assert request_id in d.scheduler.requests, "its blocks stay until nothing can write them"
    run([d], lambda: d.idle)  # P is still held: D does not need it for this
    busy = d.add(prompt(450, seed=99), max_tokens=30)  # takes all free blocks, so that a late write would be seen
    d.step()
    paused.open()
    d.finish(busy, beside=[p])
    settle(p, d)
    assert leases_of(p) == {}


def test_rejected_before_it_was_admitted(pair: Pair, lines: Lines) -> None:
    """vLLM submits such a request only to have it aborted, so that P is told; its prompt is a placeholder."""
    p, d = pair
    params = p.prefill(IDS)
    p.step()
    eventually(lambda: bool(leases_of(p)))
    d.add([0], params, rejected=True)
    settle(p, d)
    assert not lines("prefills locally")


@pytest.mark.parametrize("stage", ["prefilling", "decoding"])
def test_on_p_while(group: EngineGroup, stage: str) -> None:
    """No answer will tell D of its prompt: nothing is held for anybody."""
    p, _ = group.pair(max_batched=64)
    request_id = p.add(IDS, PREFILL, max_tokens=50)
    run([p], lambda: p.computed[request_id] > (100 if stage == "prefilling" else 403))
    p.abort(request_id)
    settle(p)
    assert p.answers[request_id].params is None and not p.leases


def test_on_p_after_it_was_handed_over(pair: Pair) -> None:
    """The prompt is done, its blocks are the lease's: the abort comes too late to matter."""
    p, d = pair
    request_id = p.add(IDS, PREFILL)
    params = p.finish(request_id).params
    p.abort(request_id)
    loaded(p, d, d.add(IDS, params))
    settle(p, d)


def test_bursts_of_aborts_then_normal_load(pair: Pair) -> None:
    """Four bursts of 300 hand-overs that are all given up, at any stage. After each burst all blocks of both engines
    are free without another request, and at the end a prompt is loaded as ever. Where loads go inside steps, each
    waits for its copy, and a burst has 60."""
    p, d = pair
    rng, count = random.Random(13), 60 if d._ahead else 300
    for burst in range(4):
        ids = {p.add(tokens := prompt(20, seed=count * burst + n), PREFILL): tokens for n in range(count)}
        under_way: list[str] = []
        while ids or under_way:
            p.step()
            for name in [name for name in ids if p.answers[name].finish is not None]:
                under_way.append(d.add(ids.pop(name), p.answers[name].params))
            for _ in range(rng.randrange(3)):
                d.step()
            for request_id in [each for each in under_way if rng.random() < 0.5]:
                under_way.remove(request_id)
                d.abort(request_id)
        settle(p, d)
    hand_over(p, d, IDS)
    settle(p, d)
