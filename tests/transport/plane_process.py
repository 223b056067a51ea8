"""Planes in processes of their own: what a test can kill, stop and start again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest

from tests.support.remote import Remote

SLOT = 256 << 10
STAGING = 4 << 20
MESSAGE = 250_000
"""Bytes of a message that nearly fills a slot; encrypted it is longer."""


class Peer(Remote):
    """A child process that serves a plane."""

    def __init__(self, plane: str, device: str = "cpu", host: str = "127.0.0.1", namespace: str = "") -> None:
        """``host``: its address; ``namespace``: the network namespace of ``ip netns`` that has it."""
        super().__init__(
            "tests.transport.plane_peer:PlanePeer", name=plane, slot_bytes=SLOT, staging_bytes=STAGING, on=device,
            host=host, namespace=namespace,
        )  # fmt: skip
        self.answer()

    def __call__(self, do: str, **arguments: Any) -> Any:
        return self.call(do, **arguments)

    def until(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 600) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            status = self("status")
            if condition(status):
                return status
            assert time.monotonic() < deadline, f"not reached within {seconds} s: {status}"
            time.sleep(0.01)

    def broken(self, id: str = "a") -> str:
        """The error of a channel, once it has one; and not by a heartbeat."""
        error: str = self.until(lambda s: s["errors"][id] is not None, seconds=20)["errors"][id]
        return error


def rest(*peers: Peer) -> bool:
    """Whether there is half a second in which none of them takes a tenth of a core. One that polls takes all that it
    gets; what a slow host adds is not always there."""
    for _ in range(20):
        begun, before = time.monotonic(), [peer("status")["cpu"] for peer in peers]
        time.sleep(0.5)
        taken = [peer("status")["cpu"] - was for peer, was in zip(peers, before, strict=True)]
        if max(taken) < 0.1 * (time.monotonic() - begun):
            return True
    return False


class Peers:
    """Peers of one plane that a test left alive serve the next test."""

    def __init__(self, plane: str, device: str = "cpu") -> None:
        self.plane, self.device = plane, device
        self.idle: list[Peer] = []
        self.used: list[Peer] = []

    def start(self) -> Peer:
        peer = self.idle.pop() if self.idle else Peer(self.plane, self.device)
        self.used.append(peer)
        return peer

    def collect(self, failed: bool) -> None:
        for peer in self.used:
            if failed or peer.process.poll() is not None:
                peer.close()
            else:
                peer("reset")
                self.idle.append(peer)
        self.used.clear()

    def pair(self) -> tuple[Peer, Peer]:
        """P and D with a channel ``a``."""
        p, d = self.start(), self.start()
        join(p, d)
        return p, d


def lend(pool: dict[str, Peers], request: pytest.FixtureRequest, plane: str, device: str = "cpu") -> Iterator[Peers]:
    """The peers of a plane for one test. After one that failed they are ended, not lent again."""
    shared = pool.setdefault(f"{plane} {device}", Peers(plane, device))
    failures = request.session.testsfailed
    yield shared
    shared.collect(request.session.testsfailed > failures)


def end(pool: dict[str, Peers]) -> None:
    """End all of them."""
    for shared in pool.values():
        for peer in shared.idle:
            peer.close()
    pool.clear()


def join(p: Peer, d: Peer, id: str = "a") -> None:
    payload = d("connect", id=id, offer=p("offer"))
    d("finish", id=id, reply=p("accept", id=id, payload=payload))


def announce(p: Peer, d: Peer, messages: list[tuple[int, int]], id: str = "a") -> None:
    d("expect", id=id, messages=messages)
    p("send", id=id, messages=messages)


def carry(p: Peer, d: Peer, tags: Iterable[int], nbytes: int = MESSAGE, id: str = "a") -> None:
    """All of these messages come, whole."""
    tags = list(tags)
    announce(p, d, [(tag, nbytes) for tag in tags], id)
    d.until(all_good(tags, id))


def damaged(payload: bytes) -> list[bytes]:
    """Payloads that are none."""
    rng = random.Random(2)
    wrong: tuple[Any, ...] = ({}, [], None, {"address": 1}, {"name": "x" * 1000})
    made = [b"", b"\x00", b"\x81" * 50_000, rng.randbytes(300), bytes(70_000), payload[:-1], payload + b"\0"]
    made += [msgspec.msgpack.encode(x) for x in wrong]
    made += [payload[: rng.randrange(len(payload))] for _ in range(20) if payload]
    return [x for x in made if x != payload]


def flipped(payload: bytes) -> list[bytes]:
    """The payload with one bit of each byte changed. One bit of a random name or a number cannot be told from another
    one: such a payload may be accepted, and leads nowhere."""
    return [payload[:i] + bytes([payload[i] ^ 0x80]) + payload[i + 1 :] for i in range(len(payload))]


REFUSALS = {
    "ProtocolError",
    "TransportError",
    "NotConnectedError",
    "PlaneBusyError",
    "PlaneUnavailableError",
    "PeerUnreachableError",
}
"""What malformed payloads raise."""


def all_good(tags: list[int], id: str = "a") -> Callable[[dict[str, Any]], bool]:
    return lambda status: sorted(status["good"][id]) == sorted(tags) and not status["bad"]
