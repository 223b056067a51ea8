"""P's side of the handshake: one session per rank of D, from its Hello on."""

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
"""``Attached.slot_bytes`` of a plane without slots; the message's least value."""


@dataclass(slots=True, eq=False)
class Session:
    """One rank of D. ``shards``: the tokens that it can hold, one for each way that its engine shares them out.
    ``asked``: it has used its data plane. ``sent``: per ended read, how many chunks went out."""

    identity: bytes
    engine_id: str
    shards: frozenset[TokenShard]
    channel: PChannel | None = None
    asked: bool = False
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)

    @property
    def attached(self) -> bool:
        """Whether there is a data plane to send on."""
        return self.channel is not None and self.channel.error is None

    @property
    def sender(self) -> SendChannel | None:
        """The channel to send on; ``None`` where there is none, or where D reads the pages by itself."""
        return None if self.channel is None or self.channel.pulls else self.channel


class Sessions:
    """All sessions of this rank, that of the longest silent D first."""

    def __init__(self, rank_context: RankContext, board: BoardAddress) -> None:
        self._rank_context = rank_context
        self._board = board
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._offers = tuple(messages.PlaneOffer(plane.name, plane.offer()) for plane in rank_context.planes)

    def find(self, identity: bytes) -> Session | None:
        """The session of a D rank that says something: from now on the last to be displaced."""
        session = self._sessions.get(identity)
        if session is not None:
            self._sessions.move_to_end(identity)
        return session

    def check(self, hello: messages.Hello) -> messages.Refused | None:
        """Why that D cannot be served, if so: another model, another geometry."""
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
        """The sessions that must end before one of ``identity`` begins: its former one, and the oldest beyond the
        bound."""
        former = self._sessions.get(identity)
        if former is not None:
            yield former
        while len(self._sessions) >= SESSIONS:
            yield next(iter(self._sessions.values()))

    def begin(self, identity: bytes, hello: messages.Hello) -> messages.Welcome:
        """A session that has passed ``check``."""
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

    def attach(self, session: Session, attach: messages.Attach) -> messages.Attached | messages.Refused:
        """Accept the data plane that D chose."""
        plane = self._rank_context.plane(attach.plane)
        try:
            if plane is None:
                raise TransportError(f"plane {attach.plane!r} is not on offer")
            if session.channel is not None:
                if session.asked:
                    raise TransportError("a data plane is attached already")
                session.channel.close()  # D could not use it
            session.channel, reply = plane.accept(attach.payload)
        except (TransportError, ProtocolError) as error:
            logger.warning("kvferry: D %s could not attach: %s", session.engine_id[:8], error)
            names = ", ".join(offer.name for offer in self._offers)
            return messages.Refused(field="data plane", ours=names, theirs=f"{attach.plane}: {error}"[:1024])
        logger.info("kvferry: D %s attached over %s", session.engine_id[:8], attach.plane)
        if session.channel.pulls:  # only such a D learns where the pages are
            pages = self._rank_context.caches.page_layouts()
            return messages.Attached(
                plane=attach.plane, slot_bytes=NO_SLOT_BYTES, payload=reply, board=self._board, pages=pages
            )
        return messages.Attached(plane=attach.plane, slot_bytes=session.channel.slot_bytes, payload=reply)

    def gone(self) -> list[Session]:
        """Sessions whose D is no longer there, by what its data plane says."""
        gone = [s for s in self._sessions.values() if s.channel is not None and s.channel.error is not None]
        for session in gone:
            assert session.channel is not None
            logger.info("kvferry: D rank of %s is gone: %s", session.engine_id[:8], session.channel.error)
        return gone

    def end(self, session: Session) -> None:
        """Close its data plane and forget it. Nothing of its reads may be under way any more."""
        if session.channel is not None:
            session.channel.close()
        self._sessions.pop(session.identity, None)

    def close(self) -> None:
        """End all of them."""
        for session in list(self._sessions.values()):
            self.end(session)
