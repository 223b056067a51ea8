"""Two ranks in network namespaces of their own, and a link that goes down, or a peer that dies or stops, while the
other one's transfer thread reads nothing: what made libzmq end the process of whoever was left.

    python tests/faults/outages.py [--count 200] [--seed S] [--workers 4]

Each seed is one outage. No process may end by it, every load must be reported, and every byte be right.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from tests.support.rank_process import RemoteRank, remote_peer

PLANES = ("tcp", "zmq", "ucx")
EVENTS = ("link", "link", "link", "kill P", "kill D", "stop P", "stop D")
SHORT: dict[str, Any] = {
    "lease_seconds": 4.0, "lease_cap_seconds": 8.0, "ask_hold_seconds": 1.0, "handshake_timeout_seconds": 1.0,
    "transfer_timeout_seconds": 2.0, "handover_timeout_seconds": 8.0,
}  # fmt: skip
LOADS, TOKENS, BLOCKS = 24, 1600, 100
"""Hand-overs at once, the tokens of each, and its blocks of 16 tokens."""
ASKED_SECONDS = 0.3
"""In which D's requests reach P, which answers all of them at once afterwards."""
PATIENCE = 600.0
_serial = itertools.count()


@dataclass(frozen=True)
class Outage:
    """``down_seconds``: of the link, or until the peer that was stopped goes on. ``still_seconds``: how long the
    transfer thread of ``still`` reads nothing. ``after_seconds``: since the loads began."""

    seed: int
    plane: str
    event: str
    down_seconds: float
    still: str
    still_seconds: float
    after_seconds: float
    short: bool

    def __str__(self) -> str:
        settings = "short" if self.short else "default"
        return (
            f"seed {self.seed}: {self.event} for {self.down_seconds:.1f} s over {self.plane}, {settings} settings, "
            f"{self.still or 'nobody'} still for {self.still_seconds:.1f} s"
        )


def draw(seed: int, longest: float = 40.0) -> Outage:
    """The outage of a seed."""
    rng = random.Random(seed)
    event = rng.choice(EVENTS)
    still = rng.choice(("P", "D")) if event == "link" else "D" if event.endswith("P") else "P"
    return Outage(
        seed, rng.choice(PLANES), event, 0.3 * (longest / 0.3) ** rng.random(), still if rng.random() < 0.8 else "",
        rng.uniform(0.5, 4.0), rng.uniform(0.0, 0.3), rng.random() < 0.6,
    )  # fmt: skip


class Broken(AssertionError):
    """What must hold does not. The message names the outage."""


class Hosts:
    """Two network namespaces with a link between them."""

    def __init__(self) -> None:
        number = f"{os.getpid()}-{next(_serial)}"
        self.names = {"P": f"kvferry-out-{number}-p", "D": f"kvferry-out-{number}-d"}
        self.address = {"P": "10.78.0.1", "D": "10.78.0.2"}
        for name in self.names.values():
            _ip("netns", "add", name)
        _ip("-n", self.names["P"], "link", "add", "kvo0", "type", "veth", "peer", "name", "kvo0",
            "netns", self.names["D"])  # fmt: skip
        for end, name in self.names.items():
            _ip("-n", name, "addr", "add", f"{self.address[end]}/24", "dev", "kvo0")
            for device in ("lo", "kvo0"):
                _ip("-n", name, "link", "set", device, "up")
        self.up()

    def down(self) -> None:
        """What is sent is lost, and nobody is told."""
        _ip("-n", self.names["P"], "link", "set", "kvo0", "down")

    def up(self) -> None:
        """Waits until the link carries, which takes the kernel a moment."""
        _ip("-n", self.names["P"], "link", "set", "kvo0", "up")
        end = time.monotonic() + PATIENCE
        while any(
            b"state UP" not in _ip("-n", name, "-oneline", "link", "show", "kvo0") for name in self.names.values()
        ):
            if time.monotonic() > end:
                raise Broken("the link does not come up")
            time.sleep(0.01)
        for name in self.names.values():  # a search for the other's address that began before would fail
            _ip("-n", name, "neigh", "flush", "dev", "kvo0")

    def close(self) -> None:
        for name in self.names.values():
            _ip("netns", "delete", name)


def _ip(*words: str) -> bytes:
    return subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60).stdout


class Pair:
    """P and D in their namespaces."""

    def __init__(self, outage: Outage) -> None:
        self.outage, self.hosts = outage, Hosts()
        settings = {"plane": outage.plane, "slot_bytes": 64 << 10, "staging_bytes": 1 << 20,
                    **(SHORT if outage.short else {})}  # fmt: skip
        self.rank = {
            end: RemoteRank(
                engine_id=f"engine-{end.lower()}", namespace=self.hosts.names[end], blocks=LOADS * BLOCKS,
                settings=settings | {"side_channel_host": self.hosts.address[end]},
            )
            for end in "PD"
        }  # fmt: skip

    def strike(self) -> Counter[str]:
        """Load, strike, and check what must hold. Returns what became of the loads."""
        p, d, outage = self.rank["P"], self.rank["D"], self.outage
        self._until(lambda: self._hand_over("warm"), "the first hand-over succeeds")
        names = [f"req-{number}" for number in range(LOADS)]
        self._begin(names)
        victim = self.rank.get(outage.event[-1]) if outage.event != "link" else None
        if victim is None:
            self.hosts.down()
            time.sleep(outage.down_seconds)
            self.hosts.up()
        elif outage.event.startswith("stop"):
            victim.signal(signal.SIGSTOP)
            time.sleep(outage.down_seconds)
            victim.signal(signal.SIGCONT)
        else:
            victim.signal(signal.SIGKILL)
        killed = victim if outage.event.startswith("kill") else None
        outcomes: Counter[str] = Counter()
        if killed is not d:
            reported = self._reported(names)
            for number, name in enumerate(names):
                good = reported[name]
                outcomes["done" if good else "failed"] += 1
                if good and not d.holds(self._blocks(number), TOKENS, number):
                    raise Broken(f"{name} was reported as done and has other bytes")
        if killed is not p:
            self._until(lambda: set(names) <= p.sent(), "every lease ends")
        if killed is None:
            self._until(lambda: self._hand_over("again"), "a hand-over succeeds afterwards")
        for rank in self.rank.values():
            if rank is not killed and rank.process.ended.wait(0.1):
                raise Broken(f"a process ended, status {rank.process.returncode}")
        return outcomes

    def _begin(self, names: list[str]) -> None:
        """Begin to load, and let what one side sends pile up before the other, which stands still."""
        p, d, outage = self.rank["P"], self.rank["D"], self.outage
        for number in range(len(names)):
            p.fill(self._blocks(number), TOKENS, salt=number)
        tokens = [p.grant(name, self._blocks(number), TOKENS) for number, name in enumerate(names)]
        if outage.still and len(names) > 1:
            p.stand_still(outage.still_seconds if outage.still == "P" else ASKED_SECONDS)
        for number, (name, token) in enumerate(zip(names, tokens, strict=True)):
            d.load(name, token, remote_peer([p]), self._blocks(number), TOKENS)
        if outage.still == "D" and len(names) > 1:
            d.stand_still(outage.still_seconds + ASKED_SECONDS)
            time.sleep(ASKED_SECONDS)
        if len(names) > 1:
            time.sleep(outage.after_seconds)

    @staticmethod
    def _blocks(number: int) -> list[int]:
        return list(range(number * BLOCKS, (number + 1) * BLOCKS))

    def _hand_over(self, name: str) -> bool:
        """Whether a hand-over succeeds; on a busy host it may take longer than short settings allow."""
        name = f"{name}-{next(_serial)}"
        self._begin([name])
        return self._reported([name])[name] and self.rank["D"].holds(self._blocks(0), TOKENS)

    def _reported(self, names: list[str]) -> dict[str, bool]:
        found: dict[str, bool] = {}

        def all_of_them() -> bool:
            found.update({name: good for name, good in self.rank["D"].received().items() if name in names})
            return len(found) == len(names)

        self._until(all_of_them, "D reports every load")
        return found

    def _until(self, condition: Any, text: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            for name, rank in self.rank.items():
                if rank.process.ended.is_set() and self.outage.event != f"kill {name}":
                    raise Broken(f"{name} ended, status {rank.process.returncode}")
            if time.monotonic() > end:
                raise Broken(f"{text}")
            time.sleep(0.05)

    def close(self) -> None:
        for rank in self.rank.values():
            rank.close()
        self.hosts.close()


def run(outage: Outage) -> Counter[str]:
    """One outage. Raises Broken."""
    pair = Pair(outage)
    try:
        return pair.strike()
    finally:
        pair.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first outage; each further one adds one")
    parser.add_argument("--workers", type=int, default=4, help="outages at once")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    lock, broken = threading.Lock(), 0

    def one(seed: int) -> None:
        nonlocal broken
        outage, begun = draw(seed), time.monotonic()
        try:
            outcomes = run(outage)
        except (Broken, OSError) as error:
            with lock:
                broken += 1
            print(f"BROKEN {outage}: {error}", flush=True)
            return
        with lock:
            total.update(outcomes)
        print(f"{outage}: {dict(outcomes)}, {time.monotonic() - begun:.1f} s", flush=True)

    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(one, range(args.seed, args.seed + args.count)))
    print(f"{args.count} outages, {broken} broken, loads {dict(total)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
