"""The two legs of a request as a router sends them: P's, which makes the KV cache, and D's, which makes the answer.

What to send when is decided in ``router.py``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kvferry.router.engines import Engine, EnginePool, Role, Seat
from kvferry.router.http_client import Answer, HttpClient, HttpError, RequestProgress, SilenceError
from kvferry.router.identities import Identities
from kvferry.router.metrics import Metrics
from kvferry.router.prefix_affinity import PrefixAffinity, PromptPrefix, prompt_prefix
from kvferry.router.request_bodies import NOT_JSON, error_of, prefill_body, without_params
from kvferry.router.spans import DECODE, PREFILL, LegSpan, leg_span
from kvferry.transport.tracing import OpenSpan, Tracer

log = logging.getLogger("kvferry.router")
T = TypeVar("T")

SETTLE_SECONDS = 120.0
"""How long D may take to load a prompt only so that P's lease ends."""


class ClientGoneError(Exception):
    """The client closed its connection."""


class NoEngineError(HttpError):
    """There is no engine for a leg."""


@dataclass(frozen=True)
class LegTimeouts:
    """Seconds. ``prefill`` bounds the whole prefill leg, ``abandoned_prefill`` the rest of it where the client is gone.
    D's answer is not bounded, only how long it may be silent."""

    connect: float = 3.0
    prefill: float = 120.0
    abandoned_prefill: float = 10.0
    decode_silence: float = 600.0


@dataclass(eq=False)
class ClientRequest:
    """One completion or chat completion of a client, with the headers for both legs. ``gone`` ends when the client
    does. ``span``: None where nothing is traced. It is over when each of its tasks has ended: ``hold`` and ``drop``;
    then ``over`` is called."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    gone: asyncio.Future[Any]
    span: OpenSpan | None = None
    over: Callable[[], None] = lambda: None
    broken: str = ""
    """Why the answer broke off."""
    prefix: PromptPrefix = field(init=False)
    _seats: list[Seat] = field(default_factory=list)
    _holders: int = 0

    def __post_init__(self) -> None:
        self.prefix = prompt_prefix(self.body)

    @property
    def chat(self) -> bool:
        return self.path.endswith("/chat/completions")

    @property
    def id(self) -> str:
        return self.headers["x-request-id"]

    def prefills_on(self, seat: Seat) -> None:
        self._seats.append(seat)

    def loaded(self) -> None:
        """D has answered: it has loaded what P handed over, or does without."""
        for seat in self._seats:
            seat.handed_over()

    def hold(self) -> None:
        self._holders += 1

    def drop(self) -> None:
        self._holders -= 1
        if not self._holders:
            for seat in self._seats:
                seat.release()
            self.over()


@dataclass
class Prefilled:
    """P's answer, empty where P failed, and its parameters for D, if P handed something over. ``failed``: another P may
    succeed."""

    answer: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] | None = None
    failed: bool = False


@dataclass
class Decoded:
    """D's answer: its head, and its whole ``body``, or where it is streamed its ``pieces``, of which the first has been
    received. Close it."""

    engine: Engine
    answer: Answer
    body: bytes = b""
    pieces: AsyncIterator[bytes] | None = None

    @property
    def status(self) -> int:
        return self.answer.status

    def close(self) -> None:
        self.answer.close()


async def unless_gone(asked: ClientRequest, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, asked.gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


class Legs:
    """Sends the legs. ``http`` is open while the app is up. ``tracer``: makes spans of requests and legs."""

    def __init__(
        self, engines: EnginePool, timeouts: LegTimeouts | None = None, clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self.engines, self.timeouts, self.clock, self.tracer = engines, timeouts or LegTimeouts(), clock, tracer
        self.identities, self.affinity = Identities(clock), PrefixAffinity()
        self.http = HttpClient()
        self.metrics = Metrics(engines)
        self.tasks: set[asyncio.Task[Any]] = set()

    def forget_gone(self) -> None:
        """Drop what is kept for engines that have left."""
        while self.engines.forgotten:
            url = self.engines.forgotten.pop()
            if self.engines.get(url) is None:
                self.http.forget(url)
                self.identities.forget(url)

    # --- P

    def take_prefill(self, asked: ClientRequest, but: Collection[Engine] = ()) -> Seat | None:
        """A P for this request; None: there is none."""
        now = self.clock()
        known = {engine.url for engine in self.engines.usable(Role.PREFILL, now, but)}
        url, cached = self.affinity.find(asked.prefix, known)
        seat = self.engines.take_prefill(asked.prefix.tokens, now, cached_on=url, cached=cached, but=but)
        if seat is not None:
            self.affinity.note(asked.prefix, seat.engine.url)
            self.metrics.affinity(url, seat.engine.url)
            asked.prefills_on(seat)
        return seat

    def start_prefill(self, asked: ClientRequest, seat: Seat, leg: dict[str, Any]) -> asyncio.Task[Prefilled]:
        """P's answer to this body. It may outlive the request."""
        task = self.start(self._ask_prefill(asked, seat.engine, leg), asked)
        task.add_done_callback(lambda _: seat.computed())
        return task

    async def _ask_prefill(self, asked: ClientRequest, engine: Engine, leg: dict[str, Any]) -> Prefilled:
        url = engine.url
        try:
            status, content = await self._prefill_answer(asked, engine, leg)
        except (HttpError, TimeoutError) as error:
            self._prefill_failed(engine)
            log.warning("%s: prefill at %s failed: %s", asked.id, url, why(error))
            return Prefilled(failed=isinstance(error, HttpError))
        if status != 200:
            # A 4xx is the request's fault, and D says so itself.
            if status >= 500:
                self._prefill_failed(engine)
            log.warning("%s: prefill at %s answered %d", asked.id, url, status)
            return Prefilled(failed=status >= 500)
        found: Any = None
        with suppress(*NOT_JSON):
            found = msgspec.json.decode(content)
        found = found if isinstance(found, dict) else {}
        params = found.get("kv_transfer_params")
        params = params if isinstance(params, dict) and params else None
        if "kv_transfer_params" in leg:
            if params is None:
                log.info("%s: prefill at %s handed nothing over, decode only", asked.id, url)
            self.identities.learn(url, params)
        return Prefilled(found, params)

    async def _prefill_answer(self, asked: ClientRequest, engine: Engine, leg: dict[str, Any]) -> tuple[int, bytes]:
        """Its status and its body. Raises HttpError, TimeoutError."""
        with leg_span(asked.span, PREFILL, engine) as span:
            async with asyncio.timeout(self.timeouts.prefill):
                answer = await self._send(asked, engine, asked.path, leg, RequestProgress(), span, silence=None)
                try:
                    return answer.status, await answer.body()
                finally:
                    answer.close()

    def _prefill_failed(self, engine: Engine) -> None:
        self.metrics.leg_failed(engine.role)
        self.engines.failed(engine, self.clock())
        self.identities.failed(engine.url)

    async def abandon(self, asked: ClientRequest, leg: asyncio.Task[Prefilled]) -> None:
        """The client is gone during P's leg: have P's lease released once P has answered. P aborts what takes longer,
        as its connection is closed."""
        with suppress(TimeoutError):
            params = (await asyncio.wait_for(leg, self.timeouts.abandoned_prefill)).params
            if params is not None:
                await self.let_go(asked, params)

    async def let_go(self, asked: ClientRequest, params: dict[str, Any]) -> None:
        """P has finished, and D will not be asked for the answer: D loads the prompt and so releases P's lease."""
        try:
            (await self.ask_decode(asked, prefill_body(asked.body, params), RequestProgress())).close()
        except HttpError as error:
            log.warning("%s: P holds its blocks until its lease ends: %s", asked.id, why(error))

    # --- D

    def another_decode(self, but: Collection[Engine]) -> bool:
        return any(self.engines.usable(Role.DECODE, self.clock(), but))

    async def ask_decode(
        self, asked: ClientRequest, body: dict[str, Any], progress: RequestProgress, *, path: str | None = None,
        engine: Engine | None = None, tried: list[Engine] | None = None,
    ) -> Decoded:  # fmt: skip
        """D's answer: all of it, or of a stream the head and the first piece.

        Where a D fails before a byte of its answer, another one is asked, once. It gets the same parameters, because
        P's lease holds if D is dead. A D that answered with a 5xx has released the lease: the other one gets none.

        Args:
            path: other than that of the client's request.
            engine: this D first.
            tried: these failed for the request before, so that the next one is the last; those asked now are added.

        Raises:
            HttpError: D failed; the log says so. A D that was told of P by a name and not by a lease is not replaced
                once it was asked: only the caller knows whether P has answered.
        """
        tried = [] if tried is None else tried
        again = not tried
        while True:
            seat = self.engines.take_decode(self.clock(), tried) if engine is None else self.engines.seat(engine, 1.0)
            if seat is None:
                raise NoEngineError("no decode engine takes requests; see /health")
            engine = None
            tried.append(seat.engine)
            again = again and self.another_decode(tried)
            try:
                decoded = await self._ask_one_decode(asked, seat, path or asked.path, body, progress)
            except HttpError as error:
                self.decode_failed(seat.engine)
                log.error("%s: decode at %s failed: %s", asked.id, seat.engine.url, why(error))
                by_name = progress.asked and "transfer_id" in (body.get("kv_transfer_params") or {})
                again = again and not (progress.answered or isinstance(error, SilenceError) or by_name)
                if not progress.answered:
                    progress.reset()  # this D releases nothing
                if not again:
                    raise type(error)(f"decode engine {seat.engine.url} failed: {why(error)}") from None
            else:
                if decoded.status < 500 or not again:
                    asked.loaded()
                    return decoded
                decoded.close()
                log.error("%s: decode at %s answered %d", asked.id, seat.engine.url, decoded.status)
                self.metrics.leg_failed(seat.engine.role)
                body = without_params(body)
            again = False

    async def _ask_one_decode(
        self, asked: ClientRequest, seat: Seat, path: str, body: dict[str, Any], progress: RequestProgress
    ) -> Decoded:
        answer, span = None, leg_span(asked.span, DECODE, seat.engine)

        def over() -> None:
            seat.release()
            span.end()

        try:
            silence = self.timeouts.decode_silence
            answer = await self._send(asked, seat.engine, path, body, progress, span, silence=silence)
            answer.on_end(over)
            if not answer.streamed:
                return Decoded(seat.engine, answer, await answer.body())
            pieces = answer.pieces()
            first = await anext(pieces, b"")
        except BaseException as error:
            span.end(error)
            if answer is not None:
                answer.close()
            seat.release()
            raise

        async def all_pieces() -> AsyncIterator[bytes]:
            yield first
            async for piece in pieces:
                yield piece

        return Decoded(seat.engine, answer, pieces=all_pieces())

    def decode_failed(self, engine: Engine) -> None:
        self.metrics.leg_failed(engine.role)
        self.engines.failed(engine, self.clock())

    def broke_off(self, asked: ClientRequest, engine: Engine | None, error: Exception) -> dict[str, Any]:
        """The event with which a stream ends that D did not end."""
        asked.broken = str(error)
        if engine is not None:  # else it is logged already
            self.decode_failed(engine)
            log.error("%s: decode at %s broke off: %s", asked.id, engine.url, why(error))
            asked.broken = f"decode engine {engine.url} broke off: {why(error)}"
        return error_of(502, asked.broken)

    # --- both

    async def _send(
        self, asked: ClientRequest, engine: Engine, path: str, body: dict[str, Any], progress: RequestProgress,
        span: LegSpan, *, silence: float | None,
    ) -> Answer:  # fmt: skip
        """The head of an engine's answer. It is sent once: an engine that has it computes it. Raises HttpError."""
        headers = {**asked.headers, **span.headers} if span.headers else asked.headers
        how: dict[str, Any] = {"body": body, "headers": headers, "progress": progress, "silence": silence}
        return span.answered(await self.http.send("POST", engine.url, path, connect=self.timeouts.connect, **how))

    def start(self, work: Coroutine[Any, Any, T], asked: ClientRequest) -> asyncio.Task[T]:
        """Run ``work`` so that it may outlive its request's answer."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        asked.hold()
        task.add_done_callback(lambda _: asked.drop())
        return task


async def settled(leg: asyncio.Task[Decoded]) -> None:
    """Let D begin to answer, and so load the prompt and release P's lease; then end its leg."""
    await asyncio.wait({leg}, timeout=SETTLE_SECONDS)
    await ended(leg)


async def ended(leg: asyncio.Task[Decoded]) -> None:
    """Cancel D's leg, or what is left of its answer: D aborts the request."""
    leg.cancel()
    with suppress(asyncio.CancelledError, HttpError):
        (await leg).close()


def why(error: BaseException) -> str:
    return str(error) or type(error).__name__
