"""D's link: the handshake, the next data plane where one is refused, one failure that stays; D's line about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from kvferry.connector.decode_side.plane_choice import (
    AVOIDED_SECONDS,
    MAX_PEERS,
    FailedPlanes,
    PlaneChoice,
    avoided_seconds,
)
from kvferry.transport.errors import PlaneUnavailableError

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


MISSING = {"nixl": "no RDMA port is up", "ucx": "UCXX is not installed"}


def choice(*planes: str) -> PlaneChoice:
    """A D on a host without RDMA that has these planes, as P has."""
    channel = SimpleNamespace(pulls=False, process=None)
    made = [
        SimpleNamespace(
            name=name, same_host=False, pulls=False,
            connect=lambda payload, host: (channel, b""), slower_because=lambda payload, reached: "",
        )
        for name in planes
    ]  # fmt: skip
    context: Any = SimpleNamespace(
        planes=made,
        missing_planes=MISSING,
        caches=SimpleNamespace(device=torch.device("cpu")),
    )
    found = PlaneChoice(context)
    found.take_offers([SimpleNamespace(name=name, payload=b"") for name in planes])  # type: ignore[misc]
    return found


@pytest.mark.parametrize(("chosen", "said"), [("cma", ""), ("shm", ""), ("tcp", "nixl: no RDMA port is up")])
def test_a_plane_that_is_missing_is_named_where_it_would_have_been_preferred(chosen: str, said: str) -> None:
    connection: Any = SimpleNamespace(address="10.0.0.1")
    plane, _, _, why = choice(chosen).connect(connection, converts=False)
    assert (plane.name, why) == (chosen, said)


def test_without_a_plane_all_are_named() -> None:
    connection: Any = SimpleNamespace(address="10.0.0.1")
    with pytest.raises(PlaneUnavailableError, match="nixl: no RDMA port is up; ucx: UCXX is not installed"):
        choice().connect(connection, converts=False)


def test_a_plane_that_broke_is_avoided_for_a_time() -> None:
    planes = FailedPlanes(AVOIDED_SECONDS)
    planes.add("p", "tcp", "cut", 10)
    planes.add("p", "shm", "gone", 20)
    assert planes.of("p", 9 + AVOIDED_SECONDS) == {"tcp": "cut", "shm": "gone"} and planes.of("q", 20) == {}
    planes.add("p", "shm", "again", 50)
    assert planes.of("p", 20 + AVOIDED_SECONDS) == {"shm": "again"}
    assert (avoided_seconds(600), avoided_seconds(5)) == (600, AVOIDED_SECONDS), "for all attempts of a load"
    for peer in range(MAX_PEERS + 5):
        planes.add(peer, "tcp", "cut", 0)
    assert len(planes) == MAX_PEERS and not planes.of(4, 0) and planes.of(5, 0)
