"""D's read from one P rank: every way to the commit, every way to stop, and no report while a copy may write."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side.link import Reason
from kvferry.connector.decode_side.load_state import LoadEvent, LoadEventKind
from kvferry.connector.decode_side.read import PROGRESS, Fence, PageWrite, ReadPhase, SourceRead
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.geometry.spans import Span
from kvferry.connector.geometry.token_sharding import ALL_TOKENS
from kvferry.connector.wire.step_plan import RankAddress
from kvferry.transport.channels import Copy, RecvChannel

K = LoadEventKind
GONE = Reason("peer_lost", "gone")
ADDRESS = RankAddress(0, 0, "host", 1, b"")


class Read:
    """A read, and how its copies begin and end."""

    def __init__(self, left: int = 0, fence: Fence = "pushed") -> None:
        anything: Any = SimpleNamespace()
        self.it = SourceRead(1, 7, anything, anything, ADDRESS, [(0.0, ReadPhase.WAITING)])
        self.it.tags = set(range(left))
        self.it.asked(left, fence, 0.0)

    def begin(self) -> LoadEvent:
        self.it.tags -= {max(self.it.tags, default=0)}
        return self.it.write_began(PageWrite(self.it, Copy(done=True), 1), 0.0)

    def end(self, failure: Reason | None = None) -> LoadEvent | None:
        return self.it.write_ended(next(iter(self.it.writes)), failure, 0.0)


def landed(fence: Fence = "pushed", *, granted: bool = True) -> Read:
    read = Read(1 if fence == "pushed" else 0, fence)
    if granted:
        assert read.it.take_grant(0.0) == PROGRESS
    read.begin()
    assert read.end() == LoadEvent(K.MOVED, 7) and read.it.landed
    return read


@pytest.mark.parametrize("fence", ["asked", "posted"])
def test_a_pulled_read_is_committed_by_its_fence(fence: Fence) -> None:
    read = landed(fence)
    assert read.it.answered(True, 0.0) is None, "not before it is asked"
    assert read.it.commit(0.0) is None
    failed = read.it.answered(False, 0.0)
    assert failed is not None and failed.kind is K.FAILED and failed.reason.kind == "expired"
    assert read.it.answered(True, 0.0) == LoadEvent(K.COMMITTED, 7)
    assert read.it.answered(True, 0.0) is None


def test_nothing_to_read() -> None:
    read = Read().it
    read.link = SimpleNamespace(slot_bytes=1)  # type: ignore[assignment]
    read.active_load = SimpleNamespace(load=None)  # type: ignore[assignment]
    assert (read.plan((), 0.0), read.commit(0.0)) == (LoadEvent(K.MOVED, 7), LoadEvent(K.COMMITTED, 7))


MIB = 1 << 20
UNBOUNDED = RecvChannel.few_bytes


@pytest.mark.parametrize(
    ("few", "slot", "step", "wanted"),
    [
        (UNBOUNDED, 8 * MIB, 0, 8 * MIB),  # a prompt that is computed, in whole slots
        (4 * MIB, 8 * MIB, 0, 4 * MIB),
        (4 * MIB, MIB, 0, MIB),
        (UNBOUNDED, 64 * MIB, 2048, 32 * MIB),  # an eighth of the layers of a step
        (UNBOUNDED, 8 * MIB, 2048, 8 * MIB),
        (4 * MIB, 16 * MIB, 2048, 8 * MIB),  # which takes several flows
        (4 * MIB, 16 * MIB, 512, 4 * MIB),
        (4 * MIB, 16 * MIB, 128, 2 * MIB),  # no longer than until an eighth of the layers is computed
    ],
)
def test_the_messages_that_d_asks_for(few: int, slot: int, step: int, wanted: int) -> None:
    region = SimpleNamespace(tile_tokens=1, content_bytes=512, shard=ALL_TOKENS)
    channel = SimpleNamespace(pulls=False, few_bytes=few)
    read = Read().it
    read.link = SimpleNamespace(  # type: ignore[assignment]
        slot_bytes=slot, channel=channel, theirs=SimpleNamespace(regions=(region,))
    )
    read.active_load = SimpleNamespace(load=SimpleNamespace(step_tokens=step, found=0))  # type: ignore[assignment]
    whole = PlannedSpan(Span(0, 0, 32, 0, 8, 0, 4096), 0, 0, 0)
    assert read.plan((whole,), 0.0) is None
    assert read.chunk_bytes == wanted and len(read.planned) == (4096 // step if step else 1)


def test_stopped_while_copies_write() -> None:
    read = Read(2)
    read.begin()
    read.begin()
    assert read.it.stop(0.0, 3.0) and not read.it.stop(0.0, 3.0)
    assert read.end() is None, "one copy still writes"
    assert read.end(GONE) == LoadEvent(K.DRAINED, 7)
    assert read.it.failed("data", "late") is None
    read = Read(2)
    assert read.it.stop(1.0, 3.0) and read.it.due == 4.0, "messages of it can come"
    read.it.left = 0
    assert read.it.due == float("inf")


CALLS = st.sampled_from(["grant", "begin", "end", "fail", "commit", "answer", "stop"])


@given(st.sampled_from(get_args(Fence)), st.integers(0, 3), st.lists(CALLS, max_size=30))
def test_nothing_is_drained_or_landed_while_a_copy_writes(fence: Fence, left: int, calls: list[str]) -> None:
    read, committed, stopped = Read(left, fence), 0, False
    for call in calls:
        event: LoadEvent | None = None
        match call:
            case "grant" if read.it.awaits_grant:
                event = read.it.take_grant(0.0)
            case "begin" if not (read.it.stopped or read.it.landed):
                event = read.begin()
            case "end" | "fail" if read.it.writes:
                event = read.end(GONE if call == "fail" else None)
            case "commit" if read.it.phase is ReadPhase.LANDED:
                event = read.it.commit(0.0)
            case "answer":
                event = read.it.answered(True, 0.0)
            case "stop":
                read.it.stop(0.0, 1.0)
        if event is not None and event.kind in (K.MOVED, K.DRAINED, K.COMMITTED):
            assert not read.it.writes
        committed += event is not None and event.kind is K.COMMITTED
        assert committed <= 1 and (committed == 1) == (read.it.phase is ReadPhase.COMMITTED)
        assert read.it.stopped or not stopped
        stopped = read.it.stopped


def test_a_burst_says_nothing_of_the_end() -> None:
    """Messages come many at once: what is left is foreseen once half of the last step's are there."""
    read = Read(8).it
    read.boxes, read.last_step, read.last_step_at = [SimpleNamespace()] * 10, 2, 1.0  # type: ignore[list-item]
    assert read.take_grant(0.0) == PROGRESS
    left = []
    for _ in range(6):
        read.tags.pop()
        left.append(read.seconds_left(4.0))
    assert left == [math.inf] * 3 + [3.0 * 4 / 3, 3.0 * 3 / 4, 3.0 * 2 / 5]
