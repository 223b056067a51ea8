"""A prompt that an engine P computes in steps while D reads it: preempted at times, or given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from kvferry.connector.engine.params import RemotePrompt, to_transfer_params
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill, PrefillChunk, PrefillStop, StepPlan, pack_ids
from tests.simulation.memory import BLOCK_TOKENS

if TYPE_CHECKING:
    from tests.simulation.engines import Engine
    from tests.simulation.prompts import Prompt

STEP_SECONDS = 2e-3
SOON_SECONDS = 200e-6
PREEMPTED, GIVEN_UP = 0.08, 0.02
"""How likely these are at the end of a step: half of them before its bytes are there, half soon after it."""


class Prefilling:
    """One prompt; an engine computes one at a time. The bytes of a step come into the blocks at its end. Until then the
    blocks hold what nobody may take for KV."""

    def __init__(self, engine: Engine, prompt: Prompt, step_tokens: int, names: tuple[str, ...]) -> None:
        """``names``: by which D may ask for the prompt."""
        self.engine, self.prompt, self.step_tokens = engine, prompt, step_tokens
        self._timeline = engine.timeline
        self._told = 0  # blocks that the ranks know
        told = RemotePrompt(prompt.token, prompt.num_tokens, prompt.digest, prompt.peer)
        prefill = Prefill(
            prompt.name, prompt.token, prompt.num_tokens, prompt.digest, names,
            msgspec.msgpack.encode(to_transfer_params(told)), 0, step_tokens, streams=True,
        )  # fmt: skip
        self._post(StepPlan(prefills=(prefill,)))
        self._later(lambda: self._begin(0, restarts=False))

    def _post(self, plan: StepPlan) -> None:
        for node in self.engine.nodes:
            node.post(plan)

    def _later(self, act: Callable[[], None], about: float = 2 * STEP_SECONDS) -> None:
        """After some time, ``about`` seconds at most, if the engine still lives."""
        seconds = about * self._timeline.rng.random()
        self._timeline.after(seconds, lambda: act() if self.engine.alive else None)

    def _begin(self, start: int, *, restarts: bool) -> None:
        """A step begins."""
        prompt = self.prompt
        stop = min(start + self.step_tokens, prompt.num_tokens)
        self._told = 0 if restarts else self._told
        new = prompt.blocks[self._told : -(-stop // BLOCK_TOKENS)]
        self._told += len(new)
        chunk = PrefillChunk(prompt.token, start, stop, (pack_ids(new),), restarts, start)
        self._post(StepPlan(chunks=(chunk,)))
        self._later(lambda: self._end(start, stop))

    def _end(self, start: int, stop: int) -> None:
        """The device has ended the step, unless the engine takes the blocks back before."""
        rng, prompt = self._timeline.rng, self.prompt
        dice, late = rng.random(), rng.random() < 0.5
        lost, ended = dice < PREEMPTED + GIVEN_UP, dice < GIVEN_UP
        if lost and not late:
            self._take_back(ended=ended)
            return
        for node in self.engine.nodes:
            if node.alive:
                node.pages.compute(prompt.blocks, prompt.number, start, stop)
                node.prefills.end_step()
        if lost:  # while copies read what has just been computed
            self._later(lambda: self._take_back(ended=ended), SOON_SECONDS)
            return
        if stop < prompt.num_tokens:
            self._later(lambda: self._begin(stop, restarts=False))
            return
        lease = LeaseGrant(prompt.name, prompt.token, prompt.num_tokens, (pack_ids(prompt.blocks),), prompt.digest)
        prompt.waiting = {node.tp_rank for node in self.engine.nodes}
        self.engine.prompts[prompt.name] = prompt
        self.engine.prefilling = None
        self._post(StepPlan(leases=(lease,)))

    def _take_back(self, *, ended: bool) -> None:
        self.engine.network.counts["prompts given up" if ended else "prompts preempted"] += 1
        self._post(StepPlan(stops=(PrefillStop(self.prompt.token, ended),)))
        for node in self.engine.nodes:
            node.prefills.end_step()
        self._give_back(self.prompt.blocks)
        if ended:
            self.engine.prefilling = None
        else:
            self._later(self._resume)

    def _give_back(self, blocks: Iterable[int]) -> None:
        ids = list(blocks)
        for node in self.engine.nodes:
            node.pages.take_back(ids)
        self.engine.free += ids

    def _resume(self) -> None:
        """The engine computes the prompt anew, in other blocks."""
        engine, count = self.engine, len(self.prompt.blocks)
        if len(engine.free) < count:
            self._later(self._resume)
            return
        self.prompt.blocks, engine.free = engine.free[:count], engine.free[count:]
        self._begin(0, restarts=True)
