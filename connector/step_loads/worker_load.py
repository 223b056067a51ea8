"""The state machine of one load beside the steps, as the engine's thread of one rank sees it. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    POSTED ──▶ ENDED

Exactly one report leaves the machine, whatever the transfer thread does: vLLM's scheduler asserts on an id that it does
not know and dies. ``step_load`` is the table of a load inside a step.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.step_loads.step_load import ThreadEnded
from kvferry.connector.wire.states import TransitionTable, ignore
from kvferry.connector.wire.step_plan import Load


class WorkerLoadPhase(enum.Enum):
    POSTED = "posted"
    ENDED = "ended"


class WorkerLoad(msgspec.Struct, frozen=True):
    """State. ``load``: the load as it was posted to the transfer thread."""

    phase: WorkerLoadPhase
    load: Load


# --- events -----------------------------------------------------------------------------------------------------


class LoadBesideEnded(msgspec.Struct, frozen=True):
    """The transfer thread has reported ``load``."""

    load: Load
    ok: bool


WorkerLoadEvent = LoadBesideEnded | ThreadEnded

# --- effects ----------------------------------------------------------------------------------------------------


class ReportBeside(msgspec.Struct, frozen=True):
    """Report the load with a step's results, once."""

    ok: bool


WorkerLoadEffect = ReportBeside
Outcome = tuple[WorkerLoad, tuple[WorkerLoadEffect, ...]]


def post_load(load: Load) -> WorkerLoad:
    """A load that is about to be posted to the transfer thread."""
    return WorkerLoad(WorkerLoadPhase.POSTED, load)


# --- transitions ------------------------------------------------------------------------------------------------


def _end(state: WorkerLoad, event: WorkerLoadEvent, now: float) -> Outcome:
    if (
        isinstance(event, LoadBesideEnded) and event.load is not state.load
    ):  # an earlier load of a request with the same id
        return state, ()
    return replace(state, phase=WorkerLoadPhase.ENDED), (ReportBeside(isinstance(event, LoadBesideEnded) and event.ok),)


WORKER_LOAD: TransitionTable[WorkerLoad, WorkerLoadEvent, WorkerLoadEffect] = TransitionTable(
    "worker load",
    WorkerLoadPhase,
    get_args(WorkerLoadEvent),
    (
        ((WorkerLoadPhase.POSTED,), get_args(WorkerLoadEvent), _end),
        # An event after the end changes nothing.
        (WorkerLoadPhase, get_args(WorkerLoadEvent), ignore),
    ),
)
