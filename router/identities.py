"""Which engine answers at the URL of a P, for a D that is asked before P has answered. Pure: the clock is passed in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("kvferry.router")

IDENTITY = ("remote_engine_id", "remote_host", "remote_port")
IDENTITY_ALSO = ("remote_key", "tp_size", "pp_size", "dcp_size", "transfer_mode")
"""What D needs to ask P for a prompt that P has not finished, and what goes with it where P's answer has it."""
CHANGES, CHANGES_SECONDS, DISTRUST_SECONDS = 2, 300.0, 600.0
"""So many changes of P's identity in so many seconds (several engines answer at its URL): it is asked serially for the
time of the third."""


class Identities:
    """By P's URL, the engine that last answered there, if D may be asked before P has answered."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, dict[str, Any]] = {}
        self._changed: dict[str, list[float]] = {}
        self._distrusted: dict[str, float] = {}

    def get(self, url: str) -> dict[str, Any] | None:
        return self._known.get(url) if self._distrusted.get(url, 0) <= self._clock() else None

    def learn(self, url: str, params: dict[str, Any] | None) -> None:
        """P's answer had these ``kv_transfer_params``."""
        before, now = self._known.pop(url, None), self._clock()
        identity = identity_of(params)
        if identity is not None:
            self._known[url] = identity
        if before is None or before == identity:
            return
        changed = [*(at for at in self._changed.get(url, ()) if now - at < CHANGES_SECONDS), now]
        self._changed[url] = changed
        if len(changed) >= CHANGES:
            self._distrusted[url] = now + DISTRUST_SECONDS
            self._changed[url] = []
            log.warning("several engines answer at %s: it is asked serially for %g s", url, DISTRUST_SECONDS)

    def failed(self, url: str) -> None:
        """P failed: another engine may answer at its URL next."""
        self._known.pop(url, None)

    def forget(self, url: str) -> None:
        """There is no such P any longer."""
        for table in (self._known, self._changed, self._distrusted):
            table.pop(url, None)


def identity_of(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """What D needs to ask this P at once; None where P does not offer it."""
    if params is None or params.get("transfer_mode") != "push":
        return None
    engine, host, port = (params.get(name) for name in IDENTITY)
    if not (isinstance(engine, str) and engine and isinstance(host, str) and host and isinstance(port, int) and port):
        return None
    return {name: params[name] for name in IDENTITY + IDENTITY_ALSO if params.get(name) is not None}
