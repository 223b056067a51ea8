"""The contract of a PULL plane, which every registered one passes between real processes, in each memory that it reads.

Reads of GPUs are skipped on a machine without one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from tests.support.remote import RemoteError
from tests.transport.plane_pair import PULL, planes_by_memory
from tests.transport.plane_peer import BLOCK_BYTES, MEMORY_BYTES
from tests.transport.plane_process import REFUSALS, Peer, Peers, damaged, end, flipped, join, lend, rest

_peers: dict[str, Peers] = {}
Ranges = dict[str, list[int]]
"""``dst``, ``src`` and ``nbytes`` of each range; offsets in the memories of D and P."""


@pytest.fixture(params=planes_by_memory(PULL))
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    name, device = request.param.split()
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    yield from lend(_peers, request, name, device)


@pytest.fixture(scope="module", autouse=True)
def end_peers() -> Iterator[None]:
    yield
    end(_peers)


@cache
def blocks(seed: int, count: int = MEMORY_BYTES // BLOCK_BYTES) -> Ranges:
    """``count`` blocks, each to another place."""
    rng = random.Random(seed)
    places = (rng.sample(range(MEMORY_BYTES // BLOCK_BYTES), count) for _ in range(2))
    dst, src = ([BLOCK_BYTES * number for number in column] for column in places)
    return {"dst": dst, "src": src, "nbytes": [BLOCK_BYTES] * count}


def attach(p: Peer, d: Peer, id: str = "a") -> None:
    """A channel of D from P over which D may read all of P's memory; D's own memory is filled."""
    join(p, d, id)
    d.until(lambda s: s["ready"][id] or s["errors"][id])
    d("translate", id=id, **dict(zip(("address", "nbytes"), p("memory"), strict=True)))
    d("fill")


def attached(peers: Peers) -> tuple[Peer, Peer]:
    p, d = peers.start(), peers.start()
    attach(p, d)
    return p, d


def finished(d: Peer, *copies: int) -> list[Any]:
    """What became of these copies, once all are done."""
    status = d.until(lambda s: all(s["copies"][copy]["done"] for copy in copies))
    return [status["copies"][copy] for copy in copies]


def reads(d: Peer, ranges: Ranges, id: str = "a") -> bool:
    """Whether D reads these, and writes nothing else."""
    d("fill")
    (copy,) = finished(d, d("read", id=id, **ranges))
    return not copy["error"] and d("differing", **ranges) == 0


def test_every_block_arrives_in_its_place(peers: Peers) -> None:
    _, d = attached(peers)
    assert reads(d, blocks(1)), "all of the memory, scattered"
    assert reads(d, blocks(2, 1)) and reads(d, blocks(3, 777))
    assert d("status")["errors"]["a"] is None


def test_ranges_of_any_length(peers: Peers) -> None:
    if peers.device == "cuda":
        pytest.skip("D's kernels copy blocks")
    _, d = attached(peers)
    rng = random.Random(4)
    nbytes = [1, 2, 7, 8, 9, 4095, 4096, 4097, 12 << 20] + [rng.randint(1, 5000) for _ in range(1000)]

    def places(free: int) -> list[int]:
        """Of each range, one behind the other in any order."""
        found = [0] * len(nbytes)
        for number in rng.sample(range(len(nbytes)), len(nbytes)):
            found[number] = free
            free += nbytes[number] + rng.randint(0, 3)
        return found

    assert reads(d, {"dst": places(3), "src": places(5), "nbytes": nbytes})


def test_several_reads_at_once_over_several_channels(peers: Peers) -> None:
    p, d, other = peers.start(), peers.start(), peers.start()
    attach(p, d, "a")
    attach(other, d, "b")
    attach(d, p, "c")  # a rank is producer and consumer at the same time
    other("fill")
    p("fill")
    everything = blocks(5)
    parts = [{key: column[part::8] for key, column in everything.items()} for part in range(8)]
    copies = [d("read", id="a", **part) for part in parts[:4]]
    back = p("read", id="c", **blocks(6, 100))
    copies += [d("read", id="a", **part) for part in parts[4:]]
    assert not any(copy["error"] for copy in finished(d, *copies))
    assert not finished(p, back)[0]["error"]
    late = d("read", id="b", **blocks(7, 10))
    assert not finished(d, late)[0]["error"]


def test_memory_that_is_not_p_s_is_an_error_of_the_copy(peers: Peers) -> None:
    p, d = attached(peers)
    address, nbytes = p("memory")
    try:
        d("translate", id="a", address=address + (1 << 46), nbytes=nbytes)
    except RemoteError as error:
        assert "errors.TransportError: " in str(error).splitlines()[-1]
    else:
        (copy,) = finished(d, d("read", id="a", **blocks(8, 4)))
        assert copy["error"] and copy["peer_lost"] and "\n" not in copy["error"]
    d("translate", id="a", address=address, nbytes=nbytes)
    assert reads(d, blocks(9, 1000)), "the channel goes on"


@pytest.mark.parametrize("moment", ["before anything", "idle", "reading"])
def test_sigkill_of_the_producer(peers: Peers, moment: str) -> None:
    p, d, bystander = peers.start(), peers.start(), peers.start()
    attach(p, d)
    attach(bystander, d, "b")
    copies = []
    if moment == "idle":
        assert reads(d, blocks(10, 100))
    elif moment == "reading":
        copies = [d("read", id="a", **blocks(11)) for _ in range(2)]
    p.kill()
    error = d.broken()
    assert error.startswith("TransportError") and "\n" not in error
    d("close", id="a")
    finished(d, *copies)
    assert reads(d, blocks(12, 1000), "b")


def test_sigkill_of_the_consumer_leaves_p_as_it_was(peers: Peers) -> None:
    p, d, other = peers.start(), peers.start(), peers.start()
    attach(p, d)
    attach(p, other)
    for _ in range(2):
        d("read", id="a", **blocks(13))
    d.kill()
    assert reads(other, blocks(14, 1000))
    assert p("status")["errors"] == {"a": None}


def test_a_restarted_peer_is_a_new_one(peers: Peers) -> None:
    d = peers.start()
    for life in ("a", "b"):
        p = peers.start()
        attach(p, d, life)
        assert reads(d, blocks(1, 100), life)
        p.kill()
        d.broken(life)
        d("close", id=life)


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_copy_that_is_given_up_ends_and_then_writes_nothing(peers: Peers, how: str) -> None:
    p, d = attached(peers)
    copies = [d("read", id="a", **blocks(20 + number)) for number in range(3)]
    for copy in copies if how == "cancel" else ():
        d("cancel", id="a", copy=copy)
    if how == "close":
        d("close", id="a")
    finished(d, *copies)
    before = d("checksum")
    time.sleep(0.2)
    assert d("checksum") == before
    attach(p, d, "again")
    assert reads(d, blocks(23, 1000), "again")


def test_plane_closes_twice_with_reads_under_way(peers: Peers) -> None:
    p, d = attached(peers)
    copies = [d("read", id="a", **blocks(20 + number)) for number in range(3)]
    d("close_plane")
    assert all(d("status")["copies"][copy]["done"] for copy in copies)
    p("close_plane")
    for peer in (d, p):
        peer.connection.close()
        assert peer.process.wait(60) == 0


def test_files_and_memory_stay_flat(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    some = blocks(40, 100)

    def round(n: int) -> None:
        attach(p, d, f"n{n}")
        assert not finished(d, d("read", id=f"n{n}", **some))[0]["error"]
        for peer in (p, d) if n % 2 else (d, p):
            peer("close", id=f"n{n}")
            peer("forget_channel", id=f"n{n}")

    for n in range(10):
        round(n)
    before = p("status"), d("status")
    for n in range(10, 40):
        round(n)
    for peer, was in zip((p, d), before, strict=True):
        now = peer.until(lambda s, w=was: s["fds"] <= w["fds"] + 3, 60)  # type: ignore[misc]
        assert now["rss"] - was["rss"] < 12 << 20, f"{(now['rss'] - was['rss']) >> 20} MiB more"


def test_no_core_is_burnt_while_idle(peers: Peers) -> None:
    p, d = attached(peers)
    assert reads(d, blocks(50, 1000))
    assert rest(p, d)


def test_malformed_offers_are_refused(peers: Peers) -> None:
    p, d = peers.start(), peers.start()
    offer = p("offer")
    for change, allowed in ((damaged, REFUSALS), (flipped, REFUSALS | {"accepted"})):
        names = d("garbage", as_offer=change(offer), as_attach=[])
        assert set(names) <= allowed, names
    attach(p, d)
    assert reads(d, blocks(60, 100))
