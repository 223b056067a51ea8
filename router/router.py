"""What a router does with one request: which engines it asks, when, and what it does where one of them fails.

The prefill leg is the client's request cut down to one token and marked with the six keys of ``kv_transfer_params``
that vLLM's connectors know. D's answer is streamed to the client. Both legs carry the client's headers, among them its
``X-Request-Id``, or one that the router makes, and its trace context (``traceparent``, ``tracestate``), or that of the
leg's own span (``spans.py``).

When D is asked:

- At first, and with ``serial`` always, after P, with the ``kv_transfer_params`` of P's answer verbatim.
- Where P's last answer said ``"transfer_mode": "push"`` and where P is, both are asked at once: D gets P's place, and
  both get one ``transfer_id``, by which D asks P for the prompt while P still computes it.
- Unless ``relay`` is off, P's token goes to the client when P has it, and D's answer follows. ``first_token.py`` says
  how, and for which requests. A relayed request for one token is P's alone.

What goes wrong:

- P fails (no connection, an error): another P is asked, once. After that, and where P is too late or hands nothing
  over, D gets the request alone and prefills by itself. If D was asked at once it waits for a prompt that does not
  come: its leg is cancelled and sent anew, unless it answers already.
- Another P answers than the one that D was told of: D's leg is cancelled and sent anew, with this P's parameters.
- D fails before a byte of its answer: another D is asked, once (``Legs.ask_decode``).
- The client goes away: D's leg is cancelled. Where D was asked at once, P's leg is cancelled too: D tells P that it
  does not want the prompt. Where D was not asked, P's leg may end, within ``LegTimeouts.abandoned_prefill``; its
  parameters go to D for one token: else P would hold the prompt's blocks until its lease ends.
- A connection breaks before a byte of the answer: no leg is sent twice to one engine, which may be computing it.
- ``kv_transfer_params`` of clients are dropped: they name hosts that D would connect to.

It keeps no state of requests: run as many routers as you like.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response

from kvferry.router.engines import Engine, EnginePool, Seat
from kvferry.router.first_token import relayed, sse, token_limit
from kvferry.router.http_client import HttpError, RequestProgress, SilenceError
from kvferry.router.identities import identity_of
from kvferry.router.legs import (
    ClientGoneError,
    ClientRequest,
    Decoded,
    Legs,
    LegTimeouts,
    NoEngineError,
    Prefilled,
    ended,
    log,
    unless_gone,
)
from kvferry.router.relay import Chunks, first_of, rest_of_answer, streams, whole_answer
from kvferry.router.request_bodies import PREFILL_TAG, can_hand_over, error_of, prefill_body
from kvferry.transport.tracing import Tracer

OWN_HEADERS = {
    "connection", "content-length", "date", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
    "server", "te", "trailer", "transfer-encoding", "upgrade", "x-request-id", "accept-encoding", "content-encoding",
}  # fmt: skip
"""Headers that belong to one connection, and those that the router or its server sets anew."""
PREFILL_TRIES = 2


class Streamed(Response):
    """An answer whose pieces go to the client as they come."""

    def __init__(self, asked: ClientRequest, pieces: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(headers)
        self._asked, self._pieces = asked, pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Raises ClientGoneError."""
        await unless_gone(self._asked, self._send_all(send))

    async def _send_all(self, send: Any) -> None:
        try:
            piece = await anext(self._pieces, b"")  # before anything that may wait: what has begun is also ended
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await anext(self._pieces, b"")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._pieces.aclose()


class Router(Legs):
    """``serial``: D is asked after P. ``relay``: P's token goes to the client where that cannot show."""

    def __init__(
        self, engines: EnginePool, timeouts: LegTimeouts | None = None, *, serial: bool = False, relay: bool = True,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        super().__init__(engines, timeouts, tracer=tracer)
        self._serial, self._relay = serial, relay

    async def answer(self, asked: ClientRequest) -> Response:
        """The answer to one completion or chat completion. Raises ClientGoneError."""
        try:
            if not can_hand_over(asked.body):
                return await self._decode(asked, None)
            tried: list[Engine] = []
            while len(tried) < PREFILL_TRIES:
                seat = self.take_prefill(asked, tried)
                if seat is None:
                    break
                tried.append(seat.engine)
                response = await self._answer_by(asked, seat)
                if response is not None:
                    return response
            log.warning("%s: no prefill engine answers, decode only", asked.id)
            return await self._decode(asked, None)
        except NoEngineError as error:
            return error_response(503, str(error))
        except HttpError as error:
            return error_response(502, str(error))

    async def _answer_by(self, asked: ClientRequest, seat: Seat) -> Response | None:
        """The answer where this P computes the prompt; None where it fails and another P may not."""
        relay = self._relay and relayed(asked.body, asked.chat)
        only_p = relay and token_limit(asked.body, asked.chat) == 1
        identity = None if self._serial or only_p else self.identities.get(seat.engine.url)
        if identity is not None:
            return await self._at_once(asked, seat, identity, relay)
        leg = self.start_prefill(asked, seat, self._leg(asked, relay, None if only_p else PREFILL_TAG))
        try:
            prefilled = await unless_gone(asked, asyncio.shield(leg))
        except ClientGoneError:
            self.start(self.abandon(asked, leg), asked)
            raise
        if prefilled.failed:
            return None
        first = first_of(asked, prefilled) if relay else None
        if first is not None:
            self.metrics.handed_over("prefill_only" if only_p else "serial")
            return _stream(asked, rest_of_answer(self, asked, first, prefilled.params))
        return await self._decode(asked, prefilled.params)

    @staticmethod
    def _leg(asked: ClientRequest, relay: bool, params: dict[str, Any] | None) -> dict[str, Any]:
        leg = prefill_body(asked.body, params)
        return leg | {"return_token_ids": True} if relay else leg

    async def _decode(
        self, asked: ClientRequest, params: dict[str, Any] | None, tried: list[Engine] | None = None
    ) -> Response:
        """D's answer, where D is asked after P. Raises ClientGoneError, HttpError."""
        self.metrics.handed_over("decode_only" if params is None else "serial")
        body = asked.body if params is None else asked.body | {"kv_transfer_params": params}
        progress = RequestProgress()
        try:
            return self._answer_of(asked, await unless_gone(asked, self.ask_decode(asked, body, progress, tried=tried)))
        except ClientGoneError:
            if not progress.asked and params is not None:
                self.start(self.let_go(asked, params), asked)
            raise

    async def _at_once(
        self, asked: ClientRequest, seat: Seat, identity: dict[str, Any], relay: bool
    ) -> Response | None:
        """D's answer, where D is asked while P computes. Raises ClientGoneError, HttpError."""
        name = {"transfer_id": uuid.uuid4().hex}
        place = {"do_remote_prefill": True, "do_remote_decode": False, **identity, "remote_request_id": asked.id}
        body = asked.body | {"kv_transfer_params": place | name}
        p = self.start_prefill(asked, seat, self._leg(asked, relay, PREFILL_TAG | name))
        progress = RequestProgress()
        tried: list[Engine] = []
        over = False  # D is asked anew, with a leg of its own
        d = self.start(
            self.ask_decode(asked, body | {"return_token_ids": True} if relay else body, progress, tried=tried), asked
        )
        try:
            await unless_gone(asked, asyncio.wait({p, d}, return_when=asyncio.FIRST_COMPLETED))
            first = None
            if not d.done():  # P has answered
                prefilled = p.result()
                if identity_of(prefilled.params) != identity:
                    over = True
                    return await self._instead(asked, prefilled, d)
                first = first_of(asked, prefilled) if relay else None
                if first is None:
                    await unless_gone(asked, asyncio.wait({d}))
            if first is None and d.exception() is not None:
                over = True
                if progress.answered or isinstance(d.exception(), SilenceError):
                    p.cancel()
                    d.result()
                return await self._by_another(asked, p, d, tried)
            if first is None and d.result().status != 200:
                p.cancel()
            self.metrics.handed_over("at_once")
            if relay and (first is not None or streams(d.result())):
                return _stream(asked, whole_answer(self, asked, first, p, d))
            return self._answer_of(asked, d.result())
        except BaseException as error:  # also one that nobody expects: a leg without an end holds its seat for good
            if not over:
                self.start(ended(d), asked)
                if isinstance(error, ClientGoneError) and not progress.asked:
                    self.start(self.abandon(asked, p), asked)
                else:
                    p.cancel()
            raise

    async def _instead(self, asked: ClientRequest, prefilled: Prefilled, d: asyncio.Task[Decoded]) -> Response | None:
        """P failed, or is another one than D was told of: D is asked anew; None where another P is to be asked."""
        log.info("%s: D is asked again: the P that it was told of does not hand over", asked.id)
        await ended(d)
        return None if prefilled.failed else await self._decode(asked, prefilled.params)

    async def _by_another(
        self, asked: ClientRequest, p: asyncio.Task[Prefilled], d: asyncio.Task[Decoded], tried: list[Engine]
    ) -> Response:
        """D failed: another D is asked when P has answered, with the lease of P's answer. Raises ClientGoneError,
        HttpError."""
        if len(tried) != 1 or not self.another_decode(tried):
            p.cancel()
            d.result()
        try:
            prefilled = await unless_gone(asked, asyncio.shield(p))
        except ClientGoneError:
            self.start(self.abandon(asked, p), asked)
            raise
        return await self._decode(asked, prefilled.params, tried)

    def _answer_of(self, asked: ClientRequest, decoded: Decoded) -> Response:
        """D's answer as it is."""
        kept = {name: value for name, value in decoded.answer.headers.items() if name not in OWN_HEADERS}
        kept["x-request-id"] = asked.id
        if decoded.pieces is None:
            return Response(decoded.body, decoded.status, kept)
        response = Streamed(asked, self._pass_on(asked, decoded), kept)
        response.status_code = decoded.status
        return response

    async def _pass_on(self, asked: ClientRequest, decoded: Decoded) -> AsyncGenerator[bytes, None]:
        assert decoded.pieces is not None
        try:
            async for piece in decoded.pieces:
                yield piece
        except HttpError as error:  # too late for a status: say it in the stream, and end it without [DONE]
            yield sse(self.broke_off(asked, decoded.engine, error))
        finally:
            decoded.close()  # closes the connection where D has not finished: D aborts the request


def _stream(asked: ClientRequest, chunks: Chunks) -> Response:
    async def written() -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in chunks:
                yield sse(chunk)
        finally:
            await chunks.aclose()

    return Streamed(asked, written(), {"x-request-id": asked.id, "content-type": "text/event-stream; charset=utf-8"})


def error_response(status: int, message: str, **headers: str) -> JSONResponse:
    """In OpenAI's form."""
    return JSONResponse(error_of(status, message), status, {name.replace("_", "-"): v for name, v in headers.items()})
