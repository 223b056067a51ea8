"""Peers that die, stop, restart or go silent. Each ends in bounded time, and what comes after works."""

from __future__ import annotations

import secrets
import signal
import socket
import time
from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.transport.control.key_file import shared_key
from kvferry.transport.control.keys import Keys
from tests.handover.gates import Gate, halves
from tests.handover.opening import OURS, PLANES, THEIRS, TOKENS, another_works
from tests.handover.rank_group import RankGroup
from tests.support.engines import free_port
from tests.support.inside import sends_of
from tests.support.rank_process import RemoteRank, remote_peer
from tests.support.ranks import SOON, Rank, grant, let_time_pass, load_plan, no_failed_link, peer, reason_of, wait

QUICK: dict[str, Any] = {"transfer_timeout_seconds": 3.0, "handshake_timeout_seconds": 6.0, "lease_seconds": 4.0}
WIDE = {"content": 512, "layers": 16}


def far(group: RankGroup, plane: str, engine_id: str = "engine", **more: float) -> RemoteRank:
    """A rank in a process of its own, for hand-overs large enough to be caught in the middle."""
    return group.process(settings=quick(plane, **more), engine_id=engine_id, **WIDE)


def near(group: RankGroup, plane: str, engine_id: str = "engine", **more: float) -> Rank:
    """Such a rank in this process."""
    return group.rank(settings=Settings(**quick(plane, **more)), engine_id=engine_id, **WIDE)


def quick(plane: str, **more: float) -> dict[str, Any]:
    return {"plane": plane, "slot_bytes": 64 << 10, "staging_bytes": 1 << 20, **QUICK, **more}


def warm_up(p: RemoteRank, d: Rank, name: str = "warm") -> None:
    """Whole hand-overs from a process until one succeeds: time-outs as short as here may strike a loaded machine, and
    what is left of an earlier fault may be noticed late."""
    for number in range(10):
        assert wait(lambda: no_failed_link(d))
        token = p.grant(f"{name}{number}-p", THEIRS, TOKENS)
        d.worker.post(load_plan(f"{name}{number}-d", token, remote_peer([p]), OURS, 0, TOKENS))
        assert wait(lambda number=number: f"{name}{number}-d" in d.received, [d])
        if f"{name}{number}-d" not in d.failed:
            break
    assert f"{name}{number}-d" not in d.failed
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("when", ["idle", "in flight"])
def test_p_is_killed(group: RankGroup, plane: str, when: str) -> None:
    p, d = far(group, plane), near(group, plane, "engine-d")
    p.fill(THEIRS, TOKENS)
    warm_up(p, d)
    token = p.grant("req-p", THEIRS, TOKENS)
    gate = Gate(halves(d)[1], "collect", lambda now: False) if when == "in flight" else None
    if when == "idle":
        p.kill()
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    if gate is not None:
        assert wait(lambda: gate.calls > 3, [d])
        p.kill()
        gate.open()
    assert wait(lambda: d.received >= {"req-d"}, [d], SOON)
    assert "req-d" in d.failed
    new = far(group, plane)
    new.fill(THEIRS, TOKENS)
    warm_up(new, d, "after")


def test_a_p_that_stops_is_read_all_the_same(group: RankGroup) -> None:
    """Over cma D needs P for nothing once the grant is posted: its pages are what they were."""
    p, d = far(group, "cma"), near(group, "cma", "engine-d")
    p.fill(THEIRS, TOKENS)
    warm_up(p, d)
    token = p.grant("req-p", THEIRS, TOKENS)
    (link,) = halves(d)[1].links
    assert link.board is not None and wait(lambda: link.board.find(token) is not None, [d])
    p.signal(signal.SIGSTOP)
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.received, [d], SOON)
    assert "req-d" not in d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    p.signal(signal.SIGCONT)
    assert wait(lambda: "req-p" in p.sent(), [d], SOON)


@pytest.mark.parametrize("plane", PLANES[1:])  # over cma D need not wait for it
def test_p_stops_and_goes_on(group: RankGroup, plane: str) -> None:
    p, d = far(group, plane), near(group, plane, "engine-d")
    p.fill(THEIRS, TOKENS)
    warm_up(p, d)
    token = p.grant("req-p", THEIRS, TOKENS)
    p.signal(signal.SIGSTOP)
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: bool(halves(d)[1].loads.running), [d])
    assert "req-d" not in d.received, "D waits for P"
    let_time_pass(d, 2 * QUICK["transfer_timeout_seconds"])
    assert wait(lambda: "req-d" in d.received, [d], SOON)
    assert "req-d" in d.failed
    for name in d.layers:
        d.caches[name].fill_(-7)
    p.signal(signal.SIGCONT)
    time.sleep(0.5)
    d.poll()
    assert all((d.caches[name] == -7).all() for name in d.layers), "a late chunk was written into pages given back"
    assert wait(lambda: "req-p" in p.sent(), [d], SOON)
    warm_up(p, d, "after")


@pytest.mark.parametrize("plane", PLANES[1:])  # over cma P has no part in the read
def test_d_is_killed(group: RankGroup, plane: str) -> None:
    p, d = near(group, plane, lease_seconds=600.0), far(group, plane, "engine-d", lease_seconds=600.0)
    p.fill(THEIRS, TOKENS)
    gate = Gate(halves(p)[0], "pump", lambda now: False)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.load("req-d", token, peer([p]), OURS, TOKENS)
    assert wait(lambda: bool(sends_of(p).turns), [p])
    d.kill()
    gate.open()
    assert wait(lambda: not sends_of(p).turns, [p], SOON)
    let_time_pass(p, 1000)
    assert wait(lambda: p.sent == {"req-p"}, [p], SOON), "the lease ends without D"
    another_works(p, near(group, plane, "other", lease_seconds=600.0))


def test_p_restarted_on_the_same_port(group: RankGroup) -> None:
    """Another life of the same engine at the same address has none of the old one's KV."""
    form = {"settings": {"side_channel_port": free_port(), **QUICK}}
    old = group.process(**form)
    d = group.rank(settings=Settings(**QUICK), engine_id="engine-d")
    old.fill(THEIRS, TOKENS)
    warm_up(old, d)
    former = remote_peer([old])
    old.close()
    new = group.process(**form)
    d.worker.post(load_plan("req-d", secrets.token_bytes(16), former, OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.failed, [d], SOON)
    new.fill(THEIRS, TOKENS)
    warm_up(new, d, "after")


def nobody(port: int) -> PeerEngine:
    return PeerEngine(
        "nobody", 1, 1, 30.0, (RankAddress(0, 0, "127.0.0.1", port, bytes(16), Keys(shared_key()).fingerprint),)
    )


def test_nobody_listens(group: RankGroup) -> None:
    d = group.rank(settings=Settings(**QUICK))
    with socket.socket() as taken:  # bound, so that nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        d.worker.post(load_plan("req-d", bytes(16), nobody(taken.getsockname()[1]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [d])
    assert reason_of(d) == "peer_lost"


def test_a_silent_peer(group: RankGroup) -> None:
    d = group.rank(settings=Settings(handshake_timeout_seconds=1.0))
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        d.worker.post(load_plan("req-d", bytes(16), nobody(mute.getsockname()[1]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [d])
    assert reason_of(d) == "timeout", "that of the settings, before the connection itself gives up"


def test_a_dead_peer_does_not_hold_up_the_others(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(settings=Settings(handshake_timeout_seconds=600.0), engine_id="engine-d")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        d.worker.post(load_plan("dead", bytes(16), nobody(mute.getsockname()[1]), [30], 0, 10))
        p.fill(THEIRS, TOKENS)
        another_works(p, d)
        assert "dead" not in d.received
