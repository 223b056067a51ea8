"""A tick looks at what is due and at nothing else; no deadline is missed, whatever moves it."""

from __future__ import annotations

import gc
import math
import weakref
from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import load_state, lookup
from kvferry.connector.decode_side.link import Reason
from kvferry.connector.pages.deadlines import SWEEP, Deadlines
from kvferry.connector.prefill_side.lease import LEASE, LeaseEvent, LeaseEventKind, LeasePhase, LeaseState
from kvferry.connector.wire.states import TransitionTable

calls = st.lists(
    st.tuples(
        st.sampled_from(["new", "earlier", "later", "gone", "handle", "leave"]), st.integers(0, 8), st.floats(0, 9)
    )
)


@given(calls)
def test_what_is_due_is_found(calls: list[tuple[str, int, float]]) -> None:
    """``handle``: a tick whose caller moves what was due; ``leave``: one that an error has kept from it."""
    now, times = 0.0, dict[int, float]()
    deadlines = Deadlines[int](lambda key: times.get(key, math.inf))
    for call, key, seconds in calls:
        if call == "new" or (call == "earlier" and key in times):
            times[key] = min(times.get(key, math.inf), now + seconds)
            deadlines.note(key, times[key])
        elif call == "later" and key in times:
            times[key] += seconds
        elif call == "gone":
            times.pop(key, None)
        elif call in ("handle", "leave"):
            now += seconds
            wanted = [key for key, at in times.items() if at <= now]
            assert sorted(deadlines.due(now)) == sorted(wanted)
            times.update((key, now + 0.5) for key in wanted if call == "handle")


def test_only_what_is_due_is_looked_at() -> None:
    looked: list[int] = []

    def at(key: int) -> float:
        looked.append(key)
        return float(key)

    deadlines = Deadlines(at)
    for key in range(4000):
        deadlines.note(key, float(key))
    looked.clear()
    assert deadlines.due(-1) == [] and not looked
    assert deadlines.due(2) == [0, 1, 2] and set(looked) == {0, 1, 2}


def test_what_is_gone_is_forgotten_long_before_its_time() -> None:
    class Thing:
        pass

    living = weakref.WeakSet[Thing]()
    deadlines = Deadlines[Thing](lambda thing: math.inf)
    for _ in range(10 * SWEEP):
        thing = Thing()
        living.add(thing)
        deadlines.note(thing, 604800.0)
    gc.collect()
    assert len(living) <= SWEEP + 1


def states() -> list[tuple[TransitionTable[Any, Any, Any], Any]]:
    """Every phase of every lifetime that waits for a time, with its times in each order."""
    found: list[tuple[TransitionTable[Any, Any, Any], Any]] = [
        (LEASE, LeaseState(Settings(), phase)) for phase in LeasePhase
    ]
    for first, second in product((3.0, 4.0, 5.0), repeat=2):
        load = load_state.LoadState(
            load_state.LoadPhase.READY, 1, frozenset({0}), min(first, second), second, Settings(), (1,), 0,
            reason=Reason("timeout", "planted"),
        )  # fmt: skip
        found += [(load_state.LOAD, replace(load, phase=phase)) for phase in load_state.LoadPhase]
        lookups = (lookup.LookupState(retry_at=first, until=second), lookup.LookupState(until=second))
        found += [(lookup.LOOKUP, replace(each, phase=phase)) for each in lookups for phase in lookup.LookupPhase]
        lease = LeaseState(Settings(), deadline=first, cap=second)
        found += [(LEASE, replace(lease, phase=phase)) for phase in (LeasePhase.PREEMPTED, LeasePhase.GRANTED)]
    return found


def test_a_lifetime_is_due_when_a_tick_changes_it() -> None:
    lease_tick = LeaseEvent(LeaseEventKind.TICK)
    ticks: dict[str, Any] = {"load": load_state.TICK, "lookup": lookup.TICK, "lease": lease_tick}
    for table, state in states():
        due, tick = state.deadline if table is LEASE else state.due, ticks[table.name]
        before = math.nextafter(min(due, 1e9), 0.0)
        assert table.step(state, tick, before) == (state, ()), table.name
        assert math.isinf(due) or table.step(state, tick, due) != (state, ()), table.name
