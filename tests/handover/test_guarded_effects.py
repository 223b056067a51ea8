"""An effect that raises loses no other: a load is reported once, its read is cancelled, its lease is released."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.wire import messages
from tests.handover.gates import PATIENT, halves
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works
from tests.handover.rank_group import RankGroup
from tests.support.ranks import SOON, Rank, grant, load_plan, peer, wait


def two(group: RankGroup, plane: str, **form: Any) -> tuple[Rank, Rank]:
    settings = Settings(plane=plane, **PATIENT)
    p, d = group.rank(settings=settings, **form), group.rank(settings=settings, engine_id="engine-d", **form)
    p.fill(THEIRS, TOKENS)
    return p, d


def begin(p: Rank, d: Rank) -> None:
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))


def breaks(*_: Any, **__: Any) -> Any:
    raise OSError(24, "planted")


@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_chunks_that_cannot_be_announced(group: RankGroup, monkeypatch: pytest.MonkeyPatch, plane: str) -> None:
    """Some chunks are announced already: P must be told to stop, and the channel must write D's pages no more."""
    p, d = two(group, plane, layers=8, content=8192)
    receiver = halves(d)[1].reads
    expect = receiver.expect

    def half(read: Any) -> None:
        expect(read)
        breaks()

    monkeypatch.setattr(receiver, "expect", half)
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert d.failed == {"req-d"}
    for name in d.layers:
        d.caches[name].fill_(-7)  # the engine has the blocks back
    assert wait(lambda: not receiver.by_number, [p, d]), "P accounts for the messages, and the read is forgotten"
    assert all((d.caches[name] == -7).all() for name in d.layers)
    monkeypatch.undo()
    another_works(p, d)


@pytest.mark.parametrize("ok", [True, False])
def test_a_count_that_breaks(group: RankGroup, monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    p, d = two(group, "shm")
    stats, consumer = d.context.stats, halves(d)[1]
    if not ok:
        monkeypatch.setattr(consumer.reads, "check_grant", breaks)
    name = "finished" if ok else "failed"
    real, calls = getattr(stats, name), []

    def breaks_once(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            breaks()
        real(*args, **kwargs)

    monkeypatch.setattr(stats, name, breaks_once)
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert (d.failed == set()) == ok and calls
    assert wait(lambda: not consumer.reads.by_number and not consumer.leases.kept, [p, d])


def test_copies_that_cannot_wait_for_the_engine(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = two(group, "shm")
    copies = d.context.caches.copies
    monkeypatch.setattr(copies, "record_event", object)
    monkeypatch.setattr(copies, "wait_event", breaks)
    begin(p, d)
    assert wait(lambda: d.received == d.failed == {"req-d"} and p.sent == {"req-p"}, [p, d]), "P has its blocks back"


def test_a_load_that_breaks_before_it_begins_releases_its_lease(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = two(group, "shm")
    monkeypatch.setattr(halves(d)[1].links, "source_addresses", breaks)
    begin(p, d)
    assert wait(lambda: d.received == d.failed == {"req-d"} and p.sent == {"req-p"}, [p, d]), "P has its blocks back"
    monkeypatch.undo()
    another_works(p, d)


def test_a_read_whose_last_message_is_bad_does_not_wait_for_p(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message of it can arrive any more, so it is forgotten also where P never answers the Cancel."""
    p, d = two(group, "shm")
    consumer = halves(d)[1]
    reply = consumer.reads.reply

    def all_but_stopped(link: Any, message: Any, now: float) -> Any:
        return () if isinstance(message, messages.Stopped) else reply(link, message, now)

    monkeypatch.setattr(consumer.reads, "reply", all_but_stopped)
    monkeypatch.setattr(type(d.context.caches), "unpack", breaks)
    begin(p, d)
    assert wait(lambda: d.received == d.failed == {"req-d"}, [p, d])
    assert wait(lambda: not consumer.reads.by_number, [p, d], SOON)


def test_encrypted_kv_bytes_in_full_slots(group: RankGroup) -> None:
    """CURVE makes each frame longer, and libzmq compares the longer frame with the largest one that D takes."""
    settings = Settings(plane="zmq", slot_bytes=128 << 10)
    p = group.rank(settings=settings, layers=8, content=8192)
    d = group.rank(settings=settings, layers=8, content=8192, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    begin(p, d)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed and d.plane == "zmq" and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
