"""The driver of a soak: processes, hand-overs, faults, samples, and what became of each hand-over."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from tests.soak.engine import MAX_TOKENS
from tests.support.engines import free_port
from tests.support.remote import Remote, RemoteError

BOUNDS: Mapping[str, float] = {"descriptors": 6, "threads": 1, "mappings": 16, "rss_mib": 12}
"""The most that a process may have more when the peers of the second half were forgotten than when those of the first
half were."""
FORGOTTEN_SECONDS = 240.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One quantity of one process, at the end of the first half and of the second one."""

    process: str
    quantity: str
    warm: float
    end: float
    bound: float

    @property
    def growth(self) -> float:
        return self.end - self.warm


SETTINGS = {
    "lease_seconds": 2.0, "lease_cap_seconds": 12.0, "ask_hold_seconds": 1.0, "handshake_timeout_seconds": 2.0,
    "transfer_timeout_seconds": 3.0,
}  # fmt: skip
PLANES = ("cma", "shm", "tcp", "zmq")
REPORT_SECONDS = 60.0
"""A load that is not reported for so long hangs: far above the settings' deadlines and the stops together."""
BLOCKS = 320
STOP_SECONDS = (0.05, 3.0)
"""For so long an engine is stopped; a lease lasts 2 s."""
HELD = ("blocks", "leases", "kept", "reads", "requests", "entries")
OF_PEERS = ("sessions", "links", "descriptors", "threads")
"""What an engine has of its peers, until it has forgotten them (``FORGOTTEN_SECONDS``)."""
ABORTED = {"before": 0.05, "during": 0.12, "never": 0.03}
"""The shares of hand-overs that are given up before they have blocks, while they load, or that D never hears of."""


class EngineProcess(Remote):
    """One life of one engine (``engine.SoakEngine``)."""

    def __init__(self, name: str, plane: str, *, port: int = 0, leak: str = "") -> None:
        self.name, self.plane, self.port = name, plane, port
        self.ready, self.alive, self.stopped_until = False, True, 0.0
        super().__init__(
            "tests.soak.engine:SoakEngine", name=name, plane=plane, port=port, blocks=BLOCKS, settings=SETTINGS,
            leak=leak,
        )  # fmt: skip

    def stop(self, until: float) -> None:
        """SIGSTOP; the driver calls ``go_on`` at ``until``."""
        self.stopped_until = until
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.stopped_until = 0.0
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.alive:
            self.alive = self.ready = False
            self.close()


@dataclass(slots=True)
class HandOver:
    """One hand-over, from its prefill to D's report."""

    name: str
    p: EngineProcess
    d: EngineProcess
    number: int
    tokens: int
    fate: str
    begun: float
    loading: bool = False


class Soak:
    """One run. ``leak``: a fault that is planted into the engines that last, see ``engine.py``. ``violations``: what
    must not be, in words; nothing is waited for after one."""

    under_way = 6  # hand-overs at a time
    quiet_seconds = 60.0
    least_loaded = 0
    """Each half lasts until so many loads have succeeded, also where that takes longer, up to ``patience``; and until
    one has succeeded with each engine that was started again."""
    patience = REPORT_SECONDS
    """For longer no hand-over lasts either."""

    def __init__(self, seconds: float, seed: int, planes: Sequence[str] = PLANES, leak: str = "") -> None:
        self.violations: list[str] = []
        self.seconds, self.rng, self.planes = seconds, random.Random(seed), planes
        self.began, self.lasted = time.monotonic(), 0.0
        self.rests: list[dict[str, dict[str, float]]] = []  # the last sample of each process in the quiet of each half
        self.counts: Counter[str] = Counter()
        self.by_plane: dict[str, Counter[str]] = {plane: Counter() for plane in planes}
        self.samples: dict[str, list[dict[str, float]]] = {}
        self.handovers: dict[str, HandOver] = {}
        self.serial = self.restarts = 0
        self.lasting = [EngineProcess(f"{side}-{plane}", plane, leak=leak) for plane in planes for side in ("P", "D")]
        self.mortal: dict[str, EngineProcess] = {}
        self.untried: set[EngineProcess] = set()  # started again, without a load that has succeeded since

    # --- processes ------------------------------------------------------------------------------------------------

    @property
    def engines(self) -> list[EngineProcess]:
        return [*self.lasting, *self.mortal.values()]

    def restart(self, side: str) -> None:
        """Kill the P or the D that may be killed, and start it again: the same port, at times another plane."""
        former = self.mortal.pop(side, None)
        plane, port = (former.plane, former.port) if former else (self.rng.choice(self.planes), free_port())
        if former is not None:
            self.kill(former)
            if self.rng.random() < 0.5:
                plane, port = self.rng.choice(self.planes), free_port()
        self.mortal[side] = EngineProcess(f"{side}-mortal", plane, port=port)
        self.untried.add(self.mortal[side])
        self.restarts += 1

    def kill(self, engine: EngineProcess) -> None:
        engine.kill()
        self.untried.discard(engine)
        for handover in list(self.handovers.values()):
            if engine is handover.d or (engine is handover.p and not handover.loading):
                self.end(handover, "gone with its engine")

    # --- hand-overs -----------------------------------------------------------------------------------------------

    def begin(self, p: EngineProcess, d: EngineProcess, fate: str) -> None:
        self.serial += 1
        name, number, tokens = f"h{self.serial}", self.rng.randrange(1 << 20), self.rng.randrange(2, MAX_TOKENS)
        self.handovers[name] = HandOver(name, p, d, number, tokens, fate, time.monotonic())
        p.order("prefill", name=name, number=number, tokens=tokens)

    def end(self, handover: HandOver, outcome: str) -> None:
        del self.handovers[handover.name]
        self.counts[outcome] += 1
        self.by_plane[handover.d.plane][outcome] += 1

    def traffic(self) -> None:
        """Keep ``under_way`` hand-overs going, over the planes in turn."""
        ready = [engine for engine in self.engines if engine.ready and not engine.stopped_until]
        while len(self.handovers) < self.under_way:
            plane = self.planes[self.serial % len(self.planes)]
            ps, ds = ([e for e in ready if e.name[0] == side and e.plane == plane] for side in "PD")
            if not (ps and ds):
                self.serial += 1
                break
            fate = self.rng.choices(["", *ABORTED], [1 - sum(ABORTED.values()), *ABORTED.values()])[0]
            self.begin(self.rng.choice(ps), self.rng.choice(ds), fate)

    # --- events ---------------------------------------------------------------------------------------------------

    def take_events(self, seconds: float) -> None:
        """Wait for an event, at most ``seconds``, and handle all that are there."""
        by_connection = {engine.connection: engine for engine in self.engines if engine.alive}
        for connection in wait(list(by_connection), seconds):
            engine = by_connection[connection]  # type: ignore[index]
            try:
                for event in engine.events():
                    self.handle(engine, event)
            except RemoteError as error:
                self.violations.append(f"{engine.name}: {error}")
            except EOFError:
                engine.kill()
                self.violations.append(f"{engine.name} has ended by itself: {engine.process.poll()}")

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end and not self.violations:
            self.take_events(0.02)
        return condition()

    def handle(self, engine: EngineProcess, event: dict[str, Any]) -> None:
        match event.pop("event"):
            case "violation":
                self.violations.append(f"{engine.name}: {event['text']}")
            case "ready":
                engine.ready, engine.port = True, event["port"]
            case "prefilled":
                self.prefilled(event["name"], event["params"])
            case "loaded":
                self.loaded(event)
            case "sample":
                self.violations += [f"{engine.name} logged: {error}" for error in event.pop("errors")]
                at = round(time.monotonic() - self.began, 2)
                self.samples.setdefault(engine.name, []).append({"at": at, **event})

    def prefilled(self, name: str, params: dict[str, Any] | None) -> None:
        handover = self.handovers.get(name)
        if handover is None:
            return
        if params is None or handover.fate == "never" or not handover.d.alive:
            self.end(handover, "no block free at P" if params is None else "D never heard of it")
            return
        handover.loading = True
        load = {"name": name, "number": handover.number, "tokens": handover.tokens, "params": params}
        after = {"before": -1.0, "during": self.rng.expovariate(1 / 0.004)}.get(handover.fate)
        handover.d.order("load", **load, abort_after=after)

    def loaded(self, event: dict[str, Any]) -> None:
        handover, outcome = self.handovers.get(event["name"]), event["outcome"]
        if handover is None or not handover.loading:
            self.violations.append(f"{event['name']} is reported once more, or was never begun")
            return
        if not event["right"]:
            self.violations.append(f"{event['name']}: other bytes than P's over {handover.d.plane}")
        self.end(handover, outcome)
        if outcome == "loaded":
            self.untried -= {handover.p, handover.d}

    def check_hangs(self) -> None:
        for handover in list(self.handovers.values()):
            if time.monotonic() - handover.begun > self.patience:
                self.violations.append(f"{handover.name} over {handover.d.plane} hangs ({handover.fate or 'no fate'})")
                self.end(handover, "hangs")

    # --- the run --------------------------------------------------------------------------------------------------

    def faults(self, now: float) -> None:
        """Stop an engine for a while, or restart one."""
        kind = self.rng.choices(["restart P", "restart D", "stop"], [3, 3, 4])[0]
        self.counts[kind] += 1
        if kind != "stop":
            self.restart(kind[-1])
            return
        running = [engine for engine in self.engines if engine.ready and not engine.stopped_until]
        if running:
            self.rng.choice(running).stop(now + self.rng.uniform(*STOP_SECONDS))

    def sample_all(self) -> None:
        for engine in self.lasting:
            if not engine.stopped_until:
                engine.order("sample")

    def run(self) -> None:
        """Twice traffic and faults, then quiet without the peers that were killed and started again."""
        try:
            assert self.wait(lambda: all(engine.ready for engine in self.lasting), 300.0), "the engines did not start"
            self.left()
            self.began = time.monotonic()
            for half in ("first", "second"):
                self.half(half)
        finally:
            for engine in self.engines:
                engine.kill()

    def half(self, which: str) -> None:
        for side in ("P", "D"):
            self.restart(side)
        begun, before = time.monotonic(), self.counts["loaded"]
        next_sample, next_fault = begun, begun + self.gap()
        while self.goes_on(begun, before):
            now = time.monotonic()
            self.traffic()
            self.take_events(0.01)
            for engine in self.engines:
                if engine.alive and 0 < engine.stopped_until <= now:
                    engine.go_on()
            if now >= next_sample:
                next_sample = now + max(0.1, min(1.0, self.seconds / 60))
                self.sample_all()
                self.check_hangs()
            if now >= next_fault:
                next_fault = now + self.gap()
                self.faults(now)
        self.lasted += time.monotonic() - begun
        for engine in self.engines:
            engine.go_on()
        self.settle(f"the {which} half")
        for engine in self.mortal.values():
            self.kill(engine)
        self.settle("the peers were forgotten", FORGOTTEN_SECONDS)
        self.rests.append({engine.name: self.samples[engine.name][-1] for engine in self.lasting})

    def goes_on(self, begun: float, before: int) -> bool:
        """Whether the traffic of a half that has ``begun`` goes on; ``before``: the loads that had succeeded then."""
        enough = self.counts["loaded"] >= before + self.least_loaded and not self.untried
        end = begun + self.seconds / 2 + (0.0 if enough else self.patience)
        return time.monotonic() < end and not self.violations

    def gap(self) -> float:
        """Seconds between two faults."""
        return self.rng.uniform(0.5, 1.5) * min(5.0, self.seconds / 4)

    def settle(self, what: str, later: float = 0.0) -> None:
        """No new traffic: every load is reported, every lease ends, all blocks come back. ``later``: so many seconds
        pass for the engines before each look, and all that they had of their peers goes, too."""
        if not self.wait(lambda: not self.handovers, self.patience):
            self.check_hangs()
        end = time.monotonic() + self.quiet_seconds
        while not self.violations and (left := self.left(later)):
            if time.monotonic() > end:
                self.violations.append(f"after {what}: {'; '.join(left)}")
            self.wait(lambda: False, 0.1)

    def left(self, later: float = 0.0) -> list[str]:
        """What the lasting engines still hold, in words. ``later``: as for ``settle``."""
        for engine in self.lasting if later else ():
            engine.order("pass_time", seconds=later)
        before = {engine.name: len(self.samples.get(engine.name, ())) for engine in self.lasting}
        self.sample_all()
        self.wait(lambda: all(len(self.samples.get(name, ())) > count for name, count in before.items()), 60.0)
        return [
            f"{engine.name} holds {held:g} {what}"
            for engine in self.lasting
            for what in (*HELD, *(OF_PEERS if later else ()))
            if not (engine.plane == "zmq" and what in ("descriptors", "threads"))  # libzmq keeps its own
            if (held := self.samples[engine.name][-1][what] - self.samples[engine.name][0][what]) > 0
        ]

    def verdicts(self) -> list[Verdict]:
        """Of each process that lasted."""
        if len(self.rests) < 2:
            return []
        warm, end = self.rests
        return [
            Verdict(name, quantity, warm[name][quantity], end[name][quantity], bound)
            for name in warm
            for quantity, bound in BOUNDS.items()
        ]

    def failures(self) -> list[str]:
        """Everything that must not be."""
        grown = [each for each in self.verdicts() if each.growth > each.bound]
        return [*self.violations, *(f"{each.process}: {each.quantity} {each.warm:g} to {each.end:g}" for each in grown)]
