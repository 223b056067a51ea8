"""Leases that nobody asks for, that end too early, or that a second D takes over: nothing stale is loaded."""

from __future__ import annotations

import errno
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.prefill_side import serve
from kvferry.connector.wire.metrics import no_figures
from kvferry.connector.wire.step_plan import StepPlan
from kvferry.transport.wake import RateLimitedLog
from tests.handover.scenario import (
    OURS,
    PATIENT,
    SMALL,
    THEIRS,
    TOKENS,
    Gate,
    RankGroup,
    begin,
    ended,
    has_all,
    is_wiped,
    leased,
    load_from,
)
from tests.handover.streamed import all_ended
from tests.support.clocks import put_forward
from tests.support.inside import sends_of, sessions_of
from tests.support.ranks import grant, let_time_pass, load_plan, on_its_thread, peer, reason_of, wait
from tests.support.timed import Timed


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
    assert p.figures()["leases"] == {"reset": 1}


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
    assert p.figures()["leases"] == {"released": 1}


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
    on_its_thread(d, lambda: loads.give(job, filter(None, [reads.commit(read, 0.0) for read in job.reads]), 0.0))
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
    assert wait(lambda: "release not sent" in (d.context.stats.take() or no_figures())["dropped"], [d])
    assert wait(lambda: "release was not sent" in caplog.text)  # the line follows the figure
    (line,) = [line for line in caplog.messages if "release was not sent" in line]
    assert "planted" in line
    let_time_pass(p[0], 700)
    assert wait(lambda: p[0].sent == {"req-p"}, [*p, d]), "it expires"
