"""Tables: of phases and events, of deadlines, and of what peers make P keep, fair between them."""

from __future__ import annotations

import gc
import math
import weakref

from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.pages.deadlines import SWEEP, Deadlines
from kvferry.transport.fair_table import FairTable

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


def test_the_greedy_lose_their_own() -> None:
    table: FairTable[int, str] = FairTable(100)
    for n in range(10):
        assert not table.put(b"modest", n, f"m{n}")
    left = [value for n in range(100, 1000) for value in table.put(b"greedy", n, f"g{n}")]
    assert len(left) > 800 and all(value.startswith("g") for value in left)
    assert left == sorted(left, key=lambda value: int(value[1:])), "the oldest first"
    assert all(table.get(n) == f"m{n}" for n in range(10)) and table.cost <= 100
    assert len(table.drop(b"greedy")) == len(range(100, 1000)) - len(left)
    assert table.first(lambda value: value < "m3") == ["m0", "m1", "m2"]
    assert table.owners() == [b"modest"] and table.oldest(b"modest") == 0 and not table.owns(b"greedy")


def test_what_is_larger_than_all_leaves_at_once() -> None:
    table: FairTable[int, str] = FairTable(100)
    table.put(b"modest", 1, "m", 40)
    assert table.put(b"greedy", 2, "g", 101) == ["g"] and table.get(1) == "m"


def test_the_largest_entry_of_the_greedy_leaves_though_it_is_the_newest() -> None:
    table: FairTable[int, str] = FairTable(100, largest=True)
    assert not table.put(b"one host", 1, "half of a message", 20)
    assert [table.put(b"one host", 2, "unread", cost) for cost in (30, 60, 90)] == [[], [], ["unread"]]


drawn_calls = st.lists(
    st.tuples(st.sampled_from(["put", "pop", "drop"]), st.integers(0, 5), st.integers(0, 20), st.integers(1, 30))
)


@given(drawn_calls)
def test_its_sums_are_those_of_its_entries(drawn_calls: list[tuple[str, int, int, int]]) -> None:
    table: FairTable[int, tuple[int, int]] = FairTable(64)  # values: the number of the call, and the key
    kept: dict[int, tuple[bytes, int, tuple[int, int]]] = {}
    for number, (call, who, key, cost) in enumerate(drawn_calls):
        owner = bytes([who])
        if call == "put":
            kept[key] = (owner, cost, (number, key))
            for _, left in table.put(owner, key, (number, key), cost):
                del kept[left]
        elif call == "pop":
            entry = kept.pop(key, None)
            assert table.pop(key) == (None if entry is None else entry[2])
        else:
            mine = [key for key, entry in kept.items() if entry[0] == owner]
            assert sorted(table.drop(owner)) == sorted(kept.pop(key)[2] for key in mine)
        assert {key: table.get(key) for key in table} == {key: entry[2] for key, entry in kept.items()}
        assert table.cost == sum(cost for _, cost, _ in kept.values()) <= 64
        assert set(table.owners()) == {owner for owner, _, _ in kept.values()}
