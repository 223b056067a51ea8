"""What P's engine says of a step: when which layers count, on a device that is behind its thread."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

import pytest
import torch

from kvferry.connector.engine.prefill_events import PrefillEvents
from kvferry.connector.pages import computed_steps
from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.pages.copies import Copies
from kvferry.connector.wire.step_plan import PrefillChunk, StepPlan
from tests.unit.labelled_model import Model

NAMES = [f"layers.{number}" for number in range(20)]
GROUPS = [3, 6, 9, 12, 15, 18, 19, 20]
"""How many layers are computed at each event."""


class Behind(Copies):
    """A device that reaches each point of its work when the test says so."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device("cpu" if device == "host" else "cuda")
        self.acts: list[Callable[[], None]] = []

    def after_engine(self, act: Callable[[], None]) -> None:
        self.acts.append(act)

    def reach(self, count: int) -> None:
        for _ in range(count):
            self.acts.pop(0)()


class Step:
    def __init__(self, device: str = "GPU") -> None:
        self.device, self.wakes, self.over = Behind(device), 0, 0
        geometry = Model(("full", "mla") * 10, 2, False).rank((0, 1), (0, 1), 16)
        self.events = PrefillEvents(self.device, geometry, self.wake, self.count_over)

    def wake(self) -> None:
        self.wakes += 1

    def count_over(self) -> None:
        self.over += 1

    def begin(self, *tokens: bytes, restarts: bool = False, found: int = 0) -> ComputedStep:
        step = self.events.begin_step(plan(*tokens, restarts=restarts, found=found))
        assert step is not None
        return step


def plan(*tokens: bytes, restarts: bool = False, found: int = 0) -> StepPlan:
    return StepPlan(prefill_chunks=tuple(PrefillChunk(token, 0, 1, (b"",), restarts, found) for token in tokens))


def test_nothing_counts_before_the_device_has_reached_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computed_steps, "NEARLY_SECONDS", 600.0)
    made = Step()
    step = made.begin(b"a", found=16)
    for name in NAMES:
        made.events.layer_computed(name)
    made.events.end_step()
    assert (step.begun, step.computed, step.ended, made.wakes, made.over) == (False, 0, False, 0, 0)
    events = 1 + len(GROUPS) + 1
    assert len(made.device.acts) == events
    made.device.reach(1)
    assert (step.begun, step.computed) == (True, 0)
    made.device.reach(1)
    assert step.computed == GROUPS[0] and not step.ended
    made.device.reach(events - 2)
    assert step.ended and step.computed == step.num_layers
    assert made.wakes == events - 1, "the end brings no news"
    assert made.over == 2, "nearly at its end, and at its end"


def test_the_begin_of_a_step_is_told_where_tokens_were_found() -> None:
    """Else what is ready then was ready when the step before had ended."""
    made = Step()
    for found, restarts, acts in ((0, False, 0), (16, False, 0), (16, True, 1), (16, False, 0)):
        step = made.begin(b"a", found=found, restarts=restarts)
        assert len(made.device.acts) == acts
        made.events.end_step()
        made.device.reach(acts + 1)
        assert step.begun == bool(acts) and step.ended


@pytest.mark.parametrize("device", ["host", "GPU"])
def test_in_host_memory_the_next_layer_begins_before_the_thread_is_woken(device: str) -> None:
    """A GPU shares no interpreter, and what it has computed leaves at once."""
    made = Step(device)
    step = made.begin(b"a")
    deferred = device == "host"
    for number, name in enumerate(NAMES):
        made.events.layer_begins()
        assert made.wakes == bisect(GROUPS, number)
        made.events.layer_computed(name)
        made.device.reach(len(made.device.acts))
        assert step.computed == max([0, *GROUPS[: bisect(GROUPS, number + 1)]])
        assert made.wakes == bisect(GROUPS, number if deferred else number + 1)
    made.events.end_step()
    made.device.reach(1)
    assert made.wakes == len(GROUPS)
    step = made.begin(b"a")
    made.events.layer_computed(NAMES[0])
    made.events.end_step()
    made.device.reach(1)
    assert step.ended and made.wakes == len(GROUPS) + 1, "where no layer begins, nothing waits for it"


def test_a_layer_has_its_place_in_each_region_of_the_step_under_way() -> None:
    made = Step()
    made.events.layer_computed("layers.0")
    step = made.begin(b"a")
    for name in ("layers.3", "layers.0", "layers.99"):  # the last one uses the cache of another layer
        made.events.layer_computed(name)
    assert sorted(step.layers) == [(0, 0), (1, 1)]
    made.events.end_step()
    made.events.layer_computed("layers.1")
    made.events.end_step()
    assert len(step.layers) == 2 and len(made.device.acts) == 1
