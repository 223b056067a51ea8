"""Copies that go on after they were started, as on a GPU: whose blocks are still touched is told to nobody, and a step
may compute with what its device waits for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from kvferry.connector.decode_side.fetch import ReadPhase
from kvferry.connector.pages import caches
from kvferry.connector.pages.copies import WaitPolicy
from kvferry.connector.step_loads import step_hold
from kvferry.connector.step_loads.step_loads import StepLoad
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import StepPlan
from kvferry.transport.wake import RunningClock
from tests.handover.scenario import (
    OURS,
    SMALL,
    THEIRS,
    TOKENS,
    Pair,
    RankGroup,
    another_works,
    begin,
    ended,
    has_all,
    lease_plan,
)
from tests.handover.slow_copies import SlowCopies, install
from tests.support.inside import leases_of
from tests.support.ranks import Rank, grant, let_time_pass, load_plan, peer, standing, wait
from tests.transport.plane_pair import PUSH, host_planes

PLANES = host_planes(PUSH)
WIDE = {"layers": 8, **SMALL}
"""Several slots take a hand-over, so it takes several copies."""
Slow = list[SlowCopies]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = install(monkeypatch)
    yield made
    for each in made:
        each.gate.set()


@pytest.fixture
def plane() -> str:
    """Where a test does not name one."""
    return "shm"


@pytest.fixture
def pair(group: RankGroup, copies: Slow, plane: str) -> Pair:
    return group.pair(plane=plane, **WIDE)


def begin_and_stop_at(slow: SlowCopies, p: Rank, d: Rank) -> None:
    """A hand-over of which a copy of P or of D is under way, and goes on once its gate is open."""
    slow.gate.clear()
    begin(p, d)
    assert wait(lambda: slow.running > 0, [p, d])


def test_d_hears_that_its_read_is_granted_before_anything_is_packed(p: Rank, d: Rank, copies: Slow) -> None:
    """P may be held up there for long, and a D that hears nothing does not know whether P has its request."""
    begin_and_stop_at(copies[0], p, d)
    reads = d.consumer.reads.by_number
    assert wait(lambda: [read.phase for read in reads.values()] == [ReadPhase.MOVING], [p, d])
    assert copies[0].running
    copies[0].gate.set()
    assert ended(p, d)


@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_a_cancelled_load_is_told_after_the_last_copy_into_its_blocks(p: Rank, d: Rank, copies: Slow) -> None:
    begin_and_stop_at(copies[1], p, d)
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert not wait(lambda: bool(d.received), [p, d], seconds=0.3), "a copy may still write its blocks"
    copies[1].gate.set()
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    assert copies[1].running == 0
    before = d.read(OURS, TOKENS).clone()
    assert not wait(lambda: not bool((before == d.read(OURS, TOKENS)).all()), [p, d], seconds=0.2)


def test_a_lease_that_expires_is_told_after_the_last_copy_from_its_blocks(
    group: RankGroup, p: Rank, d: Rank, copies: Slow
) -> None:
    begin_and_stop_at(copies[0], p, d)
    (token,) = leases_of(p)
    let_time_pass(p, 10_000)
    assert wait(lambda: d.failed == {"req-d"}, [p, d]), "D hears of it at once"
    assert not wait(lambda: bool(p.sent), [p, d], seconds=0.3), "a copy may still read its blocks"
    raw = group.raw(p, d, attached=False)
    raw.greet()
    raw.send(messages.Commit(read=1, token=token))
    assert not raw.answer(messages.Committed).ok
    copies[0].gate.set()
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    assert copies[0].running == 0


def test_a_producer_that_dies_is_told_after_the_last_copy(p: Rank, d: Rank, copies: Slow) -> None:
    begin_and_stop_at(copies[1], p, d)
    p.close()
    assert not wait(lambda: bool(d.received), [d], seconds=0.3), "a copy may still write its blocks"
    copies[1].gate.set()
    assert wait(lambda: d.failed == {"req-d"}, [d])


@pytest.mark.parametrize("side", [0, 1])
def test_a_copy_that_fails_fails_its_request(
    p: Rank, d: Rank, copies: Slow, caplog: pytest.LogCaptureFixture, side: int
) -> None:
    copies[side].error = "CUDA error: out of order"
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert not ended(p, d)
    if side == 0:  # both sides log how far the read had come at P
        far = "; the prefill read: sending, draining +"

        def lines() -> dict[str, str]:
            """Of each side's logger."""
            return {r.name: r.getMessage() for r in list(caplog.records) if far in r.getMessage()}

        assert wait(lambda: len(lines()) == 2), caplog.text  # they follow the reports
        assert all("could not be packed: CUDA error" in line for line in lines().values()), caplog.text
    copies[side].error = ""
    another_works(p, d)


def test_the_end_waits_for_copies(p: Rank, d: Rank, copies: Slow) -> None:
    begin_and_stop_at(copies[1], p, d)
    threading.Timer(0.3, copies[1].gate.set).start()
    d.thread.close(300)
    assert copies[1].running == 0
    d.poll()
    assert d.received == {"req-d"}


@pytest.mark.parametrize(
    ("alone", "brief", "idle", "waits"),
    [
        (False, True, True, WaitPolicy.NONE),
        (True, True, False, WaitPolicy.UNTIL_DONE),
        (True, True, True, WaitPolicy.UNTIL_DONE),
        (True, False, True, WaitPolicy.BOUNDED),
        (True, False, False, WaitPolicy.NONE),
    ],
)
def test_the_mover_may_wait_for_a_copy_of_a_peer_s_pages(
    pair: Pair, copies: Slow, monkeypatch: pytest.MonkeyPatch, alone: bool, brief: bool, idle: bool, waits: WaitPolicy
) -> None:
    """Where nothing else could go on."""
    copies[1].idle = idle
    if not brief:
        monkeypatch.setattr(caches, "BRIEF_BYTES", -1)
    pair[1].context.caches.fetch([], alone=alone)
    assert copies[1].waits == [waits]


def test_copies_hear_whether_the_engine_computes(p: Rank, d: Rank, copies: Slow) -> None:
    """Beside a step that computes they take few SMs, also those that the next step waits for."""
    another_works(p, d)  # so that the next one finds its link
    assert not copies[1].idle
    d.worker.post(StepPlan(idle=True))
    assert copies[1].idle
    begin(p, d, now=True)
    assert not copies[1].idle
    d.worker.begin_step()
    assert standing(d) == {"req-d"}


# --- inside a step ----------------------------------------------------------------------------------------------


def once_it_waits(d: Rank, act: Callable[[], object]) -> None:
    """Have this done when the step of D that was posted waits for the first time."""
    outcome = d.worker.step_hold.outcome
    assert outcome is not None
    wait_begun = outcome.wait_begun

    def act_and_wait(seconds: float) -> bool:
        outcome.wait_begun = wait_begun  # type: ignore[method-assign]
        act()
        return wait_begun(seconds)

    outcome.wait_begun = act_and_wait  # type: ignore[method-assign]


def begin_inside(p: Rank, d: Rank) -> None:
    """A step of D computes with a prompt of P, and has begun."""
    begin(p, d, now=True)
    d.worker.begin_step()


def freed(p: Rank, d: Rank) -> bool:
    """P has its blocks back, and the engine of D hears of no load: it knows from its step."""
    return wait(lambda: p.sent == {"req-p"}, [p, d]) and not d.received


@pytest.mark.parametrize("plane", PLANES)
def test_a_step_goes_on_as_soon_as_its_device_waits_for_the_last_copy(p: Rank, d: Rank, copies: Slow) -> None:
    copies[1].gate.clear()
    begin_inside(p, d)
    assert copies[1].running > 1 and set(copies[1].waits) == {WaitPolicy.NONE}, "the transfer thread waits for none"
    assert copies[1].held and not any(event.is_set() for event in copies[1].held)
    copies[1].gate.set()
    assert all(event.wait(60) for event in copies[1].held) and has_all(d), "what it computes with"
    assert standing(d) == {"req-d"} and freed(p, d)


def two_producers(group: RankGroup) -> tuple[list[Rank], Rank]:
    """P's two ranks with a prompt, and D, which reads from both."""
    p = [group.rank(tp_rank=rank, tp_size=2, plane="shm", **WIDE) for rank in (0, 1)]
    for rank in p:
        rank.fill(THEIRS, TOKENS)
    return p, group.rank(engine_id="engine-d", plane="shm", **WIDE)


@pytest.mark.parametrize("late", [0, 1])
def test_a_device_waits_for_the_copies_from_all_ranks(group: RankGroup, copies: Slow, late: int) -> None:
    """One of which is late to grant."""
    p, d = two_producers(group)
    token = grant([p[1 - late]], "req-p", THEIRS, TOKENS)
    copies[2].gate.clear()
    d.worker.post(load_plan("req-d", token, peer(p), OURS, 0, TOKENS, now=True))
    assert wait(lambda: copies[2].running > 0, p)
    once_it_waits(d, lambda: p[late].worker.post(lease_plan(token)))
    d.worker.begin_step()
    copies[2].gate.set()
    assert all(event.wait(60) for event in copies[2].held) and has_all(d)
    assert standing(d) == {"req-d"}
    assert wait(lambda: all(rank.sent == {"req-p"} for rank in p), [*p, d])


def test_a_step_hears_of_a_copy_that_failed_before_its_tokens_count(p: Rank, d: Rank, copies: Slow) -> None:
    copies[1].gate.clear()
    copies[1].error = "CUDA error: out of order"
    begin_inside(p, d)
    assert copies[1].held and copies[1].running
    threading.Timer(0.2, copies[1].gate.set).start()
    assert not standing(d)
    assert copies[1].running == 0, "nothing writes its blocks any more"
    assert freed(p, d)


def test_a_step_hears_of_a_lease_that_ended_while_its_device_waited(p: Rank, d: Rank, copies: Slow) -> None:
    """Where pages are read by D: P's word of it is the note that it takes back."""
    copies[1].gate.clear()
    begin_inside(p, d)
    (read,) = d.consumer.reads.by_number.values()
    read.note = SimpleNamespace(is_current=False)
    copies[1].gate.set()
    assert not standing(d) and freed(p, d)


def test_a_load_that_begins_after_it_was_given_up_fails_though_all_of_it_arrives(
    p: Rank, d: Rank, copies: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward may have read the blocks before."""
    monkeypatch.setattr(d.consumer.loads, "cancel", lambda *_: None)  # it comes too late
    monkeypatch.setattr(d.worker.step_hold, "patience", 0.2)
    copies[0].gate.clear()
    begin_inside(p, d)
    copies[0].gate.set()
    assert not standing(d) and freed(p, d)
    assert has_all(d) and not copies[1].held


def test_time_in_which_the_engine_stood_still_is_not_counted(
    p: Rank, d: Rank, copies: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has stopped it for ten minutes; P's message was there all the time."""
    clock = RunningClock
    times = itertools.chain([0.0], itertools.count(600.0))
    monkeypatch.setattr(step_hold, "RunningClock", lambda: clock(times.__next__))
    monkeypatch.setattr(d.worker.step_hold, "patience", 300.0)
    copies[0].gate.clear()
    threading.Timer(0.5, copies[0].gate.set).start()
    begin_inside(p, d)
    assert standing(d) == {"req-d"} and freed(p, d)


def test_the_transfer_thread_ends_while_the_device_waits(
    p: Rank, d: Rank, copies: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies[1].gate.clear()
    begin_inside(p, d)
    monkeypatch.setattr(StepLoad, "ended", lambda *_: None)  # whatever it says in the end is lost
    threading.Timer(0.2, copies[1].gate.set).start()
    d.thread.close(60)
    assert not standing(d)
