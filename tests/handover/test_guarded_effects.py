"""An effect that raises loses no other: a load is reported once, its read is cancelled, its lease is released."""

from __future__ import annotations

from typing import Any

import pytest

from tests.handover.scenario import PATIENT, Pair, RankGroup, another_works, begin, breaks, ended, is_wiped, wipe
from tests.support.inside import sessions_of
from tests.support.ranks import Rank, wait

Patch = pytest.MonkeyPatch


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return group.pair(plane="shm", **PATIENT)


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_chunks_that_cannot_be_announced(group: RankGroup, monkeypatch: Patch, plane: str) -> None:
    """Some chunks are announced already: P must be told to stop, and the channel must write D's pages no more."""
    p, d = group.pair(plane=plane, layers=8, content=2048, blocks=18, **PATIENT)
    reads = d.consumer.reads
    expect = reads.expect

    def half(read: Any) -> None:
        expect(read)
        breaks()

    monkeypatch.setattr(reads, "expect", half)
    begin(p, d)
    assert not ended(p, d)
    wipe(d)
    assert wait(lambda: not reads.by_number, [p, d]), "the read is forgotten"
    assert is_wiped(d)
    monkeypatch.undo()
    another_works(p, d)


@pytest.mark.parametrize("ok", [True, False])
def test_a_count_that_breaks(p: Rank, d: Rank, monkeypatch: Patch, ok: bool) -> None:
    if not ok:
        monkeypatch.setattr(d.consumer.reads, "check_grant", breaks)
    stats, name = d.context.stats, "finished" if ok else "failed"
    real, calls = getattr(stats, name), []

    def breaks_once(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            breaks()
        real(*args, **kwargs)

    monkeypatch.setattr(stats, name, breaks_once)
    begin(p, d)
    assert ended(p, d) is ok and calls
    assert wait(lambda: not d.consumer.reads.by_number and not d.consumer.renewals.kept, [p, d])


def test_a_session_whose_end_breaks_keeps_no_other(group: RankGroup, pair: Pair, monkeypatch: Patch) -> None:
    p, _ = pair
    peers, before = [group.raw(*pair) for _ in range(2)], len(sessions_of(p))
    monkeypatch.setattr(list(sessions_of(p).values())[-2].channel, "close", breaks)
    for peer in peers:
        peer.connection.close()
    assert wait(lambda: len(sessions_of(p)) == before - 2, pair)


def test_copies_that_cannot_wait_for_the_engine(p: Rank, d: Rank, monkeypatch: Patch) -> None:
    copies = d.context.caches.copies
    monkeypatch.setattr(copies, "record_event", object)
    monkeypatch.setattr(copies, "wait_event", breaks)
    begin(p, d)
    assert not ended(p, d)
