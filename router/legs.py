"""The two legs of a request as a router sends them: P's, which makes the KV cache, and D's, which makes the answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kvferry.router.engines import Engine, EnginePool, EngineState, Role, Seat, identity_of
from kvferry.router.http_client import Answer, HttpClient, HttpError, OwnFaultError, RequestProgress
from kvferry.router.metrics import Metrics
from kvferry.router.prefill_choice import PrefillChoice
from kvferry.router.prefix_affinity import BLOCK_TOKENS, PrefixAffinity, PromptPrefix, prompt_prefix
from kvferry.router.request_bodies import (
    COMPLETIONS,
    NOT_JSON,
    Body,
    small_body,
)
from kvferry.transport.errors import NO_PARAMS
from kvferry.transport.tracing import OpenSpan, Tracer

log = logging.getLogger("kvferry.router")
T = TypeVar("T")

MAX_NAME_CHARS = 128
CHECK = "x-kvferry-check"
"""With this header D says in its answer what became of the prompt, and the router in headers which engines it asked."""
FOR_D = "x-data-parallel-rank"
"""A header that vLLM's server reads, and that means one engine: P has other ranks."""
_COMMENTS = re.compile(rb"(?:(?::[^\r\n]*)?(?:\r\n|\r|\n))*+(?::[^\r\n]*)?")
"""What a stream of events may begin with that is no part of an answer."""
_OPENING = re.compile(
    rb"(?:event: (?:response\.(?:created|in_progress)|message_start)\ndata: [^\n]*\n\n"
    rb'|data: [^\n]*"delta":\{"role":"assistant","content":""\}[^\n]*\n\n'
    rb'|data: [^\n]*"choices":\[\],[^\n]*\n\n|data: \[DONE\]\n\n|:[^\n]*\n\n)*'
)
"""What vLLM's server says in a stream without a token: before its engine has the request, or of one that it ends."""
_WHOLE_EVENT = re.compile(rb"(?!event: )[^\n]|event: .*?\n\n", re.DOTALL)
"""A stream after its opening, of which enough is there: an opening has names of events where it may be long."""
ENDS = "it has ended the request by itself: it is shutting down"
MAX_OPENING_BYTES = 1 << 20  # It repeats the client's instructions and tools
MAX_BODY_BYTES = 128 << 10  # A longer answer goes to the client as it comes
_LEAVING = EngineState.LEAVING
WORTH_READING = 512
"""Tokens of a prefix that an 8B model on an H100 computes as soon as it reads them, beside hundreds of new ones."""


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


_PREFILLED = msgspec.json.Decoder(_PrefillAnswer)


class NoEngineError(HttpError):
    """There is no engine for a leg."""


@dataclass(frozen=True)
class LegTimeouts:
    """Seconds. D's answer is not bounded: it lasts as long as its connection."""

    connect: float = 3.0
    prefill: float = 120.0  # The whole prefill leg
    abandoned_prefill: float = 10.0  # The rest of it where the client is gone


@dataclass(eq=False)
class ClientRequest:
    """One completion, chat completion or response of a client. It is over when each of its tasks has ended: ``hold``
    and ``drop``; then ``over`` is called."""

    path: str
    body: Body
    headers: dict[str, str]  # For both legs
    target: str = ""  # The path as it came, with the query
    span: OpenSpan | None = None  # None: nothing is traced
    over: Callable[[], None] = lambda: None
    comment: Callable[[Answer, bytes], Awaitable[None]] | None = None  # Takes what D's server sends before its answer
    broken: str = ""  # Why the answer broke off
    by: dict[str, str] = field(default_factory=dict)  # The engines that answered, and why D got no parameters of a P
    chosen: Engine | None = None  # The D that is to prefill the prompt
    prefilled_at: float | None = None  # When P had answered
    refused_by: tuple[Engine, int] | None = None  # The P that answered with this status, a 4xx
    alone: str = ""  # Why D got no parameters of a P
    prefix: PromptPrefix = field(init=False)
    seats: list[Seat] = field(default_factory=list)
    sources: dict[str, Any] = field(default_factory=dict)  # Of a prefix, in the parameters of P's leg
    _holders: int = 0

    def __post_init__(self) -> None:
        self.prefix = prompt_prefix(self.body)

    @property
    def id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def name(self) -> str:
        """Its id for a log."""
        return ascii(self.id[:MAX_NAME_CHARS])[1:-1]

    @property
    def checks(self) -> bool:
        """Its client wants to know whether the prompt is handed over (``kvferry check``)."""
        return CHECK in self.headers

    def decode_body(self, params: dict[str, Any]) -> Body:
        """For a D that is to load the prompt."""
        return self.body | {"kv_transfer_params": params | {"report": True} if self.checks else params}

    def hold(self) -> None:
        self._holders += 1

    def drop(self) -> None:
        self._holders -= 1
        if not self._holders:
            for seat in self.seats:
                seat.release()
            self.comment = None  # who has it has this request, and its body
            self.over()


@dataclass
class Prefilled:
    params: dict[str, Any] | None = None  # What P handed over, for D
    failed: bool = False  # Another P may succeed


@dataclass
class Decoded:
    """D's answer. Close it."""

    engine: Engine
    answer: Answer  # The head
    first: bytes  # All of a short one, else the first piece
    pieces: AsyncIterator[bytes]  # What follows that
    seat: Seat

    @property
    def refused(self) -> bool:
        """It does not ask P: the status says so, or the first event of its stream."""
        return 400 <= self.answer.status < 500 or self.first.startswith((b'data: {"error"', b"event: error"))

    def close(self) -> None:
        self.answer.close()
        self.seat.release()


class Legs:
    """Sends the legs. ``http`` is open while the app is up. ``serial``: D is asked after P. ``always``: P prefills all
    prompts. ``prefix_reads``: P is told which other engine should have a prefix. ``tracer``: makes spans."""

    def __init__(
        self, engines: EnginePool, timeouts: LegTimeouts | None = None, *, serial: bool = False,
        always: bool = True, prefix_reads: bool = False, clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self.engines, self.timeouts, self.clock, self.tracer = engines, timeouts or LegTimeouts(), clock, tracer
        self.serial = serial
        self.affinity, self.on_d = PrefixAffinity(), PrefixAffinity()
        self.prefix_reads = prefix_reads
        self.choice = None if always else PrefillChoice(engines)
        self.http = HttpClient()
        self.metrics = Metrics(engines, self.clock, self.http.under_way)
        self.tasks: set[asyncio.Task[Any]] = set()

    # --- P

    def choose(self, asked: ClientRequest) -> bool:
        """Whether a D is to prefill the prompt, which then is ``asked.chosen``. A check is of a hand-over."""
        if self.choice is not None and not asked.checks and (best := self._best_prefill(asked)) is not None:
            asked.chosen = self.choice.decode_engine(asked.prefix, *best, self.clock())
        return asked.chosen is not None

    def _best_prefill(self, asked: ClientRequest, but: Collection[Engine] = ()) -> tuple[Engine, float] | None:
        """The P that is to take the prompt, with the tokens that it has to compute."""
        now = self.clock()
        known = {engine.url for engine in self.engines.usable(Role.PREFILL, now, but)}
        url, cached = self.affinity.find(asked.prefix, known)
        return self.engines.best_prefill(asked.prefix.tokens, now, url, cached, but)

    def take_prefill(self, asked: ClientRequest, but: Collection[Engine] = ()) -> Seat | None:
        """A P for this request; None: there is none."""
        best = self._best_prefill(asked, but)
        if best is None:
            return None
        engine = best[0]
        if self.prefix_reads:
            asked.sources = self._sources(asked.prefix, engine)
        self.affinity.note(asked.prefix, engine.url)
        asked.seats.append(Seat(*best, self.engines))
        return asked.seats[-1]

    def _sources(self, prefix: PromptPrefix, engine: Engine) -> dict[str, Any]:
        """What an engine is told of others that should have so much more of a prompt than itself that a read pays, the
        best one first. One that leaves has its cache still."""
        had = (self.on_d, Role.DECODE), (self.affinity, Role.PREFILL)
        cached = max(affinity.find(prefix, {engine.url})[1] for affinity, _ in had)
        found: list[tuple[float, dict[str, Any]]] = []
        for affinity, role in had:
            there = [each for each in self.engines.of(role) if each.usable(self.clock()) or each.state is _LEAVING]
            others = {each.url: each.source for each in there if each.source and each is not engine}
            url, tokens = affinity.find(prefix, set(others))
            if url is not None and tokens >= cached + WORTH_READING:
                found.append((-tokens, others[url]))
        return {"sources": [source for _, source in sorted(found, key=lambda each: each[0])]} if found else {}

    async def _learn_source(self, asked: ClientRequest, engine: Engine) -> None:
        """Where other engines can read from one that has just answered. It is asked once, and again after a failure."""
        engine.source, source = {}, None
        try:
            async with asyncio.timeout(self.timeouts.abandoned_prefill):
                body = small_body(asked.body, {"sources": []}, 1)
                answer = await self._send(asked, engine, body, RequestProgress(), COMPLETIONS)
                with closing(answer):
                    params = _PREFILLED.decode(await answer.body()).kv_transfer_params or {}
                if answer.status == 200:
                    source = params["source"] if isinstance(params.get("source"), dict) else {}
        except (HttpError, TimeoutError, *NOT_JSON) as error:
            log.info("%s has not said where others can read from it: %s", engine.url, why(error))
        finally:
            engine.source = source

    def start_prefill(self, asked: ClientRequest, seat: Seat, leg: Body) -> asyncio.Task[Prefilled]:
        """P's answer to this body. It may outlive the request."""
        task = self.start(self._ask_prefill(asked, seat.engine, leg), asked)
        task.add_done_callback(lambda _: seat.computed())
        return task

    async def _ask_prefill(self, asked: ClientRequest, engine: Engine, leg: Body) -> Prefilled:
        url, answer, progress = engine.url, None, RequestProgress()
        tokens, began = engine.load, self.clock()
        try:
            async with asyncio.timeout(self.timeouts.prefill):
                answer = await self._send(asked, engine, leg, progress)
                content = await answer.body()
                if answer.status == 200 and _ended(content):
                    raise HttpError(ENDS)
        except (HttpError, TimeoutError) as error:
            if isinstance(error, HttpError):
                self.failed(engine, error)
            else:  # perhaps the prompt is that long
                self._answered(asked, engine, 504)
            engine.identity = None  # another engine may answer there next
            asked.alone = f"prefill engine {url} failed: {why(error)}"
            log.warning("%s: %s", asked.name, asked.alone)
            return Prefilled(failed=isinstance(error, HttpError) and not progress.given_up)
        finally:
            if answer is not None:
                answer.close()
        if answer.status != 200:  # whether a 4xx is the request's fault D says
            asked.alone = f"prefill engine {url} answered {answer.status}"
            if answer.status >= 500:
                self._answered(asked, engine, answer.status)
                engine.identity = None
                log.warning("%s: %s", asked.name, asked.alone)
            else:
                asked.refused_by = engine, answer.status
            return Prefilled(failed=answer.status >= 500)
        self._answered(asked, engine, answer.status)
        asked.prefilled_at = self.clock()
        params: dict[str, Any] | None = None
        with suppress(*NOT_JSON):
            told = _PREFILLED.decode(content)
            params = {
                name: value for name, value in (told.kv_transfer_params or {}).items() if name != "source"
            } or None
            if self.choice is not None:
                self.choice.prefilled(engine, tokens, asked.prefilled_at - began, asked.prefilled_at)
        asked.alone = "" if params else f"prefill engine {url} handed nothing over: {NO_PARAMS}"
        if asked.alone:
            log.info("%s: %s", asked.name, asked.alone)
        before, engine.identity = engine.identity, identity_of(params)
        if before not in (None, engine.identity):
            log.warning("another engine answers at %s than before: name each engine by itself", url)
        engine.handed_over.prefilled(params)
        return Prefilled(params)

    def failed(self, engine: Engine, error: Exception) -> None:
        if not isinstance(error, OwnFaultError):
            engine.source = None  # another engine may answer there next
            self.metrics.failed_legs.labels(engine.role).inc()
            self.engines.failed(engine, self.clock())

    def _answered(self, asked: ClientRequest, engine: Engine, status: int) -> None:
        if status >= 500:
            self.metrics.failed_legs.labels(engine.role).inc()
        elif self.prefix_reads and status == 200 and engine.source is None:
            self.start(self._learn_source(asked, engine), asked)
        self.engines.answered(engine, status, asked.prefix, self.clock())
        if engine.role is Role.DECODE and status == 200 and asked.refused_by is not None:
            refused_by, status = asked.refused_by
            refused_by.handed_over.prefilled(None, status)
            self.engines.answered(refused_by, status, asked.prefix, self.clock())

    async def abandon(
        self, asked: ClientRequest, leg: asyncio.Task[Prefilled], seconds: float | None = None, told: Any = None
    ) -> None:
        """Have P's lease released once P has answered, where D was not ``told`` of this P. P aborts what takes longer:
        its connection is closed."""
        with suppress(TimeoutError):
            params = (await asyncio.wait_for(leg, seconds or self.timeouts.abandoned_prefill)).params
            if params is not None and not (told and identity_of(params) == told):
                await self.let_go(asked, params)

    async def let_go(self, asked: ClientRequest, params: dict[str, Any]) -> None:
        """A request that D's server refuses, and whose lease D's connector releases."""
        body = small_body(asked.body, params, 0)
        tried: list[Engine] = []
        while (seat := self.engines.take_decode(self.clock(), tried)) is not None:
            tried.append(seat.engine)
            try:
                async with asyncio.timeout(self.timeouts.abandoned_prefill):
                    answer = await self._send(asked, seat.engine, body, RequestProgress(), COMPLETIONS)
                answer.close()
                if answer.status < 500:
                    return
            except (HttpError, TimeoutError) as error:
                log.warning("%s: decode at %s released no lease: %s", asked.name, seat.engine.url, why(error))
            finally:
                seat.release()
        log.warning("%s: P holds its blocks until its lease ends", asked.name)

    # --- D

    def another_decode(self, but: Collection[Engine]) -> bool:
        return any(not engine.failed_checks for engine in self.engines.usable(Role.DECODE, self.clock(), but))

    async def ask_decode(
        self, asked: ClientRequest, body: Body, progress: RequestProgress, *, tried: list[Engine] | None = None
    ) -> Decoded:
        """D's answer: all of it, or of a stream or a long one the head and the first piece.

        Where a D fails before a byte of its answer, another one is asked, once. It gets the same parameters, because
        P's lease holds if D is dead. A D that answered with a 5xx has released the lease: the other one gets none. A D
        that was told of P by a name and not by a lease is not replaced once it was asked: only the caller knows whether
        P has answered. ``tried``: these failed for the request before, so that the next one is the last; those asked
        now are added. Raises HttpError: D failed; the log says so."""
        tried = [] if tried is None else tried
        again = not tried
        while True:
            seat = self.engines.take_decode(self.clock(), tried, asked.chosen)
            if seat is None:
                raise NoEngineError("no decode engine takes requests; see /health")
            tried.append(seat.engine)
            again = again and self.another_decode(tried)
            began, alone, tokens = self.clock(), "kv_transfer_params" not in body, 0.0
            if self.choice is not None:
                tokens = self.choice.asked(seat.engine, asked.prefix, began, alone=alone)
            try:
                sources = self._sources(asked.prefix, seat.engine) if alone and self.prefix_reads else {}
                sent = body | {"kv_transfer_params": sources} if sources else body
                decoded = await self._ask_one_decode(asked, seat, sent, progress)
            except HttpError as error:
                progress.given_up = ""
                self.failed(seat.engine, error)
                log.error("%s: decode at %s failed: %s", asked.name, seat.engine.url, why(error))
                by_name = progress.sent and "transfer_id" in (body.get("kv_transfer_params") or {})
                again = again and not (progress.answered or isinstance(error, OwnFaultError) or by_name)
                progress.sent = progress.answered  # a D without an answer releases nothing
                if not again:
                    raise type(error)(f"decode engine {seat.engine.url} failed: {why(error)}") from None
            else:
                self._answered(asked, seat.engine, decoded.answer.status)
                if self.choice is not None and decoded.answer.status == 200 and decoded.answer.streamed:
                    now = self.clock()
                    since = began if alone else max(began, asked.prefilled_at or now)
                    self.choice.began(seat.engine, tokens, now - since, now, alone=alone)
                if decoded.answer.status < 500 or not again:
                    if "kv_transfer_params" in body and decoded.answer.status == 200:
                        seat.engine.handed_over.sent += 1
                    for each in asked.seats:  # D has loaded what P handed over, or does without
                        each.handed_over()
                    return decoded
                decoded.close()
                log.error("%s: decode at %s answered %d", asked.name, seat.engine.url, decoded.answer.status)
                body = asked.body
            again = False

    async def _ask_one_decode(self, asked: ClientRequest, seat: Seat, body: Body, progress: RequestProgress) -> Decoded:
        answer = None
        try:
            answer = await self._send(asked, seat.engine, body, progress)
            pieces = answer.pieces()
            size = int(answer.headers.get("content-length", MAX_BODY_BYTES))
            if not answer.streamed and size < MAX_BODY_BYTES:
                content = await answer.body()
                if answer.status == 200 and _ended(content):
                    progress.answered = False
                    raise HttpError(ENDS)
                return Decoded(seat.engine, answer, content, pieces, seat)
            first = await anext(pieces, b"")
            while answer.streamed and first and _COMMENTS.fullmatch(first):
                progress.answered = False
                if asked.comment is not None:
                    await asked.comment(answer, first)
                first = await anext(pieces, b"")
            if answer.streamed and answer.status == 200:
                piece = first
                while (
                    piece and len(first) <= MAX_OPENING_BYTES and not _WHOLE_EVENT.match(first, _without_token(first))
                ):
                    piece = await anext(pieces, b"")
                    first += piece
                rest = first[_without_token(first) :]
                if not rest or any(_ended(line[5:]) for line in rest.split(b"\n") if line.startswith(b"data:")):
                    progress.answered = False
                    raise HttpError(ENDS)
        except BaseException:
            if answer is not None:
                answer.close()
            seat.release()
            raise
        return Decoded(seat.engine, answer, first, pieces, seat)

    def gave(self, asked: ClientRequest, decoded: Decoded, tokens: float) -> None:
        """The client has D's whole answer, of about so many tokens, and D has the KV of it."""
        if self.prefix_reads and decoded.answer.status == 200:
            hashed = (len(asked.prefix.blocks) + 1) * BLOCK_TOKENS  # of a long prompt only the first blocks are known
            self.on_d.note(asked.prefix, decoded.engine.url, min(asked.prefix.tokens, hashed) + tokens)

    # --- both

    async def _send(
        self, asked: ClientRequest, engine: Engine, body: Body, progress: RequestProgress, path: str = ""
    ) -> Answer:
        """The head of an engine's answer. It is sent once: an engine that has it computes it. Raises HttpError."""
        left_out = FOR_D if engine.role is Role.PREFILL else ""
        headers = {name: value for name, value in asked.headers.items() if name != left_out}
        path, progress.tokens = path or asked.target or asked.path, asked.prefix.tokens
        how: dict[str, Any] = {"progress": progress, "connect": self.timeouts.connect}
        return await self.http.send("POST", engine.url, path, body=body, headers=headers, **how)

    def start(self, work: Coroutine[Any, Any, T], asked: ClientRequest) -> asyncio.Task[T]:
        """Run ``work`` so that it may outlive its request's answer."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        asked.hold()
        task.add_done_callback(lambda _: asked.drop())
        return task


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Usage(msgspec.Struct):
    output_tokens: Any = None


class _Told(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    response: _Told | None = None


_TOLD = msgspec.json.Decoder(_Told)


def _ended(answer: bytes) -> bool:
    """Whether an engine says in an answer, or in an event, that it has ended the request by itself, as at SIGTERM."""
    try:
        told = _TOLD.decode(answer)
    except NOT_JSON:
        return False
    told = told.response or told
    aborted = any(choice.finish_reason == "abort" for choice in told.choices or ())
    return aborted or (told.usage is not None and told.usage.output_tokens == 0)


def _without_token(events: bytes) -> int:
    """So many bytes, from the first one, hold no token."""
    return next(_OPENING.finditer(events)).end()


async def ended(leg: asyncio.Task[Decoded]) -> None:
    """Cancel D's leg, or what is left of its answer: D aborts the request."""
    leg.cancel()
    await asyncio.wait({leg})
    if not leg.cancelled() and leg.exception() is None:
        leg.result().close()


def why(error: BaseException) -> str:
    """In one line, as a header may have it: a client's library quotes what an engine has sent."""
    text = "".join(character if character.isprintable() else " " for character in str(error)[:300])
    return " ".join(text.split()) or type(error).__name__
