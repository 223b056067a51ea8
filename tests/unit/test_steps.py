"""Engine steps: which loads go inside one, whose freed blocks it may still use, who waits for what."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.scheduler.step_load_rule import StepLoadRule
from kvferry.connector.scheduler.steps_in_flight import REMEMBERED_STEPS, StepsInFlight
from kvferry.connector.step_loads import step_loads
from kvferry.connector.step_loads.step_loads import StepLoad, StepLoads, StepOutcome
from kvferry.connector.wire import step_plan as wire
from kvferry.connector.wire.step_plan import ALONE_SECONDS, Load, LoadEnd, PeerEngine, StepPlan, by_region, pack_ids

P = PeerEngine("p", 1, 1, 30.0, ())
LONG = 600.0
"""Seconds that nobody waits for."""


FAILED = LoadEnd("data")


def load(request_id: str = "r") -> Load:
    return Load(request_id, b"t" * 16, P, (), (), now=True)


def posted(*names: str) -> list[StepLoad]:
    return StepLoads().post(map(load, names))


def standing(outcome: StepOutcome) -> set[str]:
    return {name for name, end in outcome.ends().items() if not end.failed}


class Aside:
    """What another thread returns."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._found: list[object] = []
        self._thread = threading.Thread(target=lambda: self._found.append(act()), daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        self._thread.join(0.05)
        return self._thread.is_alive()

    def result(self) -> object:
        self._thread.join(60)
        (found,) = self._found
        return found


def test_the_output_looks_at_copies_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may take seconds. Thousands of looks would take the interpreter from the thread that serves it."""
    monkeypatch.setattr(step_loads, "LOOK_SECONDS", LONG)
    ticks, looks = count(step=step_loads.YIELD_SECONDS / 10), []
    (one,) = loads = posted("r")
    monkeypatch.setattr(step_loads, "time", SimpleNamespace(monotonic=ticks.__next__))
    outcome = StepOutcome(loads, lambda: True, lambda: None)
    one.begun(lambda: looks.append(1))
    output = Aside(lambda: standing(outcome))
    assert all(output.waits for _ in range(4)) and len(looks) < 20
    one.ended(LoadEnd())
    assert output.result() == {"r"}


def test_what_needs_no_wait() -> None:
    """Copies that are done at once, and loads that are refused."""
    one, two = loads = posted("a", "b")
    outcome = StepOutcome(loads, lambda: True, lambda: None)
    assert not outcome.wait_begun(0.0) and outcome.waiting == ("a", "b"), "until they are given up"
    one.ended(LoadEnd())
    two.ended(FAILED)
    assert outcome.wait_begun(LONG) and standing(outcome) == {"a"}


def test_no_attempt_follows_once_a_step_computes_with_a_load() -> None:
    """And none of its copies is one of the attempt before."""
    (one,) = StepLoads().post([Load("r", b"t" * 16, P, (), ())])
    one.begun(lambda: True, [object()], 0.0)  # type: ignore[list-item]
    assert one.retries() and not one.under_way and not one.copies and one.stands is None and one.ends_at == math.inf
    one.begun()
    one.claimed = True
    assert not one.retries() and one.under_way


@pytest.mark.parametrize(("ends_at", "then"), [(5.0, 9.5), (math.inf, math.inf)])
def test_copies_that_follow_those_of_another_load(ends_at: float, then: float) -> None:
    """They take their time from the end of those on; where nobody knows how long, nobody knows it then."""
    (one,) = StepLoads().post([Load("r", b"t" * 16, P, (), (), seconds=0.5)])
    one.begins_again(1.0)
    assert one.ends_at == math.inf, "no copy of it is under way"
    one.begun(ends_at=ends_at)
    one.begins_again(9.0)
    assert one.ends_at == then


@pytest.mark.parametrize(("foresees", "reported"), [(False, {"soon"}), (True, {"soon", "sent"})])
def test_what_is_reported_before_its_end(monkeypatch: pytest.MonkeyPatch, foresees: bool, reported: set[str]) -> None:
    """What should end within the lead; of what P still sends only what should end now, and by a rank that foresees."""
    monkeypatch.setattr(step_loads, "time", SimpleNamespace(monotonic=lambda: 100.0))
    ends, rank = {"soon": 0.5, "late": 0.6, "sent": 0.5, "sent late": 0.6, "sent long ago": 0.4}, StepLoads()
    for one in rank.post([Load(name, b"t" * 16, P, (), ()) for name in ends]):
        if "sent" not in one.request_id:
            one.begun()
        one.ends_at = 100.0 + ends[one.request_id] - ("ago" in one.request_id) * ALONE_SECONDS
    assert rank.due(0.5, foresees=foresees) == pytest.approx(100.0)
    rank.report_early(0.5, foresees=foresees)
    assert rank.take_results().received == reported
    assert rank.due(0.5, foresees=foresees) == pytest.approx(100.1), "an engine that waits for it does not spin"


def test_a_load_that_is_reported_ends_with_its_thread() -> None:
    """Else the step that joins it waits for the next life of the rank, which knows nothing of it."""
    rank = StepLoads()
    (one,) = rank.post([Load("r", b"t" * 16, P, (), ())])
    one.begun(ends_at=0.0)
    rank.report_early(0.0, foresees=False)
    assert one.claimed and rank.take_results().received == {"r"}
    assert not rank.end_all(LoadEnd("cancelled")) and rank.take_results().received == set()
    outcome = StepOutcome(rank.join([one.load]), lambda: True, lambda: None)
    assert outcome.wait_begun(0.0) and outcome.ends()["r"].failed


@pytest.mark.parametrize("seed", range(8))
def test_three_threads(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever happens when: all threads come to an end, and what stands was under way when the forward was launched
    and has arrived."""
    monkeypatch.setattr(step_loads, "LOOK_SECONDS", 0.005)
    draw = random.Random(seed)
    loads = posted(*map(str, range(6)))
    ok = {each.request_id: draw.random() < 0.7 for each in loads}
    dies = draw.random() < 0.3
    script = [(each, what) for each in loads for what in ("begun", "ended")]
    draw.shuffle(script)

    def transfer() -> None:
        for each, what in script[: draw.randrange(len(script)) if dies else None]:
            time.sleep(draw.random() * 2e-3)
            each.begun() if what == "begun" else each.ended(LoadEnd() if ok[each.request_id] else FAILED)

    thread = threading.Thread(target=transfer, daemon=True)
    outcome = StepOutcome(loads, thread.is_alive, lambda: None)
    thread.start()
    output = Aside(outcome.ends)
    outcome.wait_begun(draw.random() * 0.02)
    given_up = set(outcome.give_up())
    ends = output.result()
    assert isinstance(ends, dict) and ends.keys() == ok.keys() and outcome.final
    stand = {name for name, end in ends.items() if not end.failed}
    assert stand <= {name for name, good in ok.items() if good} - given_up
    if not dies:
        assert stand == {name for name, good in ok.items() if good} - given_up


@pytest.mark.parametrize("ok", [False, True])
@pytest.mark.parametrize("given_up", [False, True])
def test_the_transfer_thread_decides_where_the_check_cannot(given_up: bool, ok: bool) -> None:
    """It fails; or the load was given up, and stands by no check."""
    (ours,) = loads = posted("r")
    outcome = StepOutcome(loads, lambda: True, lambda: None)
    assert not given_up or outcome.give_up() == ("r",)
    ours.begun(lambda: given_up)
    output = Aside(lambda: standing(outcome))
    ours.ended(LoadEnd() if ok else FAILED)
    assert output.result() == ({"r"} if ok and not given_up else set())


WHAT = ["the time is over", "answered", "other work", "failed", "ended", "not under way"]


@pytest.mark.parametrize("what", WHAT)
def test_the_transfer_thread_leaves_the_interpreter_until(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(step_loads, "YIELD_SECONDS", 0.02 if what == "the time is over" else LONG)
    (ours,), answer, woken, work = posted("r"), [None], threading.Event(), threading.Event()
    outcome = StepOutcome([ours], lambda: True, woken.set)

    def wait(seconds: float) -> bool:
        woken.wait(seconds)
        woken.clear()
        return work.is_set()

    if what != "not under way":
        ours.begun(lambda: answer[0])
    if what == "ended":
        ours.ended(LoadEnd())
    transfer = Aside(lambda: outcome.yield_to_engine(wait))
    if what == "other work":
        assert transfer.waits
        work.set()
        woken.set()
    if what in ("answered", "failed"):
        assert transfer.waits
        answer[0] = what == "answered"  # type: ignore[call-overload]
        output = Aside(lambda: standing(outcome))
        if what == "failed":  # only the transfer thread can say so
            transfer.result()
            ours.ended(FAILED)
        assert output.result() == ({"r"} if what == "answered" else set())
    transfer.result()


HOLD = 0.01
STEP = 0.05


@pytest.mark.parametrize(("copy", "left", "others", "fits"), [
    (0.0, 0.0, True, True), (HOLD, 0.0, True, True), (HOLD + 1e-6, 0.0, True, False),
    (0.030, 0.020, True, True), (0.030, 0.019, True, False), (0.001, 5.0, True, True), (math.inf, 5.0, True, False),
    (ALONE_SECONDS, 0.0, False, True), (ALONE_SECONDS + 1e-6, 0.0, False, False), (math.inf, 0.0, False, False),
])  # fmt: skip
def test_how_long_a_copy_may_take(copy: float, left: float, others: bool, fits: bool) -> None:
    """Beside others as long as the device is busy and the setting more; alone longer, and never less."""
    assert StepLoadRule(HOLD).fits(copy, left, math.inf, others=others) is fits
    assert StepLoadRule(2 * ALONE_SECONDS).fits(2 * ALONE_SECONDS, 0.0, math.inf, others=others)
    assert not StepLoadRule(0.0).fits(0.0, 1.0, math.inf, others=others), "switched off"


def test_loads_of_one_step_follow_each_other() -> None:
    rule = StepLoadRule(HOLD)
    rule.planned(0.006)
    for others in (True, False):  # what is planned waits too, whoever says that there is nobody else
        assert rule.fits(0.004, 0.0, STEP, others=others) and not rule.fits(0.005, 0.0, STEP, others=others)
    assert rule.fits(0.005, 0.001, STEP, others=True)
    rule.planned(0.004)
    assert not rule.fits(0.001, 0.0, STEP, others=True)
    rule.next_step()
    assert rule.fits(HOLD, 0.0, STEP, others=True), "another step, another account"


seconds = st.floats(0, 0.1)


@given(st.floats(0, 0.05), seconds, seconds, st.lists(seconds, max_size=8))
def test_others_are_never_held_up_for_longer(hold: float, left: float, step: float, copies: list[float]) -> None:
    """Than the setting, nor than a step."""
    rule, planned = StepLoadRule(hold), 0.0
    for copy in copies:
        if rule.fits(copy, left, step, others=True):
            rule.planned(copy)
            planned += copy
    assert planned - left <= min(hold, step) + 1e-9


@given(seconds, seconds, seconds)
def test_one_that_does_not_fit_is_joined_by_the_same_rule(rest: float, left: float, step: float) -> None:
    """It is reported once the rest of its copy fits."""
    rule = StepLoadRule(HOLD)
    lead = rule.lead(left, step)
    assert rest > lead - 1e-9 or rule.fits(rest, left, step, others=True)
    assert rest < lead + 1e-9 or not rule.fits(rest, left, step, others=True)
    assert StepLoadRule(0.0).lead(left, step) == -math.inf


acts = st.one_of(
    st.just(("scheduled", 0)), st.just(("processed", 0)), st.just(("unknown", 0)),
    st.tuples(st.just("freed"), st.integers(0, 3)),
)  # fmt: skip


@given(st.lists(acts, max_size=60))
def test_whatever_happens_no_block_in_use_passes_for_free(script: list[tuple[str, int]]) -> None:
    steps = StepsInFlight()
    scheduled = processed = 0
    last_users: list[tuple[int, int | None]] = []
    for number, (what, block) in enumerate(script):
        match what:
            case "scheduled":
                steps.scheduled()
                scheduled += 1
            case "processed":
                steps.processed(float(number))
                processed = min(processed + 1, scheduled)
            case _:
                steps.freed(None if what == "unknown" else [block])
                last_users.append((scheduled, None if what == "unknown" else block))
        for asked in range(4):
            used = any(freed in (None, asked) and step > processed for step, freed in last_users)
            assert steps.may_use([asked]) == used


def busy(*ends: float) -> StepsInFlight:
    """Steps that ended then, each scheduled before the one ahead had ended; one is in flight."""
    steps = StepsInFlight()
    steps.scheduled()
    for end in ends:
        steps.scheduled()
        steps.processed(end)
    return steps


@pytest.mark.parametrize(("ends", "now", "left"), [
    ((), 1.0, 0.0),  # no step has ended yet
    ((1.0,), 1.0, 0.0),  # of the first one it is not known when it began
    ((1.0, 1.010), 1.010, 0.010), ((1.0, 1.010), 1.016, 0.004), ((1.0, 1.010), 1.030, 0.0),
    ((1.0, 1.010, 1.013, 1.033), 1.033, 0.003),  # the shortest counts: a load that fits is to fit after any of them
    ((1.0, 1.003, *(1.003 + 0.008 * n for n in range(1, REMEMBERED_STEPS + 1))), 1.003 + 0.008 * REMEMBERED_STEPS,
        0.008),  # what was long ago is forgotten
])  # fmt: skip
def test_how_long_the_device_is_busy(ends: tuple[float, ...], now: float, left: float) -> None:
    assert busy(*ends).seconds_left(now) == pytest.approx(left)


def test_when_a_step_can_begin_that_is_scheduled_later() -> None:
    """After the steps in flight, the one that is scheduled now, and those that are by the time its output is seen."""
    assert busy(1.0, 1.010).seconds_until_seen(1.014) == pytest.approx(0.006 + 2 * 0.010)
    waits = StepsInFlight()  # not scheduled ahead
    for end in (1.0, 1.010):
        waits.scheduled()
        waits.scheduled()
        waits.processed(end)
        waits.processed(end + 0.010)
    assert waits.count == 0 and waits.seconds_until_seen(1.5) == pytest.approx(waits.step_seconds)
    assert StepsInFlight().seconds_until_seen(1.0) == 0.0


def test_where_a_report_is_seen_at_once_the_others_in_flight_come_before() -> None:
    early = busy(1.0, 1.010)
    early.seen_at_once = True
    assert early.seconds_until_seen(1.014) == pytest.approx(early.count * 0.010)
    assert StepsInFlight().seconds_until_seen(1.0) == 0.0


def test_steps_that_say_nothing_of_the_time_of_a_step() -> None:
    """One after a pause, which began when it was launched, and that is not known; and one that computes nothing."""
    steps = StepsInFlight()
    assert steps.seconds_left(1.0) == 0.0
    for now in (1.0, 6.0, 11.0):
        steps.scheduled()
        steps.processed(now)
    steps.scheduled()
    assert steps.seconds_left(16.0) == 0.0
    steps = busy(1.0, 1.010)
    steps.scheduled()
    steps.processed(1.0101, computed=False)
    assert steps.seconds_left(1.0101) == pytest.approx(0.010)
    steps.scheduled()
    assert steps.seconds_left(1.0121) == pytest.approx(0.018), "all steps in flight count"


def test_nothing_in_flight_keeps_no_device_busy() -> None:
    steps = busy(1.0, 1.010)
    steps.processed(1.020)
    assert steps.seconds_left(1.020) == 0.0
    steps.scheduled()
    assert steps.seconds_left(1.021) == 0.0, "when it was launched is not known"


def test_an_admission_takes_what_the_shortest_of_the_last_ones_of_its_length_took() -> None:
    steps = StepsInFlight()
    steps.admitted(100_000, 0.2)  # the engine was held up
    assert not steps.admission_seconds(100_000)
    steps.admitted(100_000, 0.01)
    expected = {100_000: 0.01, 120_000: 0.01, 80_000: 0.008, 40_000: 0.0, 200_000: 0.0}
    assert {tokens: steps.admission_seconds(tokens) for tokens in expected} == pytest.approx(expected)
    steps.admitted(100_000, 0.3)
    assert steps.admission_seconds(100_000) == 0.01
    for _ in range(2):
        steps.admitted(100_000, 0.012)
    assert steps.admission_seconds(100_000) == 0.012


PEER = PeerEngine("p", 1, 2, 30.0, ())
IDS = tuple(pack_ids([n]) for n in range(3))


def test_a_plan_of_some_groups() -> None:
    plan = StepPlan(
        leases=(wire.LeaseGrant("a", b"t" * 16, 9, IDS),), keeps=(wire.KeepLease("b", b"t" * 16, PEER, False),),
        loads=(Load("b", b"t" * 16, PEER, IDS, ((0, 9), (1, 9), (2, 9))),),
    )  # fmt: skip
    some = by_region(plan, (0, 2))
    assert some.leases[0].block_ids == some.loads[0].block_ids == (IDS[0], IDS[2])
    assert some.loads[0].tokens == ((0, 9), (2, 9)) and some.keeps == plan.keeps
    assert by_region(plan, (0, 1, 2)) == plan and by_region(plan, ()).loads[0].block_ids == ()
