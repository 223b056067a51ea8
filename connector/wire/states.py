"""The form of every lifetime: phases, events, a total table of transitions, and a record of the changes of phase.

A lifetime is a frozen state with a ``phase``. A table maps (phase, kind of event) to a transition, a pure function
``(state, event, now) -> (state, effects)``. Effects are data; the owner of the lifetime performs them. ``now`` is in
seconds of the owner's clock. A table without a row for every phase and every event does not import.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

MAX_HISTORY = 12
"""Transitions that a lifetime remembers; the longest way through any table has fewer phases."""


class _State(Protocol):
    @property
    def phase(self) -> enum.Enum: ...


class _Event(Protocol):
    @property
    def kind(self) -> enum.Enum: ...


S = TypeVar("S", bound=_State)
E = TypeVar("E", bound=_Event)
F = TypeVar("F")
Outcome = tuple[S, tuple[F, ...]]
Transition = Callable[[S, E, float], Outcome[S, F]]


class Step(NamedTuple):
    """One change of phase: its time in seconds of the owner's clock, its event, and the new phase."""

    at: float
    event: str
    phase: str


class TransitionTable(Generic[S, E, F]):
    """All transitions of one kind of lifetime.

    Args:
        name: the lifetime, as an error names it.
        phases: the enumeration of its phases.
        kinds: the enumeration of the kinds of its events.
        rows: (phases, kinds of events, transition). The first row that names a pair of phase and event counts, so a
            general row may stand below a particular one; an enumeration stands for all of its members.

    Raises:
        ValueError: a pair of phase and event has no row, or a row is never used. The error names them.
    """

    def __init__(
        self,
        name: str,
        phases: type[enum.Enum],
        kinds: type[enum.Enum],
        rows: Iterable[tuple[Iterable[enum.Enum], Iterable[enum.Enum], Transition[S, E, F]]],
    ) -> None:
        self.name = name
        found: dict[tuple[enum.Enum, enum.Enum], Transition[S, E, F]] = {}
        for row_phases, row_kinds, transition in rows:
            pairs = [(phase, kind) for phase in row_phases for kind in row_kinds]
            new = [pair for pair in pairs if pair not in found]
            if not new:
                raise ValueError(f"{name}: the row of {_named(pairs[0])} is never used")
            found.update(dict.fromkeys(new, transition))
        missing = [(phase, kind) for phase in phases for kind in kinds if (phase, kind) not in found]
        if missing:
            raise ValueError(f"{name}: no row for {', '.join(map(_named, missing))}")
        unknown = [pair for pair in found if not isinstance(pair[1], kinds)]
        if unknown:
            raise ValueError(f"{name}: a row for an event that is not listed, {_named(unknown[0])}")
        # By values: Python computes the hash of an enumeration's member in Python, and a hand-over takes 18 steps while
        # a request waits.
        self.by_value = {(kind.value, phase.value): transition for (phase, kind), transition in found.items()}

    def step(self, state: S, event: E, now: float) -> Outcome[S, F]:
        """The state after an event, and the effects that the owner of the lifetime must perform."""
        return self.by_value[event.kind._value_, state.phase._value_](state, event, now)


class History:
    """The last changes of phase of one thing."""

    __slots__ = ("_history",)

    def __init__(self, phase: enum.Enum, now: float) -> None:
        # Times, kinds of events, and phases; ``history`` makes text of them, for a log line only.
        self._history = deque[tuple[float, enum.Enum | None, enum.Enum]]([(now, None, phase)], MAX_HISTORY)

    @property
    def history(self) -> tuple[Step, ...]:
        """The last changes of phase, the oldest first."""
        return tuple(Step(at, str(kind.value) if kind else "", str(phase.value)) for at, kind, phase in self._history)

    def story(self) -> str:
        """The history in one line, each phase with its seconds after the first: ``ready 0.0 s, moving +0.002 s``."""
        first, *later = self.history
        steps = [f"{step.phase} +{step.at - first.at:.3f} s ({step.event})" for step in later]
        return ", ".join([first.phase, *steps])


class Lifetime(History, Generic[S, E, F]):
    """One lifetime under way: its state, and the last changes of its phase."""

    __slots__ = ("_transitions", "state")

    def __init__(self, table: TransitionTable[S, E, F], state: S, now: float) -> None:
        super().__init__(state.phase, now)
        self._transitions, self.state = table.by_value, state

    def step(self, event: E, now: float) -> tuple[F, ...]:
        """Take one event. Returns the effects that the owner must perform."""
        before = self.state.phase
        kind = event.kind
        self.state, effects = self._transitions[kind._value_, before._value_](self.state, event, now)
        phase = self.state.phase
        if phase is not before:
            self._history.append((now, kind, phase))
        return effects


P = TypeVar("P", bound=enum.Enum)
Moves = Mapping[P, Mapping[enum.Enum, P]]
"""By phase and event, the next phase. An event that is not listed changes nothing."""


class Phases(History, Generic[P]):
    """A lifetime whose state is its phase alone, and the last changes of it. Its owner performs what follows."""

    __slots__ = ("_moves", "phase")

    def __init__(self, moves: Moves[P], first: P, now: float) -> None:
        super().__init__(first, now)
        self._moves, self.phase = moves, first

    def step(self, event: enum.Enum, now: float) -> P:
        """Take one event. Returns the phase before it."""
        before = self.phase
        self.phase = self._moves.get(before, {}).get(event, before)
        if self.phase is not before:
            self._history.append((now, event, self.phase))
        return before


def ignore(state: S, event: object, now: float) -> tuple[S, tuple[()]]:
    """The transition that changes nothing."""
    return state, ()


def _named(pair: tuple[enum.Enum, enum.Enum]) -> str:
    phase, kind = pair
    return f"({phase.name}, {kind.name})"
