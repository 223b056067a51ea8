"""Every port of real P and D processes under strangers and holders of the key. Watched from outside, and by the
engine's own samples: the process lives, its longest turn, its memory, its descriptors, and an honest hand-over
afterwards."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvferry.connector.wire import messages
from kvferry.transport.control.key_file import shared_key
from kvferry.transport.control.keys import Keys
from tests.fuzz.attackers import KeyHolder, Stranger, ZmqKeyHolder, unix_names
from tests.fuzz.honest import Honest
from tests.fuzz.in_process import TIMES, Outcome
from tests.soak.fleet import Driver, EngineProcess
from tests.support.turns import MOST_BYTES, MOST_TURN_SECONDS
from tests.transport.test_planes_hosts import listening_ports

SAMPLE_SECONDS = 0.25
BLOCKS = 64
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
        ("zmq data port, with the key", "zmq", "data", True), ("shm socket", "shm", "socket", False),
    ]  # fmt: skip
    return [
        Target(f"{name} of {side}", plane, which, side, key)
        for name, plane, which, key in kinds
        for side in ("P", "D")
        if name != "zmq data port" or side == "P"  # a D that nobody reads from has none
    ]


class Recorder:
    """Between an honest D and a port of P: keeps what D sends."""

    def __init__(self, port: int) -> None:
        self.sent: list[bytearray] = []
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                d, _ = self._listener.accept()
                p = socket.create_connection(("127.0.0.1", self._port))
                self.sent.append(bytearray())
                threading.Thread(target=self._pump, args=(d, p, self.sent[-1]), daemon=True).start()
                threading.Thread(target=self._pump, args=(p, d, bytearray()), daemon=True).start()

    @staticmethod
    def _pump(of: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with suppress(OSError), of, to:
            while data := of.recv(1 << 16):
                kept += data
                to.sendall(data)

    def close(self) -> None:
        self._listener.close()


class Pair(Driver):
    """A P and a D of one plane."""

    def __init__(self, plane: str) -> None:
        super().__init__()
        self.sample: dict[str, dict[str, float]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self.sides = {side: EngineProcess(side, plane, blocks=BLOCKS) for side in ("P", "D")}
        self._serial = 0
        assert self.wait(lambda: all(engine.ready for engine in self.engines)), "the engines did not start"
        self.recorded = self._record()

    @property
    def engines(self) -> list[EngineProcess]:
        return list(self.sides.values())

    def handle(self, engine: EngineProcess, event: dict[str, Any]) -> None:
        match event.pop("event"):
            case "sample":
                self.sample[engine.name] = event
            case "prefilled" | "loaded":
                self.results[event["name"]] = event

    def wait(self, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
        return super().wait(condition, seconds)

    def sampled(self, side: str) -> dict[str, float]:
        """A new sample of an engine; empty where it does not answer."""
        self.sample.pop(side, None)
        self.sides[side].order("sample")
        self.wait(lambda: side in self.sample)
        return self.sample.get(side, {})

    def hand_over(self, port: int = 0, tokens: int = 200) -> str:
        """One honest hand-over, by way of ``port`` where one is given; what became of it."""
        self._serial += 1
        name = f"honest{self._serial}"
        self.sides["P"].order("prefill", name=name, number=self._serial, tokens=tokens)
        if not self.wait(lambda: name in self.results):
            return "P does not answer"
        params = self.results.pop(name)["params"]
        if params is None:
            return "P has no block"
        if port:
            params["kvferry"]["ranks"][0][3] = port
        load = {"name": name, "number": self._serial, "tokens": tokens, "params": params, "abort_after": None}
        self.sides["D"].order("load", **load)
        if not self.wait(lambda: name in self.results):
            return "D does not answer"
        return str(self.results[name]["outcome"]) if self.results[name]["right"] else "other bytes"

    def _record(self) -> list[bytes]:
        recorder = Recorder(self.sides["P"].port)
        outcome = self.hand_over(recorder.port)
        recorder.close()
        assert outcome == "loaded", outcome
        return [bytes(sent) for sent in recorder.sent if sent]

    def port(self, target: Target) -> int | bytes:
        engine = self.sides[target.side]
        if target.which == "control":
            return engine.port
        if target.which == "socket":
            (name,) = unix_names(engine.process.pid)
            return name
        (port,) = {port for _, port in listening_ports(engine.process.pid)} - {engine.port}
        return port

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()


def attacker(
    target: Target, pair: Pair, rng: random.Random, honest: Honest, keys: Keys
) -> Stranger | KeyHolder | ZmqKeyHolder:
    if not target.key:
        return Stranger(rng, pair.port(target), pair.recorded, keys if target.which == "control" else None)
    control = pair.sides[target.side].port
    if target.which == "data":
        return ZmqKeyHolder(rng, control, keys, honest.hello)
    return KeyHolder(rng, control, keys, [messages.encode(request) for request in honest.requests])


def attack(target: Target, pair: Pair, seed: int, count: int, seconds: float, honest: Honest, keys: Keys) -> Outcome:
    """Throw ``count`` inputs at a port, or for ``seconds``; see what that did to the engine. The attack is repeated
    where a turn took too long, because a shared host can make a turn slow by chance."""
    outcome = _attack(target, pair, seed, count, seconds, honest, keys)
    for _ in range(TIMES - 1):
        if set(outcome.failures) == {"slow"}:
            outcome = _attack(target, pair, seed, count, seconds, honest, keys)
    return outcome


def _attack(target: Target, pair: Pair, seed: int, count: int, seconds: float, honest: Honest, keys: Keys) -> Outcome:
    outcome = Outcome()
    if pair.hand_over() != "loaded":
        outcome.failures["before"] = "no hand-over before the attack"
        return outcome
    before = pair.sampled(target.side)
    thrower = attacker(target, pair, random.Random(f"{seed} {target.name}"), honest, keys)
    end, next_sample = time.monotonic() + seconds, 0.0

    def note(sample: dict[str, float]) -> None:
        if sample:
            outcome.worst_s = max(outcome.worst_s, sample["turn_ms"] / 1e3)
            outcome.worst_bytes = max(outcome.worst_bytes, int((sample["rss_mib"] - before["rss_mib"]) * 2**20))

    while thrower.inputs < count and time.monotonic() < end and not pair.violations:
        thrower.throw()
        if time.monotonic() >= next_sample:
            next_sample = time.monotonic() + SAMPLE_SECONDS
            pair.sides[target.side].order("sample")
            pair.take_events(0.0)
            note(pair.sample.pop(target.side, {}))
    note(pair.sampled(target.side))
    thrower.close()
    outcome.inputs = thrower.inputs

    def descriptors() -> int:
        sample = pair.sampled(target.side)
        note(sample)
        return int(sample.get("descriptors", 1e6) - before["descriptors"])

    end = time.monotonic() + WAIT_SECONDS
    while (more := descriptors()) > MORE_DESCRIPTORS and time.monotonic() < end and not pair.violations:
        time.sleep(SAMPLE_SECONDS)
    outcome.descriptors = more
    if pair.violations:
        outcome.failures["process"] = "; ".join(pair.violations)
    elif (result := pair.hand_over()) != "loaded":
        outcome.failures["honest"] = f"an honest hand-over afterwards: {result}"
    if more > MORE_DESCRIPTORS:
        outcome.failures["descriptors"] = f"{more} descriptors more than before"
    if outcome.worst_s > MOST_TURN_SECONDS:
        outcome.failures["slow"] = f"a turn of {outcome.worst_s * 1e3:.0f} ms"
    if outcome.worst_bytes > MOST_BYTES:
        outcome.failures["memory"] = f"{outcome.worst_bytes >> 20} MiB more"
    return outcome


def fuzz(
    seed: int, count: int, seconds: float, chosen: Sequence[Target], shown: Callable[[str], None] = lambda text: None
) -> dict[str, Outcome]:
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
            shown(f"{target.name}: {outcome.inputs} inputs, {'; '.join(outcome.failures.values()) or 'no failure'}")
            if outcome.failures:
                pairs.pop(target.plane).close()
    finally:
        for pair in pairs.values():
            pair.close()
    return found
