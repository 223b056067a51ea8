"""Settings whose times a test sets one by one; an engine's follow from two of them."""

from __future__ import annotations

from kvferry.connector.config import Settings


class Timed(Settings, frozen=True, kw_only=True):
    """As ``Settings``, with the properties of the same names as fields."""

    lease_cap_seconds: float = 600.0
    ask_hold_seconds: float = 10.0
    handshake_timeout_seconds: float = 10.0
    transfer_timeout_seconds: float = 30.0
