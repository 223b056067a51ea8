"""What P's engine says of a step: when which layers count, on a device that is behind its thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connector.engine.prefill_events import LAYER_GROUPS, PrefillEvents
from kvferry.connector.protocol.step_plan import LeaseGrant, PrefillChunk, PrefillStop, StepPlan
from kvferry.connector.transfer.computed_steps import ComputedStep
from kvferry.connector.transfer.copies import HostCopies
from tests.unit.labelled_model import Model

NAMES = [f"layers.{number}" for number in range(20)]
GROUP = -(-len(NAMES) // LAYER_GROUPS)


class Behind(HostCopies):
    """A device that reaches each point of its work when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.acts: list[Callable[[], None]] = []

    def after_engine(self, act: Callable[[], None]) -> None:
        self.acts.append(act)

    def reach(self, count: int) -> None:
        for _ in range(count):
            self.acts.pop(0)()


class Step:
    def __init__(self) -> None:
        self.device, self.wakes = Behind(), 0
        geometry = Model(("full", "mla") * 10, 2, False).rank((0, 1), (0, 1), 16)
        self.events = PrefillEvents(self.device, geometry, self.wake)

    def wake(self) -> None:
        self.wakes += 1

    def begin(self, *tokens: bytes, restarts: bool = False) -> ComputedStep:
        step = self.events.begin_step(plan(*tokens, restarts=restarts))
        assert step is not None
        return step


def plan(*tokens: bytes, restarts: bool = False) -> StepPlan:
    return StepPlan(chunks=tuple(PrefillChunk(token, 0, 1, (b"",), restarts) for token in tokens))


def stop(token: bytes, *, ended: bool = False) -> StepPlan:
    return StepPlan(stops=(PrefillStop(token, ended),))


def test_nothing_counts_before_the_device_has_reached_it() -> None:
    made = Step()
    step = made.begin(b"a")
    for name in NAMES:
        made.events.layer_computed(name)
    made.events.end_step()
    assert (step.begun, step.computed, step.ended, made.wakes) == (False, 0, False, 0)
    events = 1 + len(NAMES) // GROUP + 1
    assert len(made.device.acts) == events <= LAYER_GROUPS + 2
    made.device.reach(1)
    assert (step.begun, step.computed) == (True, 0)
    made.device.reach(1)
    assert step.computed == GROUP and not step.ended
    made.device.reach(events - 2)
    assert step.ended and made.wakes == events


def test_a_layer_has_its_place_in_each_region() -> None:
    made = Step()
    step = made.begin(b"a")
    for name in ("layers.3", "layers.0", "layers.99"):  # the last one uses the cache of another layer
        made.events.layer_computed(name)
    assert sorted(step.layers) == [(0, 0), (1, 1)]


def test_a_layer_between_steps_is_no_layer_of_a_step() -> None:
    made = Step()
    made.events.layer_computed("layers.0")
    step = made.begin(b"a")
    made.events.end_step()
    made.events.layer_computed("layers.0")
    made.events.end_step()
    assert not step.layers and len(made.device.acts) == 2


def test_a_step_without_an_end_ends_with_the_next_one() -> None:
    made = Step()
    first = made.begin(b"a")
    assert made.events.busy
    assert made.events.begin_step(StepPlan()) is None
    made.device.reach(2)
    assert first.ended


@pytest.mark.parametrize("ended", [False, True])
def test_blocks_are_lost_at_once_and_for_ever(ended: bool) -> None:
    made = Step()
    (first,), (other,) = made.begin(b"a").blocks, made.begin(b"b").blocks
    assert made.begin(b"a").blocks == (first,), "one life, several steps"
    made.events.take_back(stop(b"a", ended=ended))
    assert first.lost and not other.lost
    (second,) = made.begin(b"a", restarts=True).blocks
    assert second is not first and not second.lost
    made.events.begin_step(stop(b"b"))
    assert other.lost and not second.lost


def test_a_restart_alone_says_that_the_blocks_are_lost() -> None:
    made = Step()
    (first,) = made.begin(b"a").blocks
    (second,) = made.begin(b"a", restarts=True).blocks
    assert first.lost and not second.lost


def test_a_lease_keeps_the_blocks() -> None:
    made = Step()
    (blocks,) = made.begin(b"a").blocks
    made.events.begin_step(StepPlan(leases=(LeaseGrant("r", b"a", 1, ()),)))
    made.events.take_back(stop(b"a", ended=True))
    assert not blocks.lost and not made.events.busy
