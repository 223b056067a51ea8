"""Parameters that clients made up: what they name is not reached, costs little, and spoils no hand-over of others."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import links, renew
from kvferry.connector.wire.step_plan import KeepLease, StepPlan, UnneededLease
from kvferry.transport.host import AllowedPeers
from tests.handover.gates import PATIENT, halves
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works
from tests.handover.rank_group import RankGroup
from tests.support.ranks import Rank, grant, load_plan, peer, wait

Lines = pytest.LogCaptureFixture


@pytest.fixture
def pair(group: RankGroup) -> tuple[Rank, Rank]:
    p, d = group.rank(engine_id="engine-p"), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    return p, d


@pytest.mark.parametrize("wrong", ["tp_size", "tp_rank", "engine_id"])
def test_a_real_p_under_a_wrong_form(pair: tuple[Rank, Rank], wrong: str) -> None:
    """The link to P was of the form that the first request named, and honest hand-overs over it failed."""
    p, d = pair
    real, token = peer([p]), grant(pair[:1], "req-p", THEIRS, TOKENS)
    rank = real.ranks[0]
    named: Any = {
        "tp_size": replace(real, tp_size=2, ranks=(rank, replace(rank, tp_rank=1))),
        "tp_rank": replace(real, tp_size=2, ranks=(replace(rank, tp_rank=1), replace(rank, tp_rank=0))),
        "engine_id": replace(real, engine_id="another"),
    }[wrong]
    for number, engine in enumerate((named, real, named, real)):  # in one step, over one link
        d.worker.post(load_plan(f"{number}", token, engine, OURS, 0, TOKENS))
    assert wait(lambda: d.received == {"0", "1", "2", "3"}, [p, d])
    assert d.failed == (set() if wrong == "engine_id" else {"0", "2"})
    assert len(halves(d)[1].links) == 1
    another_works(p, d)


def test_many_addresses_do_not_make_many_links(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pair
    monkeypatch.setattr(links, "MAX_LINKS", 8)
    real = peer([p])
    with socket.create_server(("0.0.0.0", 0)) as mute:
        for number in range(30):
            life = replace(real.ranks[0], host=f"127.0.0.{number + 1}", port=mute.getsockname()[1])
            keep = KeepLease(f"r{number}", bytes([number]) * 16, replace(real, ranks=(life,)), False)
            d.worker.post(
                StepPlan(consumer=b"c" * 16, keeps=(keep,), releases=(UnneededLease(f"r{number}", keep.token),))
            )
        another_works(p, d)
        assert 2 <= len(halves(d)[1].links) <= 8, "of 31"


def test_made_up_incarnations_of_p_do_not_cost_the_first_honest_link(group: RankGroup) -> None:
    """Each made a connection to P of its own, and eight were all that D can have to one address."""
    p, d = (group.rank(engine_id=name, settings=Settings(**PATIENT)) for name in ("engine-p", "engine-d"))
    p.fill(THEIRS, TOKENS)
    token = grant([p], "req-p", THEIRS, TOKENS)
    for number in range(20):
        life = replace(p.address, incarnation=bytes([number]) * 16)
        made_up = bytes([number]) * 16  # a failed load releases its lease
        d.worker.post(load_plan(f"{number}", made_up, replace(peer([p]), ranks=(life,)), OURS, 0, TOKENS))
    d.worker.post(load_plan("honest", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: len(d.received) == 21, [p, d])
    assert d.failed == {f"{number}" for number in range(20)}
    assert len(halves(d)[1].links) == 1
    another_works(p, d)


def test_no_link_can_be_opened(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, caplog: Lines) -> None:
    """One line and a failed load; it was a traceback for each rank and renewal."""
    p, d = pair

    def no_more(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(links, "Link", no_more)
    token = grant(pair[:1], "req-p", THEIRS, TOKENS)
    with caplog.at_level("WARNING", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [d])
        assert wait(lambda: "hand-over of req-d failed" in caplog.text)  # it follows the report
    lines = [record for record in caplog.records if "Too many open files" in record.getMessage()]
    assert lines and not any(record.exc_info for record in caplog.records)
    assert any("hand-over of req-d failed" in record.getMessage() for record in lines)
    monkeypatch.undo()
    another_works(p, d)


def test_renewals_of_many_ranks_are_spread_over_ticks(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renew, "RENEWED_PER_TICK", 3)
    p, d = group.rank(settings=Settings(**PATIENT)), group.rank(settings=Settings(**PATIENT), engine_id="engine-d")
    keeper, asked = halves(d)[1].leases, []
    ranks = tuple(replace(peer([p]).ranks[0], tp_rank=n, port=20000 + n) for n in range(16))
    engine = replace(peer([p]), tp_size=16, ranks=ranks, lease_seconds=1e-9)

    def link(address: Any, now: float) -> Any:
        asked.append(time.monotonic())
        raise OSError(24, "planted")

    ticks: list[int] = []
    tick = keeper.send_renewals

    def counted(now: float) -> None:
        before = len(asked)
        tick(now)
        ticks.append(len(asked) - before)

    monkeypatch.setattr(keeper, "links", SimpleNamespace(get=link))
    monkeypatch.setattr(keeper, "send_renewals", counted)
    d.worker.post(StepPlan(consumer=b"c" * 16, keeps=(KeepLease("r", b"t" * 16, engine, False),)))
    assert wait(lambda: len(asked) >= 32, [d])
    assert max(ticks) == 3


def test_targets_that_the_list_does_not_admit(pair: tuple[Rank, Rank], caplog: Lines) -> None:
    """D opens no connection there, and the load fails in one line."""
    p, d = pair
    assert d.worker.rank_context is not None
    d.worker.rank_context.allowed_peers = AllowedPeers(["127.0.0.1"])
    with socket.create_server(("127.0.0.3", 0)) as trap:
        trap.settimeout(0)
        nowhere = replace(peer([p]), ranks=(replace(p.address, host="127.0.0.3", port=trap.getsockname()[1]),))
        with caplog.at_level("WARNING", "vllm.kvferry"):
            d.worker.post(load_plan("req-d", b"t" * 16, nowhere, OURS, 0, TOKENS))
            assert wait(lambda: d.failed == {"req-d"}, [d])
            assert wait(lambda: "hand-over of req-d failed" in caplog.text)
        with pytest.raises(BlockingIOError):
            trap.accept()
    (line,) = [record.getMessage() for record in caplog.records if "hand-over of req-d failed" in record.getMessage()]
    assert "127.0.0.3 is not an allowed peer: allowed_peers (KVFERRY_ALLOWED_PEERS)" in line and "127.0.0.1/32" in line
    another_works(p, d)


def test_a_name_is_resolved_once_and_the_address_is_judged(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, caplog: Lines
) -> None:
    """A name server may answer with another address each time."""
    p, d = pair
    assert d.worker.rank_context is not None
    d.worker.rank_context.allowed_peers = AllowedPeers(["127.0.0.1"])
    asked: list[str] = []

    def rebinds(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1" if len(asked) > 1 else "192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinds)
    named = replace(peer([p]), ranks=(replace(p.address, host="rebinds.example"),))
    with caplog.at_level("WARNING", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", b"t" * 16, named, OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [d])
        assert wait(lambda: "192.0.2.1 is not an allowed peer" in caplog.text)
    assert asked == ["rebinds.example"]


def test_no_line_has_a_token(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch, caplog: Lines) -> None:
    """The line of a command that broke had the whole load, and vLLM writes the whole plan when an engine dies."""
    p, d = pair

    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(halves(d)[1].loads, "begin", breaks)
    token = b"secret token 16b"
    plan = load_plan("req-d", token, peer([p]), OURS, 0, TOKENS)
    with caplog.at_level("INFO", "vllm.kvferry"):
        d.worker.post(plan)
        assert wait(lambda: d.failed == {"req-d"}, [d])
    assert wait(lambda: "unexpected error with req-d" in caplog.text)
    for text in (caplog.text, repr(plan)):
        assert "secret token" not in text and token.hex() not in text
