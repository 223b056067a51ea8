"""Every port of real P and D processes under strangers and holders of the key. Watched from outside, and by the
engine's own figures: the process lives, its longest turn, its memory, its descriptors, and an honest hand-over
afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine
from kvferry.transport.control.key_file import shared_key
from kvferry.transport.control.keys import Keys
from tests.fuzz.attackers import KeyHolder, Stranger, unix_names
from tests.fuzz.honest import TOKEN, Honest
from tests.fuzz.in_process import TIMES, Outcome
from tests.support.fault_proxy import FaultProxy
from tests.support.pair import LEASE, THEIRS, TOKENS, Broken, RankPair
from tests.support.pair import TIMES as SETTINGS
from tests.support.remote import RemoteError
from tests.support.turns import MOST_BYTES, MOST_TURN_SECONDS
from tests.transport.test_planes_hosts import listening_ports

SAMPLE_SECONDS = 0.25
MORE_DESCRIPTORS = 4
"""An engine may hold more afterwards: a link that was not there before."""
WAIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """One port of a P or a D. ``plane``: of the engines. ``which``: "control", "data" or "socket" (a Unix socket).
    ``key``: the attacker has the key."""

    name: str
    plane: str
    which: str
    side: str
    key: bool = False


def targets() -> list[Target]:
    """UCX's port is not among them: who reaches it can write memory of the engine (SECURITY.md)."""
    kinds = [
        ("control port", "shm", "control", False), ("control port, with the key", "shm", "control", True),
        ("tcp data port", "tcp", "data", False), ("zmq data port", "zmq", "data", False),
        ("shm socket", "shm", "socket", False),
    ]  # fmt: skip
    return [
        Target(f"{name} of {side}", plane, which, side, key)
        for name, plane, which, key in kinds
        for side in ("P", "D")
        if name != "zmq data port" or side == "P"  # a D that nobody reads from has none
    ]


class Pair(RankPair):
    """A P and a D of one plane. ``recorded``: what an honest D has sent to P's control port."""

    def __init__(self, plane: str) -> None:
        super().__init__(SETTINGS | {"plane": plane})
        self.sides = {"P": self.p, "D": self.d}
        self._by = ""
        self.recorded: list[bytes] = []
        if plane == "shm":  # whose bytes go by no port
            with closing(FaultProxy("127.0.0.3", records=True)) as recorder:
                recorder.open(self.port, "127.0.0.1")
                self._by = recorder.address
                self.works()
                self.recorded = [bytes(up) for up, _ in recorder.recorded if up]
            self._by = ""
        self.works()

    def peer(self) -> PeerEngine:
        address = msgspec.structs.replace(self.p.address, host=self._by or self.p.address.host)
        return PeerEngine("engine-p", 1, 1, LEASE, (address,))

    def control(self, target: Target) -> int:
        return self.sides[target.side].address.port

    def port_of(self, target: Target) -> int | bytes:
        pid = self.sides[target.side].process.pid
        if target.which == "control":
            return self.control(target)
        if target.which == "socket":
            (name,) = unix_names(pid)
            return name
        (port,) = {port for _, port in listening_ports(pid)} - {self.control(target)}
        return port

    def attacker(self, target: Target, rng: random.Random, honest: Honest, keys: Keys) -> Any:
        if not target.key:
            return Stranger(rng, self.port_of(target), self.recorded, keys if target.which == "control" else None)
        token = self.sides[target.side].grant("attacked", THEIRS, TOKENS)  # so that some messages concern a lease
        corpus = [[f.replace(TOKEN, token) for f in messages.encode(request)] for request in honest.requests]
        return KeyHolder(rng, self.control(target), keys, corpus)


def attack(target: Target, pair: Pair, seed: int, count: int, seconds: float, honest: Honest, keys: Keys) -> Outcome:
    """Throw ``count`` inputs at a port, or for ``seconds``; see what that did to the engine. The attack is repeated
    where a turn took too long, because a shared host can make a turn slow by chance."""
    for _ in range(TIMES):
        outcome = Outcome()
        try:
            _attack(target, pair, seed, count, seconds, honest, keys, outcome)
        except (Broken, RemoteError, OSError) as error:
            outcome.failures["process or hand-over"] = str(error)
        if set(outcome.failures) != {"slow"}:
            break
    return outcome


def _attack(
    target: Target, pair: Pair, seed: int, count: int, seconds: float, honest: Honest, keys: Keys, outcome: Outcome
) -> None:
    side = pair.sides[target.side]
    before = side.usage()

    def more() -> int:
        """Descriptors that the engine has more than before."""
        now = side.usage()
        outcome.worst_s = max(outcome.worst_s, now["turn_ms"] / 1e3)
        outcome.worst_bytes = max(outcome.worst_bytes, int((now["rss_mib"] - before["rss_mib"]) * 2**20))
        for error in now["errors"]:
            outcome.failures["log"] = f"it logged: {error}"
        return int(now["descriptors"] - before["descriptors"])

    thrower = pair.attacker(target, random.Random(f"{seed} {target.name}"), honest, keys)
    end, next_sample = time.monotonic() + seconds, 0.0
    with closing(thrower):
        while thrower.inputs < count and time.monotonic() < end:
            thrower.throw()
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + SAMPLE_SECONDS
                more()
        more()
    outcome.inputs = thrower.inputs
    end = time.monotonic() + WAIT_SECONDS
    while (left := more()) > MORE_DESCRIPTORS and time.monotonic() < end:
        time.sleep(SAMPLE_SECONDS)
    outcome.descriptors = left
    if left > MORE_DESCRIPTORS:
        outcome.failures["descriptors"] = f"{left} descriptors more than before"
    if outcome.worst_s > MOST_TURN_SECONDS:
        outcome.failures["slow"] = f"a turn of {outcome.worst_s * 1e3:.0f} ms"
    if outcome.worst_bytes > MOST_BYTES:
        outcome.failures["memory"] = f"{outcome.worst_bytes >> 20} MiB more"
    pair.works()


def fuzz(seed: int, count: int, seconds: float, chosen: Sequence[Target]) -> dict[str, Outcome]:
    """All targets, each with an equal share of ``count`` and of ``seconds``."""
    honest, keys = Honest(), Keys(shared_key())
    found: dict[str, Outcome] = {}
    pairs: dict[str, Pair] = {}
    try:
        for target in chosen:
            if target.plane not in pairs:
                pairs[target.plane] = Pair(target.plane)
            pair = pairs[target.plane]
            outcome = attack(target, pair, seed, max(1, count // len(chosen)), seconds / len(chosen), honest, keys)
            found[target.name] = outcome
            if outcome.failures:
                pairs.pop(target.plane).close()
    finally:
        for pair in pairs.values():
            pair.close()
    return found
