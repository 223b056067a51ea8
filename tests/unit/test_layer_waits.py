"""What a forward has waited for when it comes to a layer, on each of the streams that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.geometry.portions import portion_of
from kvferry.connector.pages.copies import Copies
from kvferry.connector.step_loads.step_hold import LayerWaits
from kvferry.connector.step_loads.step_outcome import StepOutcome
from kvferry.connector.wire.step_plan import Load, PeerEngine
from kvferry.transport.channels import Copy

LAYERS = [f"layers.{number}" for number in range(8)]
UNNAMED = "layers.9"
"""A layer that the order does not name: it may share the cache of any other one."""
MAIN, OTHER = 1, 2


class Stream(Copies):
    """Notes what each stream of the engine waits for: events, or ``None`` for all copies."""

    def __init__(self) -> None:
        super().__init__()
        self.current = MAIN
        self.waits: list[tuple[int, Any]] = []

    @property
    def engine_stream(self) -> int:
        return self.current

    def make_engine_wait(self, event: object = None) -> None:
        self.waits.append((self.current, event))


class Step:
    """A step with one load of these copies. ``blocked``: the portions that its thread has waited for."""

    def __init__(self, *copies: Copy, order: Sequence[str] = LAYERS, by_layer: bool = True) -> None:
        load = Load("r", b"t" * 16, PeerEngine("p", 1, 1, 30.0, ()), (), (), now=True)
        self.outcome = StepOutcome([load], lambda: True, lambda: None, layer_order=order)
        self.outcome.begun(load, None, copies)
        self.load, self.stream, self.blocked = load, Stream(), []  # type: ignore[var-annotated]
        self.waits = LayerWaits(self.outcome, self.stream, lambda portions: self.blocked.append(list(portions)))
        self.waits.begin(by_layer=by_layer)

    def layers(self, *names: str) -> None:
        for name in names:
            self.waits.layer(name)

    def stands(self) -> bool:
        self.outcome.ended(self.load)
        return self.outcome.standing() == {"r"}


def on_device(portions: int) -> Copy:
    copy = Copy(on_stream=True)
    events: list[Any] = [f"event {number}" for number in range(portions)] if portions > 1 else []
    copy.events = events
    return copy


def in_host_memory(portions: int) -> Copy:
    copy = Copy()
    copy.ends = [10 * number for number in range(1, portions + 1)]
    return copy


def test_one_wait_for_each_portion() -> None:
    step = Step(on_device(4))
    assert step.stream.waits == [(MAIN, "event 0")]
    step.layers(*LAYERS)
    assert step.stream.waits == [(MAIN, f"event {number}") for number in range(4)]
    assert step.waits.finish() == tuple(LAYERS)
    assert step.stream.waits[4:] == [(MAIN, None)] and step.stands()


@pytest.mark.parametrize("why", ["a graph", "not cut", "no order"])
def test_all_copies_are_awaited_before_the_forward_where(why: str) -> None:
    copy = on_device(1) if why == "not cut" else on_device(4)
    step = Step(copy, order=() if why == "no order" else LAYERS, by_layer=why != "a graph")
    assert step.stream.waits == [(MAIN, "event 3" if copy.events else None)]
    called = [] if why == "a graph" else LAYERS
    step.layers(*called)
    assert step.waits.finish() == tuple(called) and len(step.stream.waits) == 1 and step.stands()


@pytest.mark.parametrize(("called", "stands"), [(LAYERS[:-1], False), (LAYERS[2:], True)])
def test_a_layer_that_was_skipped_spoils_the_loads(called: list[str], stands: bool) -> None:
    """But for those of the first portion, for which the forward has waited at its beginning."""
    step = Step(on_device(4))
    step.layers(*called)
    assert step.waits.finish() == tuple(called) and step.stands() == stands


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 4)), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from([*LAYERS, UNNAMED]), st.sampled_from([MAIN, OTHER])), max_size=20),
)
def test_no_layer_is_used_before_its_portions(forms: list[tuple[bool, int]], calls: list[tuple[str, int]]) -> None:
    """Several copies in portions of different number, layers in any order, two streams."""
    copies = [on_device(portions) if device else in_host_memory(portions) for device, portions in forms]
    for number, copy in enumerate(copies):
        if copy.events:
            copy.events = [(number, portion) for portion in range(copy.portions)]  # type: ignore[misc]
    step = Step(*copies)
    for layer, stream in calls:
        step.stream.current = stream
        step.layers(layer)
        begun_with = [event for place, event in step.stream.waits if place in (MAIN if stream == MAIN else 0, stream)]
        begun_with += [event for _, event in step.stream.waits[: len([copy for copy in copies if copy.on_stream])]]
        for number, copy in enumerate(copies):
            wanted = copy.portions - 1
            if layer != UNNAMED:
                wanted = portion_of(LAYERS.index(layer), len(LAYERS), copy.portions)
            if not copy.on_stream:
                assert any(copy is each and portion >= wanted for waits in step.blocked for each, portion in waits)
            elif copy.events:
                assert any(event[0] == number and event[1] >= wanted for event in begun_with if event)
            else:
                assert None in begun_with
