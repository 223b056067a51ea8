"""Two ranks in network namespaces of their own, and a link that goes down, or a peer that dies, while the other one's
transfer thread reads nothing: what made libzmq end the process of whoever was left.

No process may end by it, every load must be reported, and every byte be right.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from tests.support.pair import PATIENCE, Broken, RankPair

SHORT: dict[str, Any] = {
    "lease_seconds": 4.0, "lease_cap_seconds": 8.0, "ask_hold_seconds": 1.0, "handshake_timeout_seconds": 1.0,
    "transfer_timeout_seconds": 2.0, "handover_timeout_seconds": 8.0,
}  # fmt: skip
LOADS, TOKENS, BLOCKS = 24, 1600, 100
"""Hand-overs at once, the tokens of each, and its blocks of 16 tokens."""
ASKED_SECONDS = 0.3
"""In which D's requests reach P, which answers all of them at once afterwards."""
ADDRESS = {"p": "10.78.0.1", "d": "10.78.0.2"}
DOWN_SECONDS, STILL_SECONDS, AFTER_SECONDS = 1.0, 2.0, 0.2
"""How long the link is down and a transfer thread reads nothing; and when that begins, since the loads began."""
_serial = itertools.count()


def _ip(*words: str) -> bytes:
    return subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60).stdout


class Hosts:
    """Two network namespaces with a link between them."""

    def __init__(self) -> None:
        number = f"{os.getpid()}-{next(_serial)}"
        self.names = {role: f"kvferry-out-{number}-{role}" for role in "pd"}
        for name in self.names.values():
            _ip("netns", "add", name)
        _ip("-n", self.names["p"], "link", "add", "kvo0", "type", "veth", "peer", "name", "kvo0",
            "netns", self.names["d"])  # fmt: skip
        for role, name in self.names.items():
            _ip("-n", name, "addr", "add", f"{ADDRESS[role]}/24", "dev", "kvo0")
            for device in ("lo", "kvo0"):
                _ip("-n", name, "link", "set", device, "up")
        self.up()

    def down(self) -> None:
        """What is sent is lost, and nobody is told."""
        _ip("-n", self.names["p"], "link", "set", "kvo0", "down")

    def up(self) -> None:
        """Waits until the link carries, which takes the kernel a moment."""
        _ip("-n", self.names["p"], "link", "set", "kvo0", "up")
        end, names = time.monotonic() + PATIENCE, self.names.values()
        while any(b"state UP" not in _ip("-n", name, "-oneline", "link", "show", "kvo0") for name in names):
            if time.monotonic() > end:
                raise Broken("the link does not come up")
            time.sleep(0.01)
        for name in names:  # a search for the other's address that began before would fail
            _ip("-n", name, "neigh", "flush", "dev", "kvo0")

    def close(self) -> None:
        for name in self.names.values():
            _ip("netns", "delete", name)


class DistantPair(RankPair):
    """P and D in their namespaces."""

    def __init__(self, plane: str) -> None:
        self.hosts = Hosts()
        settings = {"plane": plane, "slot_bytes": 64 << 10, "staging_bytes": 1 << 20}
        own = {
            role: {"namespace": self.hosts.names[role], "settings": {"side_channel_host": address}}
            for role, address in ADDRESS.items()
        }
        super().__init__(settings | SHORT, own, blocks=LOADS * BLOCKS)

    def strike(self, event: str, still: str) -> None:
        """Load, strike, and check what must hold. ``event``: "link", "kill P", "kill D"; ``still``: "P" or "D", whose
        transfer thread reads nothing meanwhile."""
        self.until(lambda: self._hand_over("warm"), "the first hand-over succeeds")
        names = [f"req-{number}" for number in range(LOADS)]
        self._load(names, still)
        time.sleep(AFTER_SECONDS)
        victim = {"P": self.p, "D": self.d}.get(event[-1])
        if victim is None:
            self.hosts.down()
            time.sleep(DOWN_SECONDS)
            self.hosts.up()
        else:
            victim.signal(signal.SIGKILL)
        if victim is not self.d:
            reported = self._reported(names)
            for number, name in enumerate(names):
                right = not reported[name] or self.d.holds(self._blocks(number), TOKENS, number)
                self.expect(right, f"{name} was reported as done and has P's bytes")
        if victim is not self.p:
            self.until(lambda: set(names) <= self.p.sent(), "every lease ends")
        if victim is None:
            self.until(lambda: self._hand_over("again"), "a hand-over succeeds afterwards")
        for rank in (self.p, self.d):
            self.expect(rank is victim or not rank.process.ended.wait(0.1), "no other process ends")

    def _load(self, names: Sequence[str], still: str = "") -> None:
        """Begin to load, and let what one side sends pile up before the other, which stands still."""
        for number in range(len(names)):
            self.p.fill(self._blocks(number), TOKENS, salt=number)
        tokens = [self.p.grant(name, self._blocks(number), TOKENS) for number, name in enumerate(names)]
        if still:
            self.p.stand_still(STILL_SECONDS if still == "P" else ASKED_SECONDS)
        for number, (name, token) in enumerate(zip(names, tokens, strict=True)):
            self.d.load(name, token, self.peer(), self._blocks(number), TOKENS)
        if still == "D":
            self.d.stand_still(STILL_SECONDS + ASKED_SECONDS)
            time.sleep(ASKED_SECONDS)

    @staticmethod
    def _blocks(number: int) -> list[int]:
        return list(range(number * BLOCKS, (number + 1) * BLOCKS))

    def _hand_over(self, name: str) -> bool:
        """Whether a hand-over succeeds; on a busy host it may take longer than short settings allow."""
        name = f"{name}-{next(_serial)}"
        self._load([name])
        return self._reported([name])[name] and bool(self.d.holds(self._blocks(0), TOKENS))

    def _reported(self, names: Sequence[str]) -> dict[str, bool]:
        self.until(lambda: set(names) <= self.d.received().keys(), "D reports every load")
        return dict(self.d.received())

    def close(self) -> None:
        super().close()
        self.hosts.close()
