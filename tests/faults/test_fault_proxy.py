"""A proxy between P and D damages the control stream, the data stream, or a process: seeded, with every fault in it.

``python tests/faults/run.py`` goes on with other seeds (``make faults``).
"""

from __future__ import annotations

import random
import socket
import threading
import time
from dataclasses import replace

import pytest

from tests.faults.cases import DATA_BYTES, Case, covering, draw
from tests.faults.pair import PROXY_ADDRESS, Broken, FaultyPair
from tests.faults.run import DAMAGED, PAIRS
from tests.support.fault_proxy import Fault, FaultProxy, Kind

SLICE = covering()


def cases_of(name: str) -> list[Case]:
    """The part of the slice that a pair runs. Together the pairs run all of it."""
    owners = [list(PAIRS if case.control else DAMAGED) for case in SLICE]
    return [case for n, case in enumerate(SLICE) if owners[n][n % len(owners[n])] == name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ucx if n == "ucx" else ()) for n in PAIRS])
def test_hand_overs_through_faults(name: str) -> None:
    pair = FaultyPair(PAIRS[name])
    try:
        for case in cases_of(name):
            pair.strike(case)
        assert 2 * pair.outcomes["struck"] > len(cases_of(name)) > 0, pair.outcomes  # the last bytes vary
    finally:
        pair.close()


def test_a_seed_gives_the_same_case_again() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert sum(len(cases_of(name)) for name in PAIRS) == len(SLICE) >= 18


# --- that the harness sees what it is to see ------------------------------------------------------------------------

CORRUPTED = Case(0, False, False, False, Kind.CORRUPT, at=200_000, nbytes=1, flip=4, abruptly=False)


@pytest.mark.parametrize(("name", "reason"), [("checksum", "checksum"), ("encrypt", "peer_lost")])
def test_a_changed_byte_is_found_and_the_load_tried_again(name: str, reason: str) -> None:
    """A few bytes of the data stream, drawn by a seed; each load ends with P's bytes."""
    rng, pair = random.Random(name), FaultyPair(PAIRS[name])
    try:
        for number in range(1, 4):
            pair.strike(replace(CORRUPTED, seed=number, at=rng.randrange(DATA_BYTES // 2), flip=1 << rng.randrange(8)))
            assert pair.d.retried() == {reason: 1}
            assert (pair.outcomes["struck"], pair.outcomes["done"], pair.outcomes["failed"]) == (number, number, 0)
    finally:
        pair.close()


def test_a_wrong_byte_in_a_load_that_is_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tcp, which does not promise to see it."""
    monkeypatch.setattr("tests.faults.pair.is_promised", lambda case, settings: True)
    pair = FaultyPair(PAIRS["tcp"])
    try:
        with pytest.raises(Broken, match=r"corrupt at byte 200000 of data to D.* a load that was reported as done has"):
            pair.strike(CORRUPTED)
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("settings", "broken"),
    [
        ({"transfer_timeout_seconds": 10_000.0, "handshake_timeout_seconds": 10_000.0}, "D reports a load within 35 s"),
        ({"lease_seconds": 500.0}, "P has its pages back 21 s after the load ended"),
    ],
)
def test_a_deadline_that_does_not_hold_is_noticed(settings: dict[str, float], broken: str) -> None:
    """The control port is stalled where D's first message is on its way to P."""
    pair = FaultyPair(PAIRS["tcp"] | settings, patience=2.0)
    used = replace(CORRUPTED, kind=Kind.DELAY)
    try:
        with pytest.raises(Broken, match=broken):
            pair.strike(used)
            pair.strike(replace(used, kind=Kind.STALL, control=True, upwards=True, at=10))
    finally:
        pair.close()


SENT = bytes(n % 251 for n in range(50_000))


@pytest.mark.parametrize(
    ("kind", "arrives"),
    [
        (Kind.DROP, SENT[:30_000] + SENT[30_007:]),
        (Kind.DUPLICATE, SENT[:30_007] + SENT[30_000:]),
        (Kind.REORDER, SENT[:30_000] + SENT[30_007:30_014] + SENT[30_000:30_007] + SENT[30_014:]),
        (Kind.CORRUPT, SENT[:30_000] + bytes([SENT[30_000] ^ 16]) + SENT[30_001:]),
        (Kind.TRUNCATE, SENT[:30_000]),
        (Kind.DELAY, SENT),
        (Kind.CALL, SENT),
        (Kind.STALL, SENT[:30_000]),
    ],
)
def test_what_a_fault_does_to_a_stream(kind: Kind, arrives: bytes) -> None:
    """The bytes that come out; a stalled stream comes out whole once it is healed."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        port, called, proxy = server.getsockname()[1], threading.Event(), FaultProxy(PROXY_ADDRESS)
        proxy.open(port, "127.0.0.2")
        proxy.arm(Fault(kind, port, True, 30_000, nbytes=7, flip=16, seconds=0.01, call=called.set))
        try:
            with socket.create_connection((PROXY_ADDRESS, port)) as lower, server.accept()[0] as upper:
                upper.settimeout(60)
                lower.sendall(SENT)
                got = bytearray()
                while len(got) < len(arrives):
                    got += upper.recv(1 << 16)
                assert bytes(got) == arrives
                while not proxy.struck:  # by the thread that passes the bytes on
                    time.sleep(0.001)
                assert called.is_set() is (kind is Kind.CALL)
                if kind is Kind.STALL:
                    lower.shutdown(socket.SHUT_WR)
                    upper.settimeout(0.1)
                    with pytest.raises(TimeoutError):
                        upper.recv(1)
                    proxy.heal()
                    upper.settimeout(60)
                    while data := upper.recv(1 << 16):
                        got += data
                    assert bytes(got) == SENT
        finally:
            proxy.close()
