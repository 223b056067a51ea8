"""D's half of the transfer thread: the leases that D keeps, its links to the ranks of P, and its hand-overs.

This file handles commands and messages. ``active_loads`` performs the hand-overs.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kvferry.connector.decode_side.active_loads import ActiveLoads
from kvferry.connector.decode_side.lease_keeper import LeaseKeeper
from kvferry.connector.decode_side.link import Link
from kvferry.connector.decode_side.link_state import LinkPhase
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.load_reports import FinishedLoad, LoadReports, OnBegun
from kvferry.connector.decode_side.receiver import Receiver
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire.states import Tick
from kvferry.connector.wire.step_plan import KeepLease, PeerEngine, RemoteLease, UnneededLease


class Consumer:
    """D's side of this rank. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        begun: OnBegun,
        moved: Callable[[], None],
        finished: Callable[[FinishedLoad], None],
    ) -> None:
        """
        Args:
            rank_context: this rank.
            begun, moved, finished: as ``LoadReports`` takes them.

        ``now`` of all methods is in seconds of a ``RunningClock``.
        """
        self._rank_context = rank_context
        self._log = rank_context.log
        reports = LoadReports(rank_context.stats, begun, moved, finished, rank_context.clock)
        self._receiver = Receiver(rank_context.caches)
        self._links = Links(rank_context, self._receiver.links)
        self._lease_keeper = LeaseKeeper(rank_context, self._links.get)
        self.loads = ActiveLoads(rank_context, self._links, self._receiver, self._lease_keeper, reports)

    # --- commands from the engine -------------------------------------------------------------------------------

    def identify(self, consumer: bytes) -> None:
        """``consumer`` names this life of this engine, the same on all of its ranks."""
        self._lease_keeper.consumer = consumer

    def keep(self, keep: KeepLease, now: float) -> None:
        """Keep a lease alive until its request is loaded or released."""
        self._lease_keeper.keep(keep.token, keep.peer, keep.request_id, now, siblings=keep.siblings)

    def release(self, release: UnneededLease, now: float) -> None:
        """The request loads nothing under this lease."""
        self._lease_keeper.release(release.token, release.request_id, now)

    def release_for_all(self, lease: RemoteLease, now: float) -> None:
        """Release a lease under which no rank of this engine reads."""
        self._lease_keeper.release_for_all(lease, now)

    def links_to(self, peer: PeerEngine, now: float) -> list[Link]:
        """The links to the ranks of P that this rank reads from. May raise KVFerryError."""
        return [self._links.get(address, now) for address in self._links.source_addresses(peer)]

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def finished_writes(self, now: float) -> None:
        """Handle the copies into D's pages whose end this thread awaited when they began."""
        if self._receiver.writing:
            self.loads.reads.step_all(self._receiver.finished_writes(), now)

    def serve(self, now: float, ready: Set[object] | None = None) -> bool:
        """Handle the messages that have arrived. Returns whether there is more to do at once. ``ready``: the readable
        sockets; ``None`` is any, and then deadlines are checked too."""
        dialer = self._rank_context.dialer
        if ready is None or dialer.fd in ready:
            dialer.progress()
        for link in self._links.to_serve(all_of_them=ready is None):
            try:
                for reply in link.serve(now):
                    self.loads.reads.reply(link, reply, now)
            except Exception as error:  # an error with one peer must not reach the others
                self._log.exception("link", "kvferry: unexpected error with %s", link.name)
                link.fail("internal", repr(error))
            if link.phase is not link.handled_phase:
                link.handled_phase = link.phase
                self._link_changed(link, now)
            self._links.served(link)
        return self._collect(now)

    def tick(self, now: float) -> None:
        """Check deadlines, renew leases, close links that have failed long enough or that are not used."""
        self.loads.tick(now)
        for read in self._receiver.late(now):
            self.loads.reads.step(read, Tick(), now)
        self._lease_keeper.tick(now)
        self._links.close_unused(now)

    def renew_now(self) -> None:
        """Renew at the next tick: this thread was delayed while P's deadlines went on."""
        self._lease_keeper.renew_now()

    @property
    def live(self) -> bool:
        """Whether a deadline is running, or something is left for the next tick."""
        loads = self.loads.later or self.loads.running
        return bool(loads or self._lease_keeper or self._receiver or self._links.live)

    def close(self, now: float, reason: str) -> None:
        """Release every lease and close the links; loads that still run are reported as failed for ``reason``."""
        self.loads.cancel_all(reason, now)
        self._collect(now)  # handle the copies that have just ended
        self.loads.catch_up()
        self._lease_keeper.close_all(now)
        self._links.close()

    def _link_changed(self, link: Link, now: float) -> None:
        for read in self._receiver.through(link):
            self.loads.apply_link_phase(read, now)
        if link.phase is LinkPhase.FAILED:
            self._links.failed(link, now)
            for read in self._receiver.through(link):
                self._receiver.forget(read)
            link.detach()

    def _collect(self, now: float) -> bool:
        if self._receiver or self._receiver.writing or self._receiver.backlog:
            self.loads.reads.step_all(self._receiver.collect(), now)
        return self._receiver.backlog
