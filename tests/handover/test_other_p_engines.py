"""Hand-overs of a prompt that several P engines hold: a failed one is tried again from the next P."""

from __future__ import annotations

import errno
import secrets
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.link import Link
from kvferry.connector.wire.step_plan import KeepLease, PeerEngine, RemoteLease, StepPlan
from tests.handover.gates import Gate, halves
from tests.handover.opening import OURS, THEIRS, TOKENS
from tests.handover.rank_group import RankGroup
from tests.handover.retries import LONG, WIDE, Reports, figures, load_of, pair
from tests.support.rank_process import remote_peer
from tests.support.ranks import grant, load_plan, peer, wait


def both(name: str, token: bytes, first: PeerEngine, other: bytes, second: PeerEngine) -> StepPlan:
    """Load a prompt that two P engines hold."""
    plan = load_plan(name, token, first, OURS, 0, TOKENS)
    keeps = (*plan.keeps, KeepLease(name, other, second, False))
    (load,) = plan.loads
    return replace(plan, keeps=keeps, loads=(replace(load, alternatives=(RemoteLease(other, second),)),))


def test_a_killed_p_is_followed_by_the_other_one(group: RankGroup) -> None:
    """The first P's pages have other bytes, so that none of them can be left on D."""
    settings = {**LONG, "plane": "tcp"}
    first = group.process(settings=settings, engine_id="engine-first", **WIDE)
    other, d = pair(group, plane="tcp")
    reports = Reports(d)
    token, second = first.grant("req-first", THEIRS, TOKENS), grant([other], "req-other", THEIRS, TOKENS)
    collect = Gate(halves(d)[1], "collect", lambda now: False)
    d.worker.post(both("req-d", token, remote_peer([first]), second, peer([other])))
    assert wait(lambda: collect.calls > 3 and load_of(d) is not None, [d])
    assert set(halves(d)[1].leases.kept) == {token, second}, "both leases are kept alive"
    first.kill()
    collect.open()
    assert wait(lambda: d.received == {"req-d"} and other.sent == {"req-other"}, [other, d])
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS)) and not d.failed and reports.ok == [True]
    assert not halves(d)[1].leases.kept and figures(other)["leases"] == {"released": 1}


def test_without_a_failure_both_leases_are_released_once(group: RankGroup) -> None:
    p, d = pair(group)
    other = group.rank(settings=Settings(**LONG), engine_id="engine-other", **WIDE)
    other.fill(THEIRS, TOKENS)
    token, second = grant([p], "req-p", THEIRS, TOKENS), grant([other], "req-other", THEIRS, TOKENS)
    d.worker.post(both("req-d", token, peer([p]), second, peer([other])))
    assert wait(lambda: d.received == {"req-d"} and p.sent | other.sent == {"req-p", "req-other"}, [p, d, other])
    assert not d.failed and figures(p)["leases"] == figures(other)["leases"] == {"released": 1}


def test_an_error_at_one_lease_does_not_keep_the_other(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pair(group)
    other = group.rank(settings=Settings(**LONG), engine_id="engine-other", **WIDE)
    token, second = grant([p], "req-p", THEIRS, TOKENS), grant([other], "req-other", THEIRS, TOKENS)
    keeper = halves(d)[1].leases
    release = keeper.release

    def breaks(lease: bytes, *rest: Any) -> None:
        if lease == token:
            raise RuntimeError("planted")
        release(lease, *rest)

    monkeypatch.setattr(keeper, "release", breaks)
    d.worker.post(both("req-d", token, peer([p]), second, peer([other])))
    assert wait(lambda: d.received == {"req-d"} and other.sent == {"req-other"}, [p, d, other])
    assert not d.failed and set(keeper.kept) == {token} and figures(d)["failed"] == {"internal": 1}


def test_a_lease_that_is_over_is_followed_by_the_other_p(group: RankGroup) -> None:
    p, d = pair(group, ask_hold_seconds=0.1)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(both("req-d", secrets.token_bytes(16), peer([p]), token, peer([p])))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and figures(d)["retried"] == {"expired": 1}


@pytest.mark.parametrize("how", ["no link", "no address", "a strange rank"])
def test_a_first_attempt_that_cannot_begin_is_followed_by_the_other_p(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    p, d = pair(group)
    gone = peer([p])

    def no_descriptor(rank_context: Any, address: Any, *args: Any, **more: Any) -> Link:
        if address.port == 1:
            raise OSError(errno.EMFILE, "planted")
        return Link(rank_context, address, *args, **more)

    monkeypatch.setattr("kvferry.connector.decode_side.links.Link", no_descriptor)
    rank = {"no link": {"port": 1}, "no address": {"pp_rank": 1}, "a strange rank": {"tp_rank": 7}}[how]
    gone = replace(gone, ranks=(replace(p.address, **rank),))
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(both("req-d", secrets.token_bytes(16), gone, token, peer([p])))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and not halves(d)[1].leases.kept
    assert figures(d)["retried"] == {"peer_lost" if how == "no link" else "incompatible": 1}
