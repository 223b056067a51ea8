"""Finds P's control port by the bootstrap page that a request names. One page for each request; nothing is kept."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from kvferry.connector.protocol.step_plan import Rendezvous
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.transport.control import lookup
from kvferry.transport.control.bootstrap import checked_url, first_rank
from kvferry.transport.errors import ProtocolError

SCHEME = "http://"


class BootstrapLookups:
    """The requests of D whose page is awaited. Used by the transfer thread only."""

    def __init__(
        self, rank_context: RankContext, begin: Callable[[Rendezvous, float], None], fail: Callable[[str, str], None]
    ) -> None:
        """
        Args:
            rank_context: of this rank.
            begin: called with each request once P's address is known, and the time.
            fail: called with the id of a request whose P cannot be found, and why.
        """
        self._rank_context = rank_context
        self._begin, self._fail = begin, fail
        self._awaited: dict[str, tuple[Rendezvous, lookup.PageLookup]] = {}

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def add(self, wanted: Rendezvous) -> None:
        """Look P up. ``wanted.host`` is the address of its page."""
        try:
            host, port = checked_url(wanted.host)
        except ProtocolError as error:
            self._fail(wanted.request_id, str(error))
            return
        refusal = self._rank_context.allowed_peers.refusal_without_keys
        page = lookup.PageLookup(host, port, refusal, self._rank_context.dialer.waker.wake)
        self._awaited[wanted.request_id] = wanted, lookup.begin(page)

    def leave(self, request_id: str) -> None:
        """The request does not need it any more."""
        self._awaited.pop(request_id, None)

    def serve(self, now: float) -> None:
        """Go on with the requests whose page has come."""
        for request_id, (wanted, page) in list(self._awaited.items()):
            if not page.done:
                continue
            del self._awaited[request_id]
            try:
                if page.error:
                    raise ProtocolError(page.error)
                host, port = first_rank(page.content, wanted.engine_id)
            except ProtocolError as error:
                self._fail(request_id, f"P is not found by its bootstrap page at {wanted.host}: {error}")
            else:
                self._begin(replace(wanted, host=host, port=port), now)
