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


class Kind(enum.Enum):
    SWITCH = "Switch"
    LOOK = "Look"


class Event(msgspec.Struct, frozen=True):
    kind: Kind


def switch(lamp: Lamp, event: object, now: float) -> tuple[Lamp, tuple[str, ...]]:
    other = Light.GREEN if lamp.phase is Light.RED else Light.RED
    return Lamp(other, lamp.changes + 1), (other.value,)


def table(*rows: object) -> TransitionTable[Lamp, Event, str]:
    return TransitionTable("lamp", Light, Kind, rows)  # type: ignore[arg-type]


GOOD = table((Light, (Kind.SWITCH,), switch), (Light, (Kind.LOOK,), ignore))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([((Light.RED,), (Kind.SWITCH,), switch)],
         r"lamp: no row for \(RED, LOOK\), \(GREEN, SWITCH\), \(GREEN, LOOK\)"),
        ([(Light, Kind, switch), (Light, Light, switch)], r"not listed, \(RED, RED\)"),
        ([(Light, Kind, switch), ((Light.RED,), (Kind.LOOK,), ignore)], r"the row of \(RED, LOOK\) is never used"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(rows: list[object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table(*rows)


def test_history_is_bounded() -> None:
    lamp = Lifetime(GOOD, Lamp(Light.RED), 0.0)
    for second in range(100):
        lamp.step(Event(Kind.SWITCH), float(second))
    assert len(lamp.history) == MAX_HISTORY and lamp.history[-1].at == 99.0
