"""A side that its host does not let run: no deadline counts that time, for nobody was heard in it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from clocks import hold_up, put_forward
from gates import PATIENT, Gate, halves
from opening import OURS, THEIRS, TOKENS, begin
from ranks import Rank, grant, load_plan, peer, wait
from stage import Stage

from kvferry.connector.config import Settings
from kvferry.connector.stepplan import StepPlan, Watch
from kvferry.transport import framing

LIMIT, STOP = 120.0, 600.0
"""Seconds that something may take, and that its side stands still meanwhile."""


class Deaf:
    """P hears nothing until ``open``; ``spoken_to`` says whether there is something to hear."""

    def __init__(self, p: Rank) -> None:
        self.spoken_to = False
        self._producer = halves(p)[0]
        self.open = Gate(self._producer, "serve", self._look).open

    def _look(self, now: float) -> bool:
        self.spoken_to = framing.waiting(self._producer._listener.socket)
        return False


def goes_on(rank: Rank) -> Any:
    """A condition: the rank's mover has looked at its deadlines."""
    mover = rank.worker._mover
    seen = Gate(mover, "_tick", mover._tick)
    return lambda: seen.calls > 1


@pytest.mark.parametrize("of_what", ["handshake", "transfer"])
def test_d_is_held_up(stage: Stage, caplog: pytest.LogCaptureFixture, of_what: str) -> None:
    """P answers only after D goes on, as where the host of both stood still."""
    p = stage.rank(settings=Settings(**PATIENT))
    settings = {**PATIENT, f"{of_what}_timeout_seconds": LIMIT}
    d = stage.rank(settings=Settings(**settings, plane="tcp"), engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    if of_what == "transfer":  # then the handshake is over
        begin(p, d, "first")
        assert wait(lambda: "first-d" in d.received and "first-p" in p.sent, [p, d])
    deaf = Deaf(p)
    begin(p, d)
    assert wait(lambda: deaf.spoken_to, [p, d])
    with caplog.at_level(logging.WARNING):
        hold_up(d.worker._mover, STOP)
        assert wait(goes_on(d), [p, d]) and not d.received - {"first-d"}
    assert "the transfer thread was held up for 600." in caplog.text
    deaf.open()
    assert wait(lambda: "req-d" in d.received, [p, d])
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_p_is_held_up(stage: Stage) -> None:
    """Nobody could renew its leases meanwhile."""
    p, d = stage.rank(settings=Settings(lease_seconds=LIMIT)), stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: bool(halves(p)[0]._leases), [p])
    hold_up(p.worker._mover, STOP)
    assert wait(goes_on(p), [p]) and not p.sent
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.received and p.sent == {"req-p"}, [p, d])
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    grant([p], "late-p", THEIRS, TOKENS)
    assert wait(lambda: bool(halves(p)[0]._leases), [p])
    put_forward(p.worker._mover, STOP)
    assert wait(lambda: "late-p" in p.sent, [p]), "time in which it runs does count"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_d_renews_at_once_after_it_was_held_up(stage: Stage, when: str) -> None:
    """P's clock went on, and the next renewal would come after a third of a term of D's. ``when``: D was given the
    request."""
    p = stage.rank(settings=Settings(**PATIENT, lease_cap_seconds=1200.0))
    d = stage.rank(engine_id="engine-d")
    token = grant([p], "req-p", THEIRS, TOKENS)
    leases = halves(p)[0]._leases
    assert wait(lambda: bool(leases), [p])
    before = leases[token].state.deadline
    plan = StepPlan(consumer=b"c" * 16, watches=(Watch("req-d", token, peer([p]), False),))
    mover = d.worker._mover
    if when == "meanwhile":
        mover._commands.append((plan, None, ()))
    else:
        d.worker.post(plan)
        assert wait(lambda: bool(halves(d)[1]._claims), [p, d])
    assert leases[token].state.deadline == before
    hold_up(mover, STOP)
    assert wait(lambda: leases[token].state.deadline > before, [p, d])


def test_a_turn_that_breaks_after_it_was_held_up_ends_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    p = stage.rank(settings=Settings(lease_seconds=LIMIT))
    grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: bool(halves(p)[0]._leases), [p])
    mover = p.worker._mover
    real = mover._turn

    def breaks(now: float) -> bool:
        monkeypatch.setattr(mover, "_turn", real)
        hold_up(mover, STOP)
        raise RuntimeError("planted")

    monkeypatch.setattr(mover, "_turn", breaks)
    assert wait(goes_on(p), [p]) and not p.sent
