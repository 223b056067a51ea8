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
    """A question that waits."""

    identity: bytes
    resolve: messages.Resolve
    deadline: float
    plans: int
    """``NamedPrompts.plans_seen`` when it came."""


@dataclass(slots=True)
class _Named:
    """A prompt, from ``QueuedPrompt`` or ``Prefill`` until the end of its lease."""

    names: tuple[str, ...]
    """Of its names, those that D finds it by."""
    prefill: Prefill | None = None
    """Once the engine has begun."""
    params: bytes = b""
    granted: bool = False
    """D may read it."""
    taken_back: bool = False
    """D had been answered so, and must wait again."""

    def answers(self, resolve: messages.Resolve) -> bool:
        """Whether a question need not wait."""
        return bool(self.params) and (self.granted or resolve.until == "begun")

    def answer(self, identity: bytes, resolve: messages.Resolve) -> Answer:
        prefill = self.prefill
        assert prefill is not None, "only a prompt that has begun has parameters"
        return identity, messages.Resolved(
            number=resolve.number,
            params=self.params,
            granted=self.granted,
            streams=prefill.streams and not self.granted,
            found=prefill.found,
            step_tokens=prefill.step_tokens,
        )


class NamedPrompts:
    """All prompts of P that can be asked for, and all questions that wait. Its methods return the answers to send.

    Args:
        engine_id: of P.
        hold_seconds: how long a question waits, and how long a name is remembered after its prompt has ended.
    """

    def __init__(self, engine_id: str, hold_seconds: float) -> None:
        self._engine_id, self._hold_seconds = engine_id, hold_seconds
        self._log = RateLimitedLog(logging.getLogger("vllm.kvferry.lookup"))
        self.prompts: dict[bytes, _Named] = {}
        self.tokens: dict[str, bytes] = {}
        self.gone: OrderedDict[str, float] = OrderedDict()
        """Until when a name is remembered."""
        self.held: FairTable[tuple[bytes, int], _HeldResolve] = FairTable(HELD_RESOLVES)
        """The questions that wait."""
        self.plans_seen = 0
        """Step plans of P's engine, whose thread counts them. An engine that makes none has no prompt under way."""

    def __contains__(self, token: object) -> bool:
        return token in self.prompts

    # --- P's prompts --------------------------------------------------------------------------------------------

    def queue(self, prompt: QueuedPrompt | Prefill) -> _Named:
        """P's engine has a prompt in its queue. Questions for it wait on, and D is told that it is known. Where two
        live prompts have one name, the first keeps it."""
        taken = [name for name in prompt.names if name in self.tokens]
        names = tuple(name for name in prompt.names if name not in self.tokens)
        if taken:
            self._log.warning(
                "name",
                "kvferry: %s has the name %s of a prompt that this engine holds: a decode engine finds only the "
                "first by it; a router must "
                "give each request a transfer_id of its own",
                prompt.request_id, quoted(taken[0]),
            )  # fmt: skip
        named = self.prompts[prompt.token] = _Named(names)
        for name in names:
            self.tokens[name] = prompt.token
            self.gone.pop(name, None)
        return named

    def begin(self, prefill: Prefill) -> list[Answer]:
        """P's engine begins to compute a prompt."""
        named = self.prompts.get(prefill.token) or self.queue(prefill)
        named.prefill, named.params = prefill, prefill.params
        return self._answers(named)

    def grant(self, grant: LeaseGrant) -> list[Answer]:
        """P holds the blocks of a prompt."""
        named = self.prompts.get(grant.token)
        if named is None:
            return []
        named.params = grant.params or named.params
        return self.offer(grant.token)

    def offer(self, token: bytes) -> list[Answer]:
        """D may read a prompt; before its lease, where it is computed, or nearly."""
        named = self.prompts.get(token)
        if named is None:
            return []
        named.granted, named.taken_back = True, False
        return self._answers(named)

    def take_back(self, token: bytes) -> None:
        """The engine computes a prompt anew: D must wait again."""
        named = self.prompts.get(token)
        if named is not None and named.granted:
            named.granted, named.taken_back = False, True

    def is_taken_back(self, token: bytes) -> bool:
        """Whether a D that was told that it may read the prompt must wait again."""
        named = self.prompts.get(token)
        return named is not None and named.taken_back

    def end(self, token: bytes, now: float) -> list[Answer]:
        """The lease of a prompt has ended, or there will be none."""
        named = self.prompts.pop(token, None)
        if named is None:
            return []
        for name in named.names:
            del self.tokens[name]
            self.gone[name] = now + self._hold_seconds
            self.gone.move_to_end(name)
        while len(self.gone) > GONE_NAMES:
            self.gone.popitem(last=False)
        waiting = [held for held in self.held.values() if held.resolve.name in named.names] if self.held.cost else []
        return [self._ended(held.identity, held.resolve) for held in self._taken(waiting)]

    def _answers(self, named: _Named) -> list[Answer]:
        """To the questions that have waited for this."""
        if not self.held.cost:
            return []
        held = [h for h in self.held.values() if h.resolve.name in named.names and named.answers(h.resolve)]
        return [named.answer(each.identity, each.resolve) for each in self._taken(held)]

    def _taken(self, found: list[_HeldResolve]) -> list[_HeldResolve]:
        for held in found:
            self.held.pop((held.identity, held.resolve.number))
        return found

    # --- questions of D -----------------------------------------------------------------------------------------

    def resolve(self, identity: bytes, resolve: messages.Resolve, now: float) -> list[Answer]:
        """D asks. Also answers the questions that find no room any more."""
        if resolve.engine_id not in ("", self._engine_id):
            text = f"this is engine {self._engine_id[:256]}"
            return [(identity, messages.Unresolved(number=resolve.number, final=True, detail=text))]
        token = self.tokens.get(resolve.name)
        named = None if token is None else self.prompts[token]
        if named is None and now < self.gone.get(resolve.name, now):
            return [self._ended(identity, resolve)]
        if named is not None and named.answers(resolve):
            return [named.answer(identity, resolve)]
        held = _HeldResolve(identity, resolve, now + self._hold_seconds, self.plans_seen)
        displaced = self.held.put(identity, (identity, resolve.number), held)
        return [self._not_yet(left, "too many questions wait here") for left in displaced]

    def leave(self, identity: bytes, number: int) -> None:
        """D does not need an answer any more."""
        self.held.pop((identity, number))

    def take_late(self, now: float) -> list[Answer]:
        """Answers the questions that have waited long enough. Forgets names that ended long enough ago."""
        while self.gone and now >= next(iter(self.gone.values())):
            self.gone.popitem(last=False)
        late = self._taken(self.held.first(lambda held: now >= held.deadline))
        return [self._not_yet(held, "no such prompt came in time") for held in late]

    def _not_yet(self, held: _HeldResolve, why: str) -> Answer:
        known = held.resolve.name in self.tokens and held.plans != self.plans_seen
        return held.identity, messages.Unresolved(number=held.resolve.number, final=False, known=known, detail=why)

    @staticmethod
    def _ended(identity: bytes, resolve: messages.Resolve) -> Answer:
        text = "the prompt was not handed over, or its lease has ended"
        return identity, messages.Unresolved(number=resolve.number, final=True, detail=text)
