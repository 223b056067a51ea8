"""Hand-overs of a prompt that several P engines hold: a failed one is tried again from the next P."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.decode_side.link import Link
from kvferry.connector.wire.step_plan import KeepLease, PeerEngine, RemoteLease, StepPlan
from tests.handover.retries import LONG, Reports, load_of, pair
from tests.handover.scenario import OURS, THEIRS, TOKENS, WIDE, Gate, RankGroup, breaks, has_all, leased
from tests.support.rank_process import remote_peer
from tests.support.ranks import Rank, grant, load_plan, peer, wait


def both(token: bytes, first: PeerEngine, other: bytes, second: PeerEngine) -> StepPlan:
    """Load a prompt that two P engines hold."""
    plan = load_plan("req-d", token, first, OURS, 0, TOKENS)
    keeps = (*plan.keeps, KeepLease("req-d", other, second, False))
    (load,) = plan.loads
    return replace(plan, keeps=keeps, loads=(replace(load, alternatives=(RemoteLease(other, second),)),))


def test_a_killed_p_is_followed_by_the_other_one(group: RankGroup) -> None:
    """The first P's pages have other bytes, so that none of them can be left on D."""
    first = group.process(plane="tcp", **LONG, **WIDE)
    other, d = pair(group, plane="tcp")
    reports = Reports(d)
    token, second = first.grant("req-first", THEIRS, TOKENS), grant([other], "req-other", THEIRS, TOKENS)
    collect = Gate(d.consumer, "collect", lambda now: False)
    d.worker.post(both(token, remote_peer([first]), second, peer([other])))
    assert wait(lambda: collect.calls > 3 and load_of(d) is not None, [d])
    assert set(d.consumer.renewals.kept) == {token, second}, "both leases are kept alive"
    first.kill()
    collect.open()
    assert wait(lambda: d.received == {"req-d"} and other.sent == {"req-other"}, [other, d])
    assert has_all(d) and not d.failed and reports.ok == [True]
    assert not d.consumer.renewals.kept and other.figures()["leases"] == {"released": 1}


@pytest.mark.parametrize("error", [False, True])
def test_without_a_failure_both_leases_are_released_once(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, error: bool
) -> None:
    """``error``: at the first lease. It does not keep the other."""
    p, d = pair(group)
    other = group.rank(engine_id="engine-other", **LONG, **WIDE)
    token, second = leased(p), grant([other], "req-other", THEIRS, TOKENS)
    keeper = d.consumer.renewals
    release = keeper.release

    def breaks_once(lease: bytes, *rest: Any) -> None:
        breaks() if error and lease == token else release(lease, *rest)

    monkeypatch.setattr(keeper, "release", breaks_once)
    d.worker.post(both(token, peer([p]), second, peer([other])))
    ps: list[Rank] = [other] if error else [p, other]
    assert wait(lambda: d.received == {"req-d"} and all(rank.sent for rank in ps), [p, d, other])
    assert not d.failed and all(rank.figures()["leases"] == {"released": 1} for rank in ps)
    if error:
        assert set(keeper.kept) == {token} and d.figures()["failed"] == {"internal": 1}


@pytest.mark.parametrize("how", ["over", "no link", "no address", "a strange rank"])
def test_a_first_attempt_that_cannot_begin_is_followed_by_the_other_p(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """``over``: its lease is."""
    p, d = pair(group, ask_hold_seconds=0.1)

    def no_descriptor(rank_context: Any, address: Any, *args: Any, **more: Any) -> Link:
        return breaks() if address.port == 1 else Link(rank_context, address, *args, **more)

    monkeypatch.setattr("kvferry.connector.decode_side.links.Link", no_descriptor)
    rank = {"over": {}, "no link": {"port": 1}, "no address": {"pp_rank": 1}, "a strange rank": {"tp_rank": 7}}[how]
    gone = replace(peer([p]), ranks=(replace(p.address, **rank),))
    token = leased(p)
    d.worker.post(both(secrets.token_bytes(16), gone, token, peer([p])))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and not d.consumer.renewals.kept
    reason = {"over": "expired", "no link": "peer_lost"}.get(how, "incompatible")
    assert d.figures()["retried"] == {reason: 1}
