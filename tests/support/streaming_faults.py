"""Faults to plant into prompts that leave while P computes them: D computes with wrong KV, which a test must see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.prefill_side import stream
from kvferry.connector.prefill_side.prompts import PREEMPTED_SECONDS, Prompt
from kvferry.connector.prefill_side.send import PackedChunk
from kvferry.connector.wire import params
from kvferry.connector.worker.prefill_events import PrefillEvents

LATE_SECONDS = 2e-3
"""For which the engine's thread lets the transfer thread send what it should not."""


def no_fence() -> AbstractContextManager[Any]:
    """P sends all tokens whose blocks are allocated, computed or not."""

    def holds(prompt: Prompt, *_: int) -> bool:
        return not prompt.preempted

    return mock.patch.object(stream, "holds", holds)


def blocks_taken_back() -> AbstractContextManager[Any]:
    """P sends chunks whose blocks the engine has taken back while they were copied."""
    return mock.patch.object(PackedChunk, "lost", property(lambda packed: False))


@contextmanager
def before_its_event() -> Iterator[None]:
    """P counts the tokens of a step when it begins, and computes its first layer late."""
    begin_step, layer_begins = PrefillEvents.begin_step, PrefillEvents.layer_begins

    def begin(events: PrefillEvents, plan: Any) -> Any:
        step = begin_step(events, plan)
        if step is not None:
            step.has_ended()
        return step

    def late(events: PrefillEvents) -> None:
        time.sleep(LATE_SECONDS)
        layer_begins(events)

    with mock.patch.object(PrefillEvents, "begin_step", begin), mock.patch.object(PrefillEvents, "layer_begins", late):
        yield


@contextmanager
def not_said() -> Iterator[None]:
    """P's engine does not say that it takes blocks back before others write into them: that it preempts the prompt is
    heard too late."""

    def preempt(prompt: Prompt, now: float) -> None:
        prompt.parts, prompt.computed, prompt.deadline = [], 0, now + PREEMPTED_SECONDS

    take_back = mock.patch.object(PrefillEvents, "take_back", lambda events, plan: None)
    with take_back, mock.patch.object(Prompt, "preempt", preempt):
        yield


def grant_stays() -> AbstractContextManager[Any]:
    """A grant that P has posted before the lease stands on when P's engine takes the blocks back."""

    def lose(blocks: PromptBlocks) -> None:
        blocks.lost = True

    return mock.patch.object(PromptBlocks, "lose", lose)


def any_prompt() -> AbstractContextManager[Any]:
    """D takes every prompt that P has under a name for its own."""
    return mock.patch.object(params, "check_prompt", lambda request, remote_prompt: None)


FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "no fence": no_fence,
    "blocks taken back": blocks_taken_back,
    "before its event": before_its_event,
    "not said": not_said,
    "grant stays": grant_stays,
    "any prompt": any_prompt,
}
