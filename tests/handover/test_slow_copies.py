"""Copies that go on after they were started, as on a GPU: whose blocks are still touched is told to nobody, and a step
may compute with what its device waits for."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.read import ReadPhase
from kvferry.connector.pages.copies import WaitPolicy
from kvferry.connector.step_loads import step_hold
from kvferry.connector.wire.step_plan import LeaseGrant, StepPlan, pack_ids
from kvferry.transport.wake import RunningClock
from tests.handover import opening
from tests.handover.gates import halves
from tests.handover.rank_group import RankGroup
from tests.handover.slow_copies import SlowCopies, install
from tests.support.inside import consumer_of, thread_of
from tests.support.ranks import Rank, grant, let_time_pass, load_plan, peer, reason_of, standing, wait
from tests.transport.plane_list import PUSH, host_planes

PLANES = host_planes(PUSH)
TOKENS, THEIRS, OURS = 200, list(range(3, 16)), list(range(10, 23))
begin = partial(opening.begin, tokens=TOKENS, theirs=THEIRS, ours=OURS)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SlowCopies]]:
    made = install(monkeypatch)
    yield made
    for each in made:
        each.gate.set()


@pytest.fixture
def plane() -> str:
    """Where a test does not name one."""
    return "shm"


@pytest.fixture
def pair(group: RankGroup, copies: list[SlowCopies], plane: str) -> tuple[Rank, Rank]:
    """P with a prompt, and D; slots so small that it takes several copies."""
    settings = Settings(plane=plane, slot_bytes=64 << 10, staging_bytes=1 << 20)
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    return p, d


def begin_and_stop_at(slow: SlowCopies, p: Rank, d: Rank) -> None:
    """A hand-over of which a copy of P or of D is under way, and goes on once its gate is open."""
    slow.gate.clear()
    begin(p, d)
    assert wait(lambda: slow.running > 0, [p, d])


@pytest.mark.parametrize("plane", PLANES)
def test_all_bytes_arrive(pair: tuple[Rank, Rank], plane: str) -> None:
    p, d = pair
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and d.plane == plane
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_d_hears_that_its_read_is_granted_before_anything_is_packed(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    """P may be held up there for long, and a D that hears nothing does not know whether P has its request."""
    p, d = pair
    begin_and_stop_at(copies[0], p, d)
    reads = halves(d)[1].reads.by_number
    assert wait(lambda: [read.phase for read in reads.values()] == [ReadPhase.MOVING], [p, d])
    assert copies[0].running
    copies[0].gate.set()
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])


@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_a_cancelled_load_is_told_after_the_last_copy_into_its_blocks(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    p, d = pair
    begin_and_stop_at(copies[1], p, d)
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert not wait(lambda: bool(d.received), [p, d], seconds=0.5), "a copy may still write its blocks"
    copies[1].gate.set()
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    assert copies[1].running == 0
    before = d.read(OURS, TOKENS).clone()
    assert not wait(lambda: not torch.equal(before, d.read(OURS, TOKENS)), [p, d], seconds=0.2)


def test_a_lease_that_expires_is_told_after_the_last_copy_from_its_blocks(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    p, d = pair
    begin_and_stop_at(copies[0], p, d)
    let_time_pass(p, 10_000)
    assert wait(lambda: d.failed == {"req-d"}, [p, d]), "D hears of it at once"
    assert not wait(lambda: bool(p.sent), [p, d], seconds=0.5), "a copy may still read its blocks"
    copies[0].gate.set()
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    assert copies[0].running == 0


def test_a_producer_that_dies_is_told_after_the_last_copy(pair: tuple[Rank, Rank], copies: list[SlowCopies]) -> None:
    p, d = pair
    begin_and_stop_at(copies[1], p, d)
    p.close()
    assert not wait(lambda: bool(d.received), [d], seconds=0.5), "a copy may still write its blocks"
    copies[1].gate.set()
    assert wait(lambda: d.failed == {"req-d"}, [d])


@pytest.mark.parametrize("side", [0, 1])
def test_a_copy_that_fails_fails_its_request(
    pair: tuple[Rank, Rank], copies: list[SlowCopies], caplog: pytest.LogCaptureFixture, side: int
) -> None:
    p, d = pair
    copies[side].error = "CUDA error: out of order"
    with caplog.at_level("WARNING", "vllm.kvferry"):
        begin(p, d)
        assert wait(lambda: d.failed == {"req-d"} and p.sent == {"req-p"}, [p, d])
    if side == 0:  # both sides log how far the read had come at P
        assert wait(lambda: caplog.text.count("; the read at P: sending, draining +") == 2)  # they follow the reports
        lines = [r.getMessage() for r in caplog.records if "; the read at P: sending, draining +" in r.getMessage()]
        assert len(lines) == 2 and all("could not be packed: CUDA error" in line for line in lines), caplog.text
    copies[side].error = ""
    begin(p, d, "again")
    assert wait(lambda: d.received == {"req-d", "again-d"}, [p, d])
    assert d.failed == {"req-d"} and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_the_end_waits_for_copies(pair: tuple[Rank, Rank], copies: list[SlowCopies]) -> None:
    p, d = pair
    begin_and_stop_at(copies[1], p, d)
    threading.Timer(0.3, copies[1].gate.set).start()
    d.close()
    assert copies[1].running == 0
    d.poll()
    assert d.received == {"req-d"}


def test_the_mover_may_wait_for_copies_of_the_only_load_alone(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    """Those of several go on side by side: D stands still for none of them."""
    p, d = pair
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert [set(each.waits) for each in copies] == [{WaitPolicy.UNTIL_DONE}] * 2
    copies[1].waits.clear()
    tables = {f"{n}": (secrets.token_bytes(16), ours) for n, ours in enumerate([OURS, [*range(1, 10), *range(23, 27)]])}
    leases = (LeaseGrant(f"p{n}", token, TOKENS, (pack_ids(THEIRS),)) for n, (token, _) in tables.items())
    p.worker.post(StepPlan(leases=tuple(leases)))
    plans = [load_plan(f"d{n}", token, peer([p]), ours, 0, TOKENS) for n, (token, ours) in tables.items()]
    d.worker.post(StepPlan(plans[0].consumer, loads=(*plans[0].loads, *plans[1].loads)))
    assert wait(lambda: d.received >= {"d0", "d1"} and p.sent >= {"p0", "p1"}, [p, d]) and not d.failed
    assert set(copies[1].waits) == {WaitPolicy.NONE}


def test_copies_hear_whether_the_engine_computes(pair: tuple[Rank, Rank], copies: list[SlowCopies]) -> None:
    """Beside a step that computes they take few SMs, also those that the next step waits for."""
    p, d = pair
    begin(p, d, "first")  # so that the next one finds its link
    assert wait(lambda: d.received == {"first-d"} and p.sent == {"first-p"}, [p, d]) and not copies[1].idle
    d.worker.post(StepPlan(idle=True))
    assert copies[1].idle
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, now=True))
    assert not copies[1].idle
    d.worker.begin_step()
    assert standing(d) == {"req-d"}


def once_it_waits(d: Rank, act: Callable[[], object]) -> None:
    """Have this done when the step of D that was posted waits for the first time."""
    outcome = d.worker.step_hold.outcome
    assert outcome is not None
    d.worker.step_hold.patience = 60.0
    wait_begun = outcome.wait_begun

    def act_and_wait(seconds: float) -> bool:
        outcome.wait_begun = wait_begun  # type: ignore[method-assign]
        act()
        return wait_begun(seconds)

    outcome.wait_begun = act_and_wait  # type: ignore[method-assign]


def begin_inside(p: Rank, d: Rank) -> StepPlan:
    """A step of D computes with a prompt of P, and has begun."""
    plan = load_plan("req-d", grant([p], "req-p", THEIRS, TOKENS), peer([p]), OURS, 0, TOKENS, now=True)
    d.worker.post(plan)
    d.worker.begin_step()
    return plan


@pytest.mark.parametrize("plane", PLANES)
def test_a_step_goes_on_as_soon_as_its_device_waits_for_the_last_copy(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    p, d = pair
    copies[1].gate.clear()
    begin_inside(p, d)
    assert copies[1].running > 1 and set(copies[1].waits) == {WaitPolicy.NONE}, (
        "the transfer thread waits for none of them either"
    )
    (reached,) = copies[1].held
    assert not reached.is_set()
    copies[1].gate.set()
    assert reached.wait(60)
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS)), "what it computes with"
    assert standing(d) == {"req-d"}
    assert wait(lambda: p.sent == {"req-p"}, [p, d]) and not d.received, "the engine knows"


def two_producers(group: RankGroup) -> tuple[list[Rank], Rank]:
    """P's two ranks with a prompt, and D, which reads from both."""
    settings = Settings(plane="shm", slot_bytes=64 << 10, staging_bytes=1 << 20)
    p = [group.rank(tp_rank=rank, tp_size=2, settings=settings) for rank in (0, 1)]
    for rank in p:
        rank.fill(THEIRS, TOKENS)
    return p, group.rank(engine_id="engine-d", settings=settings)


@pytest.mark.parametrize("late", [0, 1])
def test_a_device_waits_for_the_copies_from_all_ranks(group: RankGroup, copies: list[SlowCopies], late: int) -> None:
    """One of which is late to grant."""
    p, d = two_producers(group)
    token = grant([p[1 - late]], "req-p", THEIRS, TOKENS)
    lease = LeaseGrant("req-p", token, TOKENS, (pack_ids(THEIRS),))
    copies[2].gate.clear()
    d.worker.post(load_plan("req-d", token, peer(p), OURS, 0, TOKENS, now=True))
    assert wait(lambda: copies[2].running > 0, p)
    once_it_waits(d, lambda: p[late].worker.post(StepPlan(leases=(lease,))))
    d.worker.begin_step()
    copies[2].gate.set()
    assert copies[2].held[0].wait(60)
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    assert standing(d) == {"req-d"}
    assert wait(lambda: all(rank.sent == {"req-p"} for rank in p), [*p, d])


def test_a_step_hears_of_a_copy_that_failed_before_its_tokens_count(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    p, d = pair
    copies[1].gate.clear()
    copies[1].error = "CUDA error: out of order"
    begin_inside(p, d)
    assert copies[1].held and copies[1].running
    threading.Timer(0.2, copies[1].gate.set).start()
    assert not standing(d)
    assert copies[1].running == 0, "nothing writes its blocks any more"
    assert wait(lambda: p.sent == {"req-p"}, [p, d]) and not d.received


def test_a_step_hears_of_a_lease_that_ended_while_its_device_waited(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    """Where pages are read by D: P's word of it is the note that it takes back."""
    p, d = pair
    copies[1].gate.clear()
    begin_inside(p, d)
    (read,) = halves(d)[1].reads.by_number.values()
    read.note = SimpleNamespace(is_current=False)
    read.fence = "posted"
    copies[1].gate.set()
    assert not standing(d)
    assert wait(lambda: p.sent == {"req-p"}, [p, d]) and not d.received


def test_a_load_whose_copies_do_not_begin_in_time_is_given_up(
    group: RankGroup, copies: list[SlowCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of P has granted nothing. Nobody computes on until the copies from the other have ended."""
    p, d = two_producers(group)
    token = grant([p[0]], "req-p", THEIRS, TOKENS)
    copies[2].gate.clear()
    d.worker.post(load_plan("req-d", token, peer(p), OURS, 0, TOKENS, now=True))
    assert wait(lambda: copies[2].running > 0, p)
    monkeypatch.setattr(d.worker.step_hold, "patience", 0.3)
    d.worker.begin_step()
    assert not copies[2].held, "the forward reads what nobody uses"
    outcome = d.worker.take_outcome()
    assert outcome is not None and not outcome.waiting and not outcome.under_way
    ended = threading.Thread(target=outcome.standing)
    ended.start()
    ended.join(0.5)
    assert ended.is_alive() and not outcome.final, "not before the last copy into its blocks"
    copies[2].gate.set()
    ended.join(60)
    assert not outcome.standing() and copies[2].running == 0
    assert reason_of(d) == "cancelled", "and not because the hand-over's own time was over"
    assert wait(lambda: p[0].sent == {"req-p"}, [*p, d]) and not d.received


def test_a_load_that_begins_after_it_was_given_up_fails_though_all_of_it_arrives(
    pair: tuple[Rank, Rank], copies: list[SlowCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward may have read the blocks before."""
    p, d = pair
    transfer_thread = thread_of(d)
    assert transfer_thread is not None
    monkeypatch.setattr(consumer_of(transfer_thread).loads, "cancel", lambda *_: None)  # it comes too late
    copies[0].gate.clear()
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, now=True))
    monkeypatch.setattr(d.worker.step_hold, "patience", 0.2)
    d.worker.begin_step()
    copies[0].gate.set()
    assert not standing(d) and wait(lambda: p.sent == {"req-p"}, [p, d])
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS)) and not copies[1].held


def test_time_in_which_the_engine_stood_still_is_not_counted(
    pair: tuple[Rank, Rank], copies: list[SlowCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has stopped it for ten minutes; P's message was there all the time."""
    p, d = pair
    clock = RunningClock
    monkeypatch.setattr(
        step_hold, "RunningClock", lambda: clock(iter([0.0, *(600.0 + n for n in range(100))]).__next__)
    )
    token = grant([p], "req-p", THEIRS, TOKENS)
    copies[0].gate.clear()
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, now=True))
    monkeypatch.setattr(d.worker.step_hold, "patience", 4.0)
    threading.Timer(0.5, copies[0].gate.set).start()
    d.worker.begin_step()
    assert standing(d) == {"req-d"}
    assert wait(lambda: p.sent == {"req-p"}, [p, d])


def test_the_transfer_thread_ends_while_the_device_waits(
    pair: tuple[Rank, Rank], copies: list[SlowCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    copies[1].gate.clear()
    begin_inside(p, d)
    transfer_thread, outcome = thread_of(d), d.worker.step_hold.outcome
    assert transfer_thread is not None and outcome is not None
    monkeypatch.setattr(outcome, "ended", lambda *_: None)  # whatever it says in the end is lost
    threading.Timer(0.2, copies[1].gate.set).start()
    transfer_thread.close(60)
    assert not standing(d)


def test_what_is_told_of_another_load_of_that_name_counts_for_nothing(
    pair: tuple[Rank, Rank], copies: list[SlowCopies]
) -> None:
    p, d = pair
    old = begin_inside(p, d)
    assert standing(d) == {"req-d"} and wait(lambda: p.sent == {"req-p"}, [p, d])
    token = secrets.token_bytes(16)
    lease = LeaseGrant("req-p2", token, TOKENS, (pack_ids(THEIRS),))
    copies[1].gate.clear()
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, now=True))
    outcome = d.worker.step_hold.outcome
    assert outcome is not None
    outcome.begun(old.loads[0])
    outcome.ended(old.loads[0], True)
    once_it_waits(d, lambda: p.worker.post(StepPlan(leases=(lease,))))
    d.worker.begin_step()
    assert copies[1].running, "this one's copies"
    copies[1].gate.set()
    assert standing(d) == {"req-d"}


def test_of_copies_that_end_at_once_nobody_is_told(group: RankGroup) -> None:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    begun: list[object] = []
    d.thread.results.begun = lambda *args: begun.append(args)  # type: ignore[method-assign]
    begin_inside(p, d)
    assert standing(d) == {"req-d"} and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    assert wait(lambda: p.sent == {"req-p"}, [p, d]) and not begun


def test_a_step_does_not_begin_with_a_load_that_was_refused(pair: tuple[Rank, Rank], copies: list[SlowCopies]) -> None:
    """Nothing of it is under way, so nothing is waited for."""
    p, d = pair
    begin(p, d, "first")
    assert wait(lambda: d.received == {"first-d"} and p.sent == {"first-p"}, [p, d])
    p.close()
    d.worker.post(load_plan("req-d", bytes(16), peer([p]), OURS, 0, TOKENS, now=True))
    d.worker.begin_step()
    assert not copies[1].held
    assert not standing(d) and d.worker.take_outcome() is None
