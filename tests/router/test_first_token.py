"""Which requests are relayed, and how P's answer and D's events are read. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.router.first_token import RELAYED, events, relayed
from tests.support.relay_kinds import CHAT, COMPLETIONS, NOT_RELAYED

ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "x", "stream": True, "temperature": 0.7, "max_tokens": 9, "ignore_eos": True},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "extra",
    [{}, {"n": 1, "presence_penalty": 0.0, "stop": None, "logprobs": None, "seed": None}, {"tools": None, "stop": []}],
)
def test_what_is_relayed(path: str, extra: dict[str, Any]) -> None:
    assert relayed(ASKED[path] | extra, path == CHAT)


LEFT: list[tuple[str, dict[str, Any]]] = [
    *NOT_RELAYED,
    (COMPLETIONS, {"stream": False}),
    (COMPLETIONS, {"max_tokens": 0}),
    (COMPLETIONS, {"max_tokens": "9"}),
    (COMPLETIONS, {"return_token_ids": True}),
    (COMPLETIONS, {"best_of": 2}),
    (COMPLETIONS, {"use_beam_search": True}),
    (COMPLETIONS, {"prompt_logprobs": 0}),
    (COMPLETIONS, {"suffix": "y"}),
    (COMPLETIONS, {"thinking_token_budget": 5}),
    (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 2}}),
    (COMPLETIONS, {"n": True}),
    (COMPLETIONS, {"presence_penalty": False}),
    (CHAT, {"max_completion_tokens": 0}),
    (CHAT, {"tool_choice": "auto"}),
    (CHAT, {"messages": "x"}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
]


@pytest.mark.parametrize(("path", "extra"), LEFT)
def test_what_is_left_to_d(path: str, extra: dict[str, Any]) -> None:
    assert not relayed(ASKED[path] | extra, path == CHAT)


def test_every_parameter_that_not_all_values_are_relayed_of_is_tried() -> None:
    """Each name of the table with values has a request above that is left to D for it."""
    tried = {name for _, extra in LEFT for name in extra}
    assert {name for name, values in RELAYED.items() if values is not None} <= tried


def read(*pieces: bytes) -> list[Any]:
    async def all_events() -> list[Any]:
        async def given() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return [event async for event in events(given())]

    return asyncio.run(all_events())


def test_events_are_read_however_they_are_cut() -> None:
    whole = 'data: {"a": "é"}\n\ndata: {"b": 1}\n\ndata: [DONE]\n\n'.encode()
    for cut in range(len(whole)):
        assert read(whole[:cut], whole[cut:]) == [{"a": "é"}, {"b": 1}, None]


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: 3\n\n", b"x" * 200])
def test_what_is_no_event_is_an_error(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.first_token.MAX_EVENT_BYTES", 100)
    with pytest.raises(ValueError):
        read(data)
