"""A side that its host does not let run: no deadline counts that time, for nobody was heard in it."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
from gates import PATIENT, Gate, halves
from opening import OURS, THEIRS, TOKENS, another_works, begin
from rank_process import remote_peer
from ranks import Rank, grant, load_plan, peer, reason_of, wait
from stage import Stage

from kvferry.connector import mover
from kvferry.connector.config import Settings
from kvferry.connector.stepplan import StepPlan, Watch
from kvferry.transport import framing


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is longer than a turn should take is not counted, so that a loaded machine does no harm here either."""
    monkeypatch.setattr(mover, "HELD_UP_SECONDS", 0.05)


class Deaf:
    """P hears nothing until ``open``; ``spoken_to`` says whether there is something to hear."""

    def __init__(self, p: Rank) -> None:
        self.spoken_to = False
        self._producer = halves(p)[0]
        self.open = Gate(self._producer, "serve", self._look).open

    def _look(self, now: float) -> bool:
        self.spoken_to = framing.waiting(self._producer._listener.socket)
        return False


def slow_turns(rank: Rank, seconds: float) -> Gate:
    """Each turn of the rank's mover takes so long until the gate is opened, and it never sleeps."""
    consumer = halves(rank)[1]
    real = consumer.serve

    def late(*args: Any) -> bool:
        time.sleep(seconds)
        real(*args)
        return True

    return Gate(consumer, "serve", late)


def test_d_is_held_up(stage: Stage, at_once: None) -> None:
    """P answers only after D goes on, as where the host of both stood still."""
    p = stage.rank(settings=Settings(**PATIENT))
    d = stage.rank(settings=Settings(handshake_timeout_seconds=1.0), engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    deaf = Deaf(p)
    begin(p, d)
    assert wait(lambda: deaf.spoken_to, [p, d])
    slow = slow_turns(d, 1.5)
    assert wait(lambda: slow.calls > 0, [p, d])
    slow.open()
    time.sleep(1.7)
    deaf.open()
    assert wait(lambda: "req-d" in d.received, [p, d])
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_p_is_held_up(stage: Stage) -> None:
    """Its process stands still, and nobody can renew its leases meanwhile."""
    p, d = stage.process(settings={"lease_seconds": 6.0}), stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = p.grant("req-p", THEIRS, TOKENS)
    p.signal(signal.SIGSTOP)
    time.sleep(7.0)
    p.signal(signal.SIGCONT)
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.received, [d])
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    assert wait(lambda: p.sent() == {"req-p"}, [d])


def test_d_renews_at_once_after_it_was_held_up(stage: Stage, at_once: None) -> None:
    """P's clock went on, and the next renewal would come after a third of a term of D's."""
    p = stage.rank(settings=Settings(**PATIENT, lease_cap_seconds=1200.0))
    d = stage.rank(engine_id="engine-d")
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(StepPlan(consumer=b"c" * 16, watches=(Watch("req-d", token, peer([p]), False),)))
    claims, leases = halves(d)[1]._claims, halves(p)[0]._leases
    assert wait(lambda: bool(claims) and bool(leases), [p, d])
    before = leases[token].state.deadline
    slow_turns(d, 0.1)
    assert wait(lambda: leases[token].state.deadline > before, [p, d])


def test_a_side_that_is_always_held_up_gives_up_too(stage: Stage, at_once: None) -> None:
    p = stage.rank(settings=Settings(**PATIENT))
    d = stage.rank(settings=Settings(transfer_timeout_seconds=0.5), engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    Deaf(p)
    slow_turns(d, 0.2)
    grant([p], "lost-p", THEIRS, TOKENS)
    d.worker.post(load_plan("lost-d", bytes(16), peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.failed == {"lost-d"}, [d])
    assert reason_of(d) == "timeout"
