"""P's side of the handshake. A rank of D has one session from its Hello on."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.token_sharding import TokenShard
from kvferry.connector.protocol import messages
from kvferry.connector.transfer.rank_context import RankContext, check_model
from kvferry.transport.channels import PChannel, SendChannel
from kvferry.transport.errors import GeometryError, IncompatiblePeerError, ProtocolError, TransportError
from kvferry.transport.grant_board import BoardAddress

logger = logging.getLogger("vllm.kvferry.sessions")

SESSIONS = 4096
NO_SLOT_BYTES = 1
"""``Attached.slot_bytes`` of a plane without slots: the least value that the message allows."""


@dataclass(slots=True, eq=False)
class Session:
    """One rank of D. ``shards``: the tokens that it can hold, one shard for each token sharding of its engine.
    ``asked``: D has sent an ask over this session. ``sent``: the number of chunks sent, per ended read."""

    identity: bytes
    engine_id: str
    shards: frozenset[TokenShard]
    channel: PChannel | None = None
    asked: bool = False
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)

    @property
    def attached(self) -> bool:
        """Whether a data plane is attached and has no error."""
        return self.channel is not None and self.channel.error is None

    @property
    def sender(self) -> SendChannel | None:
        """The channel to send on. ``None`` where no plane is attached, or where D reads P's pages by itself."""
        return None if self.channel is None or self.channel.pulls else self.channel


class Sessions:
    """All sessions of this rank. The session whose D has been silent longest comes first."""

    def __init__(self, rank_context: RankContext, board: BoardAddress) -> None:
        self._rank_context = rank_context
        self._board = board
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._offers = tuple(messages.PlaneOffer(plane.name, plane.offer()) for plane in rank_context.planes)

    def find(self, identity: bytes) -> Session | None:
        """The session of a D rank that has sent a message. It moves to the end of the order of displacement."""
        session = self._sessions.get(identity)
        if session is not None:
            self._sessions.move_to_end(identity)
        return session

    def check(self, hello: messages.Hello) -> messages.Refused | None:
        """The refusal of a D whose model or geometry does not fit; ``None`` where P can serve this D."""
        try:
            check_model(self._rank_context.model, hello.model)
            compatible(self._rank_context.caches.geometry, hello.geometry, consumer=False, convert=hello.converts)
        except (IncompatiblePeerError, GeometryError) as error:
            logger.warning("kvferry: refused D %s: %s", hello.engine_id[:8], error)
            if isinstance(error, IncompatiblePeerError):
                ours, theirs = str(error.ours)[:1024], str(error.theirs)[:1024]
                return messages.Refused(field=error.field[:256], ours=ours, theirs=theirs)
            return messages.Refused(field="geometry", ours="a valid geometry", theirs=str(error)[:1024])
        return None

    def displaced(self, identity: bytes) -> Iterator[Session]:
        """The sessions that must end before a session of ``identity`` begins: its former session, and the session that
        has been silent longest where ``SESSIONS`` are open."""
        former = self._sessions.get(identity)
        if former is not None:
            yield former
        while len(self._sessions) >= SESSIONS:
            yield next(iter(self._sessions.values()))

    def begin(self, identity: bytes, hello: messages.Hello) -> messages.Welcome:
        """Begin a session for a Hello that has passed ``check``."""
        theirs = hello.geometry
        shards = frozenset(sharding.shard(theirs.tp_rank) for sharding in theirs.shardings)
        self._sessions[identity] = Session(identity, hello.engine_id, shards)
        rank_context = self._rank_context
        return messages.Welcome(
            engine_id=rank_context.engine_id,
            incarnation=rank_context.incarnation,
            geometry=rank_context.caches.geometry,
            model=dict(rank_context.model),
            planes=self._offers,
        )

    def attach(self, session: Session, attach: messages.Attach) -> messages.Attached | messages.AttachRefused:
        """Accept the data plane that D chose."""
        plane = self._rank_context.plane(attach.plane)
        try:
            if plane is None:
                raise TransportError(f"plane {attach.plane!r} is not on offer")
            if session.channel is not None:
                if session.asked:
                    raise TransportError("a data plane is attached already")
                session.channel.close()  # D could not use this data plane
            session.channel, reply = plane.accept(attach.payload)
        except (TransportError, ProtocolError) as error:
            logger.warning("kvferry: D %s could not attach: %s", session.engine_id[:8], error)
            return messages.AttachRefused(plane=attach.plane, reason=str(error)[:1024])
        logger.info("kvferry: D %s attached over %s", session.engine_id[:8], attach.plane)
        if session.channel.pulls:  # only a D that reads P's pages receives their addresses
            pages = self._rank_context.caches.page_layouts()
            return messages.Attached(
                plane=attach.plane, slot_bytes=NO_SLOT_BYTES, payload=reply, board=self._board, pages=pages
            )
        return messages.Attached(plane=attach.plane, slot_bytes=session.channel.slot_bytes, payload=reply)

    def gone(self) -> list[Session]:
        """The sessions whose data plane has an error: their D is gone."""
        gone = [s for s in self._sessions.values() if s.channel is not None and s.channel.error is not None]
        for session in gone:
            assert session.channel is not None
            logger.info("kvferry: D rank of %s is gone: %s", session.engine_id[:8], session.channel.error)
        return gone

    def end(self, session: Session) -> None:
        """Close the data plane of a session and forget the session. All of its reads must have ended before."""
        if session.channel is not None:
            session.channel.close()
        self._sessions.pop(session.identity, None)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def close(self) -> None:
        """End all sessions."""
        for session in list(self._sessions.values()):
            self.end(session)
