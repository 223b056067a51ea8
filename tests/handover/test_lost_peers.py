"""Peers that die, stop, restart or go silent. Each ends in bounded time, and what comes after works."""

from __future__ import annotations

import secrets
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.transport.control.key_file import shared_key
from kvferry.transport.control.keys import Keys
from tests.handover.scenario import (
    OURS,
    PATIENT,
    PLANES,
    SMALL,
    THEIRS,
    TOKENS,
    WIDE,
    Gate,
    RankGroup,
    another_works,
    has_all,
    leased,
)
from tests.support.engines import free_port
from tests.support.inside import sends_of
from tests.support.pair import RemoteRank, remote_peer
from tests.support.ranks import Rank, let_time_pass, load_plan, no_failed_link, peer, reason_of, wait

QUICK: dict[str, Any] = {"transfer_timeout_seconds": 3.0, "handshake_timeout_seconds": 6.0, "lease_seconds": 4.0}
FORM: dict[str, Any] = {**SMALL, **WIDE, **QUICK}
"""For hand-overs large enough to be caught in the middle."""


def warm_up(p: RemoteRank, d: Rank, name: str = "warm") -> None:
    """Whole hand-overs from a process until one succeeds: time-outs as short as here may strike a loaded machine, and
    what is left of an earlier fault may be noticed late."""
    p.fill(THEIRS, TOKENS)
    for number in range(10):
        assert wait(lambda: no_failed_link(d))
        load(p, d, f"{name}{number}")
        assert wait(lambda number=number: f"{name}{number}-d" in d.received, [d])
        if f"{name}{number}-d" not in d.failed:
            break
    assert f"{name}{number}-d" not in d.failed and has_all(d)


def load(p: RemoteRank, d: Rank, name: str = "req", token: bytes | None = None) -> bytes:
    token = token or p.grant(f"{name}-p", THEIRS, TOKENS)
    d.worker.post(load_plan(f"{name}-d", token, remote_peer([p]), OURS, 0, TOKENS))
    return token


def far_and_near(group: RankGroup, plane: str) -> tuple[RemoteRank, Rank]:
    """P in a process of its own, and D; a hand-over has succeeded."""
    p, d = group.process(plane=plane, **FORM), group.rank(plane=plane, engine_id="engine-d", **FORM)
    warm_up(p, d)
    return p, d


@pytest.mark.parametrize("plane", PLANES)
def test_p_is_killed(group: RankGroup, plane: str) -> None:
    """In mid-transfer; then before the handshake of the next load."""
    p, d = far_and_near(group, plane)
    gate = Gate(d.consumer, "collect", lambda now: False)
    load(p, d)
    assert wait(lambda: gate.calls > 3, [d])
    gone, token = remote_peer([p]), p.grant("idle-p", THEIRS, TOKENS)
    p.kill()
    gate.open()
    assert wait(lambda: "req-d" in d.failed, [d])
    d.worker.post(load_plan("idle-d", token, gone, OURS, 0, TOKENS))
    assert wait(lambda: "idle-d" in d.failed, [d])
    warm_up(group.process(plane=plane, **FORM), d, "after")


def test_a_p_that_stops_is_read_all_the_same(group: RankGroup) -> None:
    """Over cma D needs P for nothing once the grant is posted: its pages are what they were."""
    p, d = far_and_near(group, "cma")
    token = p.grant("req-p", THEIRS, TOKENS)
    (link,) = d.consumer.links
    assert link.board is not None and wait(lambda: link.board.find(token) is not None, [d])
    p.signal(signal.SIGSTOP)
    load(p, d, token=token)
    assert wait(lambda: "req-d" in d.received, [d])
    assert "req-d" not in d.failed and has_all(d)
    p.signal(signal.SIGCONT)
    assert wait(lambda: "req-p" in p.sent(), [d])


@pytest.mark.parametrize(
    "plane", ["shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx)]
)  # over cma P has no part in the read
def test_d_is_killed(group: RankGroup, plane: str) -> None:
    form = {**FORM, "plane": plane, "lease_seconds": 600.0}
    p, d = group.rank(**form), group.process(engine_id="engine-d", **form)
    p.fill(THEIRS, TOKENS)
    gate = Gate(p.producer, "pump", lambda now: False)
    d.load("req-d", leased(p), peer([p]), OURS, TOKENS)
    assert wait(lambda: bool(sends_of(p).turns), [p])
    d.kill()
    gate.open()
    assert wait(lambda: not sends_of(p).turns, [p])
    let_time_pass(p, 1000)
    assert wait(lambda: p.sent == {"req-p"}, [p]), "the lease ends without D"
    another_works(p, group.rank(engine_id="other", **{**form, **PATIENT}))


def test_p_says_nothing_of_a_d_that_has_ended_before_it(group: RankGroup, caplog: pytest.LogCaptureFixture) -> None:
    p, d = group.pair()
    another_works(p, d)
    d.close()
    p.close()  # and says so to the sessions that it has
    assert [line for line in caplog.messages if "dropped" in line] == []


def test_p_restarted_on_the_same_port(group: RankGroup) -> None:
    """Another life of the same engine at the same address has none of the old one's KV."""
    form = {"side_channel_port": free_port(), **QUICK}
    old, d = group.process(**form), group.rank(engine_id="engine-d", **QUICK)
    warm_up(old, d)
    former = remote_peer([old])
    old.close()
    new = group.process(**form)
    d.worker.post(load_plan("req-d", secrets.token_bytes(16), former, OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.failed, [d])
    warm_up(new, d, "after")


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A port that nobody answers at, and that nobody else gets."""
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        yield mute


def nobody(mute: socket.socket) -> PeerEngine:
    address = RankAddress(0, 0, "127.0.0.1", mute.getsockname()[1], bytes(16), Keys(shared_key()).fingerprint)
    return PeerEngine("nobody", 1, 1, 30.0, (address,))


def test_a_silent_peer(group: RankGroup, mute: socket.socket) -> None:
    d = group.rank(handshake_timeout_seconds=600.0)
    mute.listen()
    d.worker.post(load_plan("req-d", bytes(16), nobody(mute), OURS, 0, TOKENS))
    assert wait(lambda: bool(d.consumer.loads.running), [d]) and not d.received
    let_time_pass(d, 601)
    assert wait(lambda: d.failed == {"req-d"}, [d])
    assert reason_of(d) == "timeout", "that of the settings, before the connection itself gives up"


def test_a_dead_peer_does_not_hold_up_the_others(group: RankGroup, mute: socket.socket) -> None:
    p, d = group.pair(of_d={"handshake_timeout_seconds": 600.0})
    mute.listen()
    d.worker.post(load_plan("dead", bytes(16), nobody(mute), [30], 0, 10))
    another_works(p, d)
    assert "dead" not in d.received
