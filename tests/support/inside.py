"""How tests and benchmarks look into the product. Nothing else in them reaches a private name of it."""

from __future__ import annotations

from typing import Any

from kvferry.connector.wire.states import Tick
from kvferry.transport import cuda

# --- prefill side -------------------------------------------------------------------------------------------------


def producer_of(of: Any) -> Any:
    """The prefill side of a rank, or of its transfer thread; or itself."""
    of = getattr(of, "thread", of)
    return getattr(of, "_producer", of)


def listener_of(of: Any) -> Any:
    """P's end of the control plane."""
    return producer_of(of)._listener


def leases_of(of: Any) -> dict[bytes, Any]:
    """The leases that P holds, by token."""
    return {token: lease for token, lease in list(producer_of(of).leases.table.items()) if lease.begun}


def expire_lease(of: Any, lease: Any) -> None:
    """End a lease as its expiry does. On P's transfer thread."""
    producer_of(of)._step(lease, Tick(), lease.lifetime.state.deadline)


def prompts_of(of: Any) -> dict[bytes, Any]:
    """The prompts that may be read before their lease, by token."""
    return {token: lease for token, lease in list(producer_of(of).leases.table.items()) if not lease.begun}


def board_of(of: Any) -> Any:
    """Where P posts its grants."""
    return producer_of(of).leases.board


def early_asks(of: Any) -> Any:
    """The asks that wait for their lease."""
    return producer_of(of).early.asks


def early_votes(of: Any) -> Any:
    """The releases that wait for their lease, by token and consumer."""
    return producer_of(of).early.votes


def early_of(of: Any) -> Any:
    """All requests that wait for their lease."""
    return producer_of(of).early


def sessions_of(of: Any) -> Any:
    """P's sessions by identity: the table itself."""
    return producer_of(of).sessions.table


def replies_of(of: Any) -> Any:
    """What sends and keeps P's replies."""
    return producer_of(of).replies


def sends_of(of: Any) -> Any:
    """The reads that P sends."""
    return producer_of(of).sends


# --- decode side --------------------------------------------------------------------------------------------------


def consumer_of(of: Any) -> Any:
    """The decode side of a rank, or of its transfer thread; or itself."""
    of = getattr(of, "thread", of)
    return getattr(of, "_consumer", of)


# --- engine halves and the transfer thread ------------------------------------------------------------------------

# --- vLLM ---------------------------------------------------------------------------------------------------------

# --- planes -------------------------------------------------------------------------------------------------------


def forget_driver() -> None:
    """Let CUDA's driver library be opened anew by the next call."""
    for kept in (cuda._driver, cuda._primary_context):
        kept.cache_clear()


# --- control plane, sockets, bootstrap ----------------------------------------------------------------------------

# --- router and commands ------------------------------------------------------------------------------------------
