"""A load that fails in the middle is tried again, from the next P too; a host that stands still ends none."""

from __future__ import annotations

import errno
import logging
import secrets
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.decode_side import fetch
from kvferry.connector.decode_side.fetch import FetchState
from kvferry.connector.decode_side.link import Link
from kvferry.connector.decode_side.plane_choice import avoided_seconds
from kvferry.connector.wire.step_plan import KeepLease, PeerEngine, RankAddress, RemoteLease, StepPlan
from kvferry.connector.worker.loop import PostedPlan
from tests.handover.retries import LONG, Reports, Trickle, cut, in_the_middle, load_of, loads_of, moving, pair
from tests.handover.scenario import (
    OTHERS,
    OURS,
    PATIENT,
    THEIRS,
    TOKENS,
    WIDE,
    Gate,
    RankGroup,
    another_works,
    begin,
    breaks,
    ended,
    forget,
    has_all,
    leased,
    load_from,
)
from tests.support.inside import leases_of, listener_of, plans_of, sends_of
from tests.support.pair import remote_peer
from tests.support.ranks import Rank, grant, hold_up, let_time_pass, load_plan, peer, put_forward, wait

AVOIDED = avoided_seconds(120.0)
"""How long D avoids a plane with these settings."""


def changes(d: Rank) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Failures that an attempt followed, planes that were left, planes that were used."""
    found = d.figures()
    retried, changed = (found["counts"].get(f"num_{what}", {}) for what in ("retries", "plane_changes"))
    return retried, changed, list(found["finished"])


@pytest.mark.parametrize(("broken", "then"), [("tcp", "shm"), ("shm", "tcp")])
def test_a_plane_that_breaks_is_left_for_the_next(
    group: RankGroup, caplog: pytest.LogCaptureFixture, broken: str, then: str
) -> None:
    caplog.set_level("DEBUG", "vllm.kvferry")
    p, d = pair(group, (broken, then))
    trickle, reports = Trickle(p, 3), Reports(d)
    begin(p, d)
    assert wait(lambda: in_the_middle(d), [p, d])
    cut(d)
    trickle.go_on()
    assert ended(p, d) and reports.ok == [True]
    assert changes(d) == ({"peer_lost": 1}, {broken: 1}, [then])
    assert p.lease_ends() == {"released": 1}
    (changed,) = [line for line in caplog.messages if "is changed from" in line]
    assert f"from {broken} to {then} for {AVOIDED:g} s: {broken}: " in changed
    assert wait(lambda: "req-d done" in caplog.text)  # the line follows the report
    assert "attempt 2" in next(text for text in caplog.messages if "req-d done" in text)
    another_works(p, d)
    assert changes(d)[2] == [then], "for some time"
    let_time_pass(d, AVOIDED + 1)
    assert wait(lambda: not list(d.consumer.links))
    forget(p, d)
    another_works(p, d)
    assert changes(d)[2] == [broken], "the faster plane comes back"


def test_each_plane_on_which_nothing_moves_is_left_in_turn(group: RankGroup) -> None:
    """No attempt begins on a link that the last one has just lost, and no plane comes back before all were tried."""
    p, d = pair(group, ("tcp", "shm", "cma"))
    trickle, reports = Trickle(p, 0), Reports(d)
    begin(p, d)
    for number, seconds in ((1, 31), (2, 95)):
        assert wait(lambda number=number: moving(d, 1) and load_of(d).number == number, [p, d])
        let_time_pass(d, seconds)
    assert wait(lambda: d.received == {"req-d"}, [p, d]), "P need not send over the third one"
    trickle.go_on()
    assert ended(p, d) and reports.ok == [True]
    assert (retried := changes(d))[0] == {"timeout": 2} and retried[2] == ["cma"]


@pytest.mark.parametrize("how", ["it breaks", "nothing moves"])
def test_a_load_inside_a_step_is_not_tried_again(group: RankGroup, how: str) -> None:
    """Yet the next load does not meet a plane on which nothing moves."""
    p, d = pair(group, ("tcp", "shm"))
    trickle, reports = Trickle(p, 3 if how == "it breaks" else 0), Reports(d)
    begin(p, d, now=True)
    if how == "it breaks":
        assert wait(lambda: in_the_middle(d), [p, d])
        cut(d)
    else:
        assert wait(lambda: moving(d, 1), [p, d])
        let_time_pass(d, 31)
    assert wait(lambda: reports.ok == [False], [p, d])
    trickle.go_on()
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    assert changes(d)[0] == {}
    if how == "nothing moves":
        let_time_pass(d, 33)
        another_works(p, d)
        assert changes(d)[2] == ["shm"]


def test_a_plane_is_left_though_two_loads_are_stuck_on_it(group: RankGroup) -> None:
    """The second load comes while the first one waits. Neither takes the other for a proof that the plane works."""
    p, d = pair(group, ("tcp", "shm"))
    trickle, reports = Trickle(p, 0), Reports(d)
    begin(p, d, "one")
    assert wait(lambda: moving(d, 1), [p, d])
    let_time_pass(d, 15)
    begin(p, d, "two", ours=OTHERS)
    assert wait(lambda: moving(d, 2), [p, d])
    let_time_pass(d, 31)
    assert wait(lambda: loads_of(d)[0].number == 2, [p, d])
    trickle.go_on()
    assert ended(p, d, "one") and ended(p, d, "two") and has_all(d, OTHERS)
    assert changes(d) == ({"timeout": 1, "peer_lost": 1}, {"tcp": 1}, ["shm"])
    assert reports.ok == [True, True]


def test_a_plane_on_which_another_load_moves_is_kept(group: RankGroup) -> None:
    p, d = pair(group, ("tcp", "shm"))
    trickle, sender = Trickle(p, 0), sends_of(p)
    stuck, turn = [begin(p, d, "one")], sender.turn

    def passes_over_one() -> Any:
        outgoing = sender.turns[0]
        if outgoing.ask.token not in stuck:
            return turn()
        sender.turns.rotate(-1)
        return outgoing, False, ""

    sender.turn = passes_over_one
    assert wait(lambda: moving(d, 1), [p, d])
    begin(p, d, "two", ours=OTHERS)
    assert wait(lambda: moving(d, 2), [p, d])
    let_time_pass(d, 15)
    trickle.turns = 3
    assert wait(lambda: loads_of(d)[1].nbytes > 0 and trickle.done == 3, [p, d])
    let_time_pass(d, 31)
    assert wait(lambda: loads_of(d)[0].number == 2, [p, d])
    stuck.clear()
    trickle.go_on()
    assert ended(p, d, "one") and ended(p, d, "two")
    assert changes(d)[:2] == ({"timeout": 1}, {})


def test_a_p_that_trickles_ends_at_the_deadline(group: RankGroup) -> None:
    """Not when the progress ends: that would be more than a minute later."""
    p, d = pair(group, transfer_timeout_seconds=2700.0, handover_timeout_seconds=3600.0)
    trickle, reports = Trickle(p, 0), Reports(d)
    begin(p, d)
    for seconds in range(0, 3600, 300):
        let_time_pass(d, seconds)
        before = load_of(d).nbytes if seconds else 0
        trickle.turns += 1
        assert wait(lambda before=before: in_the_middle(d) and load_of(d).nbytes > before, [p, d]), "progress is made"
    assert not d.received and not reports.ok
    let_time_pass(d, 3601)
    assert not ended(p, d), "released, though the read was not over"
    found = d.figures()
    assert found["counts"]["num_failed_handovers"] == {"timeout": 1} and "num_retries" not in found["counts"]
    assert reports.ok == [False]
    trickle.go_on()
    another_works(p, d)


@pytest.mark.parametrize("how", ["cancelled", "at the deadline"])
def test_a_load_ends_between_attempts(group: RankGroup, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(fetch, "SAME_PEER_SECONDS", 60.0)
    p, d = pair(group)
    trickle, reports = Trickle(p, 3), Reports(d)
    begin(p, d)
    assert wait(lambda: in_the_middle(d), [p, d])
    cut(d)
    assert wait(lambda: load_of(d).state is FetchState.WAITING, [p, d]) and not reports.ok
    assert not wait(lambda: bool(p.sent), [p, d], 0.2), "the lease is kept for the next attempt"
    if how == "cancelled":
        d.worker.post(StepPlan(cancels=("req-d",)))
    else:
        let_time_pass(d, 121)
    assert not ended(p, d) and load_of(d) is None
    assert reports.ok == [False] and list(d.counts("num_failed_handovers")) == [
        "cancelled" if how == "cancelled" else "peer_lost"
    ]
    monkeypatch.undo()
    trickle.go_on()
    another_works(p, d)


LIMIT, STOP = 120.0, 600.0
"""Seconds that something may take, and that its side stands still meanwhile."""


def goes_on(rank: Rank) -> Callable[[], bool]:
    """A condition: the rank's transfer thread has looked at its deadlines some times more."""
    looked: list[float] = []
    real = rank.consumer.tick

    def tick(now: float) -> None:
        real(now)
        looked.append(now)

    rank.consumer.tick = tick
    return lambda: len(looked) > 3


def deadline(p: Rank, token: bytes) -> float:
    return float(leases_of(p)[token].deadline)


@pytest.mark.parametrize("of_what", ["handshake", "transfer"])
def test_d_is_held_up(group: RankGroup, caplog: pytest.LogCaptureFixture, of_what: str) -> None:
    """P answers only after D goes on, as where the host of both stood still."""
    p, d = group.pair(of_d={f"{of_what}_timeout_seconds": LIMIT, "plane": "tcp"}, **PATIENT)  # over it D has to ask
    if of_what == "transfer":  # then the handshake is over
        another_works(p, d)
    spoken_to = []

    def deaf(now: float) -> bool:
        spoken_to.extend(select.select([listener_of(p).fd], [], [], 0)[0])
        return False

    gate = Gate(p.producer, "serve", deaf)
    begin(p, d)
    assert wait(lambda: bool(spoken_to), [p, d])
    with caplog.at_level(logging.WARNING):
        d.context.log.keys.clear()  # of a line before
        hold_up(d.thread, STOP)
        assert wait(goes_on(d), [p, d])
        assert wait(lambda: "the transfer thread was held up for 60" in caplog.text, [p, d])
    assert not d.received - {"again-d"}
    gate.open()
    assert ended(p, d)


def test_p_is_held_up(group: RankGroup) -> None:
    """Nobody could renew its leases meanwhile."""
    p, d = group.pair(of_p={"lease_seconds": LIMIT})
    token = leased(p)
    hold_up(p.thread, STOP)
    assert wait(goes_on(p), [p]) and not p.sent
    load_from(p, d, token)
    assert ended(p, d)
    leased(p, "late")
    put_forward(p.thread, STOP)
    assert wait(lambda: "late-p" in p.sent, [p]), "time in which it runs does count"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_d_renews_at_once_after_it_was_held_up(group: RankGroup, when: str) -> None:
    """P's clock went on, and the next renewal would come after a third of a term of D's. ``when``: D was given the
    request."""
    p, d = group.pair(of_p={**PATIENT, "lease_cap_seconds": 1200.0})
    token = leased(p)
    before = deadline(p, token)
    plan = StepPlan(decode_engine=b"c" * 16, keeps=(KeepLease("req-d", token, peer([p]), False),))
    if when == "meanwhile":
        plans_of(d).posted.append(PostedPlan(plan))
    else:
        d.worker.post(plan)
        assert wait(lambda: bool(d.consumer.renewals.kept), [p, d])
    hold_up(d.thread, STOP)
    assert wait(lambda: deadline(p, token) > before, [p, d])


def test_what_cannot_be_renewed_costs_no_other_lease(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = group.pair(of_p={**PATIENT, "lease_cap_seconds": 1200.0})
    claims, good = d.consumer.renewals, peer([p])
    bad = replace(good, ranks=(replace(good.ranks[0], host="127.0.0.2"),))  # nobody there
    odd = replace(good, ranks=(replace(good.ranks[0], tp_rank=7),))  # of one
    keeps = [KeepLease(f"{n}-d", leased(p, f"{n}"), who, False) for n, who in enumerate((good, bad, odd))]
    before = deadline(p, keeps[0].token)
    real = claims.links.get

    def link(address: RankAddress, now: float) -> Any:
        if address.host == "127.0.0.2":
            raise OSError(errno.EMFILE, "planted")
        return real(address, now)

    with monkeypatch.context() as patch:
        patch.setattr(claims, "links", SimpleNamespace(get=link))
        d.worker.post(StepPlan(decode_engine=b"c" * 16, keeps=tuple(keeps[::-1])))
        assert wait(lambda: len(claims.kept) == 2, [p, d]), "what cannot be never comes in"
        hold_up(d.thread, STOP)
        assert wait(lambda: deadline(p, keeps[0].token) > before, [p, d])


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
    assert not d.consumer.renewals.kept and other.lease_ends() == {"released": 1}


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
    assert not d.failed and all(rank.lease_ends() == {"released": 1} for rank in ps)
    if error:
        assert set(keeper.kept) == {token} and d.counts("num_failed_handovers") == {"internal": 1}


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
    assert d.counts("num_retries") == {reason: 1}
