"""P is gone, silent, restarted, or its lease is over: recomputed or failed as the policy says, and in time."""

from __future__ import annotations

import time

import pytest

from kvferry.connector.config import Settings
from kvferry.connector.worker.loop import QUIET_SECONDS
from tests.support.engines import free_port
from tests.support.inside import consumer_of
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.paused_transfer import in_mid_transfer
from tests.vllm.stepped import PREFILL, ROOM, Engine, EngineGroup, Lines, eventually, hand_over, loaded, run, settle

pytestmark = pytest.mark.vllm
IDS = prompt(400)
POLICIES = pytest.mark.parametrize("policy", ["recompute", "fail"])
PLANES = pytest.mark.parametrize("plane", ["shm", "cma"])
"""One over which P pushes, and one over which D reads P's pages by itself."""


def ended(d: Engine, request_id: str, policy: str = "recompute") -> None:
    """Run D alone: the request ends as the policy says, and D serves on."""
    answer = d.finish(request_id)
    if policy == "recompute":
        assert answer.finish == "length"
        again = d.step_loads[request_id]  # the last prompt token, in the step whose load failed
        assert d.computed[request_id] == len(answer.prompt) + again, "all of the prompt, once"
        assert answer.external == 0, "nothing counts as loaded"
    else:
        assert answer.finish == "error" and d.computed[request_id] == 0
    settle(d)
    d.finish(d.add(prompt(50, seed=77)))
    settle(d)


@PLANES
def test_nothing_moves_in_mid_transfer(group: EngineGroup, plane: str) -> None:
    p, d = group.pair(extra={"plane": plane})
    request_id, paused = in_mid_transfer(p, d, IDS, p.prefill(IDS))
    d.let_time_pass(1000)
    ended(d, request_id)
    paused.open()
    settle(p, d)


@PLANES
def test_the_lease_ends_while_d_reads(group: EngineGroup, plane: str) -> None:
    """P's cap comes in mid-transfer, and its blocks go to another prompt: what was read is not used."""
    p, d = group.pair(extra={"plane": plane})
    request_id, paused = in_mid_transfer(p, d, IDS, p.prefill(IDS))
    p.let_time_pass(40_000)
    run([p], lambda: p.idle)
    p.finish(p.add(prompt(500, 6), max_tokens=5))
    paused.open()
    ended(d, request_id)
    settle(p, d)


@PLANES
def test_d_goes_in_mid_transfer(group: EngineGroup, plane: str) -> None:
    p, d = group.pair(extra={"plane": plane})
    _, paused = in_mid_transfer(p, d, IDS, p.prefill(IDS))
    d.close()
    paused.open()
    p.let_time_pass(40_000)
    settle(p)


def test_p_is_restarted_on_the_same_port(group: EngineGroup, lines: Lines) -> None:
    p, d = group.engine(0, extra=ROOM | {"side_channel_port": free_port()}), group.engine(1, extra=ROOM)
    hand_over(p, d, IDS)  # so that D knows the old one
    settle(p, d)
    second = p.prefill(prompt(300, 1))
    p.close()
    eventually(lambda: not p.thread.alive)
    reborn = group.engine(0, extra={"side_channel_port": second["kvferry"]["ranks"][0][3]})
    request_id = d.add(prompt(300, 1), second)
    ended(d, request_id)
    assert lines("hand-over of", request_id, "failed")
    hand_over(reborn, d, prompt(200, 2))
    settle(reborn, d)


def test_a_failed_load_leaves_a_shared_prefix_alone(group: EngineGroup, runner: str) -> None:
    """Another request runs on the blocks of the local prefix hit: they are good, and it must not be thrown back."""
    p, d = group.pair(runner=runner)
    running = d.add(IDS[:100], max_tokens=40)
    d.step()
    params = p.prefill(IDS)
    p.close()
    request_id = d.add(IDS, params)
    assert d.finish(running, request_id).finish == "length"
    assert d.computed[running] == 100 + 39
    assert d.computed[request_id] == 400 - 100 // BLOCK * BLOCK
    settle(d)


@POLICIES
def test_one_of_two_ranks_fails(group: EngineGroup, policy: str, runner: str) -> None:
    """The other rank's success counts for nothing, and the request is told of once."""
    p, d = group.pair(runner=runner, tp=2, policy=policy)
    params = p.prefill(IDS)
    p.workers[1].connector.shutdown()
    p.step()
    ended(d, d.add(IDS, params), policy)


def test_a_fault_of_our_own_that_strikes_every_turn(
    group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines pass all the same: the request is recomputed, and the log is not flooded. D's release is lost with its
    connection, which nobody looked at: P's lease ends by time."""
    monkeypatch.setattr(Settings, "handshake_timeout_seconds", 1.0)
    p, d = group.pair(extra={"lease_seconds": 5.0})
    consumer = consumer_of(d)

    def broken(now: float, ready: object) -> bool:
        raise RuntimeError("planted")

    consumer.serve = broken
    began = time.monotonic()
    request_id = d.add(IDS, p.prefill(IDS))
    d.finish(request_id, beside=[p])
    assert d.computed[request_id] == len(IDS)
    assert len(lines("unexpected error")) <= 2 + (time.monotonic() - began) / QUIET_SECONDS
    del consumer.serve
    eventually(lambda: not consumer.links)  # the one whose handshake nobody looked at fails, and is closed
    for seed in range(5, 25):  # a handshake may take longer than 1 s, on a host that stands still
        again = d.add(prompt(60, seed), p.prefill(prompt(60, seed)))
        d.finish(again, beside=[p])
        if d.origins[again].theirs == 59:
            break
    loaded(p, d, again)
    settle(p, d)


@PLANES
def test_shutting_down_with_leases_and_loads_open(group: EngineGroup, plane: str) -> None:
    p, d = group.pair(extra={"plane": plane})
    params = p.prefill(IDS)
    p.add(prompt(100, 9), PREFILL)
    in_mid_transfer(p, d, IDS, params)
    d.close()
    p.close()  # neither waits for more than its thread to end
    eventually(lambda: not p.thread.alive and not d.thread.alive)
    d.close()
    p.close()
