"""Requests of an engine D that know P's prompt by a name only, from D's question until P's answer.

What D's scheduler half does (``load_planner``), with its check of the prompt and its deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.connector.engine import params
from kvferry.connector.engine.load_planner import MAX_PATIENCE
from kvferry.connector.engine.params import prompt_of_answer
from kvferry.connector.geometry.engine_types import RequestView
from kvferry.connector.wire.step_plan import LeftAnswer, Rendezvous, RendezvousResult, StepPlan
from kvferry.transport.errors import ProtocolError
from tests.simulation.memory import BLOCK_TOKENS
from tests.simulation.prompts import Prompt, Request, tokens_of
from tests.simulation.timeline import Violation

if TYPE_CHECKING:
    from tests.simulation.engines import Engine


@dataclass(slots=True, eq=False)
class Search:
    """A request that waits. ``number``, ``num_tokens``: of its prompt. ``found``: called with what may be loaded, once.
    ``deadline``, ``end``: as in ``AwaitedPrompt``."""

    name: str
    number: int
    num_tokens: int
    found: Callable[[Request, RendezvousResult], None]
    deadline: float
    end: float


def _view(name: str, number: int, num_tokens: int) -> RequestView:
    return RequestView(name, None, tokens_of(number, num_tokens), num_tokens, 0)


def _left(name: str, number: int, num_tokens: int) -> LeftAnswer:
    return LeftAnswer(name, params.possible_digests(_view(name, number, num_tokens)))


class Searches:
    """All such requests of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.open: dict[str, Search] = {}
        self._left: set[str] = set()

    def begin(
        self,
        name: str,
        number: int,
        num_tokens: int,
        p: Engine,
        transfer_id: str,
        found: Callable[[Request, RendezvousResult], None],
        *,
        ended: bool = False,
    ) -> None:
        """A request has come. ``ended``: it has ended, too, before D's ranks have heard of it."""
        engine, now = self._engine, self._engine.timeline.now
        timeout = engine.settings.handover_timeout_seconds
        host, port = p.addresses[0]
        if ended:
            self._left.add(name)
        else:
            search = Search(name, number, num_tokens, found, now + timeout, now + MAX_PATIENCE * timeout)
            self.open[name] = search
            self._look_at(search)
        left = _left(name, number, num_tokens) if ended else None
        wanted = Rendezvous(name, host, port, p.name, transfer_id, ended=left)
        self._post(StepPlan(consumer=engine.consumer, rendezvous=(wanted,)))

    def abort(self, name: str, why: str) -> None:
        """The client has gone, or time is over."""
        search = self.open.pop(name, None) if self._engine.alive else None
        if search is not None:
            self._engine.outcomes[why] += 1
            self._leave(search)

    def _leave(self, search: Search) -> None:
        self._left.add(search.name)
        left = _left(search.name, search.number, search.num_tokens)
        self._post(StepPlan(consumer=self._engine.consumer, left=(left,)))

    def told(self, rank: str, name: str, result: RendezvousResult) -> None:
        """A rank reports P's word."""
        engine, search = self._engine, self.open.get(name)
        if search is None:
            if name not in self._left:
                raise Violation(f"{rank} reports the rendezvous of {name} once more")
            return
        if result.known:
            search.deadline = min(engine.timeline.now + engine.settings.handover_timeout_seconds, search.end)
            engine.network.counts["P has the prompt in its queue, or computes it"] += 1
            return
        del self.open[name]
        if result.error:
            engine.outcomes["not found by its name"] += 1
            return
        remote = prompt_of_answer(result.params)
        try:
            params.check_prompt(_view(name, search.number, search.num_tokens), remote)
        except ProtocolError:
            engine.network.counts["another prompt under the name"] += 1
            self._leave(search)
            return
        blocks = [0] * -(-remote.num_tokens // BLOCK_TOKENS)  # as many as D needs; P's own are not told
        prompt = Prompt(name, search.number, remote.token, blocks, remote.num_tokens, remote.peer, digest=remote.prompt)
        search.found(engine.keep(prompt, name), result)

    def _look_at(self, search: Search) -> None:
        """When its deadline has passed, the request waits no more."""

        def look() -> None:
            if self.open.get(search.name) is not search:
                return
            if self._engine.timeline.now >= search.deadline:
                self.abort(search.name, "not found in time")
            else:
                self._look_at(search)

        self._engine.timeline.after(search.deadline - self._engine.timeline.now, look)

    def _post(self, plan: StepPlan) -> None:
        for node in self._engine.nodes:
            node.post(plan)
