"""P and D whose hand-overs stop in the middle, and what D reports of its attempts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.load_state import LoadPhase
from kvferry.connector.decode_side.plane_choice import avoided_seconds
from tests.handover.gates import halves
from tests.handover.opening import THEIRS, TOKENS
from tests.handover.rank_group import RankGroup
from tests.support.ranks import Rank

OTHERS = [10, 14, 12, 9, 13, 15, 11]
"""Blocks of D for a second load."""
WIDE = {"content": 512, "layers": 16}
"""A hand-over of 13 MB."""
SMALL_SLOTS: dict[str, Any] = {"slot_bytes": 64 << 10, "staging_bytes": 1 << 20, "lease_seconds": 600.0}
LONG = {**SMALL_SLOTS, "transfer_timeout_seconds": 30.0, "handover_timeout_seconds": 120.0}
AVOIDED = avoided_seconds(120.0)
"""How long D avoids a plane with these settings."""


class Trickle:
    """P sends ``turns`` times, two chunks each time."""

    def __init__(self, p: Rank, turns: float) -> None:
        self.turns = turns  # only the test changes it, and only P's thread counts
        self.done = 0
        self._pump = halves(p)[0].pump
        halves(p)[0].pump = self._some

    def _some(self, now: float) -> bool:
        sent = self.done < self.turns and bool(self._pump(now))
        self.done += sent
        return sent


class Reports:
    """Counts what a rank reports to its engine, before the ledger sees it."""

    def __init__(self, d: Rank) -> None:
        self.ok: list[bool] = []
        results: Any = d.thread.results
        self._real = results.finished
        results.finished = self._note

    def _note(self, finished: Any) -> None:
        self.ok.append(finished.ok)
        self._real(finished)


def pair(group: RankGroup, planes: Sequence[str] = ("tcp",), **settings: Any) -> tuple[Rank, Rank]:
    """P and D, and the planes that D uses, in this order."""
    made = Settings(**{**LONG, **settings})
    p, d = (group.rank(settings=made, engine_id=f"engine-{name}", **WIDE) for name in "pd")
    p.fill(THEIRS, TOKENS)
    use(d, planes)
    return p, d


def use(d: Rank, planes: Sequence[str]) -> None:
    context = d.worker.rank_context
    assert context is not None
    context.planes = [plane for plane in map(context.plane, planes) if plane is not None]


def figures(d: Rank) -> Any:
    assert d.worker.rank_context is not None
    return d.worker.rank_context.stats.take()


def load_of(d: Rank) -> Any:
    return next(iter(loads_of(d)), None)


def loads_of(d: Rank) -> list[Any]:
    return list(halves(d)[1].loads.running)


def moving(d: Rank, count: int) -> bool:
    """Whether D has so many loads, and P has granted all of them."""
    loads = loads_of(d)
    return len(loads) == count and all(load.lifetime.state.phase is LoadPhase.MOVING for load in loads)


def in_the_middle(d: Rank) -> bool:
    load = load_of(d)
    return load is not None and load.nbytes > 0


def waits_for_the_next(d: Rank) -> bool:
    return bool(load_of(d).lifetime.state.phase is LoadPhase.WAITING)


def cut(d: Rank, port: int | None = None) -> None:
    """Cut the connection of the data plane; that of control messages stands."""
    for link in halves(d)[1].links:
        if port in (None, link.place[1]):
            link.channel.sock.shutdown(socket.SHUT_RDWR)
