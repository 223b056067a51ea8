"""D's link to one rank of P: connection, handshake, data plane. Driven by polling; nothing here blocks."""

from __future__ import annotations

import enum
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvferry.connector.geometry.byte_ranges import check_layouts, translate_pages
from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.dtypes import converted_pairs
from kvferry.connector.geometry.rank_geometry import PageLayout, RankGeometry
from kvferry.connector.protocol.handover import Reason
from kvferry.connector.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Hello,
    Refused,
    Reply,
    Request,
    VersionError,
    Welcome,
    decode_reply,
    encode,
)
from kvferry.connector.protocol.metrics import FailureKind
from kvferry.connector.protocol.step_plan import PeerEngine, RankAddress
from kvferry.connector.transfer.rank_context import RankContext, check_model
from kvferry.transport.channels import DChannel
from kvferry.transport.control.connection import Connection
from kvferry.transport.errors import (
    GeometryError,
    IncompatiblePeerError,
    KVFerryError,
    PeerUnreachableError,
    PlaneUnavailableError,
    ProtocolError,
    TransportError,
)
from kvferry.transport.grant_board import BoardAddress, BoardReader
from kvferry.transport.plane import Plane

logger = logging.getLogger("vllm.kvferry.link")


class LinkState(enum.Enum):
    CONNECTED = "connected"  # control messages only; no handshake was needed yet
    GREETING = "waiting for the answer to the handshake"
    ATTACHING = "waiting for the data plane"
    ATTACHED = "attached"
    FAILED = "failed"


class Link:
    """One connection to one life of one P rank.

    ``state`` moves forward only. ``reason`` says why it is FAILED; a failed link is replaced, never revived.
    """

    def __init__(self, rank_context: RankContext, peer: PeerEngine, address: RankAddress) -> None:
        self._rank_context = rank_context
        self.peer = peer
        self.address = address
        self.state = LinkState.CONNECTED
        self.seen = LinkState.CONNECTED  # the last state that the owner has acted on
        self.reason: Reason | None = None
        self.deadline = float("inf")
        self.failed_at = 0.0
        self.used = True  # something was sent since the owner last looked
        self.used_at = 0.0
        self.channel: DChannel | None = None
        self.plane: Plane | None = None
        self.slot_bytes = 0
        self.pages: tuple[PageLayout, ...] = ()
        self.board: BoardReader | None = None  # on which P's grants are posted
        self.converted: frozenset[tuple[int, int]] = frozenset()  # regions, ours and theirs, whose numbers differ
        self._offers: dict[str, bytes] = {}
        self._refused: list[str] = []
        self._reached = True  # P's GPU by ours, as far as was tried
        self._attached: Attached | None = None  # P's answer, where the plane is not ready yet
        self.geometry: RankGeometry | None = None
        self.connection = Connection(
            address.host,
            address.port,
            curve=rank_context.curve,
            max_message_bytes=MAX_MESSAGE_BYTES,
            connect_timeout=2 * rank_context.settings.handshake_timeout_seconds,  # our own deadline comes first
        )

    @property
    def name(self) -> str:
        """The peer as a log line names it."""
        where = f"{self.address.host}:{self.address.port}"
        return f"{self.peer.engine_id[:8]} pp{self.address.pp_rank} tp{self.address.tp_rank} at {where}"

    @property
    def theirs(self) -> RankGeometry:
        """The peer's geometry, once attached."""
        assert self.geometry is not None
        return self.geometry

    @property
    def pulls(self) -> bool:
        """Whether D reads P's pages by itself over the chosen data plane."""
        return self.plane is not None and self.plane.pulls

    @property
    def why(self) -> Reason:
        """Why it failed, with the peer's name."""
        assert self.reason is not None
        return Reason(self.reason.kind, f"{self.name}: {self.reason.text}")

    def start_handshake(self, now: float) -> None:
        """Start the handshake, unless it was started before."""
        if self.state is not LinkState.CONNECTED:
            return
        self.state = LinkState.GREETING
        self.deadline = now + self._rank_context.settings.handshake_timeout_seconds
        rank_context = self._rank_context
        self.send(
            Hello(
                engine_id=rank_context.engine_id,
                incarnation=rank_context.incarnation,
                geometry=rank_context.caches.geometry,
                model=dict(rank_context.model),
                converts=rank_context.settings.convert_dtype,
            )
        )

    def send(self, message: Request) -> None:
        """Send, or fail the link where the peer cannot be reached. A link that failed still carries what P should hear,
        a release above all, as long as its connection stands."""
        self.used = True
        sent = not self.connection.lost and self.connection.send(encode(message))
        if not sent and self.state is not LinkState.FAILED:
            why = self.connection.reason or "its control connection takes no more messages"
            self.fail("peer_lost", why)

    def has_events(self, ready: Collection[object]) -> bool:
        """Whether there is anything to serve, if something has arrived at the sockets ``ready``."""
        connection, channel = self.connection, self.channel
        if self._attached is not None or (channel is not None and channel.error is not None):
            return True
        return connection.socket in ready or connection.monitor in ready

    def serve(self, now: float) -> list[Reply]:
        """Advance the handshake; the replies that are not part of it."""
        replies: list[Reply] = []
        if self.state is LinkState.FAILED:
            return replies
        self.connection.poll_monitor()
        for frames in self.connection.receive():
            with self._failing():
                reply = decode_reply(frames)
                if isinstance(reply, Welcome | Refused | Attached):
                    self._on_handshake_reply(reply)
                else:
                    replies.append(reply)
        if self._attached is not None:
            with self._failing():
                self._complete(self._attached)
        if self.channel is not None and self.channel.error is not None:
            if self.state is LinkState.ATTACHING:  # P closes what it refuses, and that is here before its answer
                with self._failing():
                    self._next_plane(str(self.channel.error))
            else:
                self.fail("peer_lost", str(self.channel.error))
        elif self.connection.lost:
            self.fail("peer_lost", self.connection.reason or "the peer is gone")
        elif now >= self.deadline:
            waited = self._rank_context.settings.handshake_timeout_seconds
            self.fail("timeout", f"no answer to the handshake in {waited:g} s ({self.state.value})")
        return replies

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """What goes wrong in here is this link's failure."""
        try:
            yield
        except (IncompatiblePeerError, GeometryError, VersionError) as error:
            self.fail("incompatible", str(error))
        except ProtocolError as error:
            self._rank_context.stats.dropped("malformed reply")
            self.fail("data", str(error))
        except TransportError as error:
            self.fail("plane", str(error))
        except KVFerryError as error:
            self.fail("peer_lost", str(error))

    def fail(self, kind: FailureKind, text: str) -> None:
        """End the link. What was read through it fails."""
        if self.state is not LinkState.FAILED:
            self.state, self.reason, self.deadline = LinkState.FAILED, Reason(kind, text), float("inf")
            logger.warning("kvferry: link to %s failed: %s", self.name, text)

    def detach(self) -> None:
        """Close the data plane; what was in flight there never arrives. Idempotent."""
        if self.channel is not None:
            self.channel.close()

    def close(self) -> None:
        """Give the sockets and the staging memory back. Idempotent."""
        self.detach()
        self.connection.close()

    # --- handshake ----------------------------------------------------------------------------------------------

    def _on_handshake_reply(self, reply: Welcome | Refused | Attached) -> None:
        if isinstance(reply, Refused) and reply.field == "data plane" and self.state is LinkState.ATTACHING:
            assert self.plane is not None
            if reply.theirs.startswith(f"{self.plane.name}: "):
                self._next_plane(reply.theirs)
            return  # of a plane that was given up before
        if isinstance(reply, Refused):
            raise IncompatiblePeerError(reply.field, reply.theirs, reply.ours)
        if isinstance(reply, Welcome) and self.state is LinkState.GREETING:
            self._welcome(reply)
        elif isinstance(reply, Attached) and self.state is LinkState.ATTACHING:
            assert self.plane is not None and self.channel is not None
            if reply.plane != self.plane.name:
                return  # given up before
            self.plane.finish(self.channel, reply.payload)
            self.slot_bytes, self.pages = reply.slot_bytes, reply.pages
            if self.plane.pulls:
                check_layouts(self.pages, self.theirs)
                self.board = None if reply.board is None else self._open(reply.board)
            self._complete(reply)
        else:
            raise ProtocolError(f"{type(reply).__name__} came while {self.state.value}")

    def _open(self, place: BoardAddress) -> BoardReader | None:
        """P's board. Without it everything is asked for."""
        try:
            return BoardReader(place)
        except (PlaneUnavailableError, OSError) as error:
            logger.info("kvferry: grants of %s are asked for: %s", self.name, error)
            return None

    def _complete(self, reply: Attached) -> None:
        """P is ready; D is ready once P's memory can be read."""
        channel = self.channel
        if channel is not None and channel.pulls:
            self._attached = reply
            if not channel.ready:
                return
            self.pages = translate_pages(reply.pages, self.theirs, channel.translate)
        self._attached = None
        self.state, self.deadline = LinkState.ATTACHED, float("inf")

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.incarnation != self.address.incarnation:
            raise KVFerryError("P was restarted since it made this hand-over; its KV cache is gone")
        self._check_addressed(welcome.geometry)
        check_model(self._rank_context.model, welcome.model)
        ours = self._rank_context.caches.geometry
        compatible(ours, welcome.geometry, convert=self._rank_context.settings.convert_dtype)
        self.geometry = welcome.geometry
        self.converted = converted_pairs(ours, welcome.geometry)
        if self.converted:
            pairs = {f"{welcome.geometry.regions[j].dtype} to {ours.regions[i].dtype}" for i, j in self.converted}
            logger.info("kvferry: KV of %s is converted, %s", self.name, ", ".join(sorted(pairs)))
        block_size = next((region.block_size for region in welcome.geometry.regions), 0)
        logger.info("kvferry: %s: %s", self.name, self._rank_context.topology(self.peer).describe(block_size))
        self._offers = {offer.name: offer.payload for offer in welcome.planes}
        self.state = LinkState.ATTACHING
        self._attach()

    def _check_addressed(self, theirs: RankGeometry) -> None:
        """That P's rank is the one that the request's parameters named, of an engine of that form: who reads from whom
        was found out from those."""
        named = {
            "tp_rank": self.address.tp_rank,
            "pp_rank": self.address.pp_rank,
            "tp_size": self.peer.tp_size,
            "pp_size": self.peer.pp_size,
            "shardings": self.peer.shardings,
        }
        for field, value in named.items():
            if getattr(theirs, field) != value:
                raise IncompatiblePeerError(
                    f"P's {field}, as kv_transfer_params and P itself tell it", value, getattr(theirs, field)
                )

    def _next_plane(self, why: str) -> None:
        """P has no room on the plane that was chosen, or it does not come about; take the next best."""
        assert self.plane is not None
        self.detach()
        if self.channel is not None:
            self._reached &= not isinstance(self.channel.error, PeerUnreachableError)
        self._attached = None
        self._refused.append(f"{self.plane.name}: {why.removeprefix(self.plane.name + ': ')}")
        del self._offers[self.plane.name]
        self._attach()

    def _attach(self) -> None:
        self.plane, self.channel, payload = self._choose()
        self.send(Attach(plane=self.plane.name, payload=payload))

    def _choose(self) -> tuple[Plane, DChannel, bytes]:
        """The first plane that both sides have and that connects; one line says which, and why not a better one."""
        rejected = [f"{name}: {why}" for name, why in self._rank_context.missing_planes.items()] + self._refused
        for plane in self._rank_context.planes:
            if plane.name not in self._offers:
                if not any(line.startswith(f"{plane.name}: ") for line in rejected):
                    rejected.append(f"{plane.name}: P does not offer it")
                continue
            if plane.pulls and self.converted:
                rejected.append(f"{plane.name}: it copies bytes, and dtypes differ")
                continue
            if len(self._rank_context.planes) > 1 and (
                why := plane.slower_because(self._offers[plane.name], reached=self._reached)
            ):
                rejected.append(f"{plane.name}: {why}")
                continue
            try:
                channel, payload = plane.connect(self._offers[plane.name], self.connection.address)
            except PlaneUnavailableError as error:
                self._reached &= not isinstance(error, PeerUnreachableError)
                rejected.append(f"{plane.name}: {error}")
                continue
            because = f" ({'; '.join(rejected)})" if rejected else ""
            logger.info("kvferry: data plane to %s is %s%s", self.name, plane.name, because)
            return plane, channel, payload
        raise PlaneUnavailableError(f"no data plane in common: {'; '.join(rejected) or 'none offered'}")
