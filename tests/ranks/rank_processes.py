"""The processes that ranks run in, and one hand-over between all ranks of P and all ranks of D."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.wire.step_plan import PeerEngine
from tests.ranks.pairing import Pairing, Rank
from tests.support.remote import Remote

PROCESSES = 6  # Up to as many ranks have a process each; more share, those of one side with each other


@dataclass(frozen=True)
class Seen:
    """What was seen of every rank."""

    p: dict[Rank, dict[str, Any]]
    d: dict[Rank, dict[str, Any]]


class RankProcesses:
    """Processes that stay while pairings come and go."""

    def __init__(self, gpus: int = 0, remote: type[Remote] = Remote) -> None:
        """``gpus``: how many GPUs the caches lie on; in host memory where there are none. ``remote``: what
        kind of process each rank has."""
        self.gpus, self._remote = gpus, remote
        self._hosts: list[Remote] = []
        self._count = itertools.count()

    def run(self, pairing: Pairing, *, inside: bool = False, fault: str = "", seconds: float = 600.0) -> Seen:
        """One hand-over. ``inside``: a step of D computes with it. ``fault``: see ``rank_host.plant``. Raises
        RemoteError: ranks that did not start, or a process that ended or hangs; the processes are started anew."""
        if not self._hosts:
            self._hosts = [self._remote("tests.ranks.rank_host:Host") for _ in range(PROCESSES)]
            for host in self._hosts:
                host.timeout = seconds + 30
                host.answer()
        try:
            return self._run(pairing, inside, fault, seconds)
        except BaseException:
            self.close()
            raise

    def _run(self, pairing: Pairing, inside: bool, fault: str, seconds: float) -> Seen:
        p_shares, d_shares = shards(pairing.p.ranks(), pairing.d.ranks())
        number, token = next(self._count), secrets.token_bytes(16)
        p_hosts, d_hosts = self._hosts[: len(p_shares)], self._hosts[len(p_shares) :][: len(d_shares)]
        hosts = [*p_hosts, *d_hosts]
        for host, ranks in zip(hosts, [*p_shares, *d_shares], strict=True):
            side = "p" if host in p_hosts else "d"
            host.start("open", pairing, side, ranks, f"engine-{side}{number}", self.gpus, inside)
        addresses = [host.answer() for host in hosts][: len(p_hosts)]
        shardings = (TokenSharding(pairing.p.dcp, pairing.p.interleave),)
        peer = PeerEngine(
            f"engine-p{number}", pairing.p.size, pairing.p.pp, 300.0, tuple(itertools.chain(*addresses)),
            shardings=shardings,
        )  # fmt: skip
        every(p_hosts, "grant", token, fault)
        every(d_hosts, "load", token, peer, inside, fault)
        seen = every(hosts, "finish", seconds, fault)
        every([*d_hosts, *p_hosts], "close")
        of_p, of_d = ({rank: found for part in parts for rank, found in part.items()}
                      for parts in (seen[: len(p_hosts)], seen[len(p_hosts) :]))  # fmt: skip
        return Seen(of_p, of_d)

    def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.close()


def every(hosts: Sequence[Remote], command: str, *arguments: Any) -> list[Any]:
    """One command to all at once; their answers in order."""
    for host in hosts:
        host.start(command, *arguments)
    return [host.answer() for host in hosts]


def shards(p_ranks: list[Rank], d_ranks: list[Rank]) -> tuple[list[list[Rank]], list[list[Rank]]]:
    """The ranks of each process, P's and D's: one each as long as there are enough processes."""
    total = len(p_ranks) + len(d_ranks)
    for_p = len(p_ranks) if total <= PROCESSES else max(1, min(PROCESSES - 1, PROCESSES * len(p_ranks) // total))
    for_d = min(len(d_ranks), PROCESSES - for_p)
    return [p_ranks[n::for_p] for n in range(for_p)], [d_ranks[n::for_d] for n in range(for_d)]
