"""The links of one rank of D, one to each rank of P: opened at the first use, closed when they are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product

from kvferry.connector.protocol.link_state import LinkPhase
from kvferry.connector.protocol.step_plan import PeerEngine, RankAddress
from kvferry.connector.transfer.link import Link
from kvferry.connector.transfer.rank_context import P_ENGINES, RankContext
from kvferry.transport.errors import KVFerryError

FAILED_LINK_SECONDS = 1.0
"""D keeps a failed link for this time, so that a burst of requests for a dead peer fails at once."""
IDLE_LINK_SECONDS = 120.0
"""D closes a link that was not used for this time, so that its staging memory serves other peers."""


class Links:
    """At most one link to each address. Iteration is over a copy: links may be opened and closed meanwhile."""

    def __init__(self, rank_context: RankContext) -> None:
        self._rank_context = rank_context
        self._links: dict[RankAddress, Link] = {}
        self.source_addresses = lru_cache(maxsize=P_ENGINES)(self._source_addresses)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    def get(self, peer: PeerEngine, address: RankAddress) -> Link:
        """The link to a rank of P; a new one where there is none."""
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(self._rank_context, peer, address)
        return link

    def _source_addresses(self, peer: PeerEngine) -> tuple[RankAddress, ...]:
        """The ranks of P that this rank reads from.

        Raises:
            KVFerryError: there is none, or P has named no address for one.
        """
        p_ranks = self._rank_context.topology(peer).source_ranks()
        if not p_ranks:
            raise KVFerryError(f"none of P's {peer.tp_size} tensor-parallel ranks holds tokens of ours")
        by_rank = {(rank.pp_rank, rank.tp_rank): rank for rank in peer.ranks}
        wanted = list(product(range(peer.pp_size), p_ranks))
        missing = [rank for rank in wanted if rank not in by_rank]
        if missing:
            raise KVFerryError("P named no address for its rank pp{} tp{}".format(*missing[0]))
        return tuple(by_rank[rank] for rank in wanted)

    @property
    def any_failed(self) -> bool:
        return any(link.phase is LinkPhase.FAILED for link in self._links.values())

    def close_unused(self, now: float, has_reads: Callable[[Link], object]) -> None:
        """Close the links that have failed long enough ago, and those that were not used for long."""
        for address, link in list(self._links.items()):
            if link.used or has_reads(link):
                link.used, link.used_at = False, now
            failed = link.handled_phase is LinkPhase.FAILED and now >= link.failed_at + FAILED_LINK_SECONDS
            if failed or now >= link.used_at + IDLE_LINK_SECONDS:
                link.close()
                del self._links[address]

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.close()
        self._links.clear()
