"""Leases: P's pages are read under one only, posted or asked for, whatever overtakes what."""

from __future__ import annotations

import errno
import secrets
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.decode_side import link
from kvferry.connector.prefill_side import serve
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import StepPlan
from kvferry.transport import grant_board
from kvferry.transport.limited_log import RateLimitedLog
from tests.handover.scenario import (
    OURS,
    PATIENT,
    SMALL,
    THEIRS,
    TOKENS,
    Gate,
    Pair,
    RankGroup,
    another_works,
    begin,
    breaks,
    ended,
    has_all,
    is_wiped,
    lease_plan,
    leased,
    load_from,
    wipe,
)
from tests.handover.streamed import all_ended
from tests.support.inside import board_of, leases_of, sends_of, sessions_of
from tests.support.ranks import (
    Rank,
    Timed,
    grant,
    let_time_pass,
    load_plan,
    on_its_thread,
    peer,
    put_forward,
    reason_of,
    wait,
)


@pytest.mark.parametrize("plane", ["cma", "tcp"])
def test_a_lease_that_p_s_engine_ends_is_read_no_more(group: RankGroup, plane: str) -> None:
    """All of the read has arrived at D, which has not looked at the lease again; or P has sent a part of it."""
    p, d = group.pair(plane=plane, **PATIENT)
    reads = d.consumer.reads
    gates = [Gate(reads, "collect", lambda now: iter(())), Gate(p.producer, "pump", lambda now: False)]
    begin(p, d)
    assert wait(lambda: bool(sends_of(p).turns or any(r.note for r in list(reads.by_number.values()))))
    p.worker.post(StepPlan(ends_leases=True))
    assert wait(lambda: p.sent == {"req-p"}, [p]), "its blocks are the engine's"
    for gate in gates:
        gate.open()
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])
    assert p.lease_ends() == {"reset": 1}


def test_the_chunks_of_a_read_renew_its_lease(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes late in the time of the lease, and D renews nothing."""
    monkeypatch.setattr(serve, "PACKS_PER_TURN", 1)
    term = {"lease_seconds": 1000.0, "lease_cap_seconds": 1e6}
    p, d = group.pair(plane="shm", layers=16, **SMALL, **PATIENT, of_p=term)
    pump, moves = p.producer.pump, 0

    def slowly(now: float) -> bool:
        nonlocal moves
        (read,) = sends_of(p).turns or (None,)
        before = read and (read.begun, read.sent)
        more: bool = pump(now)
        if read and before != (read.begun, read.sent):
            moves += 1
            put_forward(p.thread, 800.0 * moves)
        return more

    p.producer.pump = slowly
    begin(p, d)
    assert ended(p, d) and moves > 4
    assert p.lease_ends() == {"released": 1}


def test_a_late_ask_is_refused(group: RankGroup) -> None:
    """The lease that nobody wanted has expired."""
    p, d = group.pair(of_p={"lease_seconds": 0.5})
    begun = time.monotonic()
    token = grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: p.sent == {"req-p"}, [p]) and time.monotonic() - begun > 0.25
    load_from(p, d, token)
    assert not ended(p, d) and reason_of(d) == "expired"
    assert is_wiped(d, -1)


def test_lines_of_expired_leases_beyond_a_rate_have_the_level_debug(
    group: RankGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "FAILED_LINES", 2)
    monkeypatch.setattr(serve, "RateLimitedLog", partial(RateLimitedLog, clock=lambda: 0.0))
    caplog.set_level("DEBUG", "vllm.kvferry")
    p = group.rank(engine_id="engine-p")
    for name in "abcd":
        leased(p, name)
    let_time_pass(p, 10_000)

    def levels() -> list[str]:
        return [record.levelname for record in caplog.records if " expired: " in record.getMessage()]

    assert wait(lambda: len(levels()) == 4 and len(p.sent) == 4, [p])
    assert levels() == ["WARNING"] * 2 + ["DEBUG"] * 2


def test_the_commit_is_a_fence(group: RankGroup) -> None:
    """All bytes were read, but the lease ended before the commit: P may have reused the blocks, nothing is loaded."""
    p, d = group.pair(plane="cma", of_p={"lease_cap_seconds": 30})
    loads, reads = d.consumer.loads, d.consumer.reads
    gate = Gate(reads, "commit", lambda read, now: None)
    begin(p, d)
    assert wait(lambda: gate.calls > 0, [p, d])
    let_time_pass(p, 60)
    assert wait(lambda: p.sent == {"req-p"}, [p, d])
    gate.open()
    (job,) = loads.running
    (read,) = job.reads
    on_its_thread(d, lambda: (reads.commit(read, 0.0), loads.go_on(job, 0.0)))
    assert not ended(p, d) and has_all(d), "the bytes were right: only the commit refused them"


def test_pages_are_not_read_by_a_socket_once_their_lease_is_over(group: RankGroup) -> None:
    p, d = group.pair(plane="tcp", lease_cap_seconds=30, content=8192, layers=2, blocks=18)
    plane, pushes = d.context.plane("tcp"), sends_of(p)
    assert plane is not None
    real = plane.progress
    stuck = Gate(plane, "progress", lambda: real() if not any(push.reading for push in list(pushes.turns)) else False)
    begin(p, d)
    assert wait(lambda: any(push.reading for push in list(pushes.turns)), [d]), "it must be caught in the middle"
    let_time_pass(p, 60)
    (session,) = sessions_of(p).values()
    assert wait(lambda: p.sent == {"req-p"}, [p])
    assert session.channel.reading is None
    stuck.open()
    assert not ended(p, d)


def test_no_stale_load_in_a_race_with_reuse(group: RankGroup) -> None:
    """P's blocks are overwritten the moment it may: what D reports as loaded is never what they hold then."""
    p, d = group.pair(content=64, of_p={"slot_bytes": 64 << 10})
    loaded, n, term = 0, 0, 0.02
    while n < 40 or not 5 < loaded < n - 5:  # the race means something only if it is lost at times and won at times
        n += 1
        assert n < 400
        p.context.settings = Timed(lease_seconds=term, lease_cap_seconds=term, slot_bytes=64 << 10)
        p.fill(THEIRS, TOKENS)
        token = grant([p], f"{n}-p", THEIRS, TOKENS)
        time.sleep(n % 8 * 0.004)
        d.worker.post(load_plan(f"{n}-d", token, peer([p]), OURS, 0, TOKENS))
        while f"{n}-d" not in d.received or f"{n}-p" not in p.sent:
            d.poll(), p.poll()
            if f"{n}-p" in p.sent:
                for name in p.layers:
                    p.caches[name][THEIRS] = -9
        won = ended(p, d, f"{n}")
        loaded += won
        term = min(10.0, max(0.001, term * (0.7 if won else 1.5)))


def test_a_release_that_cannot_be_sent_costs_nothing_else(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The load is reported, the other P rank frees its blocks, and the lease ends by itself."""
    p = [group.rank(tp_rank=rank, tp_size=2, **PATIENT) for rank in (0, 1)]
    d = group.rank(engine_id="engine-d")
    for rank in p:
        rank.fill(THEIRS, TOKENS)
    token, keeper = grant(p, "req-p", THEIRS, TOKENS), d.consumer.renewals
    real, asked = keeper.links.get, []

    def link(address: Any, now: float) -> Any:
        asked.append(address.tp_rank)
        if address.tp_rank == 0:
            raise OSError(errno.EMFILE, "planted")
        return real(address, now)

    monkeypatch.setattr(keeper, "links", SimpleNamespace(get=link))
    with caplog.at_level("WARNING", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", token, peer(p), OURS, 0, TOKENS))
        assert wait(lambda: d.received == {"req-d"} and p[1].sent == {"req-p"}, [*p, d])
    assert not d.failed and not p[0].sent and asked[-2:] == [0, 1] and not keeper.kept
    assert wait(lambda: "release not sent" in d.counts("num_dropped_messages"), [d])
    assert wait(lambda: "release was not sent" in caplog.text)  # the line follows the figure
    (line,) = [line for line in caplog.messages if "release was not sent" in line]
    assert "planted" in line
    let_time_pass(p[0], 700)
    assert wait(lambda: p[0].sent == {"req-p"}, [*p, d]), "it expires"


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
    assert wait(lambda: (held := leases_of(p).get(token)) is not None and held.blocks.posted is not None)
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


class Late:
    """Replies of this ``kind`` reach D's hand-overs only after ``come``."""

    def __init__(self, d: Rank, kind: type) -> None:
        self._d, self._consumer, self._kind = d, d.consumer, kind
        self._real = self._consumer.reads.reply
        self.held: list[tuple[Any, ...]] = []
        self._consumer.reads.reply = self._reply

    def _reply(self, link: Any, reply: Any, now: float) -> Any:
        if not isinstance(reply, self._kind):
            return self._real(link, reply, now)
        self.held.append((link, reply, now))
        return None

    def come(self) -> None:
        on_its_thread(self._d, self._come)

    def _come(self) -> None:
        self._consumer.reads.reply = self._real
        while self.held:
            *reply, now = self.held.pop(0)
            if (read := self._real(*reply, now)) is not None:
                self._consumer.loads.go_on(read.fetch, now)


def test_zeros_in_the_place_of_pages_that_p_may_not_read_any_more(group: RankGroup) -> None:
    """P's cap comes while a socket reads the last message: what D gets of the rest is no KV, whatever it hears when."""
    p, d = group.pair(
        plane="tcp",
        slot_bytes=64 << 20,
        staging_bytes=128 << 20,
        lease_cap_seconds=30,
        content=8192,
        layers=1,
        blocks=18,
    )
    plane, pushes = d.context.plane("tcp"), sends_of(p)
    assert plane is not None
    real = plane.progress
    # From P's first byte on D reads none: there is one message, which is more than sockets hold.
    stuck = Gate(plane, "progress", lambda: False if pushes.turns else real())
    late = Late(d, messages.Deny)
    begin(p, d)
    assert wait(lambda: any(push.reading and push.all_begun for push in list(pushes.turns)), [d]), "in the last message"
    let_time_pass(p, 60)
    assert wait(lambda: p.sent == {"req-p"}, [p])
    wipe(p)  # another prompt's
    stuck.open()
    wait(lambda: d.received == {"req-d"}, [p, d], 1.0)
    late.come()
    assert not ended(p, d)


@pytest.mark.parametrize("plane", ["shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_what_was_pushed_is_loaded_only_with_its_grant(group: RankGroup, plane: str) -> None:
    """The grant says whose prompt the chunks are: they are not loaded before it, nor after one of another prompt."""
    p, d = group.pair(plane=plane, **PATIENT)

    def all_here() -> bool:
        """Every chunk lies in D's pages."""
        return all(read.landed for job in list(d.consumer.loads.running) for read in job.reads)

    for wanted in ("a" * 32, "b" * 32):
        token, late, name = secrets.token_bytes(16), Late(d, messages.Grant), wanted[0]
        p.worker.post(lease_plan(token, name, digest="a" * 32))
        plan = load_plan(f"{name}-d", token, peer([p]), OURS, 0, TOKENS, watch=False)
        d.worker.post(replace(plan, loads=(replace(plan.loads[0], digest=wanted),)))
        assert wait(lambda late=late: all_here() and bool(late.held), [p, d])
        assert not wait(lambda name=name: f"{name}-d" in d.received, [p, d], 0.1)
        late.come()
        d.thread.wake()
        assert wait(lambda name=name: f"{name}-d" in d.received, [p, d])
    assert d.failed == {"b-d"} and reason_of(d) == "other_prompt"
