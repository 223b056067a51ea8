"""Typed errors. Each message names the fault, the value, the expected value, and the remedy.

``assert`` is for our own invariants; a fault in data of a peer or a user raises one of these errors. At the end: what
to do where a prompt was not handed over, as `kvferry check`, a router and the documentation say it.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from math import inf

PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"
"""No line ends and no control characters: KVFerry logs the strings that peers send."""
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def quoted(value: object) -> str:
    """``repr`` of a value of a peer or a client for a log line: one line of some hundred characters, of any value."""
    try:
        return _repr.repr(value)[:400]
    except Exception:  # an integer of more digits than Python prints
        return f"a value of type {type(value).__name__}"


def quoted_url(text: str) -> str:
    """``quoted`` of a URL, or of what should be one, without a user and a password."""
    return quoted(text.rpartition("@")[2])


def shortened(text: str, length: int = 300) -> str:
    """A text of a peer, cut for a log line."""
    return text if len(text) <= length else f"{text[: length - 4]} ..."


class KVFerryError(Exception):
    """Base of every error that KVFerry raises on purpose."""


class ConfigError(KVFerryError, ValueError):
    """A setting is unknown, of the wrong type, or impossible."""


class UsageError(KVFerryError, ValueError):
    """An argument of the command ``kvferry`` is not usable."""


class GeometryError(KVFerryError, ValueError):
    """A KV cache, or the description of one, is not of a form that can be carried."""


class EmbeddingError(KVFerryError, ValueError):
    """Multimodal embeddings, or the mask of their placeholders, are not of the form that is needed."""


class RatioError(GeometryError):
    """No integer ratio exists between two sizes. Transfers use ``overlaps()``, which needs none."""

    def __init__(self, what: str, local: int, remote: int) -> None:
        super().__init__(
            f"no integer {what} between local {local} and remote {remote}; "
            "plan by overlaps(), which carries any pair of sizes"
        )
        self.what, self.local, self.remote = what, local, remote


class ProtocolError(KVFerryError):
    """A message is malformed, oversized, of another protocol version, or out of place."""


class IncompatiblePeerError(KVFerryError):
    """A peer's model or geometry does not fit ours; the message names the field and both values."""

    def __init__(self, field: str, ours: object, theirs: object, *, advice: str = "") -> None:
        what, mine, other = (shortened(str(text)) for text in (field, ours, theirs))
        super().__init__(f"peer refused: {what} differs, ours is {mine}, the peer's is {other}{advice}")
        self.field, self.ours, self.theirs = field, ours, theirs


class TransportError(KVFerryError):
    """A data plane or a control connection failed."""


class PlaneUnavailableError(TransportError):
    """A data plane cannot be used here; the message gives the reason."""


class PlaneBusyError(PlaneUnavailableError):
    """Too many connect to P's socket at this moment: the caller tries again."""


class NotConnectedError(TransportError):
    """The connection of a decode rank is not here yet, perhaps behind many others: the caller looks again."""


class PeerUnreachableError(PlaneUnavailableError):
    """Our GPU does not reach P's memory by any plane."""


def check_positive(option: str, value: float) -> None:
    """Raises UsageError: the value of this option of a command is not above 0, or is no finite number."""
    if not 0 < value < inf:
        raise UsageError(f"{option} is {value if isinstance(value, int) else f'{value:g}'}, expected a number above 0")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for a misspelt name, or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def what_to_do(reason: str) -> str:
    """In one line, without Markdown."""
    return TO_DO.get(reason, ELSE_TO_DO).replace("`", "")


NO_PARAMS = (
    "it runs without KVFerry's connector ('no KVConnector found' in its log), or as kv_consumer: start it with "
    "KVFerryConnector, as kv_both or kv_producer"
)
"""Of a P whose answer has no ``kv_transfer_params``."""
NO_REPORT = "start it with KVFerryConnector in --kv-transfer-config, and with this release of KVFerry"
"""Of a D that says nothing of a prompt."""
ELSE_TO_DO = "look at /health of the router, and at docs/troubleshooting.md"
AGAIN = "no fault if it is rare: check again"
TO_DO = {
    "no_p_named": "the prefill engine gave no parameters (`no hand-over of` in its log), or the router lost them",
    "no_kvferry_params": "the prefill engine runs another connector, or the router dropped a part of its parameters",
    "no_params": "the prefill engine runs without KVFerry, or was not asked (its `prompts_total`, `plain`); or the "
    "router sent no `kv_transfer_params`, or had the decode engine prefill: docs/routers.md",
    "wrong_role": "the router sends an engine what its `kv_role` does not allow: start that engine with `kv_both`",
    "malformed": "the router must send the prefill engine's `kv_transfer_params` unchanged",
    "other_release": "run the same KVFerry release on both engines: finish the upgrade, or go back",
    "other_prompt": "the router changes the prompt or mixes two requests' parameters, or tokenizers, templates differ",
    "other_adapter": "load the same LoRA adapter on both engines under this name",
    "embeddings": "a prompt of embeddings is never handed over; nothing to do",
    "window": "use the same `--block-size` on both engines",
    "loopback": "set `side_channel_host` (`KVFERRY_SIDE_CHANNEL_HOST`) on the prefill engine to an address of its host",
    "key": "give both engines the same `key_file` (`KVFERRY_KEY_FILE`), or each other's `peer_keys`",
    "not_allowed": "add the prefill engine's network to `allowed_peers` (`KVFERRY_ALLOWED_PEERS`) of the decode engine",
    "unreachable": "set `side_channel_host` on the prefill engine, open its port; `kvferry doctor --peer HOST:PORT`",
    "no_answer": "the prefill engine has not got or not computed this prompt in time: look at its queue and its log",
    "no_lease": "the prefill leg failed, or the decode leg came after `lease_seconds`: see the prefill engine's log",
    "expired": "the decode leg came after `lease_seconds`, or waited for blocks for 20 times as long",
    "incompatible": "model, weights, dtype, caches or release differ: the decode engine's log names both values",
    "plane": "no data plane works, or the named one does not: the decode engine's log says why; run `kvferry doctor`",
    "timeout": "the prefill engine hangs, or the network is slow: `handover_timeout_seconds`, `step_hold_seconds`",
    "peer_lost": "the prefill engine ended, or the connection to it broke: look at its log",
    "data": "the prefill engine sent what does not fit: the decode engine's log says why; if often, test the hardware",
    "denied": "the prefill engine refused: its log says why",
    "internal": "a fault of KVFerry: the decode engine's log has it; report it with what `kvferry doctor` prints",
    "reset": f"the caches of an engine were reset meanwhile; {AGAIN}",
    "cancelled": f"the load was cancelled, as the client left or the engine slept; {AGAIN}",
    "cached": "no fault: the decode engine had the prompt in its own cache",
    "whole_prompt": "no fault: the decode engine had to compute all of the prompt, as for `prompt_logprobs`",
    "other_connector": "another connector below MultiConnector loaded it: no fault, or list KVFerryConnector before it",
    "ended": "no fault: the client left before",
}
"""What to do, by the reason that the decode engine gives, in Markdown; docs/troubleshooting.md shows it."""
