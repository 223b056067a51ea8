"""D's half of the transfer thread, where everything arrives: commands, messages, copies that end, deadlines."""

from __future__ import annotations

from collections.abc import Set

from kvferry.connector.decode_side.fetch import Fetch
from kvferry.connector.decode_side.link import Link, LinkPhase
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.load import Loads
from kvferry.connector.decode_side.lookup import Answer, Lookup, Lookups
from kvferry.connector.decode_side.read import ReadReply, Reads
from kvferry.connector.decode_side.renew import LeaseRenewal, LeaseRenewals
from kvferry.connector.decode_side.report import Results
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext

Waiting = Fetch | LeaseRenewal | Lookup
"""What waits for a time, in one heap."""


class Consumer:
    """D's side of this rank. Used by the transfer thread only. ``now`` of all methods is in seconds of a
    ``RunningClock``."""

    def __init__(self, rank_context: RankContext, results: Results) -> None:
        self._rank_context, self._log = rank_context, rank_context.log
        self._deadlines = deadlines = Deadlines[Waiting](lambda waiting: waiting.due)
        self.links = Links(rank_context)
        self.renewals = LeaseRenewals(rank_context, self.links, deadlines)
        self.reads = Reads(rank_context, self.renewals)
        self.loads = Loads(rank_context, self.links, self.reads, self.renewals, results, deadlines)
        self.lookups = Lookups(rank_context, self.links, self.renewals, results, deadlines)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def serve(self, now: float, ready: Set[object] | None = None) -> bool:
        """Handle the messages that have arrived. Returns whether there is more to do at once. ``ready``: the readable
        sockets; ``None`` is any, and then deadlines are checked too."""
        dialer = self._rank_context.dialer
        if ready is None or dialer.fd in ready:
            dialer.progress()
        for link in self.links.to_serve(all_of_them=ready is None):
            try:
                for reply in link.serve(now):
                    if isinstance(reply, ReadReply):
                        if (read := self.reads.reply(link, reply, now)) is not None:
                            self.loads.go_on(read.fetch, now)
                    elif isinstance(reply, Answer):
                        self.lookups.reply(link, reply, now)
            except Exception as error:  # an error with one peer must not reach the others
                self._log.exception("link", "kvferry: unexpected error with %s", link.name)
                link.fail("internal", repr(error))
            if link.phase is not link.handled_phase:
                link.handled_phase = link.phase
                self._link_moved(link, now)
            self.links.served(link)
        return self.collect(now)

    def finished_writes(self, now: float) -> None:
        """Handle the copies into D's pages whose end this thread awaited when they began."""
        if self.reads.writes:
            for read in self.reads.finished_writes(now):
                self.loads.go_on(read.fetch, now)

    def tick(self, now: float) -> None:
        """Check deadlines, renew leases, close links that have failed long enough or that are not used."""
        for waiting in self._deadlines.due(now):
            match waiting:
                case Fetch():
                    self.loads.on_due(waiting, now)
                case LeaseRenewal():
                    self.renewals.on_due(waiting, now)
                case Lookup():
                    self.lookups.on_due(waiting, now)
        self.renewals.send_renewals(now)
        self.links.close_unused(now)

    @property
    def live(self) -> bool:
        """Whether a deadline is running."""
        return bool(self.loads.running or self.renewals.kept or self.links.live or self.lookups.live)

    def close(self, now: float, reason: str) -> None:
        """Release every lease and close the links; loads that still run are reported as failed for ``reason``."""
        self.loads.cancel_all(reason, now)
        self.collect(now)  # handle the copies that have just ended
        self.loads.close(now)
        self.renewals.close(now)
        self.links.close()

    def _link_moved(self, link: Link, now: float) -> None:
        reads = self.reads.through(link)
        for read in reads:
            read.link_moved(now)
            self.loads.go_on(read.fetch, now)
        if link.phase is LinkPhase.FAILED:
            self.links.failed(link, now)
            for read in reads:
                self.reads.forget(read)
            link.detach()
        self.lookups.link_moved(link, now)

    def collect(self, now: float) -> bool:
        """Unpack messages with bytes, and look at the copies under way. Returns whether there is more to do at once."""
        if self.reads.by_number or self.reads.writes or self.reads.arrived:
            for read in self.reads.collect(now):
                self.loads.go_on(read.fetch, now)
            return self.reads.backlog
        return False  # also where the last read was cancelled while its copy moved
