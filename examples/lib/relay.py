"""Answers that begin with P's token, as streams of chunks; None is ``[DONE]``. ``first_token.py`` says why and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from examples.lib.first_token import FirstToken, SeamError, events, first_token, unmarked
from examples.lib.legs import Asked, Attempt, Decoded, Legs, Prefilled, ended, error_of, log, settled

COMPLETIONS = "/v1/completions"
Chunks = AsyncIterator[dict[str, Any] | None]


def first_of(asked: Asked, prefilled: Prefilled) -> FirstToken | None:
    """The token of P's answer, if it may go to the client."""
    return first_token(prefilled.answer, prefilled.params, asked.body, asked.chat)


def streams(decoded: Decoded) -> bool:
    return decoded.pieces is not None and decoded.response.status_code == 200


async def rest_of_answer(legs: Legs, asked: Asked, first: FirstToken, params: dict[str, Any] | None) -> Chunks:
    """P's token, and what D says after prompt plus token. ``params``: what P handed over; None: nothing."""
    attempt = Attempt()
    body = first.rest_body(asked.body) | ({} if params is None else {"kv_transfer_params": params})
    d = None
    if first.finish is None:  # before the client reads
        d = legs.start(legs.ask_decode(asked, body, attempt, path=COMPLETIONS))
    try:
        for chunk in first.opening():
            yield chunk
        if d is None:
            for chunk in first.closing():
                yield chunk
            return
        async for event in _answer(legs, asked, d):
            yield event and first.of_rest(event)
    finally:
        if d is not None:
            legs.start(ended(d))
        if params is not None and not attempt.asked:
            legs.start(legs.let_go(asked, params))


async def whole_answer(legs: Legs, asked: Asked, first: FirstToken | None, d: asyncio.Task[Decoded]) -> Chunks:
    """P's token, and D's answer to the prompt, asked for at once, without its first token. Without ``first``: all of
    D's answer, which came before P's, or P's is not to be relayed."""
    sought = first
    end = ended if first is None or first.finish is None else settled
    try:
        if first is not None:
            for chunk in first.opening():
                yield chunk
            if first.finish is not None:
                for chunk in first.closing():
                    yield chunk
                return
        async for event in _answer(legs, asked, d):
            if event is None or first is None or "choices" not in event:
                yield event and unmarked(event)
            elif sought is None:
                yield first.of_whole(event)
            elif event["choices"] and event["choices"][0].get("token_ids"):
                chunk, sought = first.without(event), None
                if chunk is not None:
                    yield chunk
        return
    except SeamError:
        log.info("%s: D's first token is not P's, D is asked for the rest", asked.id)
    finally:
        legs.start(end(d))
    assert first is not None
    url, body = d.result().url, first.rest_body(asked.body)  # this D has the KV of the prompt in its prefix cache
    d = legs.start(legs.ask_decode(asked, body, Attempt(), path=COMPLETIONS, url=url))
    try:
        async for event in _answer(legs, asked, d):
            yield event and first.of_rest(event)
    finally:
        legs.start(ended(d))


async def _answer(legs: Legs, asked: Asked, d: asyncio.Task[Decoded]) -> Chunks:
    """The events of D's answer. It is too late for a status: an error is the last event, without ``[DONE]``."""
    url = "that was asked"
    try:
        decoded = await d
        url = decoded.url
        if decoded.pieces is None:
            log.error("%s: decode at %s answered %d", asked.id, url, decoded.response.status_code)
            yield error_of(502, f"decode engine {url} answered {decoded.response.status_code}: {decoded.response.text}")
            return
        async for event in events(decoded.pieces):
            yield event
    except (httpx.HTTPError, ValueError) as error:
        yield legs.broke_off(asked, url, error)
