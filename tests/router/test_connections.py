"""Connections that the router keeps, and that break: raw sockets stand in for an engine and end at a chosen byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvferry.router.router import Router
from tests.router.stand_ins import Front, RawEngine, decode_engine, prefill_engine, routed

ENDS = ("closed", "reset")


@contextmanager
def routed_to(engine: RawEngine) -> Iterator[Front]:
    """The router in front of it and of an engine of the other role."""
    p, d = (engine, decode_engine()) if engine.role == "P" else (prefill_engine(), engine)
    with routed(p, d, cool_down=600) as front:
        yield front


def none_cools_down(router: Router) -> bool:
    return all(engine.usable(time.monotonic()) for engine in router.engines)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("first", [b"", b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_a_request_that_has_reached_an_engine_is_not_sent_to_it_again(role: str, first: bytes, end: str) -> None:
    """``first``: what comes of the answer on a kept connection."""
    engine = RawEngine(role, lambda connection, number: first if number else None, end)
    with routed_to(engine) as front:
        front.ask({"prompt": "x"})
        answer = front.ask({"prompt": "x"})
        assert not none_cools_down(front.router)
    assert answer.status_code == (200 if role == "P" else 502)
    assert engine.seen == [(0, 0), (0, 1)]
