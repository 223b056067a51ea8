"""P is gone, silent, restarted, or its lease is over: recomputed or failed as the policy says, and in time."""

from __future__ import annotations

import time

import pytest

from kvferry.connector.decode_side import link
from kvferry.connector.decode_side.load_state import LoadPhase
from kvferry.connector.engine.loop import QUIET_SECONDS
from kvferry.connector.wire import messages
from tests.support.inside import consumer_of, leases_of
from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.paused_transfer import PausedTransfer, in_phase, no_board
from tests.vllm.stepped import (
    PREFILL,
    Engine,
    eventually,
    let_time_pass,
    prefill,
    renew_after,
    run,
    settle,
    transfer_thread_of,
)
from tests.vllm.stepped_rank import RUNNERS

pytestmark = pytest.mark.vllm
IDS = prompt(400)
POLICIES = ("recompute", "fail")
PLANES = ("shm", "cma")
"""One over which P pushes, and one over which D reads P's pages by itself."""
SHORT = {"handshake_timeout_seconds": 1.0, "transfer_timeout_seconds": 1.0}


def ended(d: Engine, request_id: str, policy: str, tokens: int = len(IDS)) -> None:
    """Run D alone: the request ends as the policy says, and D serves on."""
    run([d], lambda: d.answers[request_id].finish is not None)
    if policy == "recompute":
        assert d.answers[request_id].finish == "length"
        again = d.step_loads[request_id]  # the last prompt token, in the step whose load failed
        assert d.computed[request_id] == tokens + again, "all of the prompt, once"
        assert d.answers[request_id].external == 0, "nothing counts as loaded"
    else:
        assert d.answers[request_id].finish == "error"
        assert d.computed[request_id] == 0
    settle(d)
    after = d.add(prompt(50, seed=77))
    run([d], lambda: d.answers[after].finish == "length")
    settle(d)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_p_is_gone_before_d_asks(
    group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch, policy: str, runner: str
) -> None:
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    p, d = group.pair(policy=policy, runner=runner, extra=SHORT)
    params = prefill(p, IDS)
    p.close()
    request_id = d.add(IDS, params)
    ended(d, request_id, policy)
    assert len(lines("hand-over of", request_id, "failed", "400 tokens not loaded")) == 1


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("policy", POLICIES)
def test_p_goes_in_mid_transfer(group: EngineGroup, policy: str, plane: str) -> None:
    p, d = group.pair(policy=policy, extra={"plane": plane})
    params = prefill(p, IDS)
    paused = PausedTransfer(p, reader=d, chunks=1)
    p.step()
    request_id = d.add(IDS, params)
    d.step()
    in_phase(d, request_id, LoadPhase.MOVING, lambda job: job.nbytes > 0)
    p.close()
    ended(d, request_id, policy)
    paused.open()


SILENCE = {
    "at the handshake": (messages.Hello, "shm"),
    "at the ask": (messages.Ask, "shm"),
    "at the commit": (messages.Commit, "cma"),
}


@pytest.mark.parametrize("where", SILENCE)
def test_p_goes_silent(group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(link, "BoardReader", no_board)
    silent_on, plane = SILENCE[where]
    p, d = group.pair(extra={**SHORT, "plane": plane})
    params = prefill(p, IDS)
    p.step()
    paused = PausedTransfer(p, silent_on)
    request_id = d.add(IDS, params)
    ended(d, request_id, "recompute")
    assert len(lines("hand-over of", request_id, "failed")) == 1
    paused.open()
    settle(p, d)


@pytest.mark.parametrize("plane", PLANES)
def test_nothing_moves_in_mid_transfer(group: EngineGroup, plane: str) -> None:
    p, d = group.pair(extra={**SHORT, "plane": plane})
    params = prefill(p, IDS)
    p.step()
    paused = PausedTransfer(p, reader=d, chunks=1)
    request_id = d.add(IDS, params)
    ended(d, request_id, "recompute")
    paused.open()
    settle(p, d)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lease_is_over_before_d_asks(group: EngineGroup, lines: Lines, policy: str) -> None:
    p, d = group.pair(policy=policy, extra={"lease_seconds": 0.2})
    params = prefill(p, IDS)
    run([p], lambda: p.idle)
    assert len(lines("lease of", "expired")) == 1
    request_id = d.add(IDS, params)
    ended(d, request_id, policy)
    settle(p, d)


def test_the_cap_ends_a_lease_however_often_it_is_renewed(group: EngineGroup, lines: Lines) -> None:
    p, d = group.pair(extra={"lease_seconds": 600.0, "lease_cap_seconds": 1200.0})
    running = d.add(prompt(450, seed=3), max_tokens=60)
    d.step()
    request_id = d.add(IDS, prefill(p, IDS))
    d.step()
    p.step()
    eventually(lambda: bool(leases_of(transfer_thread_of(p))))
    for seconds in (500, 1000):
        renew_after(p, d, seconds)
    let_time_pass(p, 1300)
    run([p], lambda: p.idle)
    assert len(lines("lease of", "cap of 1200 s")) == 1
    d.abort(running)
    ended(d, request_id, "recompute")


@pytest.mark.parametrize("plane", PLANES)
def test_the_lease_ends_while_d_reads(group: EngineGroup, plane: str) -> None:
    """P's cap comes in mid-transfer, and its blocks go to another prompt: what was read is not used."""
    p, d = group.pair(extra={"plane": plane})
    params = prefill(p, IDS)
    p.step()
    paused = PausedTransfer(p, reader=d, chunks=1)
    request_id = d.add(IDS, params)
    d.step()
    in_phase(d, request_id, LoadPhase.MOVING, lambda job: job.nbytes > 0)
    let_time_pass(p, 1000)
    run([p], lambda: p.idle)
    other = p.add(prompt(500, 6), max_tokens=5)
    run([p], lambda: p.answers[other].finish is not None)
    paused.open()
    ended(d, request_id, "recompute")
    settle(p, d)


def test_the_lease_ends_before_the_commit(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes have come, but P may have given the blocks to another prompt since: none of them is used."""
    monkeypatch.setattr(link, "BoardReader", no_board)
    p, d = group.pair(extra={"plane": "cma"})
    params = prefill(p, IDS)
    p.step()
    paused = PausedTransfer(p, messages.Commit)
    request_id = d.add(IDS, params)
    d.step()
    in_phase(d, request_id, LoadPhase.COMMITTING)
    let_time_pass(p, 1000)
    run([p], lambda: p.idle)
    paused.open()
    ended(d, request_id, "recompute")
    settle(p, d)


@pytest.mark.parametrize("plane", PLANES)
def test_d_goes_in_mid_transfer(group: EngineGroup, plane: str) -> None:
    p, d = group.pair(extra={"plane": plane})
    params = prefill(p, IDS)
    p.step()
    paused = PausedTransfer(p, reader=d, chunks=1)
    request_id = d.add(IDS, params)
    d.step()
    in_phase(d, request_id, LoadPhase.MOVING, lambda job: job.nbytes > 0)
    d.close()
    paused.open()
    let_time_pass(p, 1000)
    settle(p)


def test_p_is_restarted_on_the_same_port(group: EngineGroup, lines: Lines) -> None:
    p, d = group.pair()
    params = prefill(p, IDS)
    port = params["kvferry"]["ranks"][0][3]
    request_id = d.add(IDS, params)  # a first hand-over, so that D knows the old one
    run([p, d], lambda: d.answers[request_id].finish is not None)
    settle(p, d)
    second = prefill(p, prompt(300, 1))
    p.close()
    reborn = group.engine(0, extra={"side_channel_port": port})
    request_id = d.add(prompt(300, 1), second)
    ended(d, request_id, "recompute", tokens=300)
    assert lines("hand-over of", request_id, "failed")
    fresh = prompt(200, 2)
    third = d.add(fresh, prefill(reborn, fresh))
    run([reborn, d], lambda: d.answers[third].finish is not None)
    assert d.origins[third].theirs == 199
    settle(reborn, d)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_failed_load_leaves_a_shared_prefix_alone(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Another request runs on the blocks of the local prefix hit: they are good, and it must not be thrown back."""
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    p, d = group.pair(runner=runner, extra=SHORT)
    running = d.add(IDS[:100], max_tokens=100)
    d.step()
    params = prefill(p, IDS)
    p.close()
    request_id = d.add(IDS, params)
    run([d], lambda: d.answers[request_id].finish is not None)
    assert d.answers[request_id].finish == "length"
    run([d], lambda: d.answers[running].finish is not None)
    assert d.computed[running] == 100 + 99
    assert d.computed[request_id] == 400 - 100 // BLOCK * BLOCK
    settle(d)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_one_of_two_ranks_fails(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, policy: str, runner: str) -> None:
    """The other rank's success counts for nothing, and the request is told of once."""
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    p, d = group.pair(runner=runner, tp=2, policy=policy)
    params = prefill(p, IDS)
    p.workers[1].connector.shutdown()
    p.step()
    request_id = d.add(IDS, params)
    ended(d, request_id, policy)


def test_many_requests_for_a_dead_p_fail_fast(group: EngineGroup) -> None:
    p, d = group.pair(extra={"handshake_timeout_seconds": 30.0})
    several = [prompt(40, seed) for seed in range(6)]
    all_params = [prefill(p, ids) for ids in several]
    p.close()
    began = time.monotonic()
    names = [d.add(ids, params) for ids, params in zip(several, all_params, strict=True)]
    run([d], lambda: all(d.answers[name].finish is not None for name in names))
    assert time.monotonic() - began < 60, "not one after the other"
    settle(d)


def test_a_dead_p_does_not_hold_up_another(group: EngineGroup) -> None:
    p, d = group.pair()
    silent = group.engine(0)
    dead = prefill(silent, IDS)
    PausedTransfer(silent, messages.Hello)
    waiting = d.add(IDS, dead)
    d.step()
    ids = prompt(60, 4)
    good = d.add(ids, prefill(p, ids))
    run([p, d], lambda: d.answers[good].finish is not None)
    assert d.origins[good].theirs == 59
    assert d.answers[waiting].finish is None
    let_time_pass(d, 1000)
    run([p, d], lambda: d.answers[waiting].finish is not None)
    settle(p, d)


def test_a_fault_of_our_own_that_strikes_every_turn(group: EngineGroup, lines: Lines) -> None:
    """Deadlines pass all the same: the request is recomputed, and the log is not flooded."""
    p, d = group.pair(extra={"handshake_timeout_seconds": 1.0})
    consumer = consumer_of(transfer_thread_of(d))

    def broken(now: float) -> bool:
        raise RuntimeError("planted")

    consumer.serve = broken
    began = time.monotonic()
    request_id = d.add(IDS, prefill(p, IDS))
    run([p, d], lambda: d.answers[request_id].finish is not None)
    assert d.computed[request_id] == len(IDS)
    assert len(lines("unexpected error")) <= 2 + (time.monotonic() - began) / QUIET_SECONDS
    del consumer.serve
    eventually(lambda: not consumer.links)  # the one whose handshake nobody looked at fails, and is closed
    for seed in range(5, 25):  # a handshake may take longer than 1 s, on a host that stands still
        again = d.add(prompt(60, seed), prefill(p, prompt(60, seed)))
        run([p, d], lambda again=again: d.answers[again].finish is not None)
        if d.origins[again].theirs == 59:
            break
    assert d.origins[again].theirs == 59
    settle(p, d)


@pytest.mark.parametrize("plane", PLANES)
def test_shutting_down_with_leases_and_loads_open(group: EngineGroup, plane: str) -> None:
    p, d = group.pair(extra={"plane": plane})
    params = prefill(p, IDS)
    p.add(prompt(100, 9), PREFILL)
    p.step()
    PausedTransfer(p, reader=d, chunks=1)
    request_id = d.add(IDS, params)
    d.step()
    in_phase(d, request_id, LoadPhase.MOVING)
    d.close()
    p.close()  # neither waits for more than its thread to end
    assert not transfer_thread_of(p).alive and not transfer_thread_of(d).alive
    d.close()
    p.close()
