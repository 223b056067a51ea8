"""What a router does with one request: which engines it asks, when, and what it does where one of them fails.

The prefill leg is the client's request cut down to one token and marked with the six keys of ``kv_transfer_params``
that vLLM's connectors know. At first, and with ``serial`` always, D is asked after P, with the ``kv_transfer_params``
of P's answer verbatim. Where P's last answer said ``"transfer_mode": "push"`` and where P is, both are asked at once: D
gets P's place, and both get one ``transfer_id``, by which D asks P for the prompt while P still computes it. What
follows a failure is a table of docs/routers.md. No state is kept of requests: run as many routers as you like.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvferry.router.engines import Engine, Seat, identity_of
from kvferry.router.http_client import Answer, HttpError, OwnFaultError, RequestProgress
from kvferry.router.legs import (
    ClientRequest,
    Decoded,
    Legs,
    NoEngineError,
    Prefilled,
    ended,
    log,
    why,
)
from kvferry.router.prefix_affinity import BYTES_PER_TOKEN
from kvferry.router.request_bodies import PREFILL_TAG, can_hand_over, error_of, prefill_body

OF_A_CONNECTION = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
}  # fmt: skip
"""Headers that belong to one connection."""
PREFILL_TRIES = 2
LATE_SECONDS = 1.0  # P's leg may take so much longer than D's


class Reply:
    """The answer to one client. ``first``: seconds on the router's clock when its first byte was sent."""

    def __init__(self, router: Router, asked: ClientRequest, http: web.BaseRequest) -> None:
        self.first: float | None = None
        self._router, self._asked, self._http = router, asked, http
        self._begun: web.StreamResponse | None = None
        self._own = {"x-request-id": asked.id, "server": "kvferry"}
        asked.comment = self.comment

    async def comment(self, answer: Answer, piece: bytes) -> None:
        """A piece of D's stream that is no part of its answer: the client sees that its request is alive. Raises
        ConnectionError."""
        await (await self._begin(answer)).write(piece)

    async def _begin(self, answer: Answer) -> web.StreamResponse:
        if self._begun is None:
            headers = kept_headers(answer, **self._own)
            if answer.streamed:  # it may end with an error
                headers.popall("content-length", None)
            self._begun = web.StreamResponse(status=answer.status, headers=headers)
            await self._begun.prepare(self._http)
        return self._begun

    async def give(self, decoded: Decoded) -> web.StreamResponse:
        """D's answer as it is. Raises ConnectionError."""
        last, asked = b"\n\n", self._asked
        prefill = asked.seats[-1].engine.url if asked.seats else ""
        by = {"decode": decoded.engine.url, "prefill": prefill, "alone": asked.alone}
        asked.by = {name: text for name, text in by.items() if text}
        if asked.checks:
            self._own |= {f"x-kvferry-{name}": text for name, text in asked.by.items()}
        try:
            if self._begun is not None and not decoded.answer.streamed:
                return await self.fail(decoded.answer.status, decoded.first.decode(errors="replace"))
            piece, self.first, events = decoded.first, self._router.clock(), 0
            while not decoded.answer.whole:
                events += piece.count(b"data: ")
                await self.comment(decoded.answer, piece)
                last = piece[-2:] or last
                piece = await anext(decoded.pieces, b"")
            begun = await self._begin(decoded.answer)
            await begun.write_eof(piece)
            events += piece.count(b"data: ")
            self._router.gave(asked, decoded, events or len(piece) / BYTES_PER_TOKEN)
            return begun
        except HttpError as error:  # too late for a status: say it in the stream, and end it without [DONE]
            self._router.failed(decoded.engine, error)
            said = f"decode engine {decoded.engine.url} broke off: {why(error)}"
            log.error("%s: %s", asked.name, said)
            if not decoded.answer.streamed and self._http.transport is not None:
                self._http.transport.abort()
            return await self.fail(502, said, b"" if last == b"\n\n" else b"\n\n")
        finally:
            decoded.close()  # closes the connection where D has not finished: D aborts the request

    async def fail(self, status: int, message: str, before: bytes = b"") -> web.StreamResponse:
        """An error, in the stream where that has begun."""
        self._asked.broken = self._asked.broken or message
        if self._begun is None:
            return error_response(status, message, self._asked.path)
        error = error_of(status, message, self._asked.path)
        before += b"event: error\n" if "type" in error else b""
        await self._begun.write(before + b"data: " + msgspec.json.encode(error) + b"\n\n")
        await self._begun.write_eof()
        return self._begun


def kept_headers(answer: Answer, **own: str) -> CIMultiDict[str]:
    """Those of an engine's answer that its client gets, and the router's ``own``."""
    kept = CIMultiDict((name, value) for name, value in answer.headers.items() if name.lower() not in OF_A_CONNECTION)
    kept.update(own)
    return kept


class Router(Legs):
    """Decides which leg is sent when."""

    async def answer(self, asked: ClientRequest, reply: Reply) -> web.StreamResponse:
        """The answer to a request that P may have a part in. It is cancelled when the client goes away."""
        try:
            tried: list[Engine] = []
            if can_hand_over(asked.body, asked.path) and self.choose(asked):
                return await self._decode(asked, reply, None)
            while len(tried) < PREFILL_TRIES and can_hand_over(asked.body, asked.path):
                seat = self.take_prefill(asked, tried)
                if seat is None:
                    asked.alone = asked.alone or "no prefill engine takes requests"
                    break
                tried.append(seat.engine)
                response = await self._answer_by(asked, reply, seat)
                if response is not None:
                    return response
            if tried:
                log.warning("%s: no prefill engine answers, decode only", asked.name)
            return await self._decode(asked, reply, None)
        except HttpError as error:
            return await reply.fail(503 if isinstance(error, NoEngineError | OwnFaultError) else 502, str(error))

    async def _answer_by(self, asked: ClientRequest, reply: Reply, seat: Seat) -> web.StreamResponse | None:
        """The answer where this P computes the prompt; None where it fails and another P may not."""
        identity = None if self.serial else seat.engine.identity
        if identity is not None:
            return await self._at_once(asked, reply, seat, identity)
        leg = self.start_prefill(asked, seat, prefill_body(asked.body, asked.path, PREFILL_TAG | asked.sources))
        prefilled = await self._until(asked, leg)
        return None if prefilled.failed else await self._decode(asked, reply, prefilled.params)

    async def _until(self, asked: ClientRequest, leg: asyncio.Task[Prefilled]) -> Prefilled:
        """P's answer. Where the client goes away before, the leg may end, so that P's lease does."""
        try:
            return await asyncio.shield(leg)
        except asyncio.CancelledError:
            self.start(self.abandon(asked, leg), asked)
            raise

    async def _decode(
        self, asked: ClientRequest, reply: Reply, params: dict[str, Any] | None, tried: list[Engine] | None = None
    ) -> web.StreamResponse:
        """D's answer, where D is asked after P. Raises HttpError."""
        how = "decode_only" if params is None else "serial"
        self.metrics.decode_legs.labels(how if asked.chosen is None else "left_to_d").inc()
        body = asked.body if params is None else asked.decode_body(params)
        progress = RequestProgress()
        try:
            decoded = await self.ask_decode(asked, body, progress, tried=tried)
        except asyncio.CancelledError:  # D may never read what it was sent: a lease that ends twice does no harm
            self._release(asked, params)
            raise
        if decoded.refused:
            self._release(asked, params)
        return await reply.give(decoded)

    def _release(self, asked: ClientRequest, params: dict[str, Any] | None) -> None:
        if params is not None:
            self.start(self.let_go(asked, params), asked)

    async def _at_once(
        self, asked: ClientRequest, reply: Reply, seat: Seat, identity: dict[str, Any]
    ) -> web.StreamResponse | None:
        """D's answer, where D is asked while P computes. Raises HttpError."""
        name = {"transfer_id": uuid.uuid4().hex}
        place = {"do_remote_prefill": True, "do_remote_decode": False, **identity, "remote_request_id": asked.id}
        p = self.start_prefill(asked, seat, prefill_body(asked.body, asked.path, PREFILL_TAG | asked.sources | name))
        progress = RequestProgress(held=True)
        tried: list[Engine] = []
        body = asked.decode_body(place | name)
        d = self.start(self.ask_decode(asked, body, progress, tried=tried), asked)
        to_its_end = False  # P's leg
        try:
            await asyncio.wait({p, d}, return_when=asyncio.FIRST_COMPLETED)
            if not d.done():  # P has answered
                prefilled = p.result()
                if identity_of(prefilled.params) != identity:
                    log.info("%s: D is asked again: the P that it was told of does not hand over", asked.name)
                    await ended(d)
                    to_its_end = True
                    return None if prefilled.failed else await self._decode(asked, reply, prefilled.params)
                progress.go_on()
                await asyncio.wait({d})
            if d.exception() is not None:
                if progress.answered or len(tried) != 1 or not self.another_decode(tried):
                    d.result()
                to_its_end = True
                return await self._decode(asked, reply, (await self._until(asked, p)).params, tried)
            self.metrics.decode_legs.labels("at_once").inc()
            decoded = d.result()
            if decoded.refused:  # P may be about to answer
                to_its_end = True
                self.start(self.abandon(asked, p), asked)
            return await reply.give(decoded)
        except asyncio.CancelledError:
            if not to_its_end and not d.done():
                to_its_end = True
                self.start(self.abandon(asked, p, LATE_SECONDS if progress.sent else None), asked)
            raise
        finally:  # also where nobody expects it: a leg without an end holds its seat for good
            self.start(ended(d), asked)
            if not to_its_end and (not p.done() or identity_of(p.result().params) != identity):
                self.start(self.abandon(asked, p, LATE_SECONDS, identity), asked)


def json_response(value: Any, status: int = 200, **headers: str) -> web.Response:
    given = {name.replace("_", "-"): text for name, text in headers.items()} | {"server": "kvferry"}
    return web.Response(body=msgspec.json.encode(value), status=status, headers=given, content_type="application/json")


def error_response(status: int, message: str, path: str = "", **headers: str) -> web.Response:
    """In the form of the API that has this path."""
    return json_response(error_of(status, message, path), status, **headers)
