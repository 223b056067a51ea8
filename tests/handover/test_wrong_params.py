"""Parameters that clients made up: what they name is not reached, costs little, and spoils no hand-over of others."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.decode_side import links, renew
from kvferry.connector.wire.step_plan import KeepLease, StepPlan, UnneededLease
from kvferry.transport.host import AllowedPeers
from tests.handover.scenario import OURS, PATIENT, THEIRS, TOKENS, Pair, RankGroup, another_works, begin, breaks
from tests.support.ranks import Rank, grant, load_plan, peer, wait

Lines = pytest.LogCaptureFixture


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return group.pair(**PATIENT)


@pytest.mark.parametrize("wrong", ["tp_size", "tp_rank", "engine_id"])
def test_a_real_p_under_a_wrong_form(pair: Pair, wrong: str) -> None:
    """The link to P was of the form that the first request named, and honest hand-overs over it failed."""
    p, d = pair
    real, token = peer([p]), grant(pair[:1], "req-p", THEIRS, TOKENS)
    rank = real.ranks[0]
    named: Any = {
        "tp_size": replace(real, tp_size=2, ranks=(rank, replace(rank, tp_rank=1))),
        "tp_rank": replace(real, tp_size=2, ranks=(replace(rank, tp_rank=1), replace(rank, tp_rank=0))),
        "engine_id": replace(real, engine_id="another"),
    }[wrong]
    engines = (named, real, named, real)  # in one step, over one link
    plans = [load_plan(f"{number}", token, engine, OURS, 0, TOKENS) for number, engine in enumerate(engines)]
    keeps, loads = (tuple(item for plan in plans for item in getattr(plan, name)) for name in ("keeps", "loads"))
    d.worker.post(replace(plans[0], keeps=keeps, loads=loads))
    assert wait(lambda: d.received == {"0", "1", "2", "3"}, [p, d])
    assert d.failed == (set() if wrong == "engine_id" else {"0", "2"})
    assert len(d.consumer.links) == 1
    another_works(p, d)


def test_many_addresses_do_not_make_many_links(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_LINKS", 8)
    real = peer([p])
    with socket.create_server(("0.0.0.0", 0)) as mute:
        for number in range(30):
            life = replace(real.ranks[0], host=f"127.0.0.{number + 1}", port=mute.getsockname()[1])
            keep = KeepLease(f"r{number}", bytes([number]) * 16, replace(real, ranks=(life,)), False)
            unneeded = UnneededLease(f"r{number}", keep.token)
            d.worker.post(StepPlan(decode_engine=b"c" * 16, keeps=(keep,), releases=(unneeded,)))
        another_works(p, d)
        assert 2 <= len(d.consumer.links) <= 8, "of 31"


def test_made_up_incarnations_of_p_do_not_cost_the_first_honest_link(p: Rank, d: Rank) -> None:
    """Each made a connection to P of its own, and eight were all that D can have to one address."""
    for number in range(20):
        life = replace(p.address, incarnation=bytes([number]) * 16)
        made_up = bytes([number]) * 16  # a failed load releases its lease
        d.worker.post(load_plan(f"{number}", made_up, replace(peer([p]), ranks=(life,)), OURS, 0, TOKENS))
    begin(p, d, "honest")
    assert wait(lambda: len(d.received) == 21, [p, d])
    assert d.failed == {f"{number}" for number in range(20)}
    assert len(d.consumer.links) == 1
    another_works(p, d)


def fails_with(p: Rank, d: Rank, caplog: Lines, ended: str = "hand-over of req-d failed", engine: Any = None) -> str:
    """A load fails, in one line. The line follows the report."""
    with caplog.at_level("INFO", "vllm.kvferry"):
        d.worker.post(load_plan("req-d", b"t" * 16, engine or peer([p]), OURS, 0, TOKENS))
        assert wait(lambda: d.failed == {"req-d"}, [p, d])
        assert wait(lambda: ended in caplog.text)
    (line,) = [line for line in caplog.messages if ended in line]
    return line


def test_no_link_can_be_opened(pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: Lines) -> None:
    """One line and a failed load; it was a traceback for each rank and renewal."""
    with monkeypatch.context() as patch:
        patch.setattr(links, "Link", breaks)
        assert "planted" in fails_with(*pair, caplog)
    assert not any(record.exc_info for record in caplog.records)
    another_works(*pair)


def test_renewals_of_many_ranks_are_spread_over_ticks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renew, "RENEWED_PER_TICK", 3)
    p, d = pair
    keeper, asked, ticks = d.consumer.renewals, [], list[int]()
    ranks = tuple(replace(peer([p]).ranks[0], tp_rank=n, port=20000 + n) for n in range(16))
    engine = replace(peer([p]), tp_size=16, ranks=ranks, lease_seconds=1e-9)

    def link(address: Any, now: float) -> Any:
        asked.append(address)
        breaks()

    tick = keeper.send_renewals

    def counted(now: float) -> None:
        before = len(asked)
        tick(now)
        ticks.append(len(asked) - before)

    monkeypatch.setattr(keeper, "links", SimpleNamespace(get=link))
    monkeypatch.setattr(keeper, "send_renewals", counted)
    d.worker.post(StepPlan(decode_engine=b"c" * 16, keeps=(KeepLease("r", b"t" * 16, engine, False),)))
    assert wait(lambda: len(asked) >= 32, [d])
    assert max(ticks) == 3


def test_targets_that_the_list_does_not_admit(p: Rank, d: Rank, caplog: Lines) -> None:
    """D opens no connection there, and the load fails in one line."""
    d.context.allowed_peers = AllowedPeers(["127.0.0.1"])
    with socket.create_server(("127.0.0.3", 0)) as trap:
        trap.settimeout(0)
        nowhere = replace(peer([p]), ranks=(replace(p.address, host="127.0.0.3", port=trap.getsockname()[1]),))
        line = fails_with(p, d, caplog, engine=nowhere)
        with pytest.raises(BlockingIOError):
            trap.accept()
    assert "127.0.0.3 is not an allowed peer: allowed_peers (KVFERRY_ALLOWED_PEERS)" in line and "127.0.0.1/32" in line
    another_works(p, d)


def test_a_name_is_resolved_once_and_the_address_is_judged(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, caplog: Lines
) -> None:
    """A name server may answer with another address each time."""
    d.context.allowed_peers = AllowedPeers(["127.0.0.1"])
    asked: list[str] = []

    def rebinds(host: str, *_: Any, **__: Any) -> Any:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1" if len(asked) > 1 else "192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", rebinds)
    named = replace(peer([p]), ranks=(replace(p.address, host="rebinds.example"),))
    assert "192.0.2.1 is not an allowed peer" in fails_with(p, d, caplog, engine=named)
    assert asked == ["rebinds.example"]


def test_no_line_has_a_token(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, caplog: Lines) -> None:
    """The line of a command that broke had the whole load, and vLLM writes the whole plan when an engine dies."""
    monkeypatch.setattr(d.consumer.loads, "begin", breaks)
    fails_with(p, d, caplog, "unexpected error with req-d")
    plan = load_plan("req-d", b"t" * 16, peer([p]), OURS, 0, TOKENS)
    for text in (caplog.text, repr(plan)):
        assert "t" * 16 not in text and (b"t" * 16).hex() not in text
