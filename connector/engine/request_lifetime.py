"""The state machine of one request of an engine, as far as it may load KV from P. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    NEW ──▶ LOCAL ─────────────────────────────────┐
     │        ▲                                    │
     │        │ refused                            ▼
     ├──▶ OFFERED ──▶ LOADING ──▶ SETTLED ──▶ ENDED
     │        ▲ └─────────────────────▲
     └──▶ AWAITED

In AWAITED, D waits until P tells the token of the lease; the engine is told to ask later, and gives no blocks.
vLLM asks again after a failed load and after preemption, and the same answer would loop for ever. So the engine is
offered tokens only in OFFERED, and nothing leads back there. In SETTLED the engine has decided to load nothing, or the
load was reported, or the load ends inside the step that computes with it. Effects are parts of the next step plan:
every ``PlanKeep`` is followed by exactly one ``PlanRelease``, or by the ``PlanLoad``, which has all of these leases.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import TransitionTable, ignore
from kvferry.connector.wire.step_plan import KeepLease, Load, Rendezvous


class RequestPhase(enum.Enum):
    NEW = "new"
    AWAITED = "awaited"
    LOCAL = "computed here"
    OFFERED = "offered"
    LOADING = "loading"
    SETTLED = "settled"
    ENDED = "ended"


class RequestState(msgspec.Struct, frozen=True):
    """State.

    Attributes:
        start: the first token that the engine does not have, as the engine asked last.
        in_step: the step in which the request is scheduled computes with the load, by D's last answer to the engine.
        tokens: of the leases that are kept; from OFFERED on.
    """

    phase: RequestPhase = RequestPhase.NEW
    start: int = 0
    in_step: bool = False
    tokens: tuple[bytes, ...] = ()


# --- events -----------------------------------------------------------------------------------------------------


class NothingOffered(msgspec.Struct, frozen=True):
    """P holds nothing for the request."""


class PromptOffered(msgspec.Struct, frozen=True):
    """P holds the request's prompt; also other P engines, where there is more than one lease to keep."""

    keeps: tuple[KeepLease, ...]


class PromptAwaited(msgspec.Struct, frozen=True):
    """P will hold the request's prompt, and must be asked for its lease."""

    rendezvous: Rendezvous


class OfferRefused(msgspec.Struct, frozen=True):
    """D cannot use P's prompt, or P has not told of it in time, or D's caches were reset."""


class EngineAnswered(msgspec.Struct, frozen=True):
    """The engine asked how many tokens P has beyond the first ``start``."""

    start: int
    in_step: bool = False


class LoadDeclined(msgspec.Struct, frozen=True):
    """The engine has decided to load nothing."""


class BlocksAllocated(msgspec.Struct, frozen=True):
    """The engine has allocated the blocks of a load."""

    load: Load


class LoadReported(msgspec.Struct, frozen=True):
    """The workers have reported a load of this request, whether it failed or not."""


class RequestEnded(msgspec.Struct, frozen=True):
    """The request has finished, or was aborted."""


RequestEvent = (
    NothingOffered
    | PromptOffered
    | PromptAwaited
    | OfferRefused
    | EngineAnswered
    | LoadDeclined
    | BlocksAllocated
    | LoadReported
    | RequestEnded
)

# --- effects ----------------------------------------------------------------------------------------------------


class PlanKeep(msgspec.Struct, frozen=True):
    """Keep the request's lease alive."""

    keep: KeepLease


class PlanLoad(msgspec.Struct, frozen=True):
    """Load the request's tokens, once."""

    load: Load


class PlanCancel(msgspec.Struct, frozen=True):
    """Cancel the request's load."""


class PlanRelease(msgspec.Struct, frozen=True):
    """The request loads nothing: it does not need the lease with this token any more."""

    token: bytes


class PlanRendezvous(msgspec.Struct, frozen=True):
    """Ask P for the lease. ``PlanLeave`` follows, or ``PlanKeep`` of the lease of P's answer."""

    rendezvous: Rendezvous


class PlanLeave(msgspec.Struct, frozen=True):
    """The request does not need P's answer any more."""


RequestEffect = PlanKeep | PlanLoad | PlanCancel | PlanRelease | PlanRendezvous | PlanLeave
Outcome = tuple[RequestState, tuple[RequestEffect, ...]]

# --- transitions ------------------------------------------------------------------------------------------------


def _offered(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    assert isinstance(event, PromptOffered)
    tokens = tuple(keep.token for keep in event.keeps)
    return replace(state, phase=RequestPhase.OFFERED, tokens=tokens), tuple(map(PlanKeep, event.keeps))


def _awaited(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    assert isinstance(event, PromptAwaited)
    return replace(state, phase=RequestPhase.AWAITED), (PlanRendezvous(event.rendezvous),)


def _refused_awaited(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.LOCAL), (PlanLeave(),)


def _reported_awaited(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.SETTLED), (PlanLeave(),)


def _end_awaited(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.ENDED), (PlanLeave(),)


def _release(state: RequestState) -> tuple[PlanRelease, ...]:
    return tuple(map(PlanRelease, state.tokens))


def _local(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.LOCAL), ()


def _refused(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.LOCAL), _release(state)


def _refused_loading(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return state, (PlanCancel(),)


def _answered(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    assert isinstance(event, EngineAnswered)
    return replace(state, start=event.start, in_step=event.in_step), ()


def _declined(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.SETTLED), _release(state)


def _allocated(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    assert isinstance(event, BlocksAllocated)
    phase = RequestPhase.SETTLED if state.in_step else RequestPhase.LOADING
    return replace(state, phase=phase), (PlanLoad(event.load),)


def _reported(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.SETTLED), ()


def _end_offered(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.ENDED), _release(state)


def _end_loading(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.ENDED), (PlanCancel(),)


def _end(state: RequestState, event: RequestEvent, now: float) -> Outcome:
    return replace(state, phase=RequestPhase.ENDED), ()


_R = RequestPhase
REQUEST: TransitionTable[RequestState, RequestEvent, RequestEffect] = TransitionTable(
    "request",
    RequestPhase,
    get_args(RequestEvent),
    (
        ((_R.NEW, _R.AWAITED), (PromptOffered,), _offered),
        ((_R.NEW,), (PromptAwaited,), _awaited),
        ((_R.AWAITED,), (OfferRefused,), _refused_awaited),
        ((_R.AWAITED,), (RequestEnded,), _end_awaited),
        ((_R.NEW,), (NothingOffered, OfferRefused), _local),
        ((_R.OFFERED,), (OfferRefused,), _refused),
        ((_R.LOADING,), (OfferRefused,), _refused_loading),
        ((_R.OFFERED,), (EngineAnswered,), _answered),
        # A report before LOADING concerns an earlier request with this id. The engine takes it for this request's load.
        ((_R.AWAITED,), (LoadReported,), _reported_awaited),
        ((_R.OFFERED,), (LoadDeclined, LoadReported), _declined),
        ((_R.OFFERED,), (BlocksAllocated,), _allocated),
        ((_R.OFFERED,), (RequestEnded,), _end_offered),
        ((_R.LOADING,), (LoadReported,), _reported),
        ((_R.LOADING,), (RequestEnded,), _end_loading),
        ((_R.NEW, _R.LOCAL, _R.SETTLED), (RequestEnded,), _end),
        # Once the engine has decided, or D has refused, nothing changes until the request ends.
        (RequestPhase, get_args(RequestEvent), ignore),
    ),
)
