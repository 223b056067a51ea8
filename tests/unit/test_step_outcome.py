"""The loads of one step between three threads: who waits for what, and that nobody waits for a thread that is gone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from kvferry.connector.step_loads import step_outcome
from kvferry.connector.step_loads.step_outcome import StepOutcome
from kvferry.connector.wire.step_plan import Load, PeerEngine

P = PeerEngine("p", 1, 1, 30.0, ())
LONG = 600.0
"""Seconds that nobody waits for."""


def load(request_id: str = "r") -> Load:
    return Load(request_id, b"t" * 16, P, (), (), now=True)


def outcome_of(*loads: Load, alive: Callable[[], bool] = lambda: True) -> StepOutcome:
    return StepOutcome(loads, alive, lambda: None)


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
    monkeypatch.setattr(step_outcome, "LOOK_SECONDS", LONG)
    now, looks = count(), []
    one = load()
    outcome = StepOutcome([one], lambda: True, lambda: None, clock=lambda: next(now) * step_outcome.YIELD_SECONDS / 10)
    outcome.begun(one, lambda: looks.append(1))
    output = Aside(outcome.standing)
    assert all(output.waits for _ in range(4)) and len(looks) < 20
    outcome.ended(one)
    assert output.result() == {"r"}


def test_what_needs_no_wait() -> None:
    """Copies that are done at once, loads that are refused, and a step without loads."""
    one, two = load("a"), load("b")
    outcome = outcome_of(one, two)
    assert not outcome.wait_begun(0.0) and outcome.waiting == ("a", "b"), "until they are given up"
    outcome.ended(one)
    outcome.ended(two, "data")
    assert outcome.wait_begun(LONG) and not outcome.under_way and outcome.standing() == {"a"}
    nothing = outcome_of(alive=lambda: False)
    assert nothing.wait_begun(LONG) and nothing.give_up() == () and nothing.standing() == frozenset()


def test_a_load_of_another_step_with_the_same_id_is_another_one() -> None:
    ours, earlier = load(), load()
    assert ours == earlier and ours is not earlier
    outcome = outcome_of(ours)
    outcome.begun(earlier)
    outcome.ended(earlier)
    assert outcome.waiting == ("r",) and not outcome.final
    outcome.ended(ours, "data")
    outcome.ended(earlier)
    assert outcome.standing() == frozenset()


@pytest.mark.parametrize("seed", range(8))
def test_three_threads(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever happens when: all threads come to an end, and what stands was under way when the forward was launched
    and has arrived."""
    monkeypatch.setattr(step_outcome, "LOOK_SECONDS", 0.005)
    draw = random.Random(seed)
    loads = [load(str(n)) for n in range(6)]
    ok = {each.request_id: draw.random() < 0.7 for each in loads}
    dies = draw.random() < 0.3
    script = [(each, what) for each in loads for what in ("begun", "ended")]
    draw.shuffle(script)

    def transfer() -> None:
        for each, what in script[: draw.randrange(len(script)) if dies else None]:
            time.sleep(draw.random() * 2e-3)
            outcome.begun(each) if what == "begun" else outcome.ended(each, "" if ok[each.request_id] else "data")

    thread = threading.Thread(target=transfer, daemon=True)
    outcome = StepOutcome(loads, thread.is_alive, lambda: None)
    thread.start()
    output = Aside(outcome.standing)
    outcome.wait_begun(draw.random() * 0.02)
    given_up = set(outcome.give_up())
    standing = output.result()
    assert isinstance(standing, frozenset) and standing <= {name for name, good in ok.items() if good}
    assert not standing & given_up and outcome.final
    assert outcome.failures().keys() == {each.request_id for each in loads} - standing
    if not dies:
        assert standing == {name for name, good in ok.items() if good} - given_up


@pytest.mark.parametrize("ok", [False, True])
@pytest.mark.parametrize("given_up", [False, True])
def test_the_transfer_thread_decides_where_the_check_cannot(given_up: bool, ok: bool) -> None:
    """It fails; or the load was given up, and stands by no check."""
    ours = load()
    outcome = outcome_of(ours)
    assert not given_up or outcome.give_up() == ("r",)
    outcome.begun(ours, lambda: given_up)
    output = Aside(outcome.standing)
    outcome.ended(ours, "" if ok else "data")
    assert output.result() == ({"r"} if ok and not given_up else frozenset())


WHAT = ["the time is over", "answered", "other work", "failed", "ended", "not under way"]


@pytest.mark.parametrize("what", WHAT)
def test_the_transfer_thread_leaves_the_interpreter_until(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(step_outcome, "YIELD_SECONDS", 0.02 if what == "the time is over" else LONG)
    ours, answer, woken, work = load(), [None], threading.Event(), threading.Event()
    outcome = StepOutcome([ours], lambda: True, woken.set)

    def wait(seconds: float) -> bool:
        woken.wait(seconds)
        woken.clear()
        return work.is_set()

    if what != "not under way":
        outcome.begun(ours, lambda: answer[0])
    if what == "ended":
        outcome.ended(ours)
    transfer = Aside(lambda: outcome.yield_to_engine(wait))
    if what == "other work":
        assert transfer.waits
        work.set()
        woken.set()
    if what in ("answered", "failed"):
        assert transfer.waits
        answer[0] = what == "answered"  # type: ignore[call-overload]
        output = Aside(outcome.standing)
        if what == "failed":  # only the transfer thread can say so
            transfer.result()
            outcome.ended(ours, "data")
        assert output.result() == ({"r"} if what == "answered" else frozenset())
    transfer.result()
