"""P's prompts by the names that D knows, and the questions of D that wait for one of them.

A router may send both legs of a request at once, so a question may come before P's engine has the prompt. Such a
question waits for a bounded time. A D needs no handshake to ask; it may not have chosen a data plane yet.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill, QueuedPrompt
from kvferry.transport.errors import quoted
from kvferry.transport.fair_table import FairTable
from kvferry.transport.wake import RateLimitedLog

HELD_RESOLVES = 1 << 14
"""Bound on the questions that wait, of all peers together: 16 MB."""
GONE_NAMES = 1 << 14
"""Names that P remembers for a moment after their prompt has ended, so that a late question is answered at once."""

Answer = tuple[bytes, messages.Resolved | messages.Unresolved]
"""The identity of a D, and the reply to it."""


@dataclass(slots=True)
class _HeldResolve:
    """A question that waits. ``plans``: how many P's engine had posted when it came."""

    identity: bytes
    resolve: messages.Resolve
    deadline: float
    plans: int


@dataclass(slots=True)
class _Named:
    """A prompt, from ``QueuedPrompt`` or ``Prefill`` until the end of its lease. ``names``: of its names, those that D
    finds it by. ``prefill``: once the engine has begun. ``granted``: D may read it. ``taken_back``: D was told so, and
    must wait again."""

    names: tuple[str, ...]
    prefill: Prefill | None = None
    params: bytes = b""
    granted: bool = False
    taken_back: bool = False


class NamedPrompts:
    """All prompts of P that can be asked for, and all questions that wait.

    Args:
        engine_id: of P.
        hold_seconds: how long a question waits, and how long a name is remembered after its prompt has ended.
    """

    def __init__(self, engine_id: str, hold_seconds: float) -> None:
        self._engine_id, self._hold_seconds = engine_id, hold_seconds
        self._log = RateLimitedLog(logging.getLogger("vllm.kvferry.producer"))
        self._prompts: dict[bytes, _Named] = {}
        self._tokens: dict[str, bytes] = {}
        self._gone: OrderedDict[str, float] = OrderedDict()  # until when a name is remembered
        self.held: FairTable[tuple[bytes, int], _HeldResolve] = FairTable(HELD_RESOLVES)
        """The questions that wait."""
        self.posted_plans = 0
        """The step plans that P's engine has posted; its thread counts them. An engine that posts none has no prompt
        under way."""

    def __contains__(self, token: object) -> bool:
        return token in self._prompts

    # --- P's prompts --------------------------------------------------------------------------------------------

    def queue(self, prompt: QueuedPrompt) -> None:
        """P's engine has a prompt in its queue. Questions for it wait on, and D is told that it is known."""
        self._name(prompt)

    def begin(self, prefill: Prefill) -> list[Answer]:
        """P's engine begins to compute a prompt. Returns the answers to the questions that have waited for this, as
        ``grant`` and ``end`` do."""
        named = self._prompts.get(prefill.token) or self._name(prefill)
        named.prefill, named.params = prefill, prefill.params
        return self._tell(prefill.token) if prefill.params else []

    def _name(self, prompt: QueuedPrompt | Prefill) -> _Named:
        """Where two live prompts have one name, the first keeps it."""
        taken = [name for name in prompt.names if name in self._tokens]
        names = tuple(name for name in prompt.names if name not in self._tokens)
        if taken:
            self._log.warning(
                "name",
                "kvferry: %s has the name %s of a prompt that P holds: D finds only the first by it; a router must "
                "give each request a transfer_id of its own",
                prompt.request_id, quoted(taken[0]),
            )  # fmt: skip
        named = self._prompts[prompt.token] = _Named(names)
        for name in names:
            self._tokens[name] = prompt.token
            self._gone.pop(name, None)
        return named

    def grant(self, grant: LeaseGrant) -> list[Answer]:
        """P holds the blocks of a prompt."""
        named = self._prompts.get(grant.token)
        if named is None:
            return []
        named.granted, named.taken_back, named.params = True, False, grant.params or named.params
        return self._tell(grant.token)

    def offer(self, token: bytes) -> list[Answer]:
        """A prompt is computed, or nearly, and D may read it before its lease."""
        named = self._prompts.get(token)
        if named is None:
            return []
        named.granted, named.taken_back = True, False
        return self._tell(token)

    def take_back(self, token: bytes) -> None:
        """The engine computes a prompt anew: D must wait again."""
        named = self._prompts.get(token)
        if named is not None and named.granted:
            named.granted, named.taken_back = False, True

    def is_taken_back(self, token: bytes) -> bool:
        """Whether a D that was told that it may read the prompt must wait again."""
        named = self._prompts.get(token)
        return named is not None and named.taken_back

    def end(self, token: bytes, now: float) -> list[Answer]:
        """The lease of a prompt has ended, or there will be none."""
        named = self._prompts.pop(token, None)
        if named is None:
            return []
        for name in named.names:
            del self._tokens[name]
            self._gone[name] = now + self._hold_seconds
            self._gone.move_to_end(name)
        while len(self._gone) > GONE_NAMES:
            self._gone.popitem(last=False)
        return [(held.identity, self._ended(held.resolve)) for held in self._waiting_for(named)]

    def _tell(self, token: bytes) -> list[Answer]:
        named = self._prompts[token]
        found = self._waiting_for(named, granted=named.granted)
        return [(held.identity, _resolved(held.resolve, named)) for held in found]

    def _waiting_for(self, named: _Named, *, granted: bool = True) -> list[_HeldResolve]:
        """Take the questions for a prompt that wait; only those that it need not be ``granted`` for."""
        names = set(named.names)
        found = [
            held
            for held in (self.held.values() if self.held.cost else ())
            if held.resolve.name in names and (granted or held.resolve.until == "begun")
        ]
        for held in found:
            self.held.pop((held.identity, held.resolve.number))
        return found

    # --- questions of D -----------------------------------------------------------------------------------------

    def resolve(self, identity: bytes, resolve: messages.Resolve, now: float) -> list[Answer]:
        """The answer to a question, and to those that find no room any more."""
        if resolve.engine_id not in ("", self._engine_id):
            text = f"this is engine {self._engine_id[:256]}"
            return [(identity, messages.Unresolved(number=resolve.number, final=True, detail=text))]
        token = self._tokens.get(resolve.name)
        named = None if token is None else self._prompts[token]
        if named is None and now < self._gone.get(resolve.name, now):
            return [(identity, self._ended(resolve))]
        if named is not None and named.params and (named.granted or resolve.until == "begun"):
            return [(identity, _resolved(resolve, named))]
        key = identity, resolve.number
        held = _HeldResolve(identity, resolve, now + self._hold_seconds, self.posted_plans)
        return [self._not_yet(left, "too many questions wait here") for left in self.held.put(identity, key, held)]

    def leave(self, identity: bytes, number: int) -> None:
        """D does not need an answer any more."""
        self.held.pop((identity, number))

    def take_late(self, now: float) -> list[Answer]:
        """The answers to the questions that have waited long enough. Forgets names that ended long enough ago."""
        while self._gone and now >= next(iter(self._gone.values())):
            self._gone.popitem(last=False)
        late = self.held.first(lambda held: now >= held.deadline)
        for held in late:
            self.held.pop((held.identity, held.resolve.number))
        return [self._not_yet(held, "no such prompt came in time") for held in late]

    def _not_yet(self, held: _HeldResolve, why: str) -> Answer:
        known = held.resolve.name in self._tokens and held.plans != self.posted_plans
        return held.identity, messages.Unresolved(number=held.resolve.number, final=False, known=known, detail=why)

    @staticmethod
    def _ended(resolve: messages.Resolve) -> messages.Unresolved:
        text = "the prompt was not handed over, or its lease has ended"
        return messages.Unresolved(number=resolve.number, final=True, detail=text)


def _resolved(resolve: messages.Resolve, named: _Named) -> messages.Resolved:
    prefill, granted = named.prefill, named.granted
    assert prefill is not None, "only a prompt that has begun has parameters"
    return messages.Resolved(
        number=resolve.number,
        params=named.params,
        granted=granted,
        streams=prefill.streams and not granted,
        found=prefill.found,
        step_tokens=prefill.step_tokens,
    )
