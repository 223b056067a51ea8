"""Grants that P has posted: D reads without asking, and believes what it read only while the grant stands."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvferry.connector.decode_side import link
from kvferry.transport import grant_board
from tests.handover.scenario import (
    THEIRS,
    TOKENS,
    Gate,
    Pair,
    RankGroup,
    another_works,
    begin,
    breaks,
    ended,
    load_from,
    wipe,
)
from tests.support.inside import board_of, leases_of
from tests.support.ranks import Rank, grant, let_time_pass, wait


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    """With a link between them, so that what comes next finds P's board."""
    p, d = group.pair(plane="cma")
    another_works(p, d, "first")
    return p, d


def asked(p: Rank) -> Counter[str]:
    """Counts what D says to P from now on, by kind."""
    handle, counts = p.producer.handle, Counter[str]()

    def counted(identity: bytes, request: Any, *rest: Any) -> None:
        counts[type(request).__name__] += 1
        handle(identity, request, *rest)

    p.producer.handle = counted
    return counts


def posted(p: Rank, tokens: int = TOKENS) -> bytes:
    token = grant([p], "req-p", THEIRS[: -(-tokens // 16)], tokens)
    assert wait(lambda: (held := leases_of(p).get(token)) is not None and held.posted is not None)
    return token


def load(p: Rank, d: Rank, token: bytes, *, watch: bool = True) -> None:
    load_from(p, d, token, watch=watch)


def test_nothing_is_asked_and_nothing_committed(p: Rank, d: Rank) -> None:
    counts = asked(p)
    load(p, d, posted(p), watch=False)
    assert ended(p, d) and set(counts) <= {"Release", "Renew"}, counts
    assert not board_of(p).posted, "no lease is left on the board"


@pytest.mark.parametrize("when", ["while it reads", "before it reads"])
def test_what_was_read_under_a_grant_that_fell_is_not_loaded(p: Rank, d: Rank, when: str) -> None:
    token, reads = posted(p), d.consumer.reads
    if when == "while it reads":
        gate = Gate(reads, "collect", lambda now: iter(()))
        load(p, d, token)
        assert wait(lambda: any(read.note for read in list(reads.by_number.values())), [d]), "it began to"
    let_time_pass(p, 10_000)
    assert wait(lambda: "req-p" in p.sent, [p])
    wipe(p)  # another prompt's
    if when == "while it reads":
        gate.open()
    else:
        load(p, d, token)
    assert not ended(p, d)


@pytest.mark.parametrize("without", ["room", "the board"])
def test_a_lease_without_a_note_on_the_board_is_asked_for(
    p: Rank, d: Rank, group: RankGroup, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    if without == "room":
        monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    else:
        monkeypatch.setattr(link, "BoardReader", breaks)
        d = group.rank(plane="cma", engine_id="engine-e")
    counts = asked(p)
    begin(p, d)
    assert ended(p, d) and counts["Ask"] == counts["Commit"] == 1


def test_a_transfer_thread_that_ends_leaves_no_note(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its end goes wrong: the engine is then told that all its blocks are its own."""
    (theirs,) = d.consumer.links
    note = theirs.board.find(posted(p))
    assert note is not None and note.is_current
    monkeypatch.setattr(p.consumer, "close", breaks)
    p.thread.close(300)
    assert not note.is_current
    p.poll()
    assert "req-p" in p.sent
