"""D's link: the handshake, the next data plane where one is refused, one failure that stays; D's line about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side import link, links
from kvferry.connector.decode_side.link import Link, LinkPhase
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.plane_choice import (
    AVOIDED_SECONDS,
    MAX_PEERS,
    FailedPlanes,
    PlaneChoice,
    avoided_seconds,
)
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import RankAddress
from kvferry.transport.errors import PlaneUnavailableError
from tests.support.ranks import Timed
from tests.unit.labelled_model import Model

PHASE, MISSING = LinkPhase, {"nixl": "no RDMA port is up", "ucx": "UCXX is not installed"}
GEOMETRY = Model(("full",), 1, is_mla=False).rank((0, 1), (0, 1), 16)
SHM, TCP = (messages.Attached(plane=name, slot_bytes=messages.MIN_SLOT_BYTES) for name in ("shm", "tcp"))
NO_SHM, NO_TCP = (messages.AttachRefused(plane=name, reason="full") for name in ("shm", "tcp"))
OFFERS = tuple(messages.PlaneOffer(name, b"") for name in ("shm", "tcp"))
WELCOME = messages.Welcome(engine_id="p", incarnation=b"p" * 16, geometry=GEOMETRY, model={}, planes=OFFERS)


def host(*planes: str, pulls: bool = False, **more: Any) -> Any:
    """A D on a host without RDMA that has these planes."""
    made = [
        SimpleNamespace(
            name=name, same_host=False, pulls=pulls, slower_because=lambda payload, reached: "",
            lanes_to=lambda address: "", finish=lambda channel, payload: None,
            connect=lambda payload, host: (Mock(pulls=pulls, process=None, error=None, ready=False), b""),
        )
        for name in planes
    ]  # fmt: skip
    return Mock(planes=made, missing_planes=MISSING, caches=Mock(geometry=GEOMETRY, device=torch.device("cpu")), **more)


class Shaking:
    """D's link to a P of which each message is an event."""

    def __init__(self, *, pulls: bool = False) -> None:
        self.now, self.inbox, self.asked = 1.0, list[Any](), list[str]()
        self.connection = Mock(address="10.0.0.1", news=False, lost=False, send=self.send)
        self.connection.receive = lambda: [messages.encode(self.inbox.pop(0)) for _ in range(len(self.inbox))]
        context = host(
            "shm", "tcp", pulls=pulls, settings=Timed(handshake_timeout_seconds=10), engine_id="d", model={},
            incarnation=b"d" * 16, dialer=Mock(connect=lambda *_, **__: self.connection),
        )  # fmt: skip
        address, log, failed = RankAddress(0, 0, "p", 1, b""), Mock(), FailedPlanes(AVOIDED_SECONDS)
        self.it = Link(context, address, log, place=("p", 1, ""), failed_planes=failed, pending={})

    def send(self, frames: list[bytes]) -> bool:
        message = messages.decode_request(frames)
        self.asked.append(message.plane if isinstance(message, messages.Attach) else "hello")
        return True

    def happen(self, *events: Any) -> Shaking:
        """A message of P, seconds that pass, or what D does."""
        for event in events:
            if isinstance(event, float):
                self.now += event
            elif isinstance(event, str):
                HAPPENINGS[event](self)
            else:
                self.inbox.append(event)
            with patch.multiple(link, check_layouts=Mock(), translate_pages=Mock()):
                self.it.serve(self.now)
        return self


HAPPENINGS: dict[str, Callable[[Any], object]] = {
    "shake": lambda it: it.it.start_handshake(it.now),
    "mapped": lambda it: it.it.channel and it.it.channel.configure_mock(ready=True),
    "broken": lambda it: it.it.channel and it.it.channel.configure_mock(error=PlaneUnavailableError()),
    "lost": lambda it: it.connection.configure_mock(lost=True), "fail": lambda it: it.it.fail("internal", "planted"),
}  # fmt: skip


def test_a_link_ends_in_its_handshake_for_those_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no read has begun: a lookup waited for a link that was closed, until its request gave up."""
    monkeypatch.setattr(links, "MAX_LINKS", 1)
    context = host("shm", settings=Timed(), engine_id="d", model={}, incarnation=b"d" * 16)
    context.dialer.connect = lambda *_, **__: Mock(news=False, lost=False, connected=True)
    ours = Links(context)
    first = ours.get(RankAddress(0, 0, "p", 1, b""), 0.0)
    first.start_handshake(0.0)
    ours.get(RankAddress(0, 0, "p", 2, b""), 0.0)
    assert first.phase is PHASE.FAILED and first in ours.to_serve(all_of_them=False)


@pytest.mark.parametrize(
    ("pulls", "events", "phase", "asked"),
    [
        (False, ("shake", WELCOME, SHM), PHASE.ATTACHED, ["hello", "shm"]),
        (True, ("shake", WELCOME, SHM, "mapped"), PHASE.ATTACHED, ["hello", "shm"]),
        (True, ("shake", WELCOME, SHM, "broken"), PHASE.ATTACHING, ["hello", "shm", "tcp"]),
        (False, (1e9,), PHASE.CONNECTED, []),
        (False, ("shake", "shake", WELCOME, "shake", 9.0), PHASE.ATTACHING, ["hello", "shm"]),
        (False, ("shake", WELCOME, "shake", 10.0), PHASE.FAILED, ["hello", "shm"]),
        (False, ("shake", WELCOME, "broken", NO_SHM, SHM, TCP), PHASE.ATTACHED, ["hello", "shm", "tcp"]),
        (False, ("shake", WELCOME, NO_SHM, NO_TCP), PHASE.FAILED, ["hello", "shm", "tcp"]),
        (False, ("shake", WELCOME, SHM, "broken"), PHASE.FAILED, ["hello", "shm"]),
        (False, (WELCOME,), PHASE.FAILED, []),
    ],
)
def test_ways(pulls: bool, events: tuple[Any, ...], phase: LinkPhase, asked: list[str]) -> None:
    shaking = Shaking(pulls=pulls).happen(*events)
    assert (shaking.it.phase, shaking.asked) == (phase, asked)
    assert (shaking.it.broken_plane == "shm") == (events[-1] == "broken" and phase is PHASE.FAILED)


EVENTS = st.sampled_from(["shake", WELCOME, SHM, TCP, NO_SHM, NO_TCP, "mapped", "broken", "lost", "fail", 6.0])


@given(st.booleans(), st.sampled_from([0, 2, 3]), st.lists(EVENTS, max_size=12))
def test_one_failure_and_it_stays(pulls: bool, begun: int, events: list[Any]) -> None:
    shaking = Shaking(pulls=pulls).happen(*["shake", WELCOME, SHM][:begun])
    for event in events:
        before, reason = shaking.it.phase, shaking.it.reason
        phase = shaking.happen(event).it.phase
        assert (shaking.it.reason is not None) == (phase is PHASE.FAILED)
        assert before is not PHASE.FAILED or (phase, shaking.it.reason) == (before, reason)
        assert phase is not PHASE.ATTACHED or before in (PHASE.ATTACHING, PHASE.MAPPING, PHASE.ATTACHED)
        assert math.isfinite(shaking.it.deadline) == (phase in (PHASE.GREETING, PHASE.ATTACHING, PHASE.MAPPING))
    assert len(set(shaking.asked)) == len(shaking.asked), "no plane is tried twice"


def choice(*planes: str) -> PlaneChoice:
    """Of a D that has these planes, as P has."""
    found = PlaneChoice(host(*planes))
    found.take_offers([messages.PlaneOffer(name, b"") for name in planes])
    return found


@pytest.mark.parametrize(("chosen", "said"), [("cma", ""), ("shm", ""), ("tcp", "nixl: no RDMA port is up")])
def test_a_plane_that_is_missing_is_named_where_it_would_have_been_preferred(chosen: str, said: str) -> None:
    plane, _, _, why = choice(chosen).connect(Mock(address="10.0.0.1"), converts=False)
    assert (plane.name, why) == (chosen, said)


def test_without_a_plane_all_are_named() -> None:
    with pytest.raises(PlaneUnavailableError, match="nixl: no RDMA port is up; ucx: UCXX is not installed"):
        choice().connect(Mock(address="10.0.0.1"), converts=False)


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
