"""What a step costs that hands nothing over, which is nearly every step of an engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import kvferry.connector.config
from kvferry.transport import wake
from kvferry.transport.wake import ShortSwitchInterval
from tests.support.lines import LineCount
from tests.vllm.stepped import Engine, EngineGroup, eventually, run, settle

pytestmark = pytest.mark.vllm
PRODUCT = str(Path(kvferry.connector.config.__file__).parent)
MAX_LINES = {False: 146, True: 163}
"""Of KVFerry in one step, both halves, ``True`` where the only rank runs in the scheduler's process: so many on Python
3.11. Without a reason in the same change this bound does not grow."""


@pytest.mark.parametrize("one_process", [False, True])
def test_a_step_that_hands_nothing_over_executes_few_lines(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, one_process: bool
) -> None:
    monkeypatch.setattr(wake, "HELD_UP_SECONDS", math.inf)  # a step has no hold-up of the host to tell
    engine: Engine = group.engine(0, ahead=1, one_process=one_process)
    engine.add(list(range(2, 40)), max_tokens=64)
    for _ in range(6):
        engine.step()
    counts = []
    for _ in range(8):
        with LineCount(PRODUCT) as lines:
            engine.step()
        counts.append(lines.count)
    settle(engine)
    assert 0 < max(counts) <= MAX_LINES[one_process], counts


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """The interval of a process of its own: simulated ranks of other tests, which never end, may want it short."""
    monkeypatch.setattr(ShortSwitchInterval, "wanted", [])
    found = sys.getswitchinterval()
    sys.setswitchinterval(5e-3)
    yield sys.getswitchinterval()
    sys.setswitchinterval(found)


def test_the_switch_interval_is_short_only_while_something_is_handed_over(group: EngineGroup, before: float) -> None:
    p, d = group.engine(0), group.engine(1)
    eventually(lambda: sys.getswitchinterval() == before)
    params = p.prefill(list(range(2, 60)))
    assert sys.getswitchinterval() < before, "P holds a lease"
    d.add(list(range(2, 60)), params)
    run([p, d], lambda: p.idle and d.idle)
    eventually(lambda: sys.getswitchinterval() == before)


def test_an_engine_that_has_ended_leaves_the_interval_alone(group: EngineGroup, before: float) -> None:
    p = group.engine(0)
    p.prefill(list(range(2, 60)))
    assert sys.getswitchinterval() < before
    for worker in p.workers:
        worker.connector.shutdown()
    eventually(lambda: sys.getswitchinterval() == before)
    p.prefill(list(range(2, 50)))
    assert sys.getswitchinterval() == before


def test_the_interval_is_restored_when_the_last_one_does(before: float) -> None:
    one, two = ShortSwitchInterval(1e-4), ShortSwitchInterval(2e-5)
    one.shorten()
    two.shorten()
    two.shorten()
    assert sys.getswitchinterval() == pytest.approx(2e-5)
    two.restore()
    assert sys.getswitchinterval() == pytest.approx(1e-4)
    one.restore()
    one.restore()
    assert sys.getswitchinterval() == pytest.approx(before)
