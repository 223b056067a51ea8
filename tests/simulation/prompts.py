"""A prompt of an engine P, and a request of an engine D."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.connector.engine.params import prompt_digest
from kvferry.connector.wire.step_plan import Load, PeerEngine


def tokens_of(number: int, num_tokens: int) -> list[int]:
    """The token ids of a prompt."""
    return [number] * num_tokens


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that P computes or has computed, or what P has told D of one. ``waiting``: P's ranks that have a lease
    of it and have not reported its end."""

    name: str
    number: int
    token: bytes
    blocks: list[int]
    num_tokens: int
    peer: PeerEngine
    waiting: set[int] = field(default_factory=set)
    digest: str = ""

    def __post_init__(self) -> None:
        self.digest = self.digest or prompt_digest(tokens_of(self.number, self.num_tokens))


@dataclass(slots=True, eq=False)
class Request:
    """A request of D. ``others``: the same prompt at other P engines. ``phase``: kept, loading, ended. ``waiting``: D's
    ranks that have not reported its load. ``since``: when it was posted to them."""

    name: str
    prompt: Prompt
    siblings: bool
    others: Sequence[Prompt] = ()
    phase: str = "kept"
    blocks: list[int] = field(default_factory=list)
    load: Load | None = None
    span: tuple[int, int] = (0, 0)
    waiting: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    since: float = 0.0
