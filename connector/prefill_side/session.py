"""P's side of the handshake. A rank of D has one session from its Hello to the end of its connection."""

from __future__ import annotations

import logging
from collections.abc import Set
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

CONNECT_SECONDS = 10.0
"""For so long P looks for the connection of a D that has chosen a data plane."""
NO_SLOT_BYTES = messages.MIN_SLOT_BYTES
"""``Attached.slot_bytes`` of a plane without slots: the least value that the message allows."""


@dataclass(slots=True, eq=False)
class Session:
    """One rank of D. ``shards``: the tokens that it can hold, one shard for each token sharding of its engine.
    ``address``: where D connected from; ``here``: that is this host. ``asked``: D has sent an ask over this session."""

    identity: bytes
    engine_id: str
    shards: frozenset[TokenShard]
    address: str
    here: bool
    channel: PChannel | None = None
    asked: bool = False
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
    """All sessions of this rank, by the identities of D's connections."""

    def __init__(self, rank_context: RankContext, board: BoardAddress) -> None:
        self._rank_context = rank_context
        self.board = board
        self._log = RateLimitedLog(logger)
        self.table: dict[bytes, Session] = {}

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

    def begin(self, identity: bytes, hello: messages.Hello, address: str) -> messages.Welcome:
        """Begin a session for a Hello that has passed ``check`` and came from ``address``. Only a D on this host learns
        of the planes that join processes of one host: their offers name processes and files."""
        theirs = hello.geometry
        shards = frozenset(sharding.shard(theirs.tp_rank) for sharding in theirs.shardings)
        here = is_ours(address)
        self.table[identity] = Session(identity, hello.engine_id, shards, address, here)
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

    def gone(self, ended: Set[bytes]) -> list[Session]:
        """The sessions whose D is gone: their connection has ``ended``, or their data plane has an error."""
        gone = []
        for session in self.table.values():
            error = None if session.channel is None else session.channel.error
            if error is not None:
                key, text = f"gone {session.engine_id}", "kvferry: decode rank of %s is gone: %s"
                self._log.info(key, text, session.engine_id[:8], error)
            if error is not None or session.identity in ended:
                gone.append(session)
        return gone

    def end(self, session: Session) -> None:
        """Close the data plane of a session and forget the session. All of its reads must have ended before."""
        self.table.pop(session.identity, None)
        if session.channel is not None:
            session.channel.close()

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
