"""The records of D's hand-overs: an attempt, and its reads, one from each rank of P."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.connector.decode_side import handover
from kvferry.connector.decode_side.handover import Reason
from kvferry.connector.decode_side.link import Link
from kvferry.connector.decode_side.load_attempts import LoadAttempts, LoadAttemptsEffect, LoadAttemptsEvent
from kvferry.connector.decode_side.source_read import ReadEffect, ReadEvent, ReadState
from kvferry.connector.geometry.read_plan import PlannedSpan, in_windows, part_bytes
from kvferry.connector.pages.caches import Ids, PageBox
from kvferry.connector.pages.checksums import PlacedMessage
from kvferry.connector.wire.messages import MIN_CHUNK_BYTES
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import Load, RankAddress
from kvferry.transport.errors import IncompatiblePeerError, TransportError
from kvferry.transport.grant_board import PostedGrant
from kvferry.transport.tracing import RecordedSpan


class ActiveLoad(msgspec.Struct, eq=False):
    """One attempt of one request's hand-over on this rank.

    ``load``: with the lease and the P engine of this attempt; ``posted``: as the engine posted it. ``ids``: kernel
    block ids per region. ``alone``: no other hand-over began in the same step. ``begun``: the engine knows that all
    copies are under way; only for a load inside a step. ``copied_at``: the end of its last copy, by ``time.monotonic``,
    where it was noted. ``granted_at``: when P had posted the grant that D asked for before. ``attempts``: ``None``
    while no attempt of this load has failed. ``layer_order``: the layers in
    the order in which the step waits for them, one by one; empty where it waits for all of them together.
    Where the request is traced, ``phases`` has the begin of each phase of this attempt, by ``RankContext.clock``, and
    ``ended`` the spans of the attempts that have ended.
    """

    load: Load
    posted: Load
    lifetime: Lifetime[handover.Handover, handover.HandoverEvent, handover.HandoverEffect]
    started: float
    ids: list[Ids]
    alone: bool = False
    begun: bool = False
    reads: list[SourceRead] = msgspec.field(default_factory=list)
    nbytes: int = 0
    copied_at: float = 0.0
    granted_at: float = 0.0
    attempts: Lifetime[LoadAttempts, LoadAttemptsEvent, LoadAttemptsEffect] | None = None
    layer_order: Sequence[str] = ()
    phases: list[tuple[float, str]] = msgspec.field(default_factory=list)
    ended: list[RecordedSpan] = msgspec.field(default_factory=list)

    @property
    def number(self) -> int:
        """Of this attempt; the first is 1."""
        return 1 if self.attempts is None else self.attempts.state.number


class SourceRead(msgspec.Struct, eq=False):
    """One hand-over's part from one P rank.

    ``address``: the P rank as the request names it. ``planned``: the spans to read. Where P sends the bytes, ``boxes``
    are the chunks of these spans, of at most ``chunk_bytes``, and ``tags`` the tags of the chunks whose messages have
    not arrived. ``note`` is P's
    posted grant where D found one. ``placed``: by tag, the messages with checksums that are received into pages.
    ``moved``: the number of its last progress among those of all reads, by bytes in D's pages; 0 before the first.
    """

    number: int
    active_load: ActiveLoad
    link: Link
    address: RankAddress
    lifetime: Lifetime[ReadState, ReadEvent, ReadEffect]
    planned: tuple[PlannedSpan, ...] = ()
    chunk_bytes: int = 0
    boxes: list[PageBox] = msgspec.field(default_factory=list)
    tags: set[int] = msgspec.field(default_factory=set)
    note: PostedGrant | None = None
    placed: dict[int, PlacedMessage] = msgspec.field(default_factory=dict)
    moved: int = 0

    @property
    def state(self) -> ReadState:
        return self.lifetime.state

    def plan(self, planned: tuple[PlannedSpan, ...]) -> None:
        """Set the spans to read, in the order of P's steps where P sends them while it computes."""
        load, link = self.active_load.load, self.link
        self.planned, self.chunk_bytes = planned, link.slot_bytes
        if planned and load.step_tokens and not link.pulls:
            self.planned = in_windows(planned, link.theirs, load.found, load.step_tokens)
            parts = part_bytes(self.planned, link.theirs)
            self.chunk_bytes = min(link.slot_bytes, max(parts, MIN_CHUNK_BYTES))

    def misfit(self) -> Reason | None:
        """Why the P rank is not the one that the request names; ``None`` where it is."""
        try:
            self.link.check_addressed(self.active_load.load.peer, self.address)
        except IncompatiblePeerError as error:
            return Reason("incompatible", f"{self.link.name}: {error}")
        except TransportError as error:
            return Reason("peer_lost", f"{self.link.name}: {error}", "peer")
        return None

    def tag(self, chunk: int) -> int:
        """A chunk's tag on the data plane, unique in this process."""
        return self.number << 32 | chunk
