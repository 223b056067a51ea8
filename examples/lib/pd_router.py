"""A small router for disaggregated prefill and decode: each request to a prefill engine and to a decode engine.

    python examples/lib/pd_router.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000

The prefill leg is the client's request cut down to one token and marked with the six keys of ``kv_transfer_params``
that vLLM's connectors know. D's answer is streamed to the client. Both legs carry one ``X-Request-Id``.

When D is asked:

- At first, and with ``--serial`` always, after P, with the ``kv_transfer_params`` of P's answer verbatim.
- Where P's last answer said ``"transfer_mode": "push"`` and where P is, both are asked at once: D gets P's place, and
  both get one ``transfer_id``, by which D asks P for the prompt while P still computes it.
- Unless ``--no-relay``, P's token goes to the client when P has it, and D's answer follows. ``first_token.py`` says
  how, and for which requests. A relayed request for one token is P's alone.

What goes wrong:

- P fails (no connection, an error, too late, no parameters): D gets the request alone and prefills by itself. If D was
  asked at once it waits for a prompt that does not come: its leg is cancelled and sent anew, unless it answers already.
- Another P answers than the one that D was told of: D's leg is cancelled and sent anew, with this P's parameters.
- The client goes away: D's leg is cancelled. P's leg is cancelled too where D was asked at once: D tells P that it does
  not want the prompt. Else it may end, within ``Timeouts.abandoned_prefill``; its parameters go to D all the same, for
  one token: else P would hold the prompt's blocks until its lease ends.
- A kept connection breaks before a byte of the answer: the leg is sent once more, on a connection of its own.
- ``kv_transfer_params`` of clients are dropped: they name hosts that D would connect to.

Several ``--prefill`` and ``--decode`` take turns. It keeps no state of requests: run as many routers as you like.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.lib.first_token import relayed, sse, token_limit
from examples.lib.legs import (
    PREFILL_TAG,
    Asked,
    Attempt,
    ClientGoneError,
    Decoded,
    Legs,
    Timeouts,
    can_hand_over,
    ended,
    error_of,
    identity_of,
    log,
    prefill_body,
    unless_gone,
    why,
)
from examples.lib.relay import first_of, rest_of_answer, streams, whole_answer

# Hop-by-hop headers and those that httpx and uvicorn set anew.
_OWN_HEADERS = {
    "connection", "content-length", "date", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "server",
    "te", "trailer", "transfer-encoding", "upgrade", "x-request-id", "accept-encoding",
}  # fmt: skip


class Router(Legs):
    """``serial``: D is asked after P. ``relay``: P's token goes to the client where that cannot show."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], timeouts: Timeouts | None = None, *,
        serial: bool = False, relay: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(prefill, decode, timeouts)
        self._serial, self._relay = serial, relay

    async def serve(self, request: Request) -> Response:
        """One completion or chat completion."""
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = None
        except ClientDisconnect:
            log.info("the client is gone before its request was read")
            return Response(status_code=499)
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        headers = {k: v for k, v in request.headers.items() if k not in _OWN_HEADERS} | {"x-request-id": request_id}
        body.pop("kv_transfer_params", None)
        asked = Asked(request, body, headers)
        try:
            return await self._answer(asked)
        except ClientGoneError:
            log.info("%s: the client is gone", request_id)
            return Response(status_code=499)

    async def _answer(self, asked: Asked) -> Response:
        """Raises ClientGoneError."""
        if not can_hand_over(asked.body):
            return await self._decode(asked, None)
        url = self.prefill.pick()
        if url is None:
            log.warning("%s: no prefill engine answers, decode only", asked.id)
            return await self._decode(asked, None)
        relay = self._relay and relayed(asked.body, asked.chat)
        only_p = relay and token_limit(asked.body, asked.chat) == 1
        identity = None if self._serial or only_p else self.identities.get(url)
        if identity is not None:
            return await self._at_once(asked, url, identity, relay)
        leg = self.start(self.ask_prefill(asked, url, self._leg(asked, relay, None if only_p else PREFILL_TAG)))
        try:
            prefilled = await unless_gone(asked.request, asyncio.shield(leg))
        except ClientGoneError:
            self.start(self.abandon(asked, leg))
            raise
        first = first_of(asked, prefilled) if relay else None
        if first is not None:
            return self._stream(asked, rest_of_answer(self, asked, first, prefilled.params))
        return await self._decode(asked, prefilled.params)

    def _leg(self, asked: Asked, relay: bool, params: dict[str, Any] | None) -> dict[str, Any]:
        leg = prefill_body(asked.body, params)
        return leg | {"return_token_ids": True} if relay else leg

    async def _decode(self, asked: Asked, params: dict[str, Any] | None) -> Response:
        """D's answer, where D is asked after P. Raises ClientGoneError."""
        body = asked.body if params is None else asked.body | {"kv_transfer_params": params}
        attempt = Attempt()
        try:
            return self._answer_of(asked, await unless_gone(asked.request, self.ask_decode(asked, body, attempt)))
        except ClientGoneError:
            if not attempt.asked and params is not None:
                self.start(self.let_go(asked, params))
            raise
        except httpx.HTTPError as error:
            return _error(502, f"the decode engine failed: {why(error)}")

    async def _at_once(self, asked: Asked, url: str, identity: dict[str, Any], relay: bool) -> Response:
        """D's answer, where D is asked while P computes. Raises ClientGoneError."""
        name = {"transfer_id": uuid.uuid4().hex}
        place = {"do_remote_prefill": True, "do_remote_decode": False, **identity, "remote_request_id": asked.id}
        body = asked.body | {"kv_transfer_params": place | name}
        p = self.start(self.ask_prefill(asked, url, self._leg(asked, relay, PREFILL_TAG | name)))
        attempt = Attempt()
        d = self.start(self.ask_decode(asked, body | {"return_token_ids": True} if relay else body, attempt))
        try:
            await unless_gone(asked.request, asyncio.wait({p, d}, return_when=asyncio.FIRST_COMPLETED))
            first = None
            if not d.done():  # P has answered
                prefilled = p.result()
                if identity_of(prefilled.params) != identity:
                    log.info("%s: D is asked again: the P that it was told of does not hand over", asked.id)
                    await ended(d)
                    return await self._decode(asked, prefilled.params)
                first = first_of(asked, prefilled) if relay else None
                if first is None:
                    await unless_gone(asked.request, asyncio.wait({d}))
            if first is None and d.result().response.status_code != 200:
                p.cancel()
            if relay and (first is not None or streams(d.result())):
                return self._stream(asked, whole_answer(self, asked, first, d))
            return self._answer_of(asked, d.result())
        except ClientGoneError:
            self.start(ended(d))
            if p.done() and not attempt.asked and (params := p.result().params) is not None:
                self.start(self.let_go(asked, params))
            p.cancel()
            raise
        except httpx.HTTPError as error:
            p.cancel()
            return _error(502, f"the decode engine failed: {why(error)}")

    @staticmethod
    def _stream(asked: Asked, chunks: AsyncIterator[dict[str, Any] | None]) -> Response:
        written = (sse(chunk) async for chunk in chunks)
        return StreamingResponse(written, 200, {"x-request-id": asked.id}, "text/event-stream")

    def _answer_of(self, asked: Asked, decoded: Decoded) -> Response:
        """D's answer as it is."""
        response = decoded.response
        kept = {k: v for k, v in response.headers.items() if k not in _OWN_HEADERS and k != "content-encoding"}
        kept["x-request-id"] = asked.id
        if decoded.pieces is None:
            return Response(response.content, response.status_code, kept)
        return StreamingResponse(self._pass_on(asked, decoded), response.status_code, kept)

    async def _pass_on(self, asked: Asked, decoded: Decoded) -> AsyncIterator[bytes]:
        assert decoded.pieces is not None
        try:
            async for piece in decoded.pieces:
                yield piece
        except httpx.HTTPError as error:  # too late for a status: say it in the stream, and end it without [DONE]
            yield sse(self.broke_off(asked, decoded.url, error))
        finally:
            await decoded.response.aclose()  # closes the connection where D has not finished: D aborts the request

    async def health(self, request: Request) -> Response:
        """200 while a decode engine answers; ``degraded`` where no prefill engine does."""
        prefill, decode = [await self._alive(pool.urls) for pool in (self.prefill, self.decode)]
        ok = any(decode.values())
        status = "down" if not ok else "ok" if any(prefill.values()) else "degraded"
        return JSONResponse({"status": status, "prefill": prefill, "decode": decode}, 200 if ok else 503)

    async def _alive(self, urls: Sequence[str]) -> dict[str, bool]:
        async def ask(url: str) -> bool:
            with suppress(httpx.HTTPError):
                return (await self.http_fresh.get(f"{url}/health", timeout=self.timeout(3.0))).status_code == 200
            return False

        return dict(zip(urls, await asyncio.gather(*map(ask, urls)), strict=True))

    async def models(self, request: Request) -> Response:
        """What the decode engine serves."""
        url = self.decode.pick() or self.decode.urls[0]
        try:
            answer = await self.http_fresh.get(f"{url}/v1/models", timeout=self.timeout(10.0))
        except httpx.HTTPError as error:
            return _error(502, f"decode engine {url} failed: {why(error)}")
        return Response(answer.content, answer.status_code, media_type="application/json")

    @staticmethod
    def _client(kept: int) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept)
        return httpx.AsyncClient(limits=limits, trust_env=False)

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self._client(kept=100) as self.http, self._client(kept=0) as self.http_fresh:
                yield

        routes = [
            Route("/v1/completions", self.serve, methods=["POST"]),
            Route("/v1/chat/completions", self.serve, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(error_of(status, message), status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", action="append", required=True, help="URL of a prefill engine; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="URL of a decode engine; may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    for name, text in (
        ("connect", "for a connection to an engine"),
        ("prefill", "for P's answer, then decode only"),
        ("abandoned-prefill", "for P's answer where the client is gone"),
    ):
        default = getattr(Timeouts, name.replace("-", "_"))
        parser.add_argument(f"--{name}-timeout", type=float, default=default, help=f"seconds {text}")
    parser.add_argument("--serial", action="store_true", help="ask D only when P has answered")
    parser.add_argument("--no-relay", action="store_true", help="leave P's token to D")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    timeouts = Timeouts(args.connect_timeout, args.prefill_timeout, args.abandoned_prefill_timeout)
    router = Router(args.prefill, args.decode, timeouts, serial=args.serial, relay=not args.no_relay)
    uvicorn.run(router.app(), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
