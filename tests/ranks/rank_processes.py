"""The processes that ranks run in, and one hand-over between all ranks of P and all ranks of D."""

from __future__ import annotations

import base64
import itertools
import json
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import msgspec

from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from tests.ranks.pairing import Pairing, Rank
from tests.support.fork_server import fork_server

PROCESSES = 6
"""Up to as many ranks have a process each; more share, those of one side with each other."""


@dataclass(frozen=True)
class Seen:
    """What was seen of every rank."""

    p: dict[Rank, dict[str, Any]]
    d: dict[Rank, dict[str, Any]]


class HostProcess:
    """The parent's end of ``rank_host``. ``start`` a command, then take its ``answer``."""

    def __init__(self) -> None:
        self.process = fork_server().start(str(Path(__file__).with_name("rank_host.py")), text=True)
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(json.dumps({"error": f"the process of some ranks ended, code {self.process.wait()}"}))

    def start(self, command: str, **arguments: Any) -> None:
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds: float) -> Any:
        """Raises RuntimeError where it has none."""
        try:
            said = json.loads(self._answers.get(timeout=seconds))
        except Empty:
            raise RuntimeError(f"the process of some ranks said nothing for {seconds:g} s") from None
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["answer"]

    def kill(self) -> None:
        self.process.close()


class RankProcesses:
    """Processes that stay while pairings come and go."""

    def __init__(self, gpus: int = 0) -> None:
        """``gpus``: how many GPUs the caches lie on; in host memory where there are none."""
        self.gpus = gpus
        self._hosts: list[HostProcess] = []
        self._count = itertools.count()

    def run(self, pairing: Pairing, *, inside: bool = False, fault: str = "", seconds: float = 600.0) -> Seen:
        """One hand-over. ``inside``: a step of D computes with it. ``fault``: see ``rank_host.plant``.

        Raises:
            RuntimeError: ranks that did not start, or a process that ended or hangs; the processes are started anew.
        """
        if not self._hosts:
            self._hosts = [HostProcess() for _ in range(PROCESSES)]
            for host in self._hosts:
                host.answer(600)
        try:
            return self._run(pairing, inside, fault, seconds)
        except BaseException:
            self.close()
            raise

    def _run(self, pairing: Pairing, inside: bool, fault: str, seconds: float) -> Seen:
        p_shares, d_shares = shards(pairing.p.ranks(), pairing.d.ranks())
        number, token = next(self._count), secrets.token_hex(16)
        p_hosts, d_hosts = self._hosts[: len(p_shares)], self._hosts[len(p_shares) :][: len(d_shares)]
        addresses: list[RankAddress] = []
        for side, hosts, parts in (("p", p_hosts, p_shares), ("d", d_hosts, d_shares)):
            for host, ranks in zip(hosts, parts, strict=True):
                host.start("open", pairing=str(pairing), side=side, ranks=ranks,
                           engine_id=f"engine-{side}{number}", gpus=self.gpus, inside=inside)  # fmt: skip
        for host in p_hosts:
            answers = [base64.b64decode(address) for address in host.answer(600)]
            addresses += [msgspec.msgpack.decode(address, type=RankAddress) for address in answers]
        for host in d_hosts:
            host.answer(600)
        shardings = (TokenSharding(pairing.p.dcp, pairing.p.interleave),)
        peer = PeerEngine(f"engine-p{number}", pairing.p.tp, pairing.p.pp, 300.0, tuple(addresses), shardings=shardings)
        encoded = base64.b64encode(msgspec.msgpack.encode(peer)).decode()
        every(p_hosts, "grant", token=token, fault=fault)
        every(d_hosts, "load", token=token, peer=encoded, inside=inside, fault=fault)
        seen = every([*d_hosts, *p_hosts], "finish", wait=seconds + 30, seconds=seconds, fault=fault)
        every(d_hosts, "close")
        every(p_hosts, "close")
        by_rank = [{tuple(rank["rank"]): rank for part in parts for rank in part}
                   for parts in (seen[len(d_hosts) :], seen[: len(d_hosts)])]  # fmt: skip
        return Seen(*by_rank)

    def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.kill()


def every(hosts: Sequence[HostProcess], command: str, *, wait: float = 600.0, **arguments: Any) -> list[Any]:
    """One command to all at once; their answers in order."""
    for host in hosts:
        host.start(command, **arguments)
    return [host.answer(wait) for host in hosts]


def shards(p_ranks: list[Rank], d_ranks: list[Rank]) -> tuple[list[list[Rank]], list[list[Rank]]]:
    """The ranks of each process, P's and D's: one each as long as there are enough processes."""
    total = len(p_ranks) + len(d_ranks)
    for_p = len(p_ranks) if total <= PROCESSES else max(1, min(PROCESSES - 1, PROCESSES * len(p_ranks) // total))
    for_d = min(len(d_ranks), PROCESSES - for_p)
    return [p_ranks[n::for_p] for n in range(for_p)], [d_ranks[n::for_d] for n in range(for_d)]
