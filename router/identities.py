"""Which engine answers at the URL of a P, for a D that is asked before P has answered. Pure: the clock is passed in."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("kvferry.router")

IDENTITY = ("remote_engine_id", "remote_host", "remote_port")
IDENTITY_ALSO = ("remote_key", "tp_size", "pp_size", "dcp_size", "transfer_mode")
"""What D needs to ask P for a prompt that P has not finished, and what goes with it where P's answer has it."""
CHANGES, CHANGES_SECONDS, DISTRUST_SECONDS = 2, 300.0, 600.0
"""So many changes of P's identity in so many seconds (several engines answer at its URL): it is asked serially for the
time of the third."""


class Identity:
    """What D is told of a P before it has answered; None: P is asked serially. ``url``: of P."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[str, Any] | None = None
        self._changed: list[float] = []
        self._distrusted = 0.0

    def get(self, now: float) -> dict[str, Any] | None:
        return self._known if self._distrusted <= now else None

    def learn(self, params: dict[str, Any] | None, now: float) -> None:
        """P's answer had these ``kv_transfer_params``."""
        before, self._known = self._known, identity_of(params)
        if before is None or before == self._known:
            return
        self._changed = [*(at for at in self._changed if now - at < CHANGES_SECONDS), now]
        if len(self._changed) >= CHANGES:
            self._distrusted, self._changed = now + DISTRUST_SECONDS, []
            log.warning("several engines answer at %s: it is asked serially for %g s", self._url, DISTRUST_SECONDS)

    def failed(self) -> None:
        """P failed: another engine may answer at its URL next."""
        self._known = None


def identity_of(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """What D needs to ask this P at once; None where P does not offer it."""
    if params is None or params.get("transfer_mode") != "push":
        return None
    engine, host, port = (params.get(name) for name in IDENTITY)
    if not (isinstance(engine, str) and engine and isinstance(host, str) and host and isinstance(port, int) and port):
        return None
    return {name: params[name] for name in IDENTITY + IDENTITY_ALSO if params.get(name) is not None}
