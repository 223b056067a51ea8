"""Copies on a GPU: which ones their caller waits for, and what they wait for themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kvferry.connector.pages.copies import PATIENCE_SECONDS, GpuCopies, WaitPolicy
from kvferry.transport.channels import Copy
from tests.support.inside import copy_stream_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LONG = 1_000_000_000
"""Cycles; half a second on any GPU."""


def wait_for(copy: Copy) -> None:
    """Until it is done, which is said later than the stream has ended it."""
    deadline = time.monotonic() + 10
    while not copy.done and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert copy.done


@pytest.fixture
def copies() -> Iterator[GpuCopies]:
    copies = GpuCopies(torch.device("cuda", 0), 7)
    wait_for(copies.start(lambda: torch.cuda._sleep(1)))  # what the first one costs is not timed
    yield copies
    copies.close()


def busy(cycles: int = LONG) -> None:
    torch.cuda._sleep(cycles)


def _put(into: torch.Tensor, flag: torch.Tensor) -> None:
    into.copy_(flag)


def test_one_that_is_waited_for_has_ended_on_return(copies: GpuCopies) -> None:
    assert copies.start(lambda: busy(LONG // 10), WaitPolicy.UNTIL_DONE).done
    assert not copies.start(lambda: busy(LONG // 10)).done


def test_the_end_of_one_that_was_not_waited_for_is_told(copies: GpuCopies) -> None:
    ended, started = threading.Event(), threading.Event()
    copies.on_done = lambda: ended.set() if started.is_set() else None  # not of the fixture's
    started.set()
    copy = copies.start(busy)
    assert not copy.done
    assert ended.wait(60) and copy.done and not copy.error


def test_a_bounded_wait_ends_before_a_long_copy(copies: GpuCopies) -> None:
    assert copies.start(lambda: busy(LONG // 1000), WaitPolicy.BOUNDED).done
    begun = time.monotonic()
    copy = copies.start(busy, WaitPolicy.BOUNDED)
    assert not copy.done and time.monotonic() - begun >= PATIENCE_SECONDS
    copies.synchronize()


def test_none_is_waited_for_behind_what_the_engine_does(copies: GpuCopies) -> None:
    """And it does not begin before that is over."""
    with torch.cuda.stream(torch.cuda.default_stream()):  # this thread is the transfer thread, too, and on its stream
        flag = torch.zeros(1, device=copies.device)
        busy()
        flag.fill_(1)
        copies.wait_event(copies.record_event())
    found = torch.empty(1, device=copies.device)
    copy = copies.start(partial(_put, found, flag), WaitPolicy.UNTIL_DONE)
    assert not copy.done
    copies.synchronize()
    assert found.item() == 1


@pytest.mark.parametrize("current", [0, 1])
def test_the_engine_waits_on_its_gpu_for_what_was_started(copies: GpuCopies, current: int) -> None:
    """Its thread goes on meanwhile, whichever GPU is current there."""
    if torch.cuda.device_count() <= current:
        pytest.skip("needs another GPU")
    flag, found = torch.zeros(1, device=copies.device), torch.empty(1, device=copies.device)
    torch.cuda.synchronize(copies.device)

    def fill() -> None:
        busy()
        flag.fill_(1)

    copy = copies.start(fill)
    engine = torch.cuda.Stream(copies.device)
    with torch.cuda.stream(engine):
        with torch.cuda.device(current):
            assert copy.event is not None
            copies.make_engine_wait(copy.event)
        found.copy_(flag)
        assert not copy_stream_of(copies).query() and not copy.done
    engine.synchronize()
    assert found.item() == 1
    wait_for(copy)


@pytest.mark.parametrize("first", ["after", "start"])
def test_a_thread_that_has_asked_nothing_of_the_gpu_yet(first: str) -> None:
    copies = GpuCopies(torch.device("cuda", 0), 20)
    mark = copies.record_event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            if first == "after":
                copies.wait_event(mark)
            else:
                copies.start(lambda: None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    copies.close()
    assert not errors and not thread.is_alive()


def test_what_follows_the_engines_work_comes_after_it_and_in_order(copies: GpuCopies) -> None:
    seen: list[int] = []
    ended = threading.Event()
    torch.cuda._sleep(LONG)
    for number in range(3):
        copies.after_engine(partial(seen.append, number))
    copies.after_engine(ended.set)
    assert not seen
    assert not copies.start(lambda: None).error  # copies do not wait for it
    assert ended.wait(60) and seen == [0, 1, 2]
