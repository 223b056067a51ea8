"""The engines that a router knows: their states and loads, and which one takes a request. Pure: no I/O, no clock.

LEAVING: no new requests. UP and DOWN may besides be passed over for a while, because a request has failed there.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvferry.router.handed_over import HandedOver
from kvferry.router.prefix_affinity import PromptPrefix
from kvferry.transport.errors import UsageError, quoted, quoted_url

REFUSALS = 3
"""So many different prompts that were answered with 5xx, or 4xx where D answered them, none well between them, and an
engine is passed over."""
IDENTITY = ("remote_engine_id", "remote_host", "remote_port")
IDENTITY_ALSO = ("remote_key", "remote_host_id", "tp_size", "pp_size", "dcp_size", "transfer_mode")
"""What D needs to ask P for a prompt that P has not finished, and what goes with it where P's answer has it."""
_HOST = re.compile(r"(?=.{1,253}$)[^.]{1,63}(\.[^.]{1,63})*\.?")


class Role(enum.StrEnum):
    PREFILL, DECODE = "prefill", "decode"


class EngineState(enum.StrEnum):
    UP, DOWN, LEAVING = "up", "down", "leaving"


def identity_of(params: dict[str, Any] | None) -> dict[str, Any] | None:
    """What D needs to ask this P at once; None where P does not offer it."""
    if params is None or params.get("transfer_mode") != "push":
        return None
    engine, host, port = (params.get(name) for name in IDENTITY)
    if not (isinstance(engine, str) and engine and isinstance(host, str) and host and isinstance(port, int) and port):
        return None
    return {name: params[name] for name in IDENTITY + IDENTITY_ALSO if params.get(name) is not None}


@dataclass(eq=False)
class Engine:
    url: str
    role: Role
    state: EngineState
    requests: int = 0  # In flight, those whose KV cache it still hands over among them
    load: float = 0.0  # What it computes: prompt tokens for P, requests for D
    failed_checks: int = 0  # In a row
    passed_over_until: float = 0.0  # By the clock of the caller
    page: int | None = None  # A hash of what its /metrics counted at the last look; None: it is not known
    still: int = 0  # So many looks in a row have seen that unchanged, while a request waited
    last_taken: int = 0  # The number of its last request, of all engines' requests
    refused: set[PromptPrefix] = field(default_factory=set)  # Since it last answered one well
    source: dict[str, Any] | None = None
    """Where other engines can read a prefix from it, as it says; empty where they cannot, None before it was asked."""
    identity: dict[str, Any] | None = None  # What D is told of a P before it has answered; None: P is asked serially
    handed_over: HandedOver = field(default_factory=HandedOver)

    def usable(self, now: float) -> bool:
        return self.state is EngineState.UP and self.passed_over_until <= now


class Seat:
    """The part of one request in the load of one engine."""

    def __init__(self, engine: Engine, weight: float, engines: EnginePool) -> None:
        self.engine = engine
        self._weight, self._engines = weight, engines
        self._computing = self._handing_over = True
        engine.requests += 1
        engine.last_taken = next(engines.taken)
        engine.load += weight

    def computed(self) -> None:
        """The engine computes no longer for the request; it may still hand its KV cache over."""
        if self._computing:
            self._computing = False
            self.engine.load -= self._weight
            self._release_if_over()

    def handed_over(self) -> None:
        """The request needs no KV cache of the engine any longer."""
        if self._handing_over:
            self._handing_over = False
            self._release_if_over()

    def release(self) -> None:
        """The request needs the engine no longer."""
        self.computed()
        self.handed_over()

    def _release_if_over(self) -> None:
        if not self._computing and not self._handing_over:
            self.engine.requests -= 1
            self._engines.forget_if_idle(self.engine)


class EnginePool:
    """All engines by URL. ``cool_down``: seconds for which an engine is passed over after a failed request."""

    def __init__(self, prefill: Collection[str] = (), decode: Collection[str] = (), *, cool_down: float = 5.0) -> None:
        self.cool_down = cool_down
        self._engines: dict[str, Engine] = {}
        self.taken = itertools.count(1)
        for role, urls in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for url in urls:
                known = self._engines.get(engine_url(url))
                if known is not None and known.role is not role:
                    raise UsageError(f"{known.url} is named as a prefill and as a decode engine; name it once")
                self.add(url, role, EngineState.UP)

    def __iter__(self) -> Iterator[Engine]:
        return iter(list(self._engines.values()))

    def get(self, url: str) -> Engine | None:
        return self._engines.get(url)

    def of(self, role: Role) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.role is role]

    # --- which engines there are

    def add(self, url: str, role: Role, state: EngineState = EngineState.DOWN) -> Engine:
        """A new engine, also where the one at this URL had another role; or the known one, which gets requests again if
        it was leaving. Raises UsageError: ``url`` is none."""
        url = engine_url(url)
        engine = self._engines.get(url)
        if engine is not None and engine.state is not EngineState.LEAVING:
            state = engine.state
        if engine is None or engine.role is not role:
            engine = self._engines[url] = Engine(url, role, state)
        engine.state = state
        return engine

    def leave(self, engine: Engine) -> None:
        engine.state = EngineState.LEAVING
        self.forget_if_idle(engine)

    def forget_if_idle(self, engine: Engine) -> None:
        if engine.state is EngineState.LEAVING and engine.requests == 0 and self._engines.get(engine.url) is engine:
            del self._engines[engine.url]

    # --- which engine takes a request

    def usable(self, role: Role, now: float, but: Collection[Engine] = ()) -> list[Engine]:
        return [engine for engine in self.of(role) if engine.usable(now) and engine not in but]

    def best_prefill(
        self, tokens: float, now: float, cached_on: str | None = None, cached: float = 0.0, but: Collection[Engine] = ()
    ) -> tuple[Engine, float] | None:
        """The P whose load, with this prompt, is least, and the tokens that it has to compute. ``cached_on`` has the
        first ``cached`` of them and need not compute these: it takes the prompt unless it has more than that to compute
        beyond the least loaded P."""

        def own(engine: Engine) -> float:
            return tokens - cached if engine.url == cached_on else tokens

        found = self.usable(Role.PREFILL, now, but)
        best = min(found, key=lambda engine: (engine.load + own(engine), engine.last_taken), default=None)
        return None if best is None else (best, own(best))

    def take_decode(self, now: float, but: Collection[Engine] = (), chosen: Engine | None = None) -> Seat | None:
        """``chosen``, or the D with the fewest requests. Where each has failed: the one that failed first. None: there
        is none that takes new requests."""
        best = self.best_decode(now, but)
        if chosen is not None and chosen.usable(now) and chosen not in but:
            best = chosen
        return None if best is None else Seat(best, 1.0, self)

    def best_decode(self, now: float, but: Collection[Engine] = ()) -> Engine | None:
        """The D that ``take_decode`` takes where none is chosen."""
        return min(
            (each for each in self.of(Role.DECODE) if each.state is not EngineState.LEAVING and each not in but),
            key=lambda e: (not e.usable(now), e.load if e.usable(now) else e.passed_over_until, e.last_taken),
            default=None,
        )

    # --- what requests and health checks say

    def failed(self, engine: Engine, now: float, seconds: float = 0.0) -> None:
        """The engine has lost a connection: pass it over for a while, or for so many ``seconds``."""
        engine.passed_over_until = max(engine.passed_over_until, now + (seconds or self.cool_down))
        engine.refused.clear()

    def answered(self, engine: Engine, status: int, prompt: PromptPrefix, now: float) -> None:
        """The engine answered this prompt. One bad request is no fault of an engine, several are. A 4xx of a P counts
        where a D answered the same request."""
        if status < 400 or (status < 500 and engine.role is Role.DECODE):
            engine.refused.clear()
            return
        engine.refused.add(prompt)
        if len(engine.refused) >= REFUSALS:
            self.failed(engine, now)

    def checked(self, engine: Engine, passed: bool, threshold: int) -> bool:
        """The result of a health check. Whether the engine's state has changed."""
        before = engine.state
        engine.failed_checks = 0 if passed else engine.failed_checks + 1
        if before is not EngineState.LEAVING and (passed or engine.failed_checks >= threshold):
            engine.state = EngineState.UP if passed else EngineState.DOWN
        if engine.state is not before:
            engine.source = engine.identity = None  # it may be another engine
        return engine.state is not before


def engine_url(text: str) -> str:
    """The URL of an engine in one form. Raises UsageError: it is none, or has a user or a password, which would be
    shown wherever the engine is named."""
    if "@" in text:
        raise UsageError(
            f"the URL of engine {quoted_url(text)} has a user or a password, which is not sent; expected "
            "http://HOST:PORT: an engine gets the Authorization header of each client"
        )
    expected = f"{quoted(text)} is no URL of an engine; expected http://HOST:PORT"
    try:
        url = urlsplit(text.strip().rstrip("/"))
        fits = url.scheme in ("http", "https") and _HOST.fullmatch(url.hostname or "") and url.port != 0
    except ValueError as error:
        raise UsageError(f"{expected} ({error})") from None
    strange = url.path.endswith("/v1") or url.query or url.fragment
    if not fits or strange or any(ord(c) <= 32 or ord(c) > 126 for c in url.geturl()):
        raise UsageError(expected)
    return url.geturl()
