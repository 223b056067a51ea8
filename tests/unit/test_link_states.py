"""D's link: the handshake, the next data plane where one is refused, one failure that stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side.link import (
    LINK,
    LinkEffect,
    LinkEvent,
    LinkEventKind,
    LinkPhase,
    LinkState,
    Reason,
)

PHASE, K, E = LinkPhase, LinkEventKind, LinkEffect
GREET, SHAKE, WELCOMED, TICK = map(LinkEvent, (K.GREETING_WANTED, K.HANDSHAKE_WANTED, K.WELCOMED, K.TICK))
CHOSEN, ATTACHED = LinkEvent(K.CHOSEN, "shm"), LinkEvent(K.ATTACHED, "shm", ready=True)
MAPS, MAPPED = LinkEvent(K.ATTACHED, "shm"), LinkEvent(K.MAPPED)
REJECTED, LOST = LinkEvent(K.REJECTED, "shm", "full"), LinkEvent(K.LOST, why="full")
GONE = LinkEvent(K.BROKEN, reason=Reason("peer_lost", "gone"))
TCP = (LinkEvent(K.CHOSEN, "tcp"), LinkEvent(K.ATTACHED, "tcp", ready=True))
BEGUN = (SHAKE, WELCOMED, CHOSEN)


def run(*events: LinkEvent, state: LinkState | None = None, now: float = 1) -> tuple[LinkState, list[LinkEffect]]:
    state, effects = state or LinkState(timeout=10), list[LinkEffect]()
    for event in events:
        state, new = LINK.step(state, event, now)
        effects += new
    return state, effects


@pytest.mark.parametrize(
    ("events", "phase", "plane", "effects"),
    [
        ((*BEGUN, ATTACHED), PHASE.ATTACHED, "shm", []),
        ((*BEGUN, MAPS), PHASE.MAPPING, "shm", []),
        ((*BEGUN, MAPS, MAPPED), PHASE.ATTACHED, "shm", []),
        ((GREET, SHAKE, WELCOMED, CHOSEN), PHASE.ATTACHING, "shm", []),
        ((*BEGUN, REJECTED), PHASE.ATTACHING, "", [E.DROP, E.CHOOSE]),
        ((*BEGUN, LOST), PHASE.ATTACHING, "", [E.DROP, E.CHOOSE]),
        ((*BEGUN, LOST, REJECTED, ATTACHED), PHASE.ATTACHING, "", [E.DROP, E.CHOOSE]),  # of a plane that was rejected
        ((*BEGUN, LOST, REJECTED, *TCP), PHASE.ATTACHED, "tcp", [E.DROP, E.CHOOSE]),
        ((*BEGUN, ATTACHED, LOST), PHASE.FAILED, "shm", [E.REPORT]),
    ],
)
def test_ways(events: tuple[LinkEvent, ...], phase: LinkPhase, plane: str, effects: list[LinkEffect]) -> None:
    state, found = run(*events)
    assert (state.phase, state.plane, found) == (phase, plane, [E.HELLO, E.CHOOSE, *effects])
    assert state.dropped == (("shm", "full") if E.DROP in effects else ("", ""))
    assert (state.reason == Reason("peer_lost", "full", blames="plane")) == (phase is PHASE.FAILED)


def test_a_release_needs_a_session_and_no_plane() -> None:
    state, effects = run(GREET, GREET, WELCOMED, GREET)
    assert state.phase is PHASE.GREETED and effects == [E.HELLO]
    assert run(TICK, state=state, now=1e9)[0] == state
    state, effects = run(SHAKE, CHOSEN, state=state, now=50)
    assert state.phase is PHASE.ATTACHING and state.deadline == 60 and effects == [E.CHOOSE]


EVENTS = st.sampled_from(
    [GREET, SHAKE, WELCOMED, CHOSEN, *TCP, ATTACHED, MAPS, MAPPED, REJECTED, LOST, GONE, TICK]
)  # fmt: skip


@given(st.lists(st.tuples(EVENTS, st.floats(0, 20)), max_size=30))
def test_one_failure_and_it_stays(happenings: list[tuple[LinkEvent, float]]) -> None:
    state, broken = LinkState(timeout=10), 0
    for event, now in happenings:
        before = state
        state, effects = LINK.step(state, event, now)
        broken += effects.count(E.REPORT)
        if before.phase is PHASE.FAILED:
            assert state == before and not effects
    assert broken == (state.phase is PHASE.FAILED)
