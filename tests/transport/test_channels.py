"""The loop of a transfer thread: channels, deadlines, and a host that stands still."""

from __future__ import annotations

import ctypes
import linecache
import logging
import os
import random
import re
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.transport import staging
from kvferry.transport.channels import CPU, Pieces
from kvferry.transport.errors import TransportError
from kvferry.transport.limited_log import FAILED_LINES, LimitedLines, RateLimitedLog
from kvferry.transport.wake import HELD_UP_SECONDS, RunningClock, Waker
from tests.support.fork_server import fork_server
from tests.transport.plane_pair import PLANES, Pair, pattern

ROOT = Path(__file__).parents[2]
NBYTES = 50_000
CUTS = [0, 1, 2000, 2001, 40_000, NBYTES]


@pytest.fixture(params=PLANES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param, 4, CPU)
    yield pair
    pair.close()


def scattered(memory: np.ndarray) -> Pieces:
    """``NBYTES`` of the memory in pieces, the last of them first."""
    sizes = np.diff(CUTS)
    return Pieces(memory.ctypes.data + len(memory) - np.cumsum(sizes + 10), sizes)


def content(memory: np.ndarray) -> np.ndarray:
    """The bytes of these pieces, in order."""
    places = scattered(memory)
    starts = places.addresses - memory.ctypes.data
    return np.concatenate([memory[s : s + n] for s, n in zip(starts, places.nbytes, strict=True)])


def test_pieces_arrive_as_one_message(pair: Pair) -> None:
    sender, receiver = pair.join()
    source, target = pattern(1, 2 * NBYTES), np.zeros(2 * NBYTES, dtype=np.uint8)
    for tag in range(6):  # more than there are slots
        receiver.expect(tag, NBYTES, lambda: scattered(target))
        pair.turn(lambda tag=tag: sender.send_pieces(lambda: scattered(source), tag))  # type: ignore[misc]
        message = pair.arrived(receiver)
        assert (message.tag, message.nbytes) == (tag, NBYTES)
        if message.placed:
            assert np.array_equal(content(target), content(source))
            target[:] = 0
        else:
            assert not target.any()
            slot = (ctypes.c_uint8 * NBYTES).from_address(message.address)
            assert np.array_equal(np.ctypeslib.as_array(slot), content(source))
        message.release()
        pair.turn(lambda: sender.reading is None)
    sender.stop_reading()
    receiver.forget(5)
    assert sender.error is None and receiver.error is None
    pair.turn(lambda: not pair.slots_out)


def test_pieces_that_cannot_be_found_cost_no_slot(pair: Pair) -> None:
    sender, receiver = pair.join()

    def broken() -> Pieces:
        raise RuntimeError("planted")

    def raises() -> bool:
        try:
            return sender.send_pieces(broken, 1)
        except RuntimeError:
            return True

    for _ in range(6):
        pair.turn(raises)
    pair.turn(lambda: not pair.slots_out)
    pair.carry(sender, receiver, 2).release()


def test_the_connector_tells_no_channels_apart_by_their_class() -> None:
    """It asks ``channel.pulls`` and what else a channel declares, so that a new plane needs no edit there."""
    sources = {path: path.read_text() for path in (ROOT / "connector").rglob("*.py")}
    assert len(sources) > 40
    assert not [path for path, text in sources.items() if re.search(r"isinstance\([^()]*(Channel|Plane)\b", text)]
    told = {path: text for path, text in sources.items() if "doctor" not in path.parts}  # which says what planes lack
    assert not [path for path, text in told.items() if "transport.planes" in text]


DECODING = """
import sys, threading
from typing import Annotated
import msgspec
from msgspec import Meta
from kvferry.transport.plane import decode_payload

sys.setswitchinterval(1e-6)
wrong = []


def decode(kind, barrier, payload):
    barrier.wait()
    if decode_payload(payload, kind, "payload").port != 7:
        wrong.append(kind)


for number in range(1000):
    class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        port: Annotated[int, Meta(ge=0, le=number + 7)]
        host: Annotated[str, Meta(max_length=number + 9)] = ""
        key: Annotated[bytes, Meta(max_length=number + 11)] = b""
        ids: Annotated[tuple[Annotated[int, Meta(ge=number)], ...], Meta(max_length=number + 3)] = ()

    barrier = threading.Barrier(4)
    arguments = Payload, barrier, msgspec.msgpack.encode({"port": 7})
    threads = [threading.Thread(target=decode, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
sys.exit(bool(wrong))
"""


def test_several_threads_decode_a_kind_for_the_first_time() -> None:
    """In a process of its own: without a lock msgspec takes it along."""
    ended = fork_server().run("-c", DECODING, timeout=800)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_page_locked_memory_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link then takes another plane; any other exception would end it."""

    def refused(nbytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(staging, "empty_page_locked", refused)
    pool = staging.SlotPool(1 << 20, 4 << 20, page_locked=True, in_one_piece=True)
    with pytest.raises(
        TransportError, match=r"no 4 MiB of page-locked host memory.*out of memory; lower staging_bytes"
    ):
        pool.take()


def test_a_waker_wakes_a_poller_from_another_thread():
    waker, poller = Waker(), select.poll()
    poller.register(waker, select.POLLIN)
    assert not poller.poll(0) and not waker.drain()
    later = threading.Timer(0.05, waker.wake)
    later.start()
    assert poller.poll(60_000)
    later.join()
    waker.wake()
    assert waker.drain() and not waker.drain() and not poller.poll(0)
    os.eventfd_write(waker.fd, (1 << 64) - 2)  # the counter is full: one more would block
    waking = threading.Thread(target=waker.wake, daemon=True)
    waking.start()
    waking.join(30)
    assert not waking.is_alive() and waker.drain()
    waker.close()
    with open("/dev/null", "rb") as taken:  # gets the number that the waker had
        waker.wake()
        waker.close()
        assert not waker.drain() and taken.read() == b""


def test_rate_limited_log(caplog):
    now = [0.0]
    limited = RateLimitedLog(logging.getLogger("test.rate"), 10, max_keys=3, max_lines=100, clock=lambda: now[0])
    with caplog.at_level(logging.INFO, "test.rate"):
        for _ in range(5):
            limited.warning("a", "bad %s", "thing")
        limited.info("b", "other")
        now[0] = 11
        for _ in range(2):
            limited.warning("a", "bad %s", "thing")
        now[0] = 22
        for number in range(1000):
            limited.warning(f"key {number}", "x" * 100_000)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:3] == ["bad thing", "other", "bad thing (and 4 more like this)"]
    assert len(lines) == 3 + 100 and max(map(len, lines)) <= RateLimitedLog.MAX_LINE, "all keys together are limited"
    assert len(limited.keys) == 3, "keys that a peer makes up are bounded"


def test_a_limited_line_names_the_place_of_its_call(caplog):
    limited = RateLimitedLog(logging.getLogger("test.rate"))
    with caplog.at_level(logging.INFO, "test.rate"):
        limited.info("info", "x")
        limited.warning("warning", "x")
        limited.error("error", "x")
        limited.exception("exception", "x")
    places = [linecache.getline(record.pathname, record.lineno).strip() for record in caplog.records]
    assert places == [f'limited.{how}("{how}", "x")' for how in ("info", "warning", "error", "exception")]


def test_lines_from_one_place_about_one_engine_are_limited():
    now = [0.0]
    lines, told = LimitedLines(max_lines=25, clock=lambda: now[0]), list[str]()

    def fails(request, engine):
        record = logging.LogRecord("test", logging.WARNING, __file__, 1, "%s: %s failed", (request, engine), None)
        if lines.filter(record):
            told.append(record.getMessage())

    for number in range(FAILED_LINES + 5):
        fails(number, "P")
        fails(number, "D")
    for number in range(100):
        fails(0, f"engine {number}")
    assert told == [
        *(f"{number}: {engine} failed" for number in range(FAILED_LINES) for engine in "PD"),
        *(f"0: engine {number} failed" for number in range(5)),
    ], "all places together are limited"
    told.clear()
    now[0] = 10.0
    fails(99, "D")
    fails(100, "D")
    assert told == ["99: D failed (and 5 more like this)", "100: D failed"]
    assert lines.filter(logging.LogRecord("test", logging.INFO, __file__, 1, "no argument", (), None))


def test_of_several_lines_for_a_key_the_rest_have_the_level_debug(caplog):
    now = [0.0]
    limited = RateLimitedLog(logging.getLogger("test.rate"), 10, per_key=2, max_lines=4, clock=lambda: now[0])
    with caplog.at_level(logging.DEBUG, "test.rate"):
        for key in "aaaaabbb":
            limited.warning(key, key)
            now[0] += 0.1
        assert not limited.warning("c", "c"), "no line is left"
        now[0] = 11
        assert limited.warning("a", "a") and limited.warning("a", "a") and not limited.warning("a", "a")
    said = [(record.levelname[0], record.getMessage()) for record in caplog.records]
    assert said[:5] == [("W", "a")] * 2 + [("D", "a")] * 3
    assert said[5:9] == [("W", "b")] * 2 + [("D", "b"), ("D", "c")]
    assert said[9:] == [("W", "a (and 3 more like this)"), ("W", "a"), ("D", "a")]


@pytest.mark.parametrize(
    ("slept", "took", "counted", "late"),
    [
        (0.0, 0.004, 0.004, 0.0),
        (30.0, 2.0, 2.0, 0.0),
        (1.0, 2.0, 2.0, 0.0),
        (1.0, 11.0, 1.0 + HELD_UP_SECONDS, 10.0),
        (0.0, 10.0, HELD_UP_SECONDS, 10.0),
    ],
)
def test_a_turn_of_the_clock(slept, took, counted, late):
    now = [1000.0]
    clock = RunningClock(lambda: now[0])
    assert clock.turn() == 0.0
    clock.sleeps(slept)
    now[0] += took
    assert clock.turn() == pytest.approx(counted) and clock.late == pytest.approx(late)
    now[0] += 0.5
    assert clock.turn() == pytest.approx(counted + 0.5) and clock.late == 0.0


def test_the_clock_never_goes_back_and_always_goes_on():
    rng, now = random.Random(1), [1000.0]
    clock = RunningClock(lambda: now[0])
    before = clock.turn()
    for _ in range(1000):
        clock.sleeps(rng.choice([0.0, 0.001, 0.02, 1.0]))
        step = rng.choice([0.0001, 0.02, 1.5, 600.0])
        now[0] += step
        after = clock.turn()
        assert min(step, HELD_UP_SECONDS) <= after - before + 1e-9 <= step + 2e-9
        before = after
