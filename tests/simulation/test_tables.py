"""What the simulation found to be left in a table: each alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from kvferry.connector.decode_side.renew import SIBLING_SECONDS
from kvferry.connector.wire.messages import IDLE_LINK_SECONDS
from tests.simulation.engines import Engine, Request
from tests.simulation.memory import Form
from tests.simulation.network import Packet
from tests.simulation.world import World
from tests.support.inside import sessions_of

FORM = Form(1, 2, 128)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(1)
    yield made
    made.close()


def hand_over(p: Engine, d: Engine, tokens: int = 40) -> Request:
    prompt = p.prefill(tokens)
    assert prompt is not None
    request = d.keep(prompt, prompt.name)
    assert d.load(request)
    return request


def under_way(world: World, what: str) -> Packet:
    """Let time pass until there is such a packet."""
    for _ in range(1000):
        packets = [packet for packet in world.network.under_way if packet.what == what]
        if packets:
            return packets[0]
        world.run(20e-6)
    raise AssertionError(f"no {what} was sent")


def sessions(p: Engine) -> int:
    return len(sessions_of(p.nodes[0].thread))


def test_p_forgets_a_d_whose_connection_has_ended(world: World) -> None:
    """D reads P's pages by itself: P has no channel that could tell that D is gone."""
    p, d = (world.engine(name, FORM, ("sim_pull",)) for name in "pd")
    hand_over(p, d)
    world.run(IDLE_LINK_SECONDS - 2)
    assert sessions(p) == 1
    world.run(4.0)
    assert sessions(p) == 0, "D has closed its link"
    hand_over(p, d)
    world.run(1.0)
    assert sessions(p) == 1
    d.kill()
    world.run(1.0)
    assert sessions(p) == 0 and world.outcomes + d.outcomes == {"loaded": 2}


def test_a_lease_waits_for_siblings_no_longer_than_it_should(world: World) -> None:
    """Also where its next renewal is far."""
    world.settings = replace(world.settings, lease_seconds=300.0, lease_cap_seconds=300.0)
    p, d = (world.engine(name, FORM, ("sim_pull",)) for name in "pd")
    prompt = p.prefill(20)
    assert prompt is not None
    request = d.keep(prompt, prompt.name, siblings=True)
    world.run(0.5)
    d.abort(request)
    world.run(2 * SIBLING_SECONDS)
    assert not p.prompts
