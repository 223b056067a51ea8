"""Both legs of a request at once, under random turns of events: a short slice of ``run_walks.py``, and that it sees
planted faults."""

from __future__ import annotations

import pytest

from tests.support.streaming_faults import FAULTS
from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.named_walk import PLANES, Case, NamedWalk, draw

pytestmark = pytest.mark.vllm
SEED, CASES, TURNS = 5, 10, 250
FAULTY = (3, 6, 1, 12, 28, 36, 5, 59)
"""Cases in which copies of P are late, and urgent requests take blocks."""
SEEN_SOON = ("no fence", "before its event", "any prompt")
"""Which cases see the other faults depends on the order of threads: ``test_simulation.py`` plants these too."""


def cases() -> list[object]:
    """Each plane twice."""
    drawn = [draw(SEED, number) for number in range(CASES)]
    assert {case.plane for case in drawn} == set(PLANES)
    return [
        pytest.param(case, id=f"{case.number}-{case.plane}", marks=pytest.mark.ucx if case.plane == "ucx" else ())
        for case in drawn
    ]


@pytest.mark.parametrize("case", cases())
def test_walk(group: EngineGroup, lines: Lines, case: Case) -> None:
    walk = NamedWalk(case, group)
    walk.run(TURNS)
    assert not lines("unexpected error")
    assert walk.outcomes.total() > 5


@pytest.mark.parametrize("fault", SEEN_SOON)
def test_a_planted_fault_is_seen(group: EngineGroup, fault: str) -> None:
    with FAULTS[fault]():
        for number in FAULTY:
            try:
                NamedWalk(draw(SEED, number, ("shm", "tcp", "zmq")), group).run()
            except AssertionError as error:
                assert "wrong KV" in str(error), "other than by its bytes"
                return
            finally:
                close(group)
    pytest.fail("no walk has seen it")


def close(group: EngineGroup) -> None:
    while group.engines:
        group.engines.pop().close()


def test_a_number_gives_the_same_case_again() -> None:
    assert [draw(3, number) for number in range(50)] == [draw(3, number) for number in range(50)]
    assert len({str(draw(3, number)) for number in range(50)}) == 50
