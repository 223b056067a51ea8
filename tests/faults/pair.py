"""P and D as real processes with a proxy between them, and what must hold whatever fault strikes."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from kvferry.connector.wire.step_plan import PeerEngine
from tests.faults.cases import Case, is_promised
from tests.support.engines import free_port
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.rank_process import RemoteRank, remote_peer
from tests.transport.test_planes_hosts import listening_ports

P_ADDRESS, PROXY_ADDRESS = "127.0.0.2", "127.0.0.3"
DATA = 0
TOKENS, STEP, THEIRS, OURS = 100, 40, [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]
HANDSHAKE, TRANSFER, LEASE = 10.0, 10.0, 20.0
"""Seconds: settings of both processes. Their clocks are moved, so that nobody waits for these times."""
DEADLINE = HANDSHAKE + 2 * TRANSFER + 5.0
"""Seconds of D's clock from the last byte that passed until a load must be reported."""
QUIET_SECONDS = 0.15
"""After so much time without a byte between P and D nothing goes on by itself: the clocks are moved by one second."""
PATIENCE = 600.0
"""Seconds of real time after which a case has failed; no case comes near, on a slow host either."""
FORM: dict[str, Any] = {"content": 128, "layers": 16}


class Broken(AssertionError):
    """An invariant does not hold. The message names the case."""


class PairProxy(FaultProxy):
    """All ports of P but the control port are one, ``DATA``. One that P has opened is open here before D hears of it:
    ``zmq`` has a port for each channel."""

    def __init__(self, control: int) -> None:
        super().__init__(PROXY_ADDRESS)
        self.process_of_p = 0
        self.control, self._opening = control, threading.Lock()

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


class RankPair:
    """A P and a D in processes of their own, and hand-overs between them, each of a prompt that none had before."""

    def __init__(self, port: int) -> None:
        """``port``: of P, also after a restart."""
        self._port, self._number = port, 0
        self.p, self.d = self.start("p"), self.start("d")

    def options(self, role: str) -> dict[str, Any]:
        raise NotImplementedError

    def start(self, role: str) -> RemoteRank:
        return RemoteRank(engine_id=f"engine-{role}", **FORM | self.options(role))

    def restart(self, role: str) -> None:
        """End a process, in whatever state it is, and start another one in its place."""
        getattr(self, role).close()
        setattr(self, role, self.start(role))

    def peer(self) -> PeerEngine:
        return remote_peer([self.p])

    def begin(self, streamed: bool = False) -> str:
        """Start a hand-over; its name. ``streamed``: P computes the prompt while D reads it."""
        self._number += 1
        name = f"req-{self._number}"
        self.d.wipe()
        self.p.fill(THEIRS, TOKENS, salt=-self._number if streamed else self._number)
        if streamed:  # over what other requests have left there
            token = self.p.compute(name, THEIRS, TOKENS, self._number, STEP)
        else:
            token = self.p.grant(name, THEIRS, TOKENS)
        self.d.load(name, token, self.peer(), OURS, TOKENS, STEP * streamed)
        return name

    def holds(self) -> bool:
        """Whether D has P's bytes of the last hand-over."""
        return bool(self.d.holds(OURS, TOKENS, self._number))

    def reuse(self) -> None:
        """P computes another prompt in the same pages."""
        self.p.fill(THEIRS, TOKENS, salt=-self._number)

    def close(self) -> None:
        """End both processes."""
        for rank in (self.p, self.d):
            rank.close()


class FaultyPair(RankPair):
    """A P, a D and the proxy. ``strike`` runs one case. ``outcomes`` counts what became of the loads."""

    def __init__(self, settings: dict[str, Any], *, patience: float = PATIENCE) -> None:
        """``settings``: of both; deadlines among them are others than ``strike`` goes by, to see that it notices."""
        self.outcomes: Counter[str] = Counter()
        self._said = ", ".join(name if value is True else str(value) for name, value in settings.items())
        self._settings = {
            "slot_bytes": 64 << 10, "staging_bytes": 1 << 20,
            "handshake_timeout_seconds": HANDSHAKE, "transfer_timeout_seconds": TRANSFER, "lease_seconds": LEASE,
            "ask_hold_seconds": 5.0, **settings,
        }  # fmt: skip
        self._case: Case | None = None
        self._struck_before = 0
        self._wiped = False  # whether D's engine has used its blocks for something else since the load failed
        self._posted = threading.Event()  # the load of the hand-over that is struck
        self._patience = patience
        self.proxy = PairProxy(free_port())
        super().__init__(self.proxy.control)

    def options(self, role: str) -> dict[str, Any]:
        own = {"side_channel_host": P_ADDRESS, "side_channel_port": self._port} if role == "p" else {}
        return {"settings": self._settings | own}

    def start(self, role: str) -> RemoteRank:
        rank = super().start(role)
        if role == "p":
            self.proxy.process_of_p = rank.process.pid
            self.proxy.follow()
        return rank

    def peer(self) -> PeerEngine:
        address = msgspec.structs.replace(self.p.address, host=PROXY_ADDRESS)
        return PeerEngine("engine-p", 1, 1, LEASE, (address,))

    def close(self) -> None:
        self.proxy.close()
        super().close()

    # --- one case -----------------------------------------------------------------------------------------------

    def strike(self, case: Case) -> None:
        """Run a hand-over that the case's fault strikes, and check all that must hold, then and afterwards.

        Raises:
            Broken: it does not.
        """
        self._case, self._struck_before = case, len(self.proxy.struck)
        self._posted.clear()
        self._wiped = False
        if case.fresh:
            self.proxy.cut()
            self._until(lambda: self.d.tables()["links"] == 0, "D drops a link whose connection is gone", self.d)
        self.proxy.arm(
            Fault(
                case.kind, self._port if case.control else DATA, case.upwards, case.at, case.nbytes, case.flip,
                seconds=0.05, abruptly=case.abruptly, call=lambda: self._happen(case),
            )
        )  # fmt: skip
        self._hand_over(self._check_struck)
        self.outcomes["struck" if self._struck else "missed"] += 1
        self.proxy.heal()
        self._settle()
        if self._wiped:
            self._expect(self.d.is_wiped(), "D's blocks are not written after a load has failed")
        self._hand_over(self._check_clean)
        self._settle()
        self._case = None

    def _happen(self, case: Case) -> None:
        """Called by the proxy, which holds the bytes from here on back meanwhile."""
        self._posted.wait(self._patience)  # or the process could not answer the test any more
        who = self.p if case.process.endswith("P") else self.d
        who.signal(signal.SIGSTOP if case.process.startswith("stop") else signal.SIGKILL)

    def _hand_over(self, check: Callable[[str], bool]) -> None:
        """Hand over a prompt that no hand-over had before, until ``check`` is content with what became of it."""
        for _ in range(20):
            name = self.begin(self._case is not None and self._case.streamed)
            self._posted.set()
            if check(name):
                return
            self.d.let_time_pass(2.0)  # a failed link answers for a second
            time.sleep(0.3)
        raise Broken(f"{self._case}: no clean hand-over succeeds afterwards")

    def _check_struck(self, name: str) -> bool:
        assert self._case is not None
        happened = self._case.process
        if happened and self._await_strike():
            if self._happened_to_d(happened, name):
                return True
            if happened == "stop P":
                self._await_report(name)
                self.p.signal(signal.SIGCONT)
            elif happened in ("kill P", "restart P"):
                self.p.process.wait(self._patience)
                if happened == "restart P":
                    self._restart()
        ok = self._await_report(name)
        if ok and is_promised(self._case, self._settings):
            self._expect(self.holds(), "a load that was reported as done has P's bytes")
        if not ok:
            self.d.wipe()
            self._wiped = True
        self.outcomes["done" if ok else "failed"] += 1
        if happened in ("kill P", "restart P") and self._struck:
            self._restart()
        else:
            self._freed(name)
        return True

    def _happened_to_d(self, happened: str, name: str) -> bool:
        """Whether D was killed. Where it was stopped, P uses its pages again before D goes on."""
        if happened == "kill D":
            self.d.process.wait(self._patience)
            self._restart()
            self._freed(name)
            self.outcomes["D was killed"] += 1
        elif happened == "stop D":
            self._freed(name)
            self.reuse()
            self.d.signal(signal.SIGCONT)
        return happened == "kill D"

    def _check_clean(self, name: str) -> bool:
        ok = self._await_report(name)
        self._freed(name)
        if ok:
            self._expect(self.holds(), "a clean hand-over has P's bytes")
        return ok

    # --- what must hold -----------------------------------------------------------------------------------------

    def _await_report(self, name: str) -> bool:
        """Whether D reports the load as done. D reports it once (``Rank.poll``) and within its deadline."""
        passed, waited = self.proxy.passed, 0.0
        while name not in (received := self.d.received()):
            time.sleep(0.005)
            if self._quiet():
                waited = 0.0 if self.proxy.passed != passed else waited + 1.0
                passed = self.proxy.passed
                self._expect(waited <= DEADLINE, f"D reports a load within {DEADLINE:g} s of the last byte")
                self.d.let_time_pass(1.0)
        return received[name]

    def _freed(self, name: str) -> None:
        """P has its pages back: by the release, or when its clock is one second past the lease."""
        if name not in self.p.sent() and self._quiet() and name not in self.p.sent():
            self.p.let_time_pass(LEASE + 1.0)
        self._until(lambda: name in self.p.sent(), f"P has its pages back {LEASE + 1:g} s after the load ended")

    def _settle(self) -> None:
        """Nothing is left in a table of either side, at the latest when the clocks are some time-outs later."""
        for rank in (self.p, self.d):
            self._expect(not rank.process.ended.is_set(), "both processes live")
            self._until(lambda rank=rank: not left(rank), f"no table keeps anything: {left(rank)}", rank)  # type: ignore[misc]

    def _until(self, condition: Callable[[], bool], text: str, moved: RemoteRank | None = None) -> None:
        """Wait for a condition; the clock of ``moved`` goes on by a second wherever nothing happens by itself."""
        end = time.monotonic() + self._patience
        while not condition():
            self._expect(time.monotonic() < end, text)
            time.sleep(0.01)
            if moved is not None and self._quiet():
                moved.let_time_pass(1.0)

    def _expect(self, holds: bool, text: str) -> None:
        if not holds:
            raise Broken(f"{self._case} over {self._said}: {text}")

    # --- processes and clocks -----------------------------------------------------------------------------------

    def _quiet(self) -> bool:
        """Whether no byte passes for a moment."""
        passed = self.proxy.passed
        time.sleep(QUIET_SECONDS)
        return self.proxy.passed == passed

    @property
    def _struck(self) -> bool:
        return len(self.proxy.struck) > self._struck_before

    def _await_strike(self) -> bool:
        """Until the fault has struck, or the hand-over is over without it; then it strikes no later one either."""
        while not self._struck and not self._quiet():
            pass
        if not self._struck:
            self.proxy.heal()
        return self._struck

    def _restart(self) -> None:
        """A process that was killed comes back, P at its old port."""
        for role in ("p", "d"):
            if getattr(self, role).process.ended.is_set():
                self.restart(role)


def left(rank: RemoteRank) -> list[str]:
    """The tables of a rank that are not empty."""
    return [f"{count} {name}" for name, count in rank.tables().items() if count and name != "links"]
