"""P and D whose hand-overs stop in the middle, and what D reports of its attempts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from tests.handover.scenario import SMALL, WIDE, Pair, RankGroup
from tests.support.ranks import Rank

LONG: dict[str, Any] = {
    **SMALL, "lease_seconds": 600.0, "transfer_timeout_seconds": 30.0, "handover_timeout_seconds": 120.0
}  # fmt: skip


class Trickle:
    """P sends ``turns`` times, two chunks each time."""

    def __init__(self, p: Rank, turns: float) -> None:
        self.turns = turns  # only the test changes it, and only P's thread counts
        self.done = 0
        self._pump = p.producer.pump
        p.producer.pump = self._some

    def _some(self, now: float) -> bool:
        sent = self.done < self.turns and bool(self._pump(now))
        self.done += sent
        return sent

    def go_on(self) -> None:
        self.turns = float("inf")


class Reports:
    """Counts what a rank reports to its engine, before it knows."""

    def __init__(self, d: Rank) -> None:
        self.ok: list[bool] = []
        results: Any = d.thread.results
        self._real = results.finished
        results.finished = self._note

    def _note(self, load: Any, end: Any, *more: Any) -> None:
        self.ok.append(not end.failed)
        self._real(load, end, *more)


def pair(group: RankGroup, planes: Sequence[str] = ("tcp",), **settings: Any) -> Pair:
    """P and D, and the planes that D uses, in this order."""
    p, d = group.pair(**{**LONG, **WIDE, **settings})
    use(d, planes)
    return p, d


def use(d: Rank, planes: Sequence[str]) -> None:
    d.context.planes = [plane for plane in map(d.context.plane, planes) if plane is not None]


def load_of(d: Rank) -> Any:
    return next(iter(loads_of(d)), None)


def loads_of(d: Rank) -> list[Any]:
    return list(d.consumer.loads.running)


def moving(d: Rank, count: int) -> bool:
    """Whether D has so many loads, and P has granted all of them."""
    loads = loads_of(d)
    return len(loads) == count and all(load.moving for load in loads)


def in_the_middle(d: Rank) -> bool:
    load = load_of(d)
    return load is not None and load.nbytes > 0


def cut(d: Rank, port: int | None = None) -> None:
    """Cut the connection of the data plane; that of control messages stands."""
    for link in d.consumer.links:
        if port in (None, link.place[1]):
            link.channel.sock.shutdown(socket.SHUT_RDWR)
