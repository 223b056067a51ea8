"""Data and control come by different sockets: what P has pushed may be here before what P says about it."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from kvferry.connector.config import Settings
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, Load, StepPlan, pack_ids
from tests.handover.gates import PATIENT, Gate, halves
from tests.handover.opening import OURS, THEIRS, TOKENS
from tests.handover.rank_group import RankGroup
from tests.support.inside import sends_of
from tests.support.ranks import SOON, Rank, grant, let_time_pass, load_plan, peer, reason_of, wait


class Late:
    """Replies of these ``kinds`` reach D's hand-overs only after ``come``."""

    def __init__(self, d: Rank, *kinds: type) -> None:
        self._consumer, self._kinds = halves(d)[1], kinds
        self._real = self._consumer.reads.reply
        self.held: list[tuple[Any, ...]] = []
        self._consumer.reads.reply = self._reply

    def _reply(self, link: Any, reply: Any, now: float) -> Any:
        if not isinstance(reply, self._kinds):
            return self._real(link, reply, now)
        self.held.append((link, reply, now))
        return ()

    def come(self) -> None:
        self._consumer.reads.reply = self._real
        while self.held:
            *reply, now = self.held.pop(0)
            for load, event in list(self._real(*reply, now)):
                self._consumer.loads.give(load, (event,), now)


def all_here(d: Rank) -> bool:
    """Whether every chunk of D's hand-overs lies in its pages."""
    return all(read.landed for job in list(halves(d)[1].loads.running) for read in job.reads)


def test_zeros_in_the_place_of_pages_that_p_may_not_read_any_more(group: RankGroup) -> None:
    """P's cap comes while a socket reads the last message: what D gets of the rest is no KV, whatever it hears when."""
    settings = Settings(plane="tcp", slot_bytes=64 << 20, staging_bytes=256 << 20, lease_cap_seconds=30)
    form: dict[str, Any] = {"settings": settings, "content": 8192, "layers": 1}
    p, d = group.rank(**form), group.rank(engine_id="engine-d", **form)
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    plane, pushes = d.context.plane("tcp"), sends_of(p)
    assert plane is not None
    real = plane.progress

    def last() -> bool:
        return any(push.reading and push.all_begun for push in list(pushes.turns))

    # From P's first byte on D reads none: there is one message, which is more than sockets hold.
    stuck = Gate(plane, "progress", lambda: False if pushes.turns else real())
    late = Late(d, messages.Deny)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(last, [d], SOON), "it must be caught in the middle of the last message"
    let_time_pass(p, 60)
    assert wait(lambda: p.sent == {"req-p"}, [p])
    for name in p.layers:
        p.caches[name].fill_(-7)  # another prompt's
    stuck.open()
    wait(lambda: d.received == {"req-d"}, [p, d], 3.0)
    late.come()
    assert wait(lambda: d.received == {"req-d"}, [p, d], SOON)
    assert d.failed == {"req-d"}


@pytest.mark.parametrize("plane", ["shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_what_was_pushed_is_loaded_only_with_its_grant(group: RankGroup, plane: str) -> None:
    """The grant says whose prompt the chunks are: they are not loaded before it, nor after one of another prompt."""
    settings = Settings(plane=plane, **PATIENT)
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    for wanted in ("a" * 32, "b" * 32):
        token, late, name = secrets.token_bytes(16), Late(d, messages.Grant), wanted[0]
        p.worker.post(StepPlan(leases=(LeaseGrant(f"p{name}", token, TOKENS, (pack_ids(THEIRS),), "a" * 32),)))
        load = Load(f"d{name}", token, peer([p]), (pack_ids(OURS),), ((0, TOKENS),), wanted)
        d.worker.post(StepPlan(consumer=b"c" * 16, loads=(load,)))
        assert wait(lambda late=late: all_here(d) and bool(late.held), [p, d])
        assert not wait(lambda name=name: f"d{name}" in d.received, [p, d], 0.1)
        late.come()
        d.thread.wake()
        assert wait(lambda name=name: f"d{name}" in d.received, [p, d])
    assert d.failed == {"db"}
    assert reason_of(d) == "denied"
