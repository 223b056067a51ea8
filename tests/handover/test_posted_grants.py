"""Grants that P has posted: D reads without asking, and believes what it read only while the grant stands."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import link
from kvferry.connector.wire.step_plan import LeaseGrant, StepPlan, pack_ids
from kvferry.transport import grant_board
from tests.handover.gates import halves
from tests.handover.opening import OURS, THEIRS, TOKENS, begin
from tests.handover.rank_group import RankGroup
from tests.support.inside import board_of, leases_of
from tests.support.ranks import Rank, grant, let_time_pass, load_plan, peer, wait

Pair = tuple[Rank, Rank]


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    """With a link between them, so that what comes next finds P's board."""
    settings = Settings(plane="cma")
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    begin(p, d, "first")
    assert wait(lambda: "first-d" in d.received and "first-p" in p.sent, [p, d]) and not d.failed
    return p, d


def asked(p: Rank) -> Counter[str]:
    """Counts what D says to P from now on, by kind."""
    producer, counts = halves(p)[0], Counter[str]()
    serve = producer.handle

    def counted(identity: bytes, request: Any, *rest: Any) -> None:
        counts[type(request).__name__] += 1
        serve(identity, request, *rest)

    producer.handle = counted
    return counts


def posted(p: Rank, token: bytes) -> None:
    assert wait(lambda: (held := leases_of(p).get(token)) is not None and held.posted is not None)


def test_nothing_is_asked_and_nothing_committed(pair: Pair) -> None:
    p, d = pair
    counts = asked(p)
    token = grant([p], "req-p", THEIRS, TOKENS)
    posted(p, token)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, watch=False))
    assert wait(lambda: "req-d" in d.received and "req-p" in p.sent, [p, d])
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    assert set(counts) <= {"Release", "Renew"}, counts


@pytest.mark.parametrize("when", ["while it reads", "before it reads"])
def test_what_was_read_under_a_grant_that_fell_is_not_loaded(pair: Pair, when: str) -> None:
    p, d = pair
    token = grant([p], "req-p", THEIRS, TOKENS)
    posted(p, token)
    reads = halves(d)[1].reads
    collect, held = reads.collect, []

    def shut(now: float) -> Any:
        held.append(now)
        return iter(())

    if when == "while it reads":
        reads.collect = shut
    else:
        let_time_pass(p, 10_000)
        assert wait(lambda: "req-p" in p.sent, [p])
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    if when == "while it reads":
        assert wait(lambda: any(read.note for read in reads.by_number.values()), [d]), "it began to"
        let_time_pass(p, 10_000)
        assert wait(lambda: "req-p" in p.sent, [p])
        for name in p.layers:
            p.caches[name].fill_(-7)  # another prompt's
        reads.collect = collect
    assert wait(lambda: d.failed == {"req-d"}, [p, d])


def test_a_lease_without_room_on_the_board_is_asked_for(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pair
    monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    counts = asked(p)
    begin(p, d)
    assert wait(lambda: "req-d" in d.received and "req-p" in p.sent, [p, d])
    assert not d.failed and counts["Ask"] == counts["Commit"] == 1


def test_a_posted_grant_of_another_prompt_is_not_loaded(pair: Pair) -> None:
    p, d = pair
    token = b"t" * 16
    p.worker.post(StepPlan(leases=(LeaseGrant("req-p", token, TOKENS, (pack_ids(THEIRS),), prompt="theirs"),)))
    posted(p, token)
    plan = load_plan("req-d", token, peer([p]), OURS, 0, TOKENS)
    (load,) = plan.loads
    other = type(load)(load.request_id, load.token, load.peer, load.block_ids, load.tokens, prompt="ours")
    d.worker.post(StepPlan(consumer=plan.consumer, keeps=plan.keeps, loads=(other,)))
    assert wait(lambda: d.failed == {"req-d"}, [p, d])


def test_more_tokens_than_the_grant_has_are_asked_for_and_denied(pair: Pair) -> None:
    p, d = pair
    counts = asked(p)
    token = grant([p], "req-p", THEIRS[:6], 90)
    posted(p, token)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    assert counts["Ask"] == 1


def test_no_lease_is_left_on_the_board(pair: Pair) -> None:
    p, d = pair
    for number in range(20):
        token = grant([p], f"p{number}", THEIRS, TOKENS)
        d.worker.post(load_plan(f"d{number}", token, peer([p]), OURS, 0, TOKENS))
        assert wait(lambda n=number: f"d{n}" in d.received and f"p{n}" in p.sent, [p, d])
    assert not d.failed and not board_of(p).posted


def test_without_the_board_it_asks(pair: Pair, group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, _ = pair

    def refused(*args: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(link, "BoardReader", refused)
    d = group.rank(settings=Settings(plane="cma"), engine_id="engine-e")
    counts = asked(p)
    begin(p, d)
    assert wait(lambda: "req-d" in d.received and "req-p" in p.sent, [p, d])
    assert not d.failed and counts["Ask"] == counts["Commit"] == 1


def test_a_transfer_thread_that_ends_leaves_no_note(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its end goes wrong: the engine is then told that all its blocks are its own."""
    p, d = pair
    token = grant([p], "req-p", THEIRS, TOKENS)
    posted(p, token)
    (theirs,) = halves(d)[1].links
    note = theirs.board.find(token)
    assert note is not None and note.is_current

    def breaks(now: float) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(halves(p)[1], "close", breaks)
    p.close()
    assert not note.is_current
    p.poll()
    assert "req-p" in p.sent


def test_a_load_that_was_waited_for_is_reported_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where something breaks after its report: the engine dies of a second one. The copy is waited for, as on a
    GPU, so that the hand-over ends in the turn that it began in."""
    p, d = pair
    consumer, reported = halves(d)[1], []
    reads = consumer.reads
    begin_pull, tell, close = reads.begin_pull, d.thread.results.finished, consumer.leases.release

    def copied(read: Any, *args: Any) -> Any:
        event = begin_pull(read, *args)
        read.link.plane.progress()
        assert next(reversed(reads.writes)).copy.done
        return event

    def broken(*args: Any) -> None:
        close(*args)
        raise OSError(24, "Too many open files")

    def noted(finished: Any) -> None:
        reported.append((finished.load.request_id, finished.ok))
        tell(finished)

    for owner, name, value in (
        (reads, "begin_pull", copied), (d.thread.results, "finished", noted),
        (consumer.leases, "release", broken),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, value)
    token = grant([p], "req-p", THEIRS, TOKENS)
    posted(p, token)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, watch=False))
    assert wait(lambda: "req-d" in d.received, [p, d])
    assert not wait(lambda: len(reported) > 1, [p, d], 0.2)
    assert reported == [("req-d", True)] and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
