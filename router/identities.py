"""Which engine answers at the URL of a P, for a D that is asked before P has answered. Pure."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("kvferry.router")

IDENTITY = ("remote_engine_id", "remote_host", "remote_port")
IDENTITY_ALSO = ("remote_key", "remote_host_id", "tp_size", "pp_size", "dcp_size", "transfer_mode")
"""What D needs to ask P for a prompt that P has not finished, and what goes with it where P's answer has it."""
CALM_ANSWERS = 20
"""Where P's identity changes twice within so many answers, several engines answer at its URL: it is asked serially
until so many in a row are of one."""


class Identity:
    """What D is told of a P before it has answered; None: P is asked serially. ``url``: of P."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[str, Any] | None = None
        self._several, self._unchanged = False, CALM_ANSWERS

    def get(self) -> dict[str, Any] | None:
        return None if self._several else self._known

    def learn(self, params: dict[str, Any] | None) -> None:
        """P's answer had these ``kv_transfer_params``."""
        before, self._known = self._known, identity_of(params)
        changed, calm = before not in (None, self._known), self._unchanged >= CALM_ANSWERS
        if changed and not calm and not self._several:
            log.warning("several engines answer at %s: it is asked serially", self._url)
        self._several = not calm and (changed or self._several)
        self._unchanged = 0 if changed else self._unchanged + 1

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
