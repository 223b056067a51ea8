"""A side that its host does not let run: no deadline counts that time, for nobody was heard in it."""

from __future__ import annotations

import errno
import logging
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.engine.loop import PostedPlan
from kvferry.connector.wire.step_plan import KeepLease, RankAddress, StepPlan
from tests.handover.scenario import PATIENT, Gate, RankGroup, another_works, begin, ended, leased, load_from
from tests.support.clocks import hold_up, put_forward
from tests.support.inside import leases_of, listener_of, plans_of
from tests.support.ranks import Rank, peer, wait

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
    return float(leases_of(p)[token].lifetime.state.deadline)


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
