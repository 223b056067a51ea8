"""The two legs of a request as a router sends them: P's, which makes the KV cache, and D's, which makes the answer.

What to send when is decided in ``pd_router.py``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from starlette.requests import Request

log = logging.getLogger("pd_router")
T = TypeVar("T")

PREFILL_TAG: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
IDENTITY = ("remote_engine_id", "remote_host", "remote_port")
IDENTITY_ALSO = ("remote_key", "tp_size", "pp_size", "dcp_size", "transfer_mode")
"""What D needs to ask P for a prompt that P has not finished, and what goes with it where P's answer has it."""
SETTLE_SECONDS = 120.0
"""How long D may take to load a prompt only so that P's lease ends."""
CHANGES, CHANGES_SECONDS, DISTRUST_SECONDS = 2, 300.0, 600.0
"""So many changes of P's identity in so many seconds (several engines answer at its URL): it is asked serially for the
time of the third."""


class ClientGoneError(Exception):
    """The client closed its connection."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``prefill`` bounds the whole prefill leg, ``abandoned_prefill`` the rest of it where the client is gone.
    D's answer is not bounded, only how long it may be silent."""

    connect: float = 3.0
    prefill: float = 120.0
    abandoned_prefill: float = 10.0
    decode_silence: float = 600.0
    cool_down: float = 5.0


@dataclass
class Attempt:
    """How far the sending of one request has come. ``fresh``: it has made a connection of its own. ``asked``: the
    request is sent. ``answered``: a byte of the answer was received."""

    fresh: bool = False
    asked: bool = False
    answered: bool = False

    async def trace(self, event: str, info: dict[str, Any]) -> None:
        """httpcore's ``trace`` extension."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self.fresh = True
            _note_reads(info["return_value"])
        self.asked = self.asked or event == "http11.send_request_body.complete"


_attempt: ContextVar[Attempt | None] = ContextVar("_attempt", default=None)
"""The attempt whose task is running: httpcore reads a connection in the task of the request."""


def _note_reads(stream: Any) -> None:
    """Have the attempts that read this connection know of the bytes that come. httpcore reports whole heads only."""
    read = stream.read

    async def noted(*args: Any, **kwargs: Any) -> bytes:
        data: bytes = await read(*args, **kwargs)
        attempt = _attempt.get()
        if data and attempt is not None:
            attempt.answered = True
        return data

    stream.read = noted


class Pool:
    """Engines that take turns; one that failed is passed over for a while."""

    def __init__(self, urls: Sequence[str], cool_down: float) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._turn = itertools.cycle(self.urls)
        self._until: dict[str, float] = {}
        self._cool_down = cool_down

    def pick(self) -> str | None:
        """The next one that did not fail just now; None where all did."""
        now = time.monotonic()
        for _ in self.urls:
            url = next(self._turn)
            if self._until.get(url, 0) <= now:
                return url
        return None

    def failed(self, url: str) -> None:
        self._until[url] = time.monotonic() + self._cool_down


class Identities:
    """By P's URL, the engine that last answered there, if D may be asked before P has answered."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}
        self._changed: dict[str, list[float]] = {}
        self._distrusted: dict[str, float] = {}

    def get(self, url: str) -> dict[str, Any] | None:
        return self._known.get(url) if self._distrusted.get(url, 0) <= time.monotonic() else None

    def learn(self, url: str, params: dict[str, Any] | None) -> None:
        """P's answer had these ``kv_transfer_params``."""
        before, now = self._known.pop(url, None), time.monotonic()
        identity = identity_of(params)
        if identity is not None:
            self._known[url] = identity
        if before is None or before == identity:
            return
        changed = [*(at for at in self._changed.get(url, ()) if now - at < CHANGES_SECONDS), now]
        self._changed[url] = changed
        if len(changed) >= CHANGES:
            self._distrusted[url] = now + DISTRUST_SECONDS
            self._changed[url] = []
            log.warning("several engines answer at %s: it is asked serially for %g s", url, DISTRUST_SECONDS)

    def forget(self, url: str) -> None:
        """P failed: another engine may answer at its URL next."""
        self._known.pop(url, None)


def identity_of(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """What D needs to ask this P at once; None where P does not offer it."""
    if params is None or params.get("transfer_mode") != "push":
        return None
    engine, host, port = (params.get(name) for name in IDENTITY)
    if not (isinstance(engine, str) and engine and isinstance(host, str) and host and isinstance(port, int) and port):
        return None
    return {name: params[name] for name in IDENTITY + IDENTITY_ALSO if params.get(name) is not None}


@dataclass
class Asked:
    """One completion or chat completion of a client, with the headers for both legs."""

    request: Request
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return self.request.url.path

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def id(self) -> str:
        return self.headers["x-request-id"]


@dataclass
class Prefilled:
    """P's answer, empty where P failed, and its parameters for D, if P handed something over."""

    answer: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] | None = None


@dataclass
class Decoded:
    """D's answer: its head, and where it is streamed its ``pieces``, of which the first has been received."""

    url: str
    response: httpx.Response
    pieces: AsyncIterator[bytes] | None = field(default=None)


def prefill_body(body: dict[str, Any], params: dict[str, Any] | None = PREFILL_TAG) -> dict[str, Any]:
    """The prefill leg of a request: one token, one choice, not streamed, with these ``kv_transfer_params``."""
    leg = {k: v for k, v in body.items() if k not in ("stream_options", "min_tokens", "best_of", "use_beam_search")}
    leg |= {"stream": False, "max_tokens": 1, "n": 1}
    if params is not None:
        leg["kv_transfer_params"] = dict(params)
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


def can_hand_over(body: dict[str, Any]) -> bool:
    """Whether the request holds one prompt; one set of parameters cannot name several."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
        return True
    return len(prompt) == 1


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: it did.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for future in (task, watch):
            if not future.done():
                future.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await future


class Legs:
    """Sends the legs. ``http``, which keeps connections, and ``http_fresh``, which does not, are open while the app is
    up."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self.prefill = Pool(prefill, self.timeouts.cool_down)
        self.decode = Pool(decode, self.timeouts.cool_down)
        self.identities = Identities()
        self.http: httpx.AsyncClient
        self.http_fresh: httpx.AsyncClient
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask_prefill(self, asked: Asked, url: str, leg: dict[str, Any]) -> Prefilled:
        """P's answer to this body."""
        send = self._send(url + asked.path, leg, asked.headers, Attempt(), silence=None)
        try:
            response = await asyncio.wait_for(send, self.timeouts.prefill)
        except (httpx.HTTPError, TimeoutError) as error:
            self._prefill_failed(url)
            log.warning("%s: prefill at %s failed, decode only: %s", asked.id, url, why(error))
            return Prefilled()
        if response.status_code != 200:
            # A 4xx is the request's fault, and D says so itself.
            if response.status_code >= 500:
                self._prefill_failed(url)
            log.warning("%s: prefill at %s answered %d, decode only", asked.id, url, response.status_code)
            return Prefilled()
        answer: Any = None
        with suppress(ValueError):
            answer = response.json()
        answer = answer if isinstance(answer, dict) else {}
        params = answer.get("kv_transfer_params")
        params = params if isinstance(params, dict) and params else None
        if "kv_transfer_params" in leg:
            if params is None:
                log.info("%s: prefill at %s handed nothing over, decode only", asked.id, url)
            self.identities.learn(url, params)
        return Prefilled(answer, params)

    def _prefill_failed(self, url: str) -> None:
        self.prefill.failed(url)
        self.identities.forget(url)

    async def abandon(self, asked: Asked, leg: asyncio.Task[Prefilled]) -> None:
        """The client is gone during P's leg: have P's lease released once P has answered. P aborts what takes longer,
        as its connection is closed."""
        with suppress(TimeoutError):
            params = (await asyncio.wait_for(leg, self.timeouts.abandoned_prefill)).params
            if params is not None:
                await self.let_go(asked, params)

    async def let_go(self, asked: Asked, params: dict[str, Any]) -> None:
        """P has finished, and D will not be asked for the answer: D loads the prompt and so releases P's lease."""
        url = self.decode.pick() or self.decode.urls[0]
        try:
            leg = prefill_body(asked.body, params)
            await self._send(url + asked.path, leg, asked.headers, Attempt(), silence=self.timeouts.decode_silence)
        except httpx.HTTPError as error:
            log.warning("%s: P holds its blocks until its lease ends: %s", asked.id, why(error))

    async def ask_decode(
        self, asked: Asked, body: dict[str, Any], attempt: Attempt, *, path: str | None = None, url: str | None = None
    ) -> Decoded:
        """D's answer: all of it, or of a stream the head and the first piece. ``path`` and ``url``: other than that of
        the client's request and that of the next D. Raises httpx.HTTPError, and has then said so."""
        url = url or self.decode.pick() or self.decode.urls[0]
        response = None
        try:
            silence = self.timeouts.decode_silence
            response = await self._send(
                url + (path or asked.path), body, asked.headers, attempt, silence=silence, stream=True
            )
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                await response.aread()
                return Decoded(url, response)
            pieces = response.aiter_bytes()
            first = await anext(pieces, b"")
        except BaseException as error:
            if response is not None:
                self.start(response.aclose())
            if isinstance(error, httpx.HTTPError):
                self.decode.failed(url)
                log.error("%s: decode at %s failed: %s", asked.id, url, why(error))
            raise

        async def all_pieces() -> AsyncIterator[bytes]:
            yield first
            async for piece in pieces:
                yield piece

        return Decoded(url, response, all_pieces())

    async def _send(
        self, url: str, body: dict[str, Any], headers: dict[str, str], attempt: Attempt, *,
        silence: float | None, stream: bool = False,
    ) -> httpx.Response:  # fmt: skip
        """An engine's answer, its body too unless ``stream``; on a fresh connection where a kept one breaks before a
        byte of the answer. Raises httpx.HTTPError."""
        _attempt.set(attempt)
        how: dict[str, Any] = {"timeout": self.timeout(silence), "extensions": {"trace": attempt.trace}}
        message = self.http.build_request("POST", url, json=body, headers=headers, **how)
        try:
            return await self.http.send(message, stream=stream)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            if attempt.fresh or attempt.answered:
                raise
            log.info("%s: a kept connection to %s broke, once more: %s", headers["x-request-id"], url, why(error))
        attempt.asked = False
        return await self.http_fresh.send(message, stream=stream)

    def broke_off(self, asked: Asked, url: str, error: Exception) -> dict[str, Any]:
        """The event with which a stream ends that D did not end."""
        self.decode.failed(url)
        log.error("%s: decode at %s broke off: %s", asked.id, url, why(error))
        return error_of(502, f"decode engine {url} broke off: {why(error)}")

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` so that it may outlive its request."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def timeout(self, read: float | None) -> httpx.Timeout:
        return httpx.Timeout(read, connect=self.timeouts.connect)


async def settled(leg: asyncio.Task[Decoded]) -> None:
    """Let D begin to answer, and so load the prompt and release P's lease; then end its leg."""
    await asyncio.wait({leg}, timeout=SETTLE_SECONDS)
    await ended(leg)


async def ended(leg: asyncio.Task[Decoded]) -> None:
    """Cancel D's leg, or what is left of its answer: D aborts the request."""
    leg.cancel()
    with suppress(asyncio.CancelledError, httpx.HTTPError):
        await (await leg).response.aclose()


def error_of(status: int, message: str) -> dict[str, Any]:
    """An error as vLLM writes it."""
    kind = "BadRequestError" if status < 500 else "BadGatewayError"
    return {"error": {"message": message, "type": kind, "code": status}}


def why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
