"""Peers that die, stop, restart, go silent or do not fit; leases that end too early. Each ends in bounded time."""

from __future__ import annotations

import secrets
import signal
import socket
import time

import pytest
import torch
from engines import free_port
from rank_process import RemoteRank, remote_peer
from ranks import Rank, grant, let_time_pass, load_plan, no_failed_link, peer, renew_after, wait
from stage import Stage
from test_aborts import Gate, another_works, halves

from kvferry.connector import protocol
from kvferry.connector.config import Settings
from kvferry.connector.errors import TransportError
from kvferry.connector.stepplan import PeerEngine, RankAddress, StepPlan, Watch
from kvferry.transport import framing
from kvferry.transport.control import Connection

TOKENS, THEIRS, OURS = 100, [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]
QUICK = {"transfer_timeout_seconds": 3.0, "handshake_timeout_seconds": 6.0, "lease_seconds": 4.0}
SOON = 20.0
"""Seconds: long on a loaded machine, shorter than what would end a hand-over without these settings."""
PLANES = ["cma", "shm", "tcp", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)]


def reason_of(rank: Rank) -> str:
    """The kind of the one failure that the rank counted."""
    assert rank.worker.site is not None
    (kind,) = rank.worker.site.stats.take()["failed"]
    return str(kind)


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_lease_that_nobody_wants_expires(stage: Stage) -> None:
    p = stage.rank(settings=Settings(lease_seconds=1.0))
    p.fill(THEIRS, TOKENS)
    begun = time.monotonic()
    grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: p.sent == {"req-p"}, [p], SOON)
    assert time.monotonic() - begun > 0.5


def test_a_late_ask_is_refused(stage: Stage) -> None:
    p, d = stage.rank(settings=Settings(lease_seconds=0.1)), stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    assert wait(lambda: p.sent == {"req-p"}, [p], SOON)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    assert reason_of(d) == "expired"
    assert all((d.caches[name] == -1).all() for name in d.layers)


def test_renewal_keeps_a_lease_until_the_cap(stage: Stage) -> None:
    p = stage.rank(settings=Settings(lease_seconds=600.0, lease_cap_seconds=1200.0))
    d = stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(StepPlan(consumer=b"c" * 16, watches=(Watch("req-d", token, peer([p]), False),)))
    for seconds in (500, 1000):
        renew_after(p, d, seconds)
        assert not wait(lambda: bool(p.sent), [p, d], 0.1), "D renews from the moment it has the request"
    let_time_pass(p, 1300)
    assert wait(lambda: bool(p.sent), [p, d]), "but not for ever"


def test_the_commit_is_a_fence(stage: Stage) -> None:
    """All bytes were read, but the lease ended before the commit: P may have reused the blocks, nothing is loaded."""
    p = stage.rank(settings=Settings(lease_cap_seconds=30))
    d = stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    gate = Gate(halves(d)[1], "_commit", lambda read, now: None)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: gate.calls > 0, [p, d], SOON)
    let_time_pass(p, 60)
    assert wait(lambda: p.sent == {"req-p"}, [p, d], SOON)
    gate.open()
    (job,) = halves(d)[1]._jobs.values()
    for read in job.reads:
        halves(d)[1]._commit(read, time.monotonic())
    assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS)), "the bytes were right: only the commit refused them"


def test_pages_are_not_read_by_a_socket_once_their_lease_is_over(stage: Stage) -> None:
    settings = Settings(plane="tcp", lease_cap_seconds=30)
    form = {"settings": settings, "content": 8192, "layers": 8}
    p, d = stage.rank(**form), stage.rank(engine_id="engine-d", **form)
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    plane, pushes = d.worker.site.plane("tcp"), halves(p)[0]._pushes
    real = plane.progress
    stuck = Gate(plane, "progress", lambda: real() if not any(push.reading for push in pushes._pushes) else False)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: any(push.reading for push in list(pushes._pushes)), [d], SOON), (
        "it must be caught in the middle"
    )
    let_time_pass(p, 60)
    (session,) = halves(p)[0]._sessions._sessions.values()
    assert wait(lambda: p.sent == {"req-p"}, [p])
    assert session.channel.reading is None
    stuck.open()
    assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)


def test_no_stale_load_in_a_race_with_reuse(stage: Stage) -> None:
    """P's blocks are overwritten the moment it may: what D reports as loaded is never what they hold then."""
    p = stage.rank(settings=Settings(slot_bytes=64 << 10), content=64)
    d = stage.rank(engine_id="engine-d", content=64)
    loaded, n, term = 0, 0, 0.02
    while n < 40 or not 5 < loaded < n - 5:  # the race means something only if it is lost at times and won at times
        n += 1
        assert n < 400 and p.worker.site is not None
        p.worker.site.settings = Settings(lease_seconds=term, lease_cap_seconds=term, slot_bytes=64 << 10)
        p.fill(THEIRS, TOKENS)
        token = grant([p], f"p{n}", THEIRS, TOKENS)
        time.sleep(n % 8 * 0.004)
        d.worker.post(load_plan(f"d{n}", token, peer([p]), OURS, 0, TOKENS))
        while f"d{n}" not in d.received or f"p{n}" not in p.sent:
            d.poll()
            p.poll()
            if f"p{n}" in p.sent:
                for name in p.layers:
                    p.caches[name][THEIRS] = -9
        if f"d{n}" not in d.failed:
            loaded += 1
            assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
        term = min(10.0, max(0.001, term * (1.5 if f"d{n}" in d.failed else 0.7)))


def test_a_second_consumer_may_take_over(stage: Stage) -> None:
    p, d1, d2 = stage.rank(), stage.rank(engine_id="d1"), stage.rank(engine_id="d2")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    gate = Gate(halves(d1)[1], "_collect", lambda now: False)
    d1.worker.post(load_plan("r1", token, peer([p]), OURS, 0, TOKENS, consumer=b"1" * 16))
    assert wait(lambda: gate.calls > 3, [p, d1, d2])
    d2.worker.post(load_plan("r2", token, peer([p]), OURS, 0, TOKENS, consumer=b"2" * 16))
    assert wait(lambda: d2.received == {"r2"} and p.sent == {"req-p"}, [p, d1, d2])
    assert not d2.failed
    gate.open()
    assert wait(lambda: d1.received == {"r1"}, [p, d1])
    assert d1.failed == {"r1"}, "the lease ended with the other consumer's release"


# --- peers that go away ---------------------------------------------------------------------------------------------


def wide(stage: Stage, plane: str, **settings: float) -> tuple[dict[str, object], Settings]:
    """A hand-over large enough to be caught in the middle, and the same settings for both sides."""
    values = {"plane": plane, "slot_bytes": 64 << 10, "staging_bytes": 1 << 20, **QUICK, **settings}
    return {"settings": values, "content": 512, "layers": 16}, Settings(**values)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("when", ["idle", "in flight"])
def test_p_is_killed(stage: Stage, plane: str, when: str) -> None:
    form, settings = wide(stage, plane)
    p = stage.process(**form)
    d = stage.rank(settings=settings, content=512, layers=16, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    warm_up(p, d)
    token = secrets.token_bytes(16)
    p.grant("req-p", THEIRS, TOKENS, token)
    gate = Gate(halves(d)[1], "_collect", lambda now: False) if when == "in flight" else None
    if when == "idle":
        p.signal(signal.SIGKILL)
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    if gate is not None:
        assert wait(lambda: gate.calls > 3, [d])
        p.signal(signal.SIGKILL)
        time.sleep(0.1)
        gate.open()
    assert wait(lambda: d.received >= {"req-d"}, [d], SOON)
    assert "req-d" in d.failed
    new = stage.process(**form)
    new.fill(THEIRS, TOKENS)
    warm_up(new, d, "after")


def warm_up(p: RemoteRank, d: Rank, name: str = "warm") -> None:
    """Whole hand-overs from a process until one succeeds: time-outs as short as here may strike a loaded machine, and
    what is left of an earlier fault may be noticed late."""
    for number in range(10):
        assert wait(lambda: no_failed_link(d))
        token = secrets.token_bytes(16)
        p.grant(f"{name}{number}-p", THEIRS, TOKENS, token)
        d.worker.post(load_plan(f"{name}{number}-d", token, remote_peer([p]), OURS, 0, TOKENS))
        assert wait(lambda number=number: f"{name}{number}-d" in d.received, [d])  # type: ignore[misc]
        if f"{name}{number}-d" not in d.failed:
            break
    assert f"{name}{number}-d" not in d.failed
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_a_p_that_stops_is_read_all_the_same(stage: Stage) -> None:
    """Over cma D needs P for nothing once the grant is posted: its pages are what they were."""
    form, settings = wide(stage, "cma")
    p = stage.process(**form)
    d = stage.rank(settings=settings, content=512, layers=16, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    warm_up(p, d)
    token = secrets.token_bytes(16)
    p.grant("req-p", THEIRS, TOKENS, token)
    (link,) = halves(d)[1]._links.values()
    assert link.board is not None and wait(lambda: link.board.find(token) is not None, [d])
    p.signal(signal.SIGSTOP)
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.received, [d], SOON)
    assert "req-d" not in d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    p.signal(signal.SIGCONT)
    assert wait(lambda: "req-p" in p.sent(), [d], SOON)


@pytest.mark.parametrize("plane", PLANES[1:])  # over cma D need not wait for it
def test_p_stops_and_goes_on(stage: Stage, plane: str) -> None:
    form, settings = wide(stage, plane)
    p = stage.process(**form)
    d = stage.rank(settings=settings, content=512, layers=16, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    warm_up(p, d)
    token = secrets.token_bytes(16)
    p.grant("req-p", THEIRS, TOKENS, token)
    p.signal(signal.SIGSTOP)
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.received, [d], SOON)
    assert "req-d" in d.failed
    for name in d.layers:
        d.caches[name].fill_(-7)
    p.signal(signal.SIGCONT)
    time.sleep(0.5)
    d.poll()
    assert all((d.caches[name] == -7).all() for name in d.layers), "a late chunk was written into pages given back"
    assert wait(lambda: "req-p" in p.sent(), [d], SOON)
    warm_up(p, d, "after")


@pytest.mark.parametrize("plane", PLANES[1:])  # over cma P has no part in the read
def test_d_is_killed(stage: Stage, plane: str) -> None:
    form, settings = wide(stage, plane, lease_seconds=600.0)
    p = stage.rank(settings=settings, content=512, layers=16)
    d = stage.process(**form, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    gate = Gate(halves(p)[0], "pump", lambda now: False)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.load("req-d", token, peer([p]), OURS, TOKENS)
    assert wait(lambda: bool(halves(p)[0]._pushes), [p])
    d.signal(signal.SIGKILL)
    gate.open()
    assert wait(lambda: not halves(p)[0]._pushes, [p], SOON)
    let_time_pass(p, 1000)
    assert wait(lambda: p.sent == {"req-p"}, [p], SOON), "the lease ends without D"
    other = stage.rank(settings=settings, content=512, layers=16, engine_id="other")
    another_works(p, other)


def test_p_restarted_on_the_same_port(stage: Stage) -> None:
    """Another life of the same engine at the same address has none of the old one's KV."""
    form = {"settings": {"side_channel_port": free_port(), **QUICK}}
    old = stage.process(**form)
    d = stage.rank(settings=Settings(**QUICK), engine_id="engine-d")
    old.fill(THEIRS, TOKENS)
    warm_up(old, d)
    former = remote_peer([old])
    old.close()
    new = stage.process(**form)
    d.worker.post(load_plan("req-d", secrets.token_bytes(16), former, OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.failed, [d], SOON)
    new.fill(THEIRS, TOKENS)
    warm_up(new, d, "after")


def nobody(port: int) -> PeerEngine:
    return PeerEngine("nobody", 1, 1, 30.0, (RankAddress(0, 0, "127.0.0.1", port, bytes(16)),))


def test_nobody_listens(stage: Stage) -> None:
    d = stage.rank(settings=Settings(**QUICK))
    with socket.socket() as taken:  # bound, so that nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        d.worker.post(load_plan("req-d", bytes(16), nobody(taken.getsockname()[1]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [d])
    assert reason_of(d) == "peer_lost"


def test_a_silent_peer(stage: Stage) -> None:
    d = stage.rank(settings=Settings(handshake_timeout_seconds=1.0))
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        d.worker.post(load_plan("req-d", bytes(16), nobody(mute.getsockname()[1]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [d])
    assert reason_of(d) == "timeout", "that of the settings, before the connection itself gives up"


def test_a_dead_peer_does_not_hold_up_the_others(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "HANDSHAKE_SECONDS", 600.0)
    p, d = stage.rank(), stage.rank(settings=Settings(handshake_timeout_seconds=600.0), engine_id="engine-d")
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        d.worker.post(load_plan("dead", bytes(16), nobody(mute.getsockname()[1]), [30], 0, 10))
        p.fill(THEIRS, TOKENS)
        another_works(p, d)
        assert "dead" not in d.received


# --- peers that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"model": {"architectures": "Other"}}, "architectures"),
        ({"total_heads": 8}, "total_heads"),
        ({"content": 32}, "content_bytes"),
        ({"layers": 3}, "layers"),
    ],
)
def test_another_model_or_geometry_is_refused_by_name(
    stage: Stage, theirs: dict[str, object], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    p, d = stage.rank(**theirs), stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.kvferry.link"]
    assert len(lines) == 1
    assert named in lines[0]
    assert "\n" not in lines[0]


def test_another_protocol_version_is_refused_by_name(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    p = stage.rank()
    connection = Connection(p.address.host, p.address.port, curve=None, max_message_bytes=1 << 20)
    connection.send([protocol.MAGIC, (9).to_bytes(2, "big"), b"whatever version 9 says"])
    answers: list[list[bytes]] = []
    assert wait(lambda: bool(answers.extend(connection.receive()) or answers), [p])
    refused = protocol.decode_reply(answers[0])
    connection.close()
    assert refused == protocol.Refused(field="protocol version", ours="1", theirs="9")


def test_no_plane_in_common(stage: Stage) -> None:
    p, d = stage.rank(settings=Settings(plane="shm")), stage.rank(settings=Settings(plane="zmq"), engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    assert reason_of(d) == "plane"
    assert wait(lambda: p.sent == {"req-p"}, [p, d], SOON)


def test_a_plane_that_p_has_no_room_on_is_passed_over(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = stage.rank(), stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)

    def full(payload: bytes) -> None:
        raise TransportError("staging memory is used up")

    for name in ("cma", "shm"):
        monkeypatch.setattr(p.worker.site.plane(name), "accept", full)
    another_works(p, d)
    assert d.plane not in ("cma", "shm")


@pytest.mark.parametrize(
    "frames",
    [
        [b"GET / HTTP/1.1"],
        [protocol.MAGIC, b"\0\1", b"\x80\x04\x95pickle"],
        [protocol.MAGIC, b"\0\1", b"\xdf\xff\xff\xff\xff"],
        protocol.encode(protocol.Commit(read=1, token=bytes(16))),
        protocol.encode(protocol.Release(token=bytes(16), consumer=bytes(16), consumer_rank=0, expected=(0,))),
        protocol.encode(protocol.Renew(tokens=(bytes(16),) * 1000)),
    ],
    ids=["http", "pickle", "huge claim", "before hello", "unknown release", "unknown renew"],
)
def test_garbage_is_counted_and_p_serves_on(stage: Stage, frames: list[bytes]) -> None:
    p, d = stage.rank(), stage.rank(engine_id="engine-d")
    connection = Connection(p.address.host, p.address.port, curve=None, max_message_bytes=1 << 20)
    for _ in range(50):
        connection.send(frames)
    p.fill(THEIRS, TOKENS)
    another_works(p, d)
    connection.close()


def test_blocks_out_of_range_fail_the_one_request(stage: Stage) -> None:
    p, d = stage.rank(), stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), [999] * 7, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"} and p.sent == {"req-p"}, [p, d], SOON)
    another_works(p, d)


def test_a_read_beyond_the_prompt_is_denied(stage: Stage) -> None:
    p, d = stage.rank(), stage.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, 50)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.failed == {"req-d"}, [p, d], SOON)
    assert all((d.caches[name] == -1).all() for name in d.layers)
    another_works(p, d)


def test_an_error_of_the_copy_is_one_requests_failure(stage: Stage) -> None:
    settings = Settings(plane="shm")
    p, d = stage.rank(settings=settings), stage.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    for site, kind in ((d.worker.site, "internal"), (p.worker.site, "denied")):
        copies = object.__getattribute__(site, "caches")
        real = type(copies)._copy
        token = grant([p], f"{kind}-p", THEIRS, TOKENS)
        type(copies)._copy = lambda self, *a, real=real, copies=copies, **k: (
            fail() if self is copies else real(self, *a, **k)
        )
        try:
            d.worker.post(load_plan(f"{kind}-d", token, peer([p]), OURS, 0, TOKENS))
            assert wait(lambda kind=kind: f"{kind}-d" in d.failed and f"{kind}-p" in p.sent, [p, d], SOON)
        finally:
            type(copies)._copy = real
        assert reason_of(d) == kind
    another_works(p, d)
