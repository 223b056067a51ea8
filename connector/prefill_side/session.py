"""P's side of the handshake. A rank of D has one session from its Hello on."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.token_sharding import TokenShard
from kvferry.connector.pages.rank_context import RankContext, check_model
from kvferry.connector.wire import messages
from kvferry.transport.channels import PChannel, SendChannel
from kvferry.transport.errors import (
    GeometryError,
    IncompatiblePeerError,
    NotConnectedError,
    ProtocolError,
    TransportError,
)
from kvferry.transport.grant_board import BoardAddress
from kvferry.transport.host import is_ours
from kvferry.transport.limited_log import RateLimitedLog

logger = logging.getLogger("vllm.kvferry.session")

SESSIONS = 4096
LOOKED_AT = 64
"""Sessions whose data plane ``gone`` looks at in one call."""
SILENT_SECONDS = 2 * messages.IDLE_LINK_SECONDS
"""D has closed the link of a session from which no message came for this time."""
CONNECT_SECONDS = 10.0
"""For so long P looks for the connection of a D that has chosen a data plane."""
NO_SLOT_BYTES = messages.MIN_SLOT_BYTES
"""``Attached.slot_bytes`` of a plane without slots: the least value that the message allows."""


@dataclass(slots=True, eq=False)
class Session:
    """One rank of D. ``shards``: the tokens that it can hold, one shard for each token sharding of its engine.
    ``address``: where D connected from; ``here``: that is this host. ``asked``: D has sent an ask over this session.
    ``heard``: when its last message came."""

    identity: bytes
    engine_id: str
    shards: frozenset[TokenShard]
    address: str
    here: bool
    channel: PChannel | None = None
    asked: bool = False
    heard: float = 0.0
    attach_until: float = 0.0
    """Until when D's connection may come; 0 where none is expected."""

    @property
    def attached(self) -> bool:
        """Whether a data plane is attached and has no error."""
        return self.channel is not None and self.channel.error is None

    @property
    def sender(self) -> SendChannel | None:
        """The channel to send on. ``None`` where no plane is attached, or where D reads P's pages by itself."""
        return None if self.channel is None or self.channel.pulls else self.channel

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk that a slot of ``sender`` holds."""
        assert self.sender is not None
        return self.sender.slot_bytes


class Sessions:
    """All sessions of this rank. The session whose D has been silent longest comes first."""

    def __init__(self, rank_context: RankContext, board: BoardAddress) -> None:
        self._rank_context = rank_context
        self.board = board
        self._log = RateLimitedLog(logger)
        self.table: OrderedDict[bytes, Session] = OrderedDict()
        self._to_look_at: list[Session] = []

    def find(self, identity: bytes, now: float) -> Session | None:
        """The session of a D rank that has sent a message. It moves to the end of the order of displacement."""
        session = self.table.get(identity)
        if session is not None:
            session.heard = now
            self.table.move_to_end(identity)
        return session

    def check(self, hello: messages.Hello) -> messages.Refused | None:
        """The refusal of a D whose model or geometry does not fit; ``None`` where P can serve this D."""
        try:
            check_model(self._rank_context.model, hello.model)
            compatible(self._rank_context.caches.geometry, hello.geometry, consumer=False, convert=hello.converts)
        except (IncompatiblePeerError, GeometryError) as error:
            log = self._log.info if messages.DOCTORS_FIELD in hello.model else self._log.warning
            log(f"refused {hello.engine_id}", "kvferry: refused decode rank %s: %s", hello.engine_id[:8], error)
            if isinstance(error, IncompatiblePeerError):
                ours, theirs = str(error.ours)[:1024], str(error.theirs)[:1024]
                return messages.Refused(field=error.field[:256], ours=ours, theirs=theirs)
            return messages.Refused(field="geometry", ours="a valid geometry", theirs=str(error)[:1024])
        return None

    def displaced(self, identity: bytes) -> Iterator[Session]:
        """The sessions that must end before a session of ``identity`` begins: its former session; and, where
        ``SESSIONS`` are open, of the host that has most of them the one that has been silent longest."""
        former = self.table.get(identity)
        if former is not None:
            yield former
        while len(self.table) >= SESSIONS:
            ((most, _),) = Counter(session.address for session in self.table.values()).most_common(1)
            yield next(session for session in self.table.values() if session.address == most)

    def begin(self, identity: bytes, hello: messages.Hello, address: str, now: float) -> messages.Welcome:
        """Begin a session for a Hello that has passed ``check`` and came from ``address``. Only a D on this host learns
        of the planes that join processes of one host: their offers name processes and files."""
        theirs = hello.geometry
        shards = frozenset(sharding.shard(theirs.tp_rank) for sharding in theirs.shardings)
        here = is_ours(address)
        self.table[identity] = Session(identity, hello.engine_id, shards, address, here, heard=now)
        rank_context = self._rank_context
        return messages.Welcome(
            engine_id=rank_context.engine_id,
            incarnation=rank_context.incarnation,
            geometry=rank_context.caches.geometry,
            model=dict(rank_context.model),
            planes=tuple(
                messages.PlaneOffer(plane.name, plane.offer())
                for plane in rank_context.planes
                if here or not plane.same_host
            ),
        )

    def attach(
        self, session: Session, attach: messages.Attach, now: float
    ) -> messages.Attached | messages.AttachRefused | None:
        """Accept the data plane that D chose. ``None``: D's connection is not here yet; call this again soon."""
        plane = self._rank_context.plane(attach.plane)
        try:
            if plane is None:
                raise TransportError(f"plane {attach.plane!r} is not on offer")
            if plane.same_host and not session.here:
                raise TransportError(
                    f"plane {attach.plane} joins processes of one host, the decode engine is at {session.address}"
                )
            if session.channel is not None:
                if session.asked:
                    raise TransportError("a data plane is attached already")
                session.channel.close()  # D could not use this data plane
                session.channel = None
            session.channel, reply = plane.accept(attach.payload)
            if session.channel.pulls and plane.same_host:
                session.channel.lend(self.board.fd)
        except (TransportError, ProtocolError) as error:
            if isinstance(error, NotConnectedError):
                session.attach_until = session.attach_until or now + CONNECT_SECONDS
                if now < session.attach_until:
                    return None
            session.attach_until = 0.0
            key, text = f"not attached {session.engine_id}", "kvferry: decode rank %s could not attach: %s"
            self._log.warning(key, text, session.engine_id[:8], error)
            return messages.AttachRefused(plane=attach.plane, reason=str(error)[:1024])
        session.attach_until = 0.0
        key, text = f"attached {session.engine_id}", "kvferry: decode rank %s attached over %s"
        self._log.info(key, text, session.engine_id[:8], attach.plane)
        if session.channel.pulls:  # only a D that reads P's pages receives their addresses
            pages = self._rank_context.caches.page_layouts()
            board = self.board if plane.same_host else None
            return messages.Attached(
                plane=attach.plane, slot_bytes=NO_SLOT_BYTES, payload=reply, board=board, pages=pages
            )
        return messages.Attached(plane=attach.plane, slot_bytes=session.channel.slot_bytes, payload=reply)

    def gone(self, now: float) -> list[Session]:
        """The sessions whose D is gone: their data plane has an error, of ``LOOKED_AT`` in turn, or they have been
        silent for long. Where D reads P's pages by itself, P holds nothing that could have an error. No lease that such
        a D knew stands any more."""
        gone = []
        self._to_look_at = self._to_look_at or list(self.table.values())
        for _ in range(min(LOOKED_AT, len(self._to_look_at))):
            session = self._to_look_at.pop()
            stands = self.table.get(session.identity) is session
            if stands and session.channel is not None and session.channel.error is not None:
                gone.append(session)
                key, text = f"gone {session.engine_id}", "kvferry: decode rank of %s is gone: %s"
                self._log.info(key, text, session.engine_id[:8], session.channel.error)
        silent = max(SILENT_SECONDS, self._rank_context.settings.lease_cap_seconds)
        for session in self.table.values():  # the one that has been silent longest comes first
            if now < session.heard + silent:
                break
            if session not in gone:
                gone.append(session)
        return gone

    def end(self, session: Session) -> None:
        """Close the data plane of a session and forget the session. All of its reads must have ended before."""
        if session.channel is not None:
            session.channel.close()
        self.table.pop(session.identity, None)

    def close(self) -> None:
        """End all sessions."""
        for session in list(self.table.values()):
            self.end(session)


def refusal(request: messages.Request) -> messages.Reply | None:
    """The answer to a request that came without a Hello, or from a D whose session has ended, if there is one."""
    text = "no handshake was made, or it was forgotten"
    match request:
        case messages.Attach():
            return messages.AttachRefused(plane=request.plane, reason=text, detached=True)
        case messages.Ask():
            return messages.Deny(read=request.read, reason="detached", detail=text)
        case messages.Commit():
            return messages.Committed(read=request.read, ok=False)
    return None
