"""What D's line about its data plane says of the planes that were not chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connector.decode_side.plane_choice import (
    AVOIDED_SECONDS,
    MAX_PEERS,
    FailedPlanes,
    PlaneChoice,
    avoided_seconds,
)
from kvferry.transport.errors import PlaneUnavailableError

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
