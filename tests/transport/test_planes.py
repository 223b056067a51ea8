"""The contract of a PUSH plane, which every registered one passes between real processes."""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.transport.errors import PlaneUnavailableError, ProtocolError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.registry import make_plane, plane_names
from tests.transport.plane_pair import PLANES
from tests.transport.plane_process import (
    REFUSALS,
    SLOT,
    STAGING,
    Peers,
    all_good,
    announce,
    damaged,
    end,
    flipped,
    join,
    lend,
    rest,
)

SOCKETS = sum(int(Path(f"/proc/sys/net/ipv4/tcp_{way}mem").read_text().split()[2]) for way in "rw")
"""What both ends' sockets of one connection hold at most."""

_peers: dict[str, Peers] = {}


@pytest.fixture(params=PLANES)
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    yield from lend(_peers, request, request.param)


@pytest.fixture(scope="module", autouse=True)
def end_peers() -> Iterator[None]:
    yield
    end(_peers)


def test_every_size_arrives_in_order_and_intact(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    join(p, d)
    slot = p("slot_bytes", id="a")
    assert 4096 <= slot <= SLOT
    rng = random.Random(1)
    sizes = [1, 2, 7, 8, 9, 63, 4095, 4096, 8191, 8192, 8193, 65536, slot - 1, slot]
    sizes += [rng.randint(1, slot) for _ in range(60)]
    messages = [((i + 1) << 40 | i, size) for i, size in enumerate(sizes)]
    announce(p, d, messages)
    status = d.until(all_good([tag for tag, _ in messages]))
    assert status["errors"]["a"] is None
    assert p("status")["sent"]["a"] == len(messages)


def test_the_largest_tags_pass(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    join(p, d)
    tags = [0, 1, 2**63, 2**64 - 1]
    announce(p, d, [(tag, 100_000) for tag in tags])
    d.until(all_good(tags))


def test_a_message_that_is_not_what_was_announced_breaks_the_channel(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    join(p, d)
    d("expect", id="a", messages=[(1, 5000)])
    p("send", id="a", messages=[(1, 5001)])
    status = d.until(lambda s: s["errors"]["a"] is not None)
    assert "5001 bytes, expected 5000" in status["errors"]["a"]
    assert status["good"]["a"] == []


def test_slow_consumer_holds_the_producer_back(peers: Peers) -> None:
    p, d = peers.start(fresh=True), peers.start(fresh=True)  # whose memory has not grown yet
    join(p, d)
    slot = p("slot_bytes", id="a")
    before = p("status")["rss"], d("status")["rss"]
    d("hold", on=True)
    messages = [(tag, slot) for tag in range(120)]
    announce(p, d, messages)
    p.until(lambda s: s["refused"]["a"] > 0)
    d.until(lambda s: s["held"] > 0)
    time.sleep(0.5)
    status, stuck = d("status"), p("status")
    # Both ends together hold no more than their staging memory, and the kernel what sockets hold; the rest waits on P.
    assert stuck["sent"]["a"] * slot <= 2 * STAGING + SOCKETS
    assert 0 < status["held"] < 120
    assert status["rss"] - before[1] < STAGING + (24 << 20)
    assert stuck["rss"] - before[0] < STAGING + (24 << 20)
    d("hold", on=False)
    d.until(all_good([tag for tag, _ in messages]))


def test_two_channels_at_once(peers: Peers) -> None:
    p, d, other = peers.start(), peers.start(), peers.start()
    join(p, d, "a")
    join(p, other, "b")
    join(other, d, "c")  # a rank is producer and consumer at the same time
    batches = {"a": (p, d), "b": (p, other), "c": (other, d)}
    for start, (id, (source, target)) in enumerate(batches.items()):
        announce(source, target, [(start << 32 | i, 300_000 + i) for i in range(60)], id)
    for start, (id, (_, target)) in enumerate(batches.items()):
        target.until(all_good([start << 32 | i for i in range(60)], id))


def test_one_full_channel_does_not_stop_another(peers: Peers) -> None:
    p, slow, d = peers.start(), peers.start(), peers.start()
    join(p, slow, "slow")
    join(p, d, "a")
    slow("hold", on=True)
    announce(p, slow, [(tag, 500_000) for tag in range(100)], "slow")
    p.until(lambda s: s["refused"]["slow"] > 0)
    announce(p, d, [(tag, 500_000) for tag in range(1000, 1100)])
    d.until(all_good(list(range(1000, 1100))))


def test_acquired_slots_can_be_given_back(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    join(p, d)
    p.until(lambda _: p("acquire", id="a"))  # once the consumer has connected
    for _ in range(50):
        while p("acquire", id="a"):
            pass
        p("give_back")
    announce(p, d, [(1, 10)])
    d.until(all_good([1]))


def test_cancelled_messages_leave_nothing_behind(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    join(p, d)
    for round in range(10):
        base = round * 1000
        messages = [(base + i, 700_000) for i in range(40)]
        d("expect", id="a", messages=messages)
        p("send", id="a", messages=messages[:25])  # the rest is never sent
        p("flush", id="a", tags=[tag for tag, _ in messages[25:]])
        d("forget", id="a", tags=[tag for tag, _ in messages[20:]])  # and five of what was sent are not wanted
        d.until(lambda s, b=base: {b + i for i in range(20)} <= set(s["good"]["a"]))  # type: ignore[misc]
    d.until(lambda s: s["posted"]["a"] == 0)
    announce(p, d, [(10**6 + i, SLOT // 2) for i in range(60)])
    status = d.until(lambda s: {10**6 + i for i in range(60)} <= set(s["good"]["a"]))
    assert not status["bad"] and status["errors"]["a"] is None and status["retired"] == 0


@pytest.mark.parametrize("victim", ["producer", "consumer"])
@pytest.mark.parametrize("moment", ["idle", "before anything", "moving", "holding"])
def test_sigkill_of_the_peer(peers: Peers, victim: str, moment: str) -> None:
    p, d, bystander = peers.start(), peers.start(), peers.start()
    join(p, d)
    join(*((bystander, d) if victim == "producer" else (p, bystander)), "b")
    if moment in ("moving", "holding"):
        d("hold", on=moment == "holding")
        announce(p, d, [(tag, 1_000_000) for tag in range(5000)])
        d.until(lambda s: len(s["good"]["a"]) >= 3)
    elif moment == "idle":
        announce(p, d, [(1, 1_000_000)])
        d.until(all_good([1]))
        time.sleep(0.2)
    dead, survivor = (p, d) if victim == "producer" else (d, p)
    dead.kill()
    status = survivor.until(lambda s: s["errors"]["a"] is not None, seconds=20)  # and not by a heartbeat
    assert status["errors"]["a"].startswith("TransportError") and "\n" not in status["errors"]["a"]
    survivor("hold", on=False)
    survivor("close", id="a")
    # The survivor serves its other channel, with all of its slots.
    source, target = (bystander, d) if victim == "producer" else (p, bystander)
    tags = list(range(10**6, 10**6 + 100))
    announce(source, target, [(tag, 1_000_000) for tag in tags], "b")
    target.until(all_good(tags, "b"))
    survivor.until(lambda s: s["retired"] == 0 and not s["bad"])


def test_a_restarted_peer_is_a_new_one(peers: Peers) -> None:
    p = peers.start()
    for life in range(3):
        d = peers.start()
        join(p, d, f"life{life}")
        announce(p, d, [(life * 10, 500_000), (life * 10 + 1, 500_000)], f"life{life}")
        d.until(all_good([life * 10, life * 10 + 1], f"life{life}"))
        d.kill()
        p.until(lambda s, i=f"life{life}": s["errors"][i] is not None)  # type: ignore[misc]
        p("close", id=f"life{life}")


@pytest.mark.parametrize("closer", ["producer", "consumer"])
def test_close_is_seen_by_the_peer(peers: Peers, closer: str) -> None:
    p, d = peers.start(), peers.start()
    join(p, d)
    announce(p, d, [(1, 10)])
    d.until(all_good([1]))
    leaver, other = (p, d) if closer == "producer" else (d, p)
    leaver("close", id="a")
    other.until(lambda s: s["errors"]["a"] is not None, seconds=20)
    other("close", id="a")
    join(p, d, "again")
    announce(p, d, [(2, 1_000_000)], "again")
    d.until(all_good([2], "again"))


def test_close_in_the_middle_gives_all_slots_back(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    for round in range(20):
        id = f"round{round}"
        join(p, d, id)
        announce(p, d, [(round * 1000 + i, 1_000_000) for i in range(100)], id)
        d.until(lambda s, i=id: len(s["good"][i]) >= 5)  # type: ignore[misc]
        (p if round % 2 else d)("close", id=id)
        (d if round % 2 else p).until(lambda s, i=id: s["errors"][i] is not None)  # type: ignore[misc]
        (d if round % 2 else p)("close", id=id)
    for peer in (p, d):
        peer.until(lambda s: s["retired"] == 0)
    join(p, d, "last")
    announce(p, d, [(10**6 + i, 1_000_000) for i in range(100)], "last")
    d.until(all_good([10**6 + i for i in range(100)], "last"))


def test_plane_closes_twice_with_traffic(peers: Peers) -> None:
    p, d = peers.start(fresh=True), peers.start(fresh=True)
    join(p, d)
    announce(p, d, [(i, 1_000_000) for i in range(500)])
    d.until(lambda s: len(s["good"]["a"]) >= 5)
    p("close_plane")
    d.until(lambda s: s["errors"]["a"] is not None, seconds=20)
    d("close_plane")
    for peer in (p, d):
        peer("status")
        peer.process.stdin.close()
        assert peer.process.wait(60) == 0


def test_files_and_memory_stay_flat(peers: Peers) -> None:
    p, d = peers.start(fresh=True), peers.start(fresh=True)

    def round(n: int) -> None:
        id = f"n{n}"
        join(p, d, id)
        announce(p, d, [(n * 10 + i, 200_000) for i in range(3)], id)
        d.until(all_good([n * 10 + i for i in range(3)], id))
        for peer in (p, d) if n % 2 else (d, p):
            peer("close", id=id)
            peer("forget_channel", id=id)

    for n in range(30):
        round(n)
    time.sleep(0.3)
    before = p("status"), d("status")
    for n in range(30, 230):
        round(n)
    time.sleep(0.3)
    for peer, was in zip((p, d), before, strict=True):
        now = peer.until(lambda s, w=was: s["fds"] <= w["fds"] + 3)  # type: ignore[misc]
        assert now["rss"] - was["rss"] < 16 << 20, f"{(now['rss'] - was['rss']) >> 20} MiB more"


def test_no_core_is_burnt_while_idle(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    join(p, d)
    announce(p, d, [(i, 500_000) for i in range(20)])
    d.until(all_good(list(range(20))))
    assert rest(p, d)


def test_malformed_payloads_are_refused(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    offer = base64.b64decode(p("offer"))
    attach = base64.b64decode(d("connect", id="a", offer=base64.b64encode(offer).decode()))
    d("finish", id="a", reply=p("accept", id="a", payload=base64.b64encode(attach).decode()))
    names = d("garbage", as_offer=damaged(offer), as_attach=[])
    names += p("garbage", as_offer=[], as_attach=damaged(attach))
    assert set(names) <= REFUSALS, names
    names = d("garbage", as_offer=flipped(offer), as_attach=[])
    names += p("garbage", as_offer=[], as_attach=flipped(attach))
    assert set(names) <= REFUSALS | {"accepted"}, names
    announce(p, d, [(1, 100_000)])
    d.until(all_good([1]))


def test_unknown_plane_is_refused() -> None:
    with pytest.raises(PlaneUnavailableError, match=f"expected one of {', '.join(plane_names())}"):
        make_plane("rdma", PlaneContext("127.0.0.1", SLOT, STAGING))


def test_reply_where_none_is_expected_is_refused() -> None:
    plane = make_plane("shm", PlaneContext("127.0.0.1", SLOT, STAGING))
    channel, _ = plane.connect(plane.offer(), "127.0.0.1")
    with pytest.raises(ProtocolError, match="expected none"):
        plane.finish(channel, b"x")
    plane.close()
