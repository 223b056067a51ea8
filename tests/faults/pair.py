"""A P and a D with a proxy between them, the fault that a seed draws, and what must hold whatever strikes."""

from __future__ import annotations

import random
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.connector.wire.step_plan import PeerEngine
from tests.support.fault_proxy import Fault, FaultProxy, Kind
from tests.support.pair import LEASE, PATIENCE, TIMES, RankPair, RemoteRank
from tests.transport.test_planes_hosts import listening_ports

WHOLE_STREAM = (Kind.TRUNCATE, Kind.DELAY, Kind.STALL)
"""Faults after which the bytes that did arrive are P's: all that a network does to a TCP stream."""
DAMAGE = (Kind.DROP, Kind.DUPLICATE, Kind.REORDER, Kind.CORRUPT)
"""Faults that only somebody between P and D can do to a stream, or broken memory."""
PROCESS = ("kill P", "kill D", "stop P", "stop D", "restart P")
"""What happens to a process at a byte of a stream."""
HANDSHAKE_BYTES, TO_P_BYTES, TO_D_BYTES, DATA_BYTES = 800, 150, 60, 1_000_000
"""Before which byte of a stream a fault strikes: a handshake has more; so have the control messages of a hand-over
without a handshake, in each direction, and the KV of one prompt."""


@dataclass(frozen=True)
class Case:
    """One fault, and the hand-over that it strikes.

    ``fresh``: D connects anew for this hand-over, so that the handshake can be struck too. ``control``: the fault is on
    the control port, else on the data port. ``process``: what happens to a process at that byte, one of ``PROCESS``.
    ``streamed``: P computes the prompt while D reads it.
    """

    seed: int
    fresh: bool
    control: bool
    upwards: bool
    kind: Kind
    at: int
    nbytes: int
    flip: int
    abruptly: bool
    process: str = ""
    streamed: bool = False

    def __str__(self) -> str:
        what = self.process or self.kind.value
        where = f"{'control' if self.control else 'data'} to {'P' if self.upwards else 'D'}"
        text = f"seed {self.seed}: {what} at byte {self.at} of {where}, {'fresh' if self.fresh else 'used'} connection"
        return f"{text}, while P computes" if self.streamed else text


def draw(seed: int, *, data: bool = True) -> Case:
    """The case of a seed. ``data``: the fault may be on the data port."""
    rng = random.Random(seed)
    control, fresh = rng.random() < 0.6 or not data, rng.random() < 0.5
    upwards = rng.random() < 0.5 if control else False  # D sends next to nothing to a data port
    process = rng.choice(PROCESS) if rng.random() < 0.3 else ""
    kind = Kind.CALL if process else rng.choice(WHOLE_STREAM + DAMAGE)
    if control:
        at = rng.randrange(HANDSHAKE_BYTES if fresh else TO_P_BYTES if upwards else TO_D_BYTES)
    else:
        at = rng.randrange(DATA_BYTES)
    return Case(
        seed, fresh, control, upwards, kind, at, nbytes=rng.choice((1, 7, 64, 500)), flip=1 << rng.randrange(8),
        abruptly=rng.random() < 0.5, process=process, streamed=rng.random() < 0.4,
    )  # fmt: skip


def covering(first: int = 0) -> list[Case]:
    """The first cases from the seed ``first`` on of which each has a fault that none before it had: all kinds of damage
    to the control stream and to the data stream, and all that happens to processes, also while P computes."""
    wanted = {(kind, control, "") for kind in WHOLE_STREAM + DAMAGE for control in (True, False)}
    wanted |= {(Kind.CALL, True, process) for process in PROCESS} | {(Kind.CALL, False, "kill P")}
    streamed = {(Kind.CALL, False, "kill P"), (Kind.TRUNCATE, False, ""), (Kind.STALL, True, "")}
    streamed |= {(Kind.CALL, True, process) for process in PROCESS}
    found: list[Case] = []
    while wanted or streamed:
        case = draw(first)
        first += 1
        key, keys = (case.kind, case.control, case.process), streamed if case.streamed else wanted
        if key in keys:
            keys.remove(key)
            found.append(case)
    return found


def is_promised(case: Case, settings: Mapping[str, Any]) -> bool:
    """Whether a load that is reported as done must have P's bytes. Where nothing protects a stream, and somebody
    changes it, that is not so: see SECURITY.md. ``settings``: of both engines."""
    if case.process or case.kind in WHOLE_STREAM or case.control:
        return True
    return settings["plane"] == "zmq" or bool(settings.get("encrypt"))


P_ADDRESS, PROXY_ADDRESS = "127.0.0.2", "127.0.0.3"
DATA = 0


class PairProxy(FaultProxy):
    """All ports of P but the control port are one, ``DATA``. One that P has opened is open here before D hears of it:
    ``zmq`` has a port for each channel."""

    def __init__(self) -> None:
        super().__init__(PROXY_ADDRESS)
        self.process_of_p = self.control = 0
        self._opening = threading.Lock()

    def follow(self) -> None:
        """Open what P has opened."""
        with self._opening, suppress(OSError):  # P may have ended
            for _, port in listening_ports(self.process_of_p):
                self.open(port, P_ADDRESS)

    def _pump(self, connection: Any, upwards: bool) -> None:
        if connection.port != self.control:
            connection.port = DATA
        super()._pump(connection, upwards)

    def _pieces(self, connection: Any, upwards: bool, of: socket.socket, data: bytes) -> Iterator[bytes]:
        if connection.port == self.control and not upwards:
            self.follow()
        return super()._pieces(connection, upwards, of, data)


class FaultyPair(RankPair):
    """A P, a D and the proxy. ``strike`` runs one case. ``outcomes`` counts what became of the loads.

    ``settings``: of both.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._name = ", ".join(name if value is True else str(value) for name, value in settings.items())
        self._struck_before = 0
        self._posted = threading.Event()  # the load of the hand-over that is struck
        self.proxy = PairProxy()
        super().__init__(
            {"slot_bytes": 64 << 10, "staging_bytes": 1 << 20, **TIMES, **settings},
            {"p": {"settings": {"side_channel_host": P_ADDRESS}}}, content=128, layers=16,
        )  # fmt: skip

    def start(self, role: str) -> RemoteRank:
        rank = super().start(role)
        if role == "p":
            self.proxy.process_of_p, self.proxy.control = rank.process.pid, self.port
            self.proxy.follow()
        return rank

    def peer(self) -> PeerEngine:
        address = msgspec.structs.replace(self.p.address, host=PROXY_ADDRESS)
        return PeerEngine("engine-p", 1, 1, LEASE, (address,))

    def close(self) -> None:
        self.proxy.close()
        super().close()

    @property
    def passed(self) -> int:
        return self.proxy.passed

    # --- one case -----------------------------------------------------------------------------------------------

    def strike(self, case: Case) -> None:
        """Run a hand-over that the case's fault strikes, and check all that must hold, then and afterwards.

        Raises:
            Broken: it does not.
        """
        self.case, self._struck_before = f"{case} over {self._name}", len(self.proxy.struck)
        self._posted.clear()
        if case.fresh:
            self.proxy.cut()
            self.until(lambda: self.d.tables()["links"] == 0, "D drops a link whose connection is gone", self.d)
        self.proxy.arm(
            Fault(
                case.kind, self.port if case.control else DATA, case.upwards, case.at, case.nbytes, case.flip,
                seconds=0.05, abruptly=case.abruptly, call=lambda: self._happen(case),
            )
        )  # fmt: skip
        name = self.begin(case.streamed)
        self._posted.set()
        wiped = self._check_struck(case, name)
        self.outcomes["struck" if self._struck else "missed"] += 1
        self.proxy.heal()
        self.settle()
        self.expect(not wiped or self.d.is_wiped(), "D's blocks are not written after a load has failed")
        self.works(case.streamed)

    def _happen(self, case: Case) -> None:
        """Called by the proxy, which holds the bytes from here on back meanwhile."""
        self._posted.wait(PATIENCE)  # or the process could not answer the test any more
        who = self.p if case.process.endswith("P") else self.d
        who.signal(signal.SIGSTOP if case.process.startswith("stop") else signal.SIGKILL)

    def _check_struck(self, case: Case, name: str) -> bool:
        """Returns whether D's engine has used its blocks for something else since the load failed."""
        happened = case.process if case.process and self._await_strike() else ""
        if happened == "kill D":
            self.d.process.wait(PATIENCE)
            self._restart()
            self.freed(name)
            self.outcomes["D was killed"] += 1
            return False
        if happened == "stop D":  # P uses its pages again before D goes on
            self.freed(name)
            self.reuse()
            self.d.signal(signal.SIGCONT)
        elif happened == "stop P":
            self.reported(name)
            self.p.signal(signal.SIGCONT)
        elif happened:
            self.p.process.wait(PATIENCE)
            if happened == "restart P":
                self._restart()
        done = self.ended(name) if is_promised(case, self.settings) else self.reported(name)
        if not done:
            self.d.wipe()
        self.outcomes["done" if done else "failed"] += 1
        if happened in ("kill P", "restart P"):
            self._restart()
        else:
            self.freed(name)
        return not done

    @property
    def _struck(self) -> bool:
        return len(self.proxy.struck) > self._struck_before

    def _await_strike(self) -> bool:
        """Until the fault has struck, or the hand-over is over without it; then it strikes no later one either."""
        while not self._struck and not self.quiet():
            pass
        if not self._struck:
            self.proxy.heal()
        return self._struck

    def _restart(self) -> None:
        """A process that was killed comes back, P at its old port."""
        for role in ("p", "d"):
            if getattr(self, role).process.ended.is_set():
                self.restart(role)
