"""The links of one rank of D, one to each rank of P: opened at the first use, closed when they are not used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from kvferry.connector.decode_side.link import Link, LinkPhase, Place
from kvferry.connector.decode_side.plane_choice import FailedPlanes, avoided_seconds
from kvferry.connector.pages.rank_context import P_ENGINES, RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.transport.errors import KVFerryError, TransportError
from kvferry.transport.limited_log import RateLimitedLog

FAILED_LINK_SECONDS = 1.0
"""D keeps a failed link for this time, so that a burst of requests for a dead peer fails at once."""
UNUSED_LOOK_SECONDS = 0.25
"""Seconds between two looks for links that are not used. D may have thousands of links, and ticks 50 times a second."""
MAX_LINKS = 4096
"""Links at once. Requests name the addresses, and clients may send any."""


class Links:
    """At most one link to each place. Iteration is over a copy: links may be opened and closed meanwhile."""

    def __init__(self, rank_context: RankContext) -> None:
        self._rank_context = rank_context
        self._log = RateLimitedLog(logging.getLogger("vllm.kvferry.link"))
        self._links: dict[Place, Link] = {}
        self._pending: dict[Link, None] = {}
        self._failed: dict[Link, None] = {}  # until they are closed
        self._next_look = 0.0
        self._failed_planes = FailedPlanes(avoided_seconds(rank_context.settings.handover_timeout_seconds))
        self.source_addresses = lru_cache(maxsize=P_ENGINES)(self._source_addresses)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    def get(self, address: RankAddress, now: float, *, redial: bool = False) -> Link:
        """The link to a rank of P; a new one where there is none. ``redial``: also where the link has failed, once the
        owner has acted on that. So it is where another life of the rank had answered, which may have been restarted on
        its port, and where the link is ``detached``.

        Raises:
            TransportError: no link can be opened.
        """
        place = address.host, address.port, address.key
        link = self._links.get(place)
        if link is not None and link.handled_phase is LinkPhase.FAILED:
            answered = link.life[1]
            if redial or link.detached or (answered and answered != address.incarnation):
                self._close(link)
                link = None
        if link is None:
            if len(self._links) >= MAX_LINKS:
                self._make_room()
            try:
                link = Link(
                    self._rank_context, address, self._log,
                    place=place, failed_planes=self._failed_planes, pending=self._pending,
                )  # fmt: skip
                self._links[place], link.used_at = link, now
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
                raise TransportError(f"no connection to {address.host}:{address.port} can be opened: {error}") from None
        return link

    def _make_room(self) -> None:
        """Close a link without reads: one that was never connected, also where a question waits for it, because who is
        there has proven nothing; else the one that was not used for the longest time, if possible without data plane.
        """
        spare = [
            link for link in self._links.values() if not (link.users or (link.questions and link.connection.connected))
        ]
        if not spare:
            raise TransportError(
                f"{len(self._links)} links to ranks of the prefill engine are in use, limit {MAX_LINKS}"
            )
        link = min(spare, key=lambda link: (link.connection.connected, link.phase is LinkPhase.ATTACHED, link.used_at))
        self._close(link)
        if link.questions or link.shakes:
            link.fail("peer_lost", "it has not answered, and others are asked")  # the owner acts on it

    def _close(self, link: Link) -> None:
        link.close()
        del self._links[link.place]
        self._pending.pop(link, None)
        self._failed.pop(link, None)

    def to_serve(self, *, all_of_them: bool) -> list[Link]:
        """The links that have work. ``all_of_them``: also those that have failed, or whose time may be over, which no
        event tells."""
        links = list(self._pending)
        if all_of_them:
            links += [link for link in self._links.values() if link.may_have_failed and link not in self._pending]
        return links

    def served(self, link: Link) -> None:
        """A link was served, and its owner has acted on its phase."""
        if not link.pending:
            self._pending.pop(link, None)

    def _source_addresses(self, peer: PeerEngine) -> tuple[RankAddress, ...]:
        """The ranks of P that this rank reads from.

        Raises:
            KVFerryError: there is none, or P has named no address for one.
        """
        wanted = list(product(range(peer.pp_size), self._rank_context.topology(peer).source_ranks()))
        if not wanted:
            raise KVFerryError(
                f"none of the prefill engine's {peer.tp_size} tensor-parallel ranks holds tokens of ours"
            )
        by_rank = {(rank.pp_rank, rank.tp_rank): rank for rank in peer.ranks}
        missing = [rank for rank in wanted if rank not in by_rank]
        if missing:
            raise KVFerryError("the prefill engine named no address for its rank pp{} tp{}".format(*missing[0]))
        return tuple(by_rank[rank] for rank in wanted)

    @property
    def live(self) -> bool:
        """Whether a link has work, or has failed and is not closed yet."""
        return bool(self._pending or self._failed)

    def failed(self, link: Link, now: float) -> None:
        """A link has failed. Where its data plane ended it, the links to this P rank avoid this plane for some time."""
        link.failed_at = now
        if self._links.get(link.place) is link:
            self._failed[link] = None
        if link.broken_plane:
            why = link.failure.text
            self._failed_planes.add(link.life, link.broken_plane, why, now)

    def close_unused(self, now: float) -> None:
        """Close the links that have failed long enough ago, those that were not used for long, and those that avoid a
        data plane which may be used again."""
        for link in [link for link in self._failed if now >= link.failed_at + FAILED_LINK_SECONDS]:
            self._close(link)
        if now < self._next_look:
            return
        self._next_look = now + UNUSED_LOOK_SECONDS
        for link in self:
            if not link.users:
                link.drop_arrived()
            in_use = link.users or link.questions or link.shakes
            if link.used or in_use:
                link.used, link.used_at = False, now
            idle = now >= link.used_at + messages.IDLE_LINK_SECONDS
            worse = link.avoids and not in_use and not self._failed_planes.of(link.life, now)
            if idle or worse:
                self._close(link)

    def fail_all(self, why: str) -> None:
        """End all links, and so the reads over them. Later ones begin with a new handshake."""
        for link in self:
            if link.handled_phase is LinkPhase.FAILED:  # it may have been refused for what has changed
                self._close(link)
            else:
                link.detached = True
                link.fail("peer_lost", why)

    def close(self) -> None:
        """Close all links."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._pending.clear()
        self._failed.clear()
