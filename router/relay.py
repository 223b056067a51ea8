"""Answers that begin with P's token, as streams of chunks; None is ``[DONE]``. ``first_token.py`` says why and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from kvferry.router.engines import Engine
from kvferry.router.first_token import FirstToken, SeamError, events, first_token, unmarked
from kvferry.router.http_client import HttpError, RequestProgress
from kvferry.router.legs import ClientRequest, Decoded, Legs, Prefilled, ended, log, settled
from kvferry.router.request_bodies import error_of

COMPLETIONS = "/v1/completions"
Chunks = AsyncGenerator[dict[str, Any] | None, None]


def first_of(asked: ClientRequest, prefilled: Prefilled) -> FirstToken | None:
    """The token of P's answer, if it may go to the client."""
    return first_token(prefilled.answer, prefilled.params, asked.body, asked.chat)


def streams(decoded: Decoded) -> bool:
    return decoded.pieces is not None and decoded.status == 200


async def rest_of_answer(legs: Legs, asked: ClientRequest, first: FirstToken, params: dict[str, Any] | None) -> Chunks:
    """P's token, and what D says after prompt plus token. ``params``: what P handed over; None: nothing."""
    rest = Rest(legs, asked, first, params) if first.finish is None else None  # D is asked before the client reads
    try:
        for chunk in first.opening():
            yield chunk
        if rest is None:
            for last in first.closing():
                yield last
            return
        async for following in rest.events():
            yield following
    finally:
        if rest is not None:
            rest.end()
        elif params is not None:
            legs.start(legs.let_go(asked, params), asked)


async def whole_answer(
    legs: Legs, asked: ClientRequest, first: FirstToken | None, p: asyncio.Task[Prefilled], d: asyncio.Task[Decoded]
) -> Chunks:
    """P's token, and D's answer to the prompt, asked for at once, without its first token. Without ``first``: all of
    D's answer, which came before P's, or P's is not to be relayed."""
    sought = first
    end = ended if first is None or first.finish is None else settled
    try:
        if first is not None:
            for chunk in first.opening():
                yield chunk
            if first.finish is not None:
                for last in first.closing():
                    yield last
                return
            await asyncio.wait({d})
            if d.exception() is not None and legs.another_decode(()):
                raise SeamError
        async for event in _answer(legs, asked, d):
            if event is None or first is None or "choices" not in event:
                yield event and unmarked(event)
            elif sought is None:
                yield first.of_whole(event)
            elif event["choices"] and event["choices"][0].get("token_ids"):
                left, sought = first.without(event), None
                if left is not None:
                    yield left
        return
    except SeamError:
        pass
    finally:
        legs.start(end(d), asked)
    assert first is not None
    if d.exception() is None:
        log.info("%s: D's first token is not P's, D is asked for the rest", asked.id)
        rest = Rest(legs, asked, first, None, d.result().engine)  # it has the KV of the prompt in its prefix cache
    else:
        log.info("%s: D has failed, another one is asked for the rest", asked.id)
        rest = Rest(legs, asked, first, p.result().params)
    try:
        async for following in rest.events():
            yield following
    finally:
        rest.end()


class Rest:
    """D is asked for what follows P's token. ``params``: what P handed over, for a D that has not loaded it.
    ``engine``: the D to ask."""

    def __init__(
        self,
        legs: Legs,
        asked: ClientRequest,
        first: FirstToken,
        params: dict[str, Any] | None,
        engine: Engine | None = None,
    ) -> None:
        self._legs, self._asked, self._first, self._params = legs, asked, first, params
        self._progress = RequestProgress()
        body = first.rest_body(asked.body) | ({} if params is None else {"kv_transfer_params": params})
        self._leg = legs.start(legs.ask_decode(asked, body, self._progress, path=COMPLETIONS, engine=engine), asked)

    async def events(self) -> Chunks:
        async for event in _answer(self._legs, self._asked, self._leg):
            yield event and self._first.of_rest(event)

    def end(self) -> None:
        self._legs.start(ended(self._leg), self._asked)
        if self._params is not None and not self._progress.asked:
            self._legs.start(self._legs.let_go(self._asked, self._params), self._asked)


async def _answer(legs: Legs, asked: ClientRequest, d: asyncio.Task[Decoded]) -> Chunks:
    """The events of D's answer. It is too late for a status: an error is the last event, without ``[DONE]``."""
    engine = None
    try:
        decoded = await d
        engine = decoded.engine
        if decoded.pieces is None:
            log.error("%s: decode at %s answered %d", asked.id, engine.url, decoded.status)
            asked.broken = f"decode engine {engine.url} answered {decoded.status}"
            yield error_of(502, f"{asked.broken}: {decoded.body.decode(errors='replace')}")
            return
        async for event in events(decoded.pieces):
            yield event
    except (HttpError, ValueError) as error:
        yield legs.broke_off(asked, engine, error)
