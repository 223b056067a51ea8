"""The state machine of one load inside a step, on one rank. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    POSTED ──▶ UNDER_WAY ──▶ STANDS
       │           └───────▶ FAILED
       └─▶ GIVEN_UP ──────────▲

The step that the load was posted with computes with the loaded tokens. In UNDER_WAY all copies are under way, or have
ended, and the device waits for them. The engine launches the forward once no load of the step is POSTED. A load that
the engine has given up fails whatever its copies do: the forward was launched without them. STANDS and FAILED are
final, and in both nothing writes the load's blocks any more. There are no effects: the step's output waits until all of
its loads are final.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import TransitionTable, ignore


class StepLoadPhase(enum.Enum):
    POSTED = "posted"
    UNDER_WAY = "under way"
    GIVEN_UP = "given up"
    STANDS = "stands"
    FAILED = "failed"


FINAL = (StepLoadPhase.STANDS, StepLoadPhase.FAILED)


class StepLoad(msgspec.Struct, frozen=True):
    """State."""

    phase: StepLoadPhase = StepLoadPhase.POSTED


# --- events -----------------------------------------------------------------------------------------------------


class CopiesBegun(msgspec.Struct, frozen=True):
    """All copies of the load are under way."""


class LoadEnded(msgspec.Struct, frozen=True):
    """The transfer thread has reported the load."""

    ok: bool


class EngineGaveUp(msgspec.Struct, frozen=True):
    """The engine launches the forward now, whether the copies are under way or not."""


class ThreadEnded(msgspec.Struct, frozen=True):
    """The transfer thread is gone, and has reported nothing of the load."""


StepLoadEvent = CopiesBegun | LoadEnded | EngineGaveUp | ThreadEnded
Outcome = tuple[StepLoad, tuple[()]]

# --- transitions ------------------------------------------------------------------------------------------------


def _begin(state: StepLoad, event: StepLoadEvent, now: float) -> Outcome:
    return replace(state, phase=StepLoadPhase.UNDER_WAY), ()


def _end(state: StepLoad, event: StepLoadEvent, now: float) -> Outcome:
    ok = isinstance(event, LoadEnded) and event.ok
    return replace(state, phase=StepLoadPhase.STANDS if ok else StepLoadPhase.FAILED), ()


def _give_up(state: StepLoad, event: StepLoadEvent, now: float) -> Outcome:
    return replace(state, phase=StepLoadPhase.GIVEN_UP), ()


def _fail(state: StepLoad, event: StepLoadEvent, now: float) -> Outcome:
    return replace(state, phase=StepLoadPhase.FAILED), ()


_P = StepLoadPhase
STEP_LOAD: TransitionTable[StepLoad, StepLoadEvent, object] = TransitionTable(
    "load inside a step",
    StepLoadPhase,
    get_args(StepLoadEvent),
    (
        ((_P.POSTED,), (CopiesBegun,), _begin),
        ((_P.POSTED,), (EngineGaveUp,), _give_up),
        ((_P.POSTED, _P.UNDER_WAY), (LoadEnded,), _end),
        ((_P.GIVEN_UP,), (LoadEnded,), _fail),
        ((_P.POSTED, _P.UNDER_WAY, _P.GIVEN_UP), (ThreadEnded,), _fail),
        # The forward may begin once; copies that begin after it has come too late; nothing follows the end.
        (StepLoadPhase, get_args(StepLoadEvent), ignore),
    ),
)
