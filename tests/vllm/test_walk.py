"""Random turns of events under vLLM's real scheduler, a short slice of ``walk.py``: whatever happens, tokens and KV are
right and nothing is left. And that it sees planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.inside import scheduler_half
from tests.support.streaming_faults import FAULTS
from tests.vllm.stepped import EngineGroup, Lines
from tests.vllm.walk import PLANES, Case, Walk, draw, one_by_one

pytestmark = pytest.mark.vllm
SEED, TURNS = 5, 120
FAULTY = (3, 6, 1, 12, 28, 36, 5, 59)
"""Cases in which copies of P are late, and urgent requests take blocks."""
SEEN_SOON = ("no fence", "before its event", "any prompt")
"""Which cases see the other faults depends on the order of threads: ``test_simulation.py`` plants these too."""


def cases() -> list[object]:
    """Of legs that are sent at once, each plane once; of those that follow one another, each runner once."""
    drawn = [draw(SEED, number) for number in range(len(PLANES))] + [one_by_one(SEED, number) for number in (0, 4, 8)]
    assert {case.plane for case in drawn} == {*PLANES, "auto"}
    marks = {"ucx": pytest.mark.ucx}
    return [
        pytest.param(case, id=f"{case.number}-{case.plane}-{case.runner}", marks=marks.get(case.plane, ()))
        for case in drawn
    ]


@pytest.mark.parametrize("case", cases())
def test_walk(group: EngineGroup, lines: Lines, case: Case) -> None:
    walk = Walk(case, group)
    walk.run(TURNS)
    assert not lines("unexpected error")
    assert walk.outcomes.total() > 5 if case.at_once else walk.d.all_loads


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_loads_inside_the_step_with_a_window(group: EngineGroup, lines: Lines, ahead: int) -> None:
    """Of two block tables. Leases end, engines restart and blocks are few, so some of them fail."""
    walk = Walk(replace(one_by_one(SEED, ahead), plane="cma", runner="v2 eager", window=64, ahead=ahead), group)
    scheduler_half(walk.d).step_load_rule.hold_seconds = 600.0
    walk.run(TURNS)
    assert walk.d.step_loads and not lines("unexpected error")


@pytest.mark.parametrize("fault", SEEN_SOON)
def test_a_planted_fault_is_seen(group: EngineGroup, fault: str) -> None:
    with FAULTS[fault]():
        for number in FAULTY:
            try:
                Walk(draw(SEED, number, ("shm", "tcp", "zmq")), group).run()
            except AssertionError as error:
                assert "wrong KV" in str(error), "other than by its bytes"
                return
            finally:
                group.close()
    pytest.fail("no walk has seen it")


def test_a_number_gives_the_same_case_again() -> None:
    assert [draw(3, number) for number in range(50)] == [draw(3, number) for number in range(50)]
    assert len({str(draw(3, number)) for number in range(50)}) == 50
