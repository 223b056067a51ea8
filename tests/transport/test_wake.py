"""The tools of a thread that polls: its waker, its clock, and warnings that cannot flood the log."""

from __future__ import annotations

import linecache
import logging
import os
import random
import select
import threading

import pytest

from kvferry.transport.wake import FAILED_LINES, HELD_UP_SECONDS, LimitedLines, RateLimitedLog, RunningClock, Waker


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
