"""A stage of a hand-over, held for as long as a test likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.inside import consumer_of, producer_of
from tests.support.ranks import Rank

PATIENT: dict[str, Any] = {
    "handshake_timeout_seconds": 600.0, "transfer_timeout_seconds": 600.0, "ask_hold_seconds": 600.0,
    "lease_seconds": 600.0, "handover_timeout_seconds": 600.0,
}  # fmt: skip
"""Settings: nothing ends because time is over, but because it was given up."""


class Gate:
    """Replaces ``owner.name`` by something that returns ``shut`` until ``open``."""

    def __init__(self, owner: Any, name: str, shut: Callable[..., Any]) -> None:
        self._owner, self._name, self._real = owner, name, getattr(owner, name)
        self.calls = 0

        def gate(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return shut(*args, **kwargs)

        setattr(owner, name, gate)

    def open(self) -> None:
        setattr(self._owner, self._name, self._real)


def halves(rank: Rank) -> tuple[Any, Any]:
    """(producer, consumer) of a rank's transfer thread."""
    return producer_of(rank), consumer_of(rank)
