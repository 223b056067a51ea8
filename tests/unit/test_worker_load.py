"""A load as the engine's thread sees it, and the ledger of a rank: every posted id is reported exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.engine.load_ledger import LoadLedger
from kvferry.connector.protocol import worker_load as w
from kvferry.connector.protocol.step_plan import Load, PeerEngine, StepResults

PHASE = w.WorkerLoadPhase
P = PeerEngine("p", 1, 1, 30.0, ())


def load(request_id: str = "r", *, now: bool = False) -> Load:
    return Load(request_id, b"t" * 16, P, (), (), now=now)


def run(state: w.WorkerLoad, *events: w.WorkerLoadEvent) -> tuple[w.WorkerLoad, list[w.WorkerLoadEffect]]:
    effects: list[w.WorkerLoadEffect] = []
    for event in events:
        state, new = w.WORKER_LOAD.step(state, event, 1)
        effects += new
    return state, effects


@pytest.mark.parametrize("ok", [True, False])
def test_beside_the_steps(ok: bool) -> None:
    posted = load()
    state, effects = run(w.post_load(posted), w.CopiesBegun(posted))
    assert (state.phase, effects) == (PHASE.BESIDE, [])
    state, effects = run(state, w.LoadEnded(ok), w.LoadEnded(not ok), w.ThreadEnded())
    assert (state.phase, effects) == (PHASE.ENDED, [w.ReportBeside(ok)])


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_in_a_step(ok: bool, waits: bool) -> None:
    posted = load(now=True)
    state, effects = run(w.post_load(posted), *((w.CopiesBegun(posted), w.CopiesBegun(posted)) if waits else ()))
    assert state.phase is (PHASE.DEVICE_WAITS if waits else PHASE.IN_STEP)
    assert effects == ([w.HoldDevice()] if waits else []), "the device is held once"
    state, effects = run(state, w.LoadEnded(ok), w.CopiesBegun(posted), w.ThreadEnded(), w.LoadEnded(not ok))
    assert (state.phase, effects) == (PHASE.ENDED, [w.ReportInStep(ok)])


@pytest.mark.parametrize("now", [True, False])
def test_the_end_of_the_thread_fails_it(now: bool) -> None:
    state, effects = run(w.post_load(load(now=now)), w.ThreadEnded(), w.LoadEnded(True))
    assert state.phase is PHASE.ENDED
    assert effects == [w.ReportInStep(False) if now else w.ReportBeside(False)]


def test_the_copies_of_an_earlier_load_of_that_id_count_for_nothing() -> None:
    posted, earlier = load(now=True), load(now=True)
    assert posted == earlier and posted is not earlier
    state, effects = run(w.post_load(posted), w.CopiesBegun(earlier))
    assert (state.phase, effects) == (PHASE.IN_STEP, [])


# --- the ledger -------------------------------------------------------------------------------------------------


def test_a_failure_is_received_too_and_everything_is_taken_once() -> None:
    ledger = LoadLedger()
    ledger.post([load("a"), load("b"), load("c", now=True)], ["p"])
    ledger.load_ended("a", ok=False)
    ledger.load_ended("c", ok=False)
    ledger.lease_freed("p")
    for _ in range(2):  # of what was never posted nothing is reported
        ledger.load_ended("x", ok=True)
        ledger.lease_freed("x")
    assert ledger.take_results() == StepResults({"p"}, {"a"}, {"a"}) and ledger.take_failed_in_step() == {"c"}
    assert ledger.take_results() == StepResults() and ledger.take_failed_in_step() == set()
    assert ledger.owes and ledger.awaits_load
    ledger.load_ended("b", ok=True)
    assert not ledger.owes and not ledger.awaits_load
    assert ledger.take_results() == StepResults(received={"b"})


def test_a_step_begins_when_its_device_waits_for_all_its_loads() -> None:
    ledger, one, two = LoadLedger(), load("a", now=True), load("b", now=True)
    ledger.post([one, two, load("c")], ())
    assert set(ledger.in_step) == {"a", "b"} and not ledger.step_may_begin
    assert ledger.copies_begun(one) and not ledger.step_may_begin
    ledger.load_ended("b", ok=False)
    assert ledger.step_may_begin and ledger.in_step == ("a",)
    ledger.load_ended("a", ok=True)
    assert ledger.step_may_begin and not ledger.in_step and ledger.take_failed_in_step() == {"b"}
    assert ledger.take_results() == StepResults(), "the step has them"


def test_a_log_line_has_the_histories_of_some() -> None:
    ledger = LoadLedger(clock=iter(range(100)).__next__)
    posted = load("a", now=True)
    ledger.post([posted], ())
    ledger.copies_begun(posted)
    assert ledger.stories() == "a (in a step, the device waits +1.000 s (CopiesBegun))"
    ledger.post([load(str(n)) for n in range(10)], ())
    assert ledger.stories().endswith("6 (beside the steps) and 3 more")


NAMES = "abc"
act = st.one_of(
    st.tuples(st.just("post"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.sampled_from(["begun", "lease", "freed"]), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("ended"), st.sampled_from(NAMES), st.booleans()),
    st.tuples(st.sampled_from(["take", "thread"]), st.none(), st.none()),
)


@given(st.lists(act, max_size=60))
def test_whatever_happens_every_id_is_reported_once(script: list[tuple[str, str | None, bool | None]]) -> None:
    ledger = LoadLedger()
    owed: dict[str, Load] = {}  # posted, and not taken
    leased: set[str] = set()

    def take() -> None:
        results, failed = ledger.take_results(), ledger.take_failed_in_step()
        assert results.failed <= results.received and not results.received & failed
        assert all(not owed.pop(name).now for name in results.received), "it is owed, and beside the steps"
        assert all(owed.pop(name).now for name in failed)
        for name in [name for name, each in owed.items() if each.now and name not in ledger.in_step]:
            del owed[name]  # it came, and the step has computed with it
        assert results.sent <= leased
        leased.difference_update(results.sent)

    for what, name, flag in script:
        if what == "post" and name not in owed:
            owed[str(name)] = load(str(name), now=bool(flag))
            ledger.post([owed[str(name)]], ())
        elif what == "begun" and name in owed:
            ledger.copies_begun(owed[name])
        elif what == "ended":
            ledger.load_ended(str(name), ok=bool(flag))
        elif what == "lease" and name not in leased:
            leased.add(str(name))
            ledger.post((), [str(name)])
        elif what == "freed":
            ledger.lease_freed(str(name))
        elif what == "thread":
            ledger.thread_ended()
        elif what == "take":
            take()
    ledger.thread_ended()
    take()
    assert not owed and not leased and not ledger.owes
