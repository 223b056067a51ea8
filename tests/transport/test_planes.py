"""The contract of a PUSH plane, which every registered one passes between real processes."""

from __future__ import annotations

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
    MESSAGE,
    REFUSALS,
    SLOT,
    STAGING,
    Peers,
    all_good,
    announce,
    carry,
    damaged,
    end,
    flipped,
    join,
    lend,
    rest,
)

SOCKETS = sum(int(Path(f"/proc/sys/net/ipv4/tcp_{way}mem").read_text().split()[2]) for way in "rw")
"""What both ends' sockets of one connection hold at most."""
PART = SLOT * 2 // 3
"""Bytes of most messages."""
AFTERWARDS = range(10**6, 10**6 + 2 * STAGING // SLOT + 8)
"""Tags of messages that take each slot of a side twice."""

_peers: dict[str, Peers] = {}


@pytest.fixture(params=PLANES)
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    yield from lend(_peers, request, request.param)


@pytest.fixture(scope="module", autouse=True)
def end_peers() -> Iterator[None]:
    yield
    end(_peers)


def test_every_size_arrives_in_order_and_intact(peers: Peers) -> None:
    p, d = peers.pair()
    slot = p("slot_bytes", id="a")
    assert 4096 <= slot <= SLOT
    rng = random.Random(1)
    sizes = [1, 2, 7, 8, 9, 63, 4095, 4096, 8191, 8192, 8193, 65536, slot - 1, slot]
    sizes += [rng.randint(1, slot) for _ in range(20)]
    tags = [0, 1, 2**63, 2**64 - 1, *((i + 1) << 40 | i for i in range(len(sizes) - 4))]
    announce(p, d, list(zip(tags, sizes, strict=True)))
    status = d.until(all_good(tags))
    assert status["errors"]["a"] is None and p("status")["sent"]["a"] == len(tags)


def test_a_message_that_is_not_what_was_announced_breaks_the_channel(peers: Peers) -> None:
    p, d = peers.pair()
    d("expect", id="a", messages=[(1, 5000)])
    p("send", id="a", messages=[(1, 5001)])
    assert "5001 bytes, expected 5000" in d.broken()
    assert d("status")["good"]["a"] == []


def test_slow_consumer_holds_the_producer_back(peers: Peers) -> None:
    p, d = peers.pair()
    slot = p("slot_bytes", id="a")
    d("hold", on=True)
    most = (2 * STAGING + SOCKETS) // slot
    tags = list(range(most + 40))
    announce(p, d, [(tag, slot) for tag in tags])
    p.until(lambda s: s["refused"]["a"] > 0)
    d.until(lambda s: s["held"] > 0)
    time.sleep(0.3)
    # Both ends together hold no more than their staging memory, and the kernel what sockets hold; the rest waits on P.
    assert 0 < d("status")["held"] <= p("status")["sent"]["a"] <= most
    d("hold", on=False)
    d.until(all_good(tags))


def test_one_full_channel_does_not_stop_another(peers: Peers) -> None:
    """A rank is producer and consumer at the same time."""
    (p, d), slow = peers.pair(), peers.start()
    join(p, slow, "slow")
    join(slow, d, "c")
    slow("hold", on=True)
    announce(p, slow, [(tag, PART) for tag in range((2 * STAGING + SOCKETS) // PART + 40)], "slow")
    p.until(lambda s: s["refused"]["slow"] > 0)
    carry(p, d, range(1000, 1100), PART)
    carry(slow, d, range(2000, 2060), PART, "c")


def test_cancelled_messages_leave_nothing_behind(peers: Peers) -> None:
    p, d = peers.pair()
    for base in range(0, 10_000, 1000):
        messages = [(base + i, PART) for i in range(40)]
        d("expect", id="a", messages=messages)
        p("send", id="a", messages=messages[:25])  # the rest is never sent
        d("forget", id="a", tags=[tag for tag, _ in messages[20:]])  # and five of what was sent are not wanted
        d.until(lambda s, b=base: {b + i for i in range(20)} <= set(s["good"]["a"]))  # type: ignore[misc]
    d.until(lambda s: s["posted"]["a"] == 0)
    announce(p, d, [(10**6 + i, SLOT // 2) for i in range(60)])
    status = d.until(lambda s: {10**6 + i for i in range(60)} <= set(s["good"]["a"]))
    assert not status["bad"] and status["errors"]["a"] is None and status["retired"] == 0


@pytest.mark.parametrize(
    ("victim", "moment"),
    [(v, m) for m in ("before anything", "moving") for v in ("producer", "consumer")]
    + [("producer", "holding"), ("consumer", "idle")],
)
def test_sigkill_of_the_peer(peers: Peers, victim: str, moment: str) -> None:
    (p, d), bystander = peers.pair(), peers.start()
    join(*((bystander, d) if victim == "producer" else (p, bystander)), "b")
    if moment in ("moving", "holding"):
        d("hold", on=moment == "holding")
        announce(p, d, [(tag, MESSAGE) for tag in range(5000)])
        d.until(lambda s: len(s["good"]["a"]) >= 3)
    elif moment == "idle":
        carry(p, d, [1])
        time.sleep(0.2)
    dead, survivor = (p, d) if victim == "producer" else (d, p)
    dead.kill()
    error = survivor.broken()
    assert error.startswith("TransportError") and "\n" not in error
    survivor("hold", on=False)
    survivor("close", id="a")
    # The survivor serves its other channel, with all of its slots.
    carry(*((bystander, d) if victim == "producer" else (p, bystander)), AFTERWARDS, id="b")
    survivor.until(lambda s: s["retired"] == 0 and not s["bad"])


def test_close_in_the_middle_gives_all_slots_back(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    for round in range(4):
        id = f"round{round}"
        join(p, d, id)
        announce(p, d, [(round * 1000 + i, MESSAGE) for i in range(100)], id)
        d.until(lambda s, i=id: len(s["good"][i]) >= 5)  # type: ignore[misc]
        leaver, other = (p, d) if round % 2 else (d, p)
        leaver("close", id=id)
        other.broken(id)
        other("close", id=id)
    for peer in (p, d):
        peer.until(lambda s: s["retired"] == 0)
    join(p, d, "last")
    carry(p, d, AFTERWARDS, id="last")


def test_plane_closes_twice_with_traffic(peers: Peers) -> None:
    p, d = peers.pair()
    announce(p, d, [(i, MESSAGE) for i in range(500)])
    d.until(lambda s: len(s["good"]["a"]) >= 5)
    p("close_plane")
    d.broken()
    d("close_plane")
    for peer in (p, d):
        peer.connection.close()
        assert peer.process.wait(60) == 0


def test_files_and_memory_stay_flat(peers: Peers) -> None:
    p, d = peers.start(), peers.start()

    def rounds(numbers: range) -> list[dict[str, int]]:
        for n in numbers:
            join(p, d, f"n{n}")
            carry(p, d, [n * 10, n * 10 + 1], PART, f"n{n}")
            for peer in (p, d) if n % 2 else (d, p):
                peer("close", id=f"n{n}")
                peer("forget_channel", id=f"n{n}")
        time.sleep(0.3)
        return [p("status"), d("status")]

    before = rounds(range(10))
    rounds(range(10, 30))
    for peer, was in zip((p, d), before, strict=True):
        now = peer.until(lambda s, w=was: s["fds"] <= w["fds"] + 3, 60)  # type: ignore[misc]
        assert now["rss"] - was["rss"] < 8 << 20, f"{(now['rss'] - was['rss']) >> 20} MiB more"


def test_no_core_is_burnt_while_idle(peers: Peers) -> None:
    p, d = peers.pair()
    carry(p, d, range(20), PART)
    assert rest(p, d)


def test_malformed_payloads_are_refused(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    offer = p("offer")
    attach = d("connect", id="a", offer=offer)
    d("finish", id="a", reply=p("accept", id="a", payload=attach))
    for change, allowed in ((damaged, REFUSALS), (flipped, REFUSALS | {"accepted"})):
        names = d("garbage", as_offer=change(offer), as_attach=[])
        names += p("garbage", as_offer=[], as_attach=change(attach))
        assert set(names) <= allowed, names
    carry(p, d, [1], PART)


def test_unknown_plane_is_refused() -> None:
    with pytest.raises(PlaneUnavailableError, match=f"expected one of {', '.join(plane_names())}"):
        make_plane("rdma", PlaneContext("127.0.0.1", SLOT, STAGING))


def test_reply_where_none_is_expected_is_refused() -> None:
    plane = make_plane("shm", PlaneContext("127.0.0.1", SLOT, STAGING))
    channel, _ = plane.connect(plane.offer(), "127.0.0.1")
    with pytest.raises(ProtocolError, match="expected none"):
        plane.finish(channel, b"x")
    plane.close()
