"""A side that its host does not let run: no deadline counts that time, for nobody was heard in it."""

from __future__ import annotations

import errno
import logging
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.engine.loop import PostedPlan
from kvferry.connector.wire.step_plan import KeepLease, RankAddress, StepPlan
from kvferry.transport.wake import RateLimitedLog
from tests.handover.gates import PATIENT, Gate, halves
from tests.handover.opening import OURS, THEIRS, TOKENS, begin
from tests.handover.rank_group import RankGroup
from tests.support.clocks import hold_up, put_forward
from tests.support.inside import consumer_of, leases_of, listener_of, plans_of, thread_of
from tests.support.ranks import Rank, grant, load_plan, peer, wait

LIMIT, STOP = 120.0, 600.0
"""Seconds that something may take, and that its side stands still meanwhile."""


class Deaf:
    """P hears nothing until ``open``; ``spoken_to`` says whether there is something to hear."""

    def __init__(self, p: Rank) -> None:
        self.spoken_to = False
        self._producer = halves(p)[0]
        self.open = Gate(self._producer, "serve", self._look).open

    def _look(self, now: float) -> bool:
        self.spoken_to = bool(select.select([listener_of(self._producer).fd], [], [], 0)[0])
        return False


def goes_on(rank: Rank) -> Callable[[], bool]:
    """A condition: the rank's transfer thread has looked at its deadlines some times more."""
    consumer: Any = consumer_of(rank)
    looked: list[float] = []
    real = consumer.tick

    def tick(now: float) -> None:
        real(now)
        looked.append(now)

    consumer.tick = tick
    return lambda: len(looked) > 3


@pytest.mark.parametrize("of_what", ["handshake", "transfer"])
def test_d_is_held_up(group: RankGroup, caplog: pytest.LogCaptureFixture, of_what: str) -> None:
    """P answers only after D goes on, as where the host of both stood still."""
    p = group.rank(settings=Settings(**PATIENT))
    settings = {**PATIENT, f"{of_what}_timeout_seconds": LIMIT}
    d = group.rank(settings=Settings(**settings, plane="tcp"), engine_id="engine-d")  # over which it has to ask
    p.fill(THEIRS, TOKENS)
    if of_what == "transfer":  # then the handshake is over
        begin(p, d, "first")
        assert wait(lambda: "first-d" in d.received and "first-p" in p.sent, [p, d])
    deaf = Deaf(p)
    begin(p, d)
    assert wait(lambda: deaf.spoken_to, [p, d])
    d.context.log = RateLimitedLog(logging.getLogger("test.held_up"))
    with caplog.at_level(logging.WARNING):
        hold_up(thread_of(d), STOP)
        assert wait(goes_on(d), [p, d])
        assert wait(lambda: "the transfer thread was held up for 60" in caplog.text, [p, d])
    assert not d.received - {"first-d"}
    deaf.open()
    assert wait(lambda: "req-d" in d.received, [p, d])
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_p_is_held_up(group: RankGroup) -> None:
    """Nobody could renew its leases meanwhile."""
    p, d = group.rank(settings=Settings(lease_seconds=LIMIT)), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: bool(leases_of(p)), [p])
    hold_up(thread_of(p), STOP)
    assert wait(goes_on(p), [p]) and not p.sent
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.received and p.sent == {"req-p"}, [p, d])
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    grant([p], "late-p", THEIRS, TOKENS)
    assert wait(lambda: bool(leases_of(p)), [p])
    put_forward(thread_of(p), STOP)
    assert wait(lambda: "late-p" in p.sent, [p]), "time in which it runs does count"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_d_renews_at_once_after_it_was_held_up(group: RankGroup, when: str) -> None:
    """P's clock went on, and the next renewal would come after a third of a term of D's. ``when``: D was given the
    request."""
    p = group.rank(settings=Settings(**PATIENT, lease_cap_seconds=1200.0))
    d = group.rank(engine_id="engine-d")
    token = grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: bool(leases_of(p)), [p])
    before = leases_of(p)[token].lifetime.state.deadline
    plan = StepPlan(consumer=b"c" * 16, keeps=(KeepLease("req-d", token, peer([p]), False),))
    transfer_thread = d.thread
    if when == "meanwhile":
        plans_of(transfer_thread).posted.append(PostedPlan(plan))
    else:
        d.worker.post(plan)
        assert wait(lambda: bool(halves(d)[1].leases.kept), [p, d])
    hold_up(transfer_thread, STOP)
    assert wait(lambda: leases_of(p)[token].lifetime.state.deadline > before, [p, d])


@pytest.mark.parametrize("bad_first", [False, True])
def test_what_cannot_be_renewed_costs_no_other_lease(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, bad_first: bool
) -> None:
    p = group.rank(settings=Settings(**PATIENT, lease_cap_seconds=1200.0))
    d = group.rank(engine_id="engine-d")
    tokens = [grant([p], name, THEIRS, TOKENS) for name in ("good", "bad", "odd")]
    claims = halves(d)[1].leases
    assert wait(lambda: len(leases_of(p)) == 3, [p])
    before = leases_of(p)[tokens[0]].lifetime.state.deadline
    good = peer([p])
    bad = replace(good, ranks=(replace(good.ranks[0], host="127.0.0.2"),))  # nobody there
    odd = replace(good, ranks=(replace(good.ranks[0], tp_rank=7),))  # of one
    keeps = [
        KeepLease(f"{n}-d", token, who, False)
        for n, (token, who) in enumerate(zip(tokens, (good, bad, odd), strict=True))
    ]
    real = claims.links.get

    def link(address: RankAddress, now: float) -> Any:
        if address.host == "127.0.0.2":
            raise OSError(errno.EMFILE, "planted")
        return real(address, now)

    monkeypatch.setattr(claims, "links", SimpleNamespace(get=link))
    d.worker.post(StepPlan(consumer=b"c" * 16, keeps=tuple(keeps[::-1] if bad_first else keeps)))
    assert wait(lambda: len(claims.kept) == 2, [p, d]), "what cannot be never comes in"
    hold_up(thread_of(d), STOP)
    assert wait(lambda: leases_of(p)[tokens[0]].lifetime.state.deadline > before, [p, d])
    monkeypatch.undo()


def test_a_turn_that_breaks_after_it_was_held_up_ends_nothing(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = group.rank(settings=Settings(lease_seconds=LIMIT))
    grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: bool(leases_of(p)), [p])
    transfer_thread = p.thread
    real = transfer_thread.turn

    def breaks(now: float) -> bool:
        monkeypatch.setattr(transfer_thread, "turn", real)
        hold_up(transfer_thread, STOP)
        raise RuntimeError("planted")

    monkeypatch.setattr(transfer_thread, "turn", breaks)
    assert wait(goes_on(p), [p]) and not p.sent
