"""Data and control come by different sockets: what P has pushed may be here before what P says about it."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.wire import messages
from tests.handover.scenario import OURS, PATIENT, TOKENS, Gate, RankGroup, begin, ended, lease_plan, wipe
from tests.support.inside import sends_of
from tests.support.ranks import Rank, let_time_pass, load_plan, on_its_thread, peer, reason_of, wait


class Late:
    """Replies of this ``kind`` reach D's hand-overs only after ``come``."""

    def __init__(self, d: Rank, kind: type) -> None:
        self._d, self._consumer, self._kind = d, d.consumer, kind
        self._real = self._consumer.reads.reply
        self.held: list[tuple[Any, ...]] = []
        self._consumer.reads.reply = self._reply

    def _reply(self, link: Any, reply: Any, now: float) -> Any:
        if not isinstance(reply, self._kind):
            return self._real(link, reply, now)
        self.held.append((link, reply, now))
        return ()

    def come(self) -> None:
        on_its_thread(self._d, self._come)

    def _come(self) -> None:
        self._consumer.reads.reply = self._real
        while self.held:
            *reply, now = self.held.pop(0)
            for load, event in list(self._real(*reply, now)):
                self._consumer.loads.give(load, (event,), now)


def test_zeros_in_the_place_of_pages_that_p_may_not_read_any_more(group: RankGroup) -> None:
    """P's cap comes while a socket reads the last message: what D gets of the rest is no KV, whatever it hears when."""
    p, d = group.pair(
        plane="tcp",
        slot_bytes=64 << 20,
        staging_bytes=128 << 20,
        lease_cap_seconds=30,
        content=8192,
        layers=1,
        blocks=18,
    )
    plane, pushes = d.context.plane("tcp"), sends_of(p)
    assert plane is not None
    real = plane.progress
    # From P's first byte on D reads none: there is one message, which is more than sockets hold.
    stuck = Gate(plane, "progress", lambda: False if pushes.turns else real())
    late = Late(d, messages.Deny)
    begin(p, d)
    assert wait(lambda: any(push.reading and push.all_begun for push in list(pushes.turns)), [d]), "in the last message"
    let_time_pass(p, 60)
    assert wait(lambda: p.sent == {"req-p"}, [p])
    wipe(p)  # another prompt's
    stuck.open()
    wait(lambda: d.received == {"req-d"}, [p, d], 1.0)
    late.come()
    assert not ended(p, d)


@pytest.mark.parametrize("plane", ["shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_what_was_pushed_is_loaded_only_with_its_grant(group: RankGroup, plane: str) -> None:
    """The grant says whose prompt the chunks are: they are not loaded before it, nor after one of another prompt."""
    p, d = group.pair(plane=plane, **PATIENT)

    def all_here() -> bool:
        """Every chunk lies in D's pages."""
        return all(read.landed for job in list(d.consumer.loads.running) for read in job.reads)

    for wanted in ("a" * 32, "b" * 32):
        token, late, name = secrets.token_bytes(16), Late(d, messages.Grant), wanted[0]
        p.worker.post(lease_plan(token, name, digest="a" * 32))
        plan = load_plan(f"{name}-d", token, peer([p]), OURS, 0, TOKENS, watch=False)
        d.worker.post(replace(plan, loads=(replace(plan.loads[0], digest=wanted),)))
        assert wait(lambda late=late: all_here() and bool(late.held), [p, d])
        assert not wait(lambda name=name: f"{name}-d" in d.received, [p, d], 0.1)
        late.come()
        d.thread.wake()
        assert wait(lambda name=name: f"{name}-d" in d.received, [p, d])
    assert d.failed == {"b-d"} and reason_of(d) == "other_prompt"
