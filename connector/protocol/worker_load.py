"""The state machine of one load, as the engine's thread of one rank sees it. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    BESIDE ───────────────────────▶ ENDED
                                      ▲
    IN_STEP ──▶ DEVICE_WAITS ─────────┤
       └──────────────────────────────┘

A load goes on BESIDE the engine's steps, or IN_STEP: the step that it was posted with computes with the loaded tokens.
In DEVICE_WAITS the device waits for the load's copies, and the engine's thread goes on. Exactly one report leaves the
machine, whatever the transfer thread does: vLLM's scheduler asserts on an id that it does not know and dies.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.protocol.state_machine import TransitionTable, ignore
from kvferry.connector.protocol.step_plan import Load


class WorkerLoadPhase(enum.Enum):
    BESIDE = "beside the steps"
    IN_STEP = "in a step"
    DEVICE_WAITS = "the device waits"
    ENDED = "ended"


STEP_NEEDS = (WorkerLoadPhase.IN_STEP, WorkerLoadPhase.DEVICE_WAITS)


class WorkerLoad(msgspec.Struct, frozen=True):
    """State. ``load``: the load as it was posted to the transfer thread."""

    phase: WorkerLoadPhase
    load: Load


# --- events -----------------------------------------------------------------------------------------------------


class CopiesBegun(msgspec.Struct, frozen=True):
    """All copies of ``load`` are under way."""

    load: Load


class LoadEnded(msgspec.Struct, frozen=True):
    """The transfer thread has reported the load."""

    ok: bool


class ThreadEnded(msgspec.Struct, frozen=True):
    """The transfer thread is gone, and has reported nothing of the load."""


WorkerLoadEvent = CopiesBegun | LoadEnded | ThreadEnded

# --- effects ----------------------------------------------------------------------------------------------------


class HoldDevice(msgspec.Struct, frozen=True):
    """Make the engine's device wait for the copies that are under way."""


class ReportBeside(msgspec.Struct, frozen=True):
    """Report the load with a step's results, once."""

    ok: bool


class ReportInStep(msgspec.Struct, frozen=True):
    """Report the load to the step that computes with it, once."""

    ok: bool


WorkerLoadEffect = HoldDevice | ReportBeside | ReportInStep
Outcome = tuple[WorkerLoad, tuple[WorkerLoadEffect, ...]]


def post_load(load: Load) -> WorkerLoad:
    """A load that is about to be posted to the transfer thread."""
    return WorkerLoad(WorkerLoadPhase.IN_STEP if load.now else WorkerLoadPhase.BESIDE, load)


# --- transitions ------------------------------------------------------------------------------------------------


def _begun(state: WorkerLoad, event: WorkerLoadEvent, now: float) -> Outcome:
    assert isinstance(event, CopiesBegun)
    if event.load is not state.load:  # an earlier load of a request with the same id
        return state, ()
    return replace(state, phase=WorkerLoadPhase.DEVICE_WAITS), (HoldDevice(),)


def _end_beside(state: WorkerLoad, event: WorkerLoadEvent, now: float) -> Outcome:
    return replace(state, phase=WorkerLoadPhase.ENDED), (ReportBeside(isinstance(event, LoadEnded) and event.ok),)


def _end_in_step(state: WorkerLoad, event: WorkerLoadEvent, now: float) -> Outcome:
    return replace(state, phase=WorkerLoadPhase.ENDED), (ReportInStep(isinstance(event, LoadEnded) and event.ok),)


WORKER_LOAD: TransitionTable[WorkerLoad, WorkerLoadEvent, WorkerLoadEffect] = TransitionTable(
    "worker load",
    WorkerLoadPhase,
    get_args(WorkerLoadEvent),
    (
        ((WorkerLoadPhase.BESIDE,), (LoadEnded, ThreadEnded), _end_beside),
        (STEP_NEEDS, (LoadEnded, ThreadEnded), _end_in_step),
        ((WorkerLoadPhase.IN_STEP,), (CopiesBegun,), _begun),
        # A device waits only for a load inside a step, and once; an event after the end changes nothing.
        (WorkerLoadPhase, get_args(WorkerLoadEvent), ignore),
    ),
)
