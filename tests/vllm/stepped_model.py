"""The made-up model of an engine that is stepped by hand, and what its model runner remembers from step to step.

A runner knows tokens that the scheduler has not seen yet (async scheduling), and with speculative decoding it feeds
drafts, keeps those that the model agrees with, and computes the rest anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

WRONG = 1
"""What the model says after wrong KV; after right KV it never does."""


def next_token(ids: Sequence[int]) -> int:
    """What the made-up model says after these tokens."""
    return (ids[-1] * 31 + len(ids)) % 280 + 2


@dataclass(frozen=True)
class Turn:
    """One request in one step: tokens ``ids[start:]`` are fed, the last ``len(drafts)`` of which are drafts."""

    ids: list[int]
    start: int
    drafts: list[int]
    complete: bool
    """All that is known of the request is fed, so the step samples."""

    def sampled(self) -> list[int]:
        """The model's next token, and those after it as far as the drafts were right."""
        if not self.complete:
            return []
        known = self.ids[: len(self.ids) - len(self.drafts)]
        tokens = [next_token(known)]
        for draft in self.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(next_token([*known, *tokens]))
        return tokens


class RunnerMemory:
    """Each request's tokens and drafts, as a model runner that may be a step ahead of the scheduler has them."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._known: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}

    def begin(self, step: Any) -> None:
        """What was sampled before a preemption and not told counts no more."""
        for request_id in {new.req_id for new in step.scheduled_new_reqs} | step.scheduled_cached_reqs.resumed_req_ids:
            self._known.pop(request_id, None)
            self._drafts.pop(request_id, None)

    def turn(self, request: Request, step: Any) -> Turn:
        """What this step feeds of a request.

        The scheduler counts drafts of a step under way as computed, the runner knows which of them were right.
        """
        count = step.num_scheduled_tokens[request.request_id]
        known = self._tokens(request)
        places = len(step.scheduled_spec_decode_tokens.get(request.request_id, ()))
        start = min(request.num_computed_tokens - count, len(known) - 1)
        drafts = [*self._drafts.get(request.request_id, ()), *[0] * places][:places]  # vLLM pads a new request's first
        ids = [*known, *drafts][: start + count]
        return Turn(ids, start, drafts, complete=start + count - places >= len(known))

    def sample(self, turns: dict[str, Turn], wrong: Collection[str] = ()) -> list[list[int]]:
        """The step's tokens by request; drafts for the next one are made after them. ``wrong``: requests that the step
        computed from wrong KV, whose tokens are ``WRONG``."""
        sampled = []
        for request_id, turn in turns.items():
            tokens = [WRONG] * len(turn.sampled()) if request_id in wrong else turn.sampled()
            known = [*turn.ids[: len(turn.ids) - len(turn.drafts)], *tokens]
            sampled.append(tokens)
            self._drafts[request_id] = self._draft(known) if turn.complete else []
            if turn.complete:
                self._known[request_id] = known
        return sampled

    def _draft(self, known: list[int]) -> list[int]:
        """Some right, then some wrong: all are found out, at every length."""
        ids, wrong = [*known], len(known) % 3
        for number in range(self._num_drafts):
            ids.append(1 if number >= self._num_drafts - wrong else next_token(ids))
        return ids[len(known) :]

    def drafted(self, turns: dict[str, Turn]) -> DraftTokenIds:
        """What the engine asks for after a step, where its scheduler is not ahead."""
        return DraftTokenIds(list(turns), [list(self._drafts[request_id]) for request_id in turns])

    def _tokens(self, request: Request) -> list[int]:
        """A request's tokens as the runner knows them: those that the scheduler has not seen yet as well."""
        token_ids, known = list(request.all_token_ids), self._known.get(request.request_id, [])
        return known if known[: len(token_ids)] == token_ids else token_ids
