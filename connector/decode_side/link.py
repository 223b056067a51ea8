"""D's link to one life of one P rank: connection, handshake, data plane. Driven by polling; nothing here blocks.

Its life ::

    CONNECTED ─▶ GREETING ─▶ ATTACHING ─▶ MAPPING ─▶ ATTACHED          (each ─▶ FAILED; MAPPING only where D pulls)
                               ▲ └─────────┴── the next plane where P or the memory refuses one

Messages that need no handshake go over it in every phase but FAILED, which is the last one. A phase between CONNECTED
and ATTACHED has a deadline. A message of the handshake that comes in another phase than its own fails the link.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import msgspec

from kvferry.connector.decode_side.plane_choice import FailedPlanes, PlaneChoice
from kvferry.connector.geometry.byte_ranges import check_layouts, translate_pages
from kvferry.connector.geometry.compatibility import compatible, draft_layers
from kvferry.connector.geometry.dtypes import converted_pairs
from kvferry.connector.geometry.rank_geometry import PageLayout, RankGeometry
from kvferry.connector.geometry.read_plan import routes
from kvferry.connector.pages.rank_context import RankContext, check_model, misfit
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import FailureKind
from kvferry.connector.wire.states import story
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.transport.channels import DChannel
from kvferry.transport.errors import (
    GeometryError,
    IncompatiblePeerError,
    KVFerryError,
    PlaneBusyError,
    PlaneUnavailableError,
    ProtocolError,
    TransportError,
    shortened,
)
from kvferry.transport.grant_board import BoardAddress, BoardReader
from kvferry.transport.limited_log import RateLimitedLog
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import Plane

Blame = Literal["", "plane", "peer"]
"""What must not be used again: nothing that is known, the data plane of the link, or this life of P."""


class Reason(msgspec.Struct, frozen=True):
    """Why a link or a load failed: a kind to count, one line for the log, and what another attempt should avoid."""

    kind: FailureKind
    text: str
    blames: Blame = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class LinkPhase(enum.Enum):
    CONNECTED = "connected"  # control messages only; no handshake was needed yet
    GREETING = "waiting for the answer to the handshake"
    ATTACHING = "waiting for the data plane"
    MAPPING = "waiting for P's memory to be mapped"
    ATTACHED = "attached"
    FAILED = "failed"


Place = tuple[str, int, str]
"""Host and port of a rank of P, and the fingerprint of its key: the connection proves them. What else a request says
of the rank may be wrong, and must not concern other requests: ``Link.check_addressed`` checks it for each hand-over."""
Life = tuple[Place, bytes]
"""A place, and the incarnation of the rank that has answered there."""


_CONNECTED, _GREETING, _ATTACHING, _MAPPING, _ATTACHED, _FAILED = LinkPhase
# Python 3.11 finds a member of an enumeration in Python code, which is slow for a look at each link.


class Link:
    """One connection to one life of one P rank: control connection, handshake, data plane.

    A failed link is replaced, never used again.
    """

    def __init__(
        self,
        rank_context: RankContext,
        address: RankAddress,
        log: RateLimitedLog,
        *,
        place: Place,
        failed_planes: FailedPlanes,
        pending: dict[Link, None],
    ) -> None:
        """``failed_planes``: those that broke on links to the P rank come last. ``pending``: the link adds itself where
        it becomes ``pending``."""
        settings = rank_context.settings
        self._rank_context, self._timeout = rank_context, settings.handshake_timeout_seconds
        self._log = log
        self._all_pending = pending
        self.place = place
        self._host, self._port = address.host, address.port
        self._incarnation = b""  # P's, once it has answered
        self._failed_planes = failed_planes
        self._now = 0.0  # the time that the last call passed
        self.phase = self.handled_phase = _CONNECTED  # now, and the last one that the owner has acted on
        self._history: list[tuple[float, enum.Enum]] = [(self._now, self.phase)]
        self.reason: Reason | None = None  # of the failure
        self.detached = False  # P or D itself has ended the session: the next load may begin a new one at once
        self.misfit = False  # the handshake alone has failed: P and D do not fit, and P answers questions all the same
        self.deadline = math.inf  # of the handshake
        self.failed_at = 0.0
        self.used = True  # a message was sent since the owner last looked
        self.used_at = 0.0
        self.users = 0  # reads that use it
        self.questions: dict[int, Any] = {}  # lookups that wait for P's answer over it, by the question's number
        self.channel: DChannel | None = None
        self.plane: Plane | None = None  # under negotiation or in use
        self.slot_bytes = 0  # of a chunk in a slot
        self.pages: tuple[PageLayout, ...] = ()
        self.board: BoardReader | None = None  # P's board of posted grants
        self.process: PeerProcess | None = None  # P's process, where D reads the process itself
        self.converted: frozenset[tuple[int, int]] = frozenset()  # regions, D's and P's, whose dtypes or scales differ
        self._choice = PlaneChoice(rank_context)
        self.geometry: RankGeometry | None = None
        self._engine_id = ""  # P's own, once it has answered
        self.connection = rank_context.dialer.connect(self._host, self._port, key=address.key, timeout=self._timeout)
        self.connection.on_news = partial(pending.__setitem__, self, None)
        if self.connection.news:
            pending[self] = None

    @property
    def life(self) -> Life:
        """Whose link this is, once P has answered."""
        return self.place, self._incarnation

    def story(self) -> str:
        return story(self._history)

    @property
    def avoids(self) -> bool:
        """Whether this link avoids data planes that broke."""
        return bool(self._choice.avoid)

    @property
    def pending(self) -> bool:
        """Whether ``serve`` has work, or the owner has not acted on the phase. A deadline, and a data plane that
        breaks, bring no work here: see ``may_have_failed``."""
        return self.connection.news or self.phase is not self.handled_phase or self.phase is _MAPPING

    @property
    def may_have_failed(self) -> bool:
        """Whether ``serve`` must look at the time, or at the data plane. D may have thousands of links, and looks at
        each of them at every tick."""
        channel = self.channel
        return channel is None or channel.error is not None or self.phase is not _ATTACHED

    @property
    def shakes(self) -> bool:
        """Whether the handshake is under way: a lookup may wait for its end."""
        return self.deadline < math.inf

    @property
    def name(self) -> str:
        """The peer as a log line names it."""
        known = self.geometry
        who = "P" if known is None else f"{self._engine_id[:8]} pp{known.pp_rank} tp{known.tp_rank}"
        return f"{who} at {self._host}:{self._port}"

    def _key(self, what: str) -> str:
        """Under which lines of one kind about one peer are limited."""
        return f"{what} {self._host}:{self._port}"

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
    def failure(self) -> Reason:
        """Why the link failed, with the peer's name."""
        reason = self.reason
        assert reason is not None
        return Reason(reason.kind, f"{self.name}: {reason.text}", reason.blames)

    def start_handshake(self, now: float) -> None:
        """Start the handshake, unless it was started before."""
        self._now = now
        if self.phase is not _CONNECTED:
            return
        self._enter(_GREETING)
        self.deadline = now + self._timeout
        ours = self._rank_context
        hello = messages.Hello(
            engine_id=ours.engine_id, incarnation=ours.incarnation, geometry=ours.caches.geometry,
            model=dict(ours.model), converts=ours.settings.convert_dtype,
        )  # fmt: skip
        self.send(hello)

    def send(self, message: messages.Request) -> None:
        """Send, or fail the link where the peer cannot be reached. A failed link still carries messages, above all a
        release, as long as its connection stands."""
        self.used = True
        if self.connection.lost or not self.connection.send(messages.encode(message)):
            self._take_closing()
            why = self.connection.reason or "its control connection takes no more messages"
            self.fail(self.connection.failure or "peer_lost", why)

    def serve(self, now: float) -> list[messages.Reply]:
        """Advance the handshake. Returns the replies that do not belong to it."""
        self._now = now
        replies: list[messages.Reply] = []
        arrived = self.connection.receive()
        if self.phase is _FAILED:
            return replies
        for frames in arrived:
            with self._errors_fail_the_link():
                reply = messages.decode_reply(frames)
                if isinstance(reply, messages.HandshakeReply):
                    self._on_handshake_reply(reply)
                elif not self._on_closing(reply):
                    replies.append(reply)
        if self.phase is _MAPPING and self.channel is not None and self.channel.error is None:
            with self._errors_fail_the_link():
                self._map_pages()
        if self.connection.lost:
            self.fail(self.connection.failure or "peer_lost", self.connection.reason or "the peer is gone")
        elif self.channel is not None and self.channel.error is not None:
            self.lose_plane(str(self.channel.error))
        elif now >= self.deadline:
            self.fail("timeout", f"no answer to the handshake in {self._timeout:g} s ({self.phase.value})", "peer")
        elif self.phase is _ATTACHING and self.plane is None:
            self._choose_plane()
        return replies

    @contextmanager
    def _errors_fail_the_link(self) -> Iterator[None]:
        try:
            yield
        except (IncompatiblePeerError, GeometryError) as error:
            release = isinstance(error, IncompatiblePeerError) and error.field == messages.VERSION
            self.misfit = not (release or self.phase is _CONNECTED)
            self.fail("incompatible", str(error))
        except messages.VersionError as error:
            self.fail("incompatible", str(error))
        except ProtocolError as error:
            self._rank_context.stats.dropped("malformed reply")
            self.fail("data", str(error))
        except TransportError as error:
            self.fail("plane", str(error), "peer")
        except KVFerryError as error:
            self.fail("peer_lost", str(error), "peer")

    def fail(self, kind: FailureKind, text: str, blames: Blame = "") -> None:
        """End the link. The reads over it fail."""
        if self.phase is _FAILED:
            return
        if self.phase is _GREETING:  # nobody is there, or D may not connect there: another attempt would find the same
            blames = "peer"
        self.reason, self.deadline = Reason(kind, text, blames), math.inf
        self._enter(_FAILED)
        line = "kvferry: link to %s failed: %s [%s]"
        self._log.warning(self._key("failed"), line, self.name, text, self.story())

    def lose_session(self, why: str) -> None:
        """P has ended its session with this D. The next load, or the next attempt, makes a new link."""
        self.detached = True
        self.fail("peer_lost", f"the prefill engine has no handshake of ours: {why}")

    def lose_plane(self, why: str) -> None:
        """The data plane has broken. The reads over the link fail; during the handshake the next plane is tried: P
        closes a channel that it refuses, and the close arrives before P's answer."""
        if self.phase in (_ATTACHING, _MAPPING) and self.plane is not None:
            self._next_plane(why)
        elif self.phase is _ATTACHED:
            self.fail("peer_lost", why, "plane")

    @property
    def broken_plane(self) -> str:
        """The data plane that ended this link, while its control connection stood; empty if something else did."""
        by_plane = self.reason is not None and self.reason.blames == "plane"
        return self.plane.name if by_plane and self.plane is not None else ""

    def _enter(self, phase: LinkPhase) -> None:
        self.phase = phase
        self._history.append((self._now, phase))
        self._all_pending[self] = None

    def _take_closing(self) -> None:
        """Fail the link with the reason that P gave where it closed the connection, if it has given one."""
        for frames in self.connection.receive() if self.phase is not _FAILED else ():
            with suppress(ProtocolError):
                self._on_closing(messages.decode_reply(frames))

    def _on_closing(self, reply: messages.Reply) -> bool:
        """Whether a reply is P's last one, which fails the link."""
        if not isinstance(reply, messages.Closing):
            return False
        self.fail("peer_lost", f"the prefill engine has ended its leases: {reply.reason}", "peer")
        return True

    def drop_arrived(self) -> None:
        """Drop messages that came after the stop of the last read over the link, and that the channel did not drop."""
        if self.channel is not None and not self.channel.pulls:
            for message in self.channel.poll():
                message.release()

    def detach(self) -> None:
        """Close the data plane; messages in flight there do not arrive. Idempotent."""
        if self.channel is not None:
            self.channel.close()

    def close(self) -> None:
        """Close the sockets and free the staging memory. Idempotent."""
        self.detach()
        self.connection.close()
        self.board = None

    # --- handshake ----------------------------------------------------------------------------------------------

    def _on_handshake_reply(self, reply: messages.HandshakeReply) -> None:
        match reply:
            case messages.Refused():
                raise misfit(reply.field, reply.theirs, reply.ours)
            case messages.Welcome():
                if self.phase is not _GREETING:
                    raise ProtocolError(f"Welcome came while {self.phase.value}")
                self._check_welcome(reply)
                self._choose_plane()
            case messages.AttachRefused(detached=True):
                self.lose_session(shortened(reply.reason))
            case messages.AttachRefused():
                if self.plane is not None and reply.plane == self.plane.name and self.phase in (_ATTACHING, _MAPPING):
                    self._next_plane(shortened(reply.reason))
            case messages.Attached():
                self._on_attached(reply)

    def _on_attached(self, reply: messages.Attached) -> None:
        if self.phase is not _ATTACHING:
            raise ProtocolError(f"Attached came while {self.phase.value}")
        if self.plane is None or self.channel is None or reply.plane != self.plane.name:
            return  # D has rejected this plane in the meantime
        try:
            self.plane.finish(self.channel, reply.payload)
        except PlaneUnavailableError as error:
            self._choice.note_error(error)
            self._next_plane(str(error))
            return
        if self.channel.encrypted:
            self._log.info(self._key("encrypted"), "kvferry: KV bytes from %s are encrypted", self.name)
        self.slot_bytes, self.pages = reply.slot_bytes, reply.pages
        if not self.plane.pulls:
            self._attached()
            return
        check_layouts(self.pages, self.theirs)
        self.process = self.channel.process if self.channel.pulls else None
        self.board = None if reply.board is None else self._open_board(reply.board)
        self._enter(_MAPPING)
        self._map_pages()

    def _attached(self) -> None:
        self._enter(_ATTACHED)
        self.deadline = math.inf

    def _open_board(self, address: BoardAddress) -> BoardReader | None:
        """P's board; without it D asks for every grant."""
        if self.process is None:
            return None
        try:
            return BoardReader(self.process, address)
        except (PlaneUnavailableError, OSError) as error:
            self._log.info(self._key("board"), "kvferry: this engine asks %s for every grant: %s", self.name, error)
            return None

    def _map_pages(self) -> None:
        """Translate the addresses of P's pages once D can read P's memory."""
        channel = self.channel
        assert channel is not None and channel.pulls
        if channel.ready:
            self.pages = translate_pages(self.pages, self.theirs, channel.translate)
            self._attached()

    def _check_welcome(self, welcome: messages.Welcome) -> None:
        self._incarnation = welcome.incarnation
        self._choice.avoid = self._failed_planes.of(self.life, self._now)
        check_model(self._rank_context.model, welcome.model)
        ours = self._rank_context.caches.geometry
        compatible(ours, welcome.geometry, convert=self._rank_context.settings.convert_dtype)
        self.geometry, self._engine_id = welcome.geometry, welcome.engine_id
        self.converted = converted_pairs(ours, welcome.geometry)
        if self.converted:
            pairs = {f"{welcome.geometry.regions[j].dtype} to {ours.regions[i].dtype}" for i, j in self.converted}
            text = "kvferry: KV of %s is converted, %s"
            self._log.info(self._key("converted"), text, self.name, ", ".join(sorted(pairs)))
        read = [(route.region, route.layer, route.num_layers) for route in routes(ours, welcome.geometry)]
        if welcome.geometry.pp_size == 1 and (left := draft_layers(ours, read)):
            text = (
                "kvferry: %s lacks %d layers of the model that drafts here, which begins each loaded prompt without KV"
            )
            self._log.info(self._key("drafts"), text, self.name, len(left))
        block_size = next((region.block_size for region in welcome.geometry.regions), 0)
        described = self._rank_context.topology(welcome.geometry).describe(block_size)
        self._log.info(self._key("topology"), "kvferry: %s: %s", self.name, described)
        self._choice.take_offers(welcome.planes)

    def check_addressed(self, peer: PeerEngine, address: RankAddress) -> None:
        """Check that this rank of P has the form that a request's parameters name, and lives the life that they name.
        D has chosen the ranks to read from these parameters.

        Raises:
            IncompatiblePeerError: it has another form.
            TransportError: another life.
        """
        if address.incarnation != self._incarnation:
            raise TransportError(
                "the prefill engine was restarted, or has slept, since it made this hand-over; its KV cache is gone"
            )
        theirs = self.theirs
        for named, fields in ((address, ("tp_rank", "pp_rank")), (peer, ("tp_size", "pp_size", "shardings"))):
            for field in fields:
                said, is_so = getattr(named, field), getattr(theirs, field)
                if said != is_so:
                    raise IncompatiblePeerError(
                        f"the prefill engine's {field}, in kv_transfer_params and in the prefill engine's handshake,",
                        said,
                        is_so,
                    )

    # --- data plane ---------------------------------------------------------------------------------------------

    def _next_plane(self, why: str) -> None:
        """Close D's end of the plane under negotiation, do not choose it again, and choose another one."""
        assert self.plane is not None and self.channel is not None
        self.detach()
        self._choice.note_error(self.channel.error)
        self._choice.drop(self.plane.name, why)
        self.plane = self.channel = None
        self._choose_plane()

    def _choose_plane(self) -> None:
        """Connect the first plane that both sides have, and ask P for the other end. One log line names it, and why no
        better plane was chosen. Where no such plane is left, the link fails."""
        if self.phase is not _ATTACHING:
            self._enter(_ATTACHING)
        with self._errors_fail_the_link():
            try:
                self.plane, self.channel, payload, why = self._choice.connect(
                    self.connection, converts=bool(self.converted)
                )
            except PlaneBusyError:
                return  # the next tick tries again
            name, because = self.plane.name, f" ({why})" if why else ""
            lanes = self.plane.lanes_to(self.connection.address)
            shown = f"{name}, lanes: {lanes}" if lanes else name
            self._log.info(self._key(name), "kvferry: data plane to %s is %s%s", self.name, shown, because)
            self._choice.report_change(self.name, name, partial(self._log.warning, self._key(f"changed to {name}")))
            self.send(messages.Attach(plane=name, payload=payload))
