"""Connections that the router keeps, and that break: raw sockets stand in for an engine and end at a chosen byte."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import pytest

from kvferry.router.app import App
from kvferry.router.router import Router
from tests.router.stand_ins import PARAMS, ask, decode_engine, make_router, prefill_engine, served

BODIES = {"P": {"kv_transfer_params": PARAMS, "choices": []}, "D": {"text": "from D"}}
ENDS = ("closed", "reset")


def answer_of(role: str) -> bytes:
    body = json.dumps(BODIES[role]).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@dataclass
class RawEngine:
    """Answers requests on kept connections. ``breaks``: for a connection's number and the request's number on it, the
    bytes after which the connection ends; None: a whole answer. ``seen``: both numbers of each request. ``closed``: a
    connection has ended."""

    role: str
    breaks: Callable[[int, int], bytes | None]
    end: str = "closed"
    seen: list[tuple[int, int]] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[str]:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            for connection in range(1000):
                accepted, _ = listener.accept()
                threading.Thread(target=self._run, args=(accepted, connection), daemon=True).start()

    def _run(self, accepted: socket.socket, connection: int) -> None:
        self._serve(accepted, connection)
        self.closed.set()

    def _serve(self, accepted: socket.socket, connection: int) -> None:
        with accepted, accepted.makefile("rb") as lines, suppress(OSError):
            number = 0
            while True:
                length = 0
                while (line := lines.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                if not line:
                    return
                lines.read(length)
                self.seen.append((connection, number))
                last = self.breaks(connection, number)
                accepted.sendall(answer_of(self.role) if last is None else last)
                if last is not None:
                    if self.end == "reset":
                        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                number += 1


@contextmanager
def routed_to(engine: RawEngine) -> Iterator[tuple[Router, str]]:
    """The router in front of it and of an engine of the other role."""
    with engine.running() as raw, ExitStack() as stack:
        other = stack.enter_context(served((decode_engine() if engine.role == "P" else prefill_engine()).app))
        urls = (raw, other) if engine.role == "P" else (other, raw)
        router = make_router([urls[0]], [urls[1]], cool_down=600)
        yield router, stack.enter_context(served(App(router)))


def none_cools_down(router: Router) -> bool:
    return all(engine.usable(time.monotonic()) for engine in router.engines)


@pytest.mark.parametrize("role", ["P", "D"])
def test_a_connection_that_ends_while_it_is_kept_costs_nothing(role: str) -> None:
    engine = RawEngine(role, lambda connection, number: None if connection else answer_of(role))
    with routed_to(engine) as (router, url):
        answers = [ask(url, {"prompt": "x"})]
        assert engine.closed.wait(60)
        answers += [ask(url, {"prompt": "x"}) for _ in range(2)]
        assert none_cools_down(router), "the engine was passed over for a connection that it had kept too long"
    assert [answer.json() for answer in answers] == [{"text": "from D"}] * 3
    assert engine.seen == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("first", [b"", b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_a_request_that_has_reached_an_engine_is_not_sent_to_it_again(role: str, first: bytes, end: str) -> None:
    """``first``: what comes of the answer on a kept connection."""
    engine = RawEngine(role, lambda connection, number: first if number else None, end)
    with routed_to(engine) as (router, url):
        ask(url, {"prompt": "x"})
        answer = ask(url, {"prompt": "x"})
        assert not none_cools_down(router)
    assert answer.status_code == (200 if role == "P" else 502)
    assert engine.seen == [(0, 0), (0, 1)]


@pytest.mark.parametrize("role", ["P", "D"])
def test_a_fresh_connection_that_breaks_is_not_tried_again(role: str) -> None:
    engine = RawEngine(role, lambda connection, number: b"")
    with routed_to(engine) as (_, url):
        assert ask(url, {"prompt": "x"}).status_code == (200 if role == "P" else 502)
    assert engine.seen == [(0, 0)]
