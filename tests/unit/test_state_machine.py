"""Tables without a row for every phase and event do not import; a lifetime remembers its last changes of phase."""

from __future__ import annotations

import enum

import msgspec
import pytest

from kvferry.connector.wire.states import MAX_HISTORY, Lifetime, TransitionTable, ignore


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"


class Lamp(msgspec.Struct, frozen=True):
    phase: Light
    changes: int = 0


class Switch(msgspec.Struct, frozen=True):
    pass


class Look(msgspec.Struct, frozen=True):
    pass


def switch(lamp: Lamp, event: object, now: float) -> tuple[Lamp, tuple[str, ...]]:
    other = Light.GREEN if lamp.phase is Light.RED else Light.RED
    return Lamp(other, lamp.changes + 1), (other.value,)


def table(*rows: object, events: tuple[type, ...] = (Switch, Look)) -> TransitionTable[Lamp, object, str]:
    return TransitionTable("lamp", Light, events, rows)  # type: ignore[arg-type]


GOOD = table((Light, (Switch,), switch), (Light, (Look,), ignore))


@pytest.mark.parametrize(
    ("rows", "events", "words"),
    [
        ([((Light.RED,), (Switch,), switch)], (Switch, Look),
         r"lamp: no row for \(RED, Look\), \(GREEN, Switch\), \(GREEN, Look\)"),
        ([(Light, (Switch, Look), switch)], (Switch,), r"not listed, \(RED, Look\)"),
        ([(Light, (Switch, Look), switch), ((Light.RED,), (Look,), ignore)], (Switch, Look),
         r"the row of \(RED, Look\) is never used"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(rows: list[object], events: tuple[type, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table(*rows, events=events)


def test_the_first_row_counts() -> None:
    first = table(((Light.RED,), (Switch,), ignore), (Light, (Switch, Look), switch))
    assert first.step(Lamp(Light.RED), Switch(), 0) == (Lamp(Light.RED), ())
    assert first.step(Lamp(Light.GREEN), Switch(), 0) == (Lamp(Light.RED, 1), ("red",))


def test_history_is_bounded() -> None:
    lamp = Lifetime(GOOD, Lamp(Light.RED), 0.0)
    for second in range(100):
        lamp.step(Switch(), float(second))
    assert len(lamp.history) == MAX_HISTORY and lamp.history[-1].at == 99.0
