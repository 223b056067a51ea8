"""A network in virtual time: control connections, and streams of data planes. What travels are the real bytes.

Packets of one connection arrive in order, unless a fault reorders them. A fault concerns one packet (lost, doubled,
late, overtaken) or two hosts (cut off from each other for some time)."""

from __future__ import annotations

import heapq
import logging
import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple, Protocol


class Violation(AssertionError):
    """A promise was broken."""


class Timeline:
    """Events in the order of their time, and of their making where times are equal. ``now``: seconds from 0."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self.happened: deque[tuple[float, str, str]] = deque(maxlen=400)
        """The last notes, for the message of a violation."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._made = 0

    def clock(self) -> float:
        """The time, for those that take a clock."""
        return self.now

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Let ``act`` happen in ``seconds``."""
        self._made += 1
        heapq.heappush(self._events, (self.now + seconds, self._made, act))

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Let ``act`` happen at a time."""
        self._made += 1
        heapq.heappush(self._events, (when, self._made, act))

    def run(self, seconds: float) -> None:
        """Let ``seconds`` pass, with all that happens in them."""
        end, events = self.now + seconds, self._events
        while events and events[0][0] <= end:
            self.now, _, act = heapq.heappop(events)
            act()
        self.now = end

    def note(self, kind: str, what: str = "") -> None:
        """Remember what happened."""
        self.happened.append((self.now, kind, what))

    def story(self) -> str:
        """The last notes, the latest at the end."""
        return "\n".join(f"{at:12.6f}  {kind}{what and ': '}{what}" for at, kind, what in self.happened)


class ErrorLog(logging.Handler):
    """Notices each line at ERROR: the product logs there only what must not happen."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


LATENCY_SECONDS = 100e-6
LATE_SECONDS = 2.0
"""How late a packet comes at most that a fault delays."""
LOOPBACK = "127.0.0.1"
"""Where every D connects from: the planes of one host are on offer."""
WAKER_FD, LISTENER_FD, DIALER_FD = range(1 << 20, (1 << 20) + 3)
"""What a thread would poll. Nothing sleeps here, so they are no descriptors."""
SILENCE_SECONDS = 5.0
"""A connection is lost where the hosts of its ends do not reach each other for this time, or where one is off."""


class Host(Protocol):
    """One life of one process, as the network sees it."""

    number: int
    alive: bool

    def mark(self, what: object) -> None:
        """Something is readable, or a plane has an event."""


class Odds(NamedTuple):
    """How likely a fault is for each packet."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    overtaken: float = 0.0


class Packet:
    """Bytes under way. ``lost``: they will not arrive."""

    __slots__ = ("arrive", "lane", "lost", "sure", "what")

    def __init__(self, lane: Lane, what: str, arrive: Callable[[], None], *, sure: bool = False) -> None:
        self.lane, self.what, self.arrive, self.lost, self.sure = lane, what, arrive, False, sure


class Lane:
    """One direction of one connection, from one process to another."""

    __slots__ = ("last", "network", "of", "to")

    def __init__(self, network: Network, of: Host, to: Host) -> None:
        self.network, self.of, self.to, self.last = network, of, to, 0.0

    def send(self, what: str, arrive: Callable[[], None], seconds: float = 0.0, *, sure: bool = False) -> None:
        """Let ``arrive`` happen at the other end, after ``seconds`` and the latency. ``what`` names the packet.
        ``sure``: no fault concerns this packet."""
        network, rng = self.network, self.network.timeline.rng
        packet = Packet(self, what, arrive, sure=sure)
        delay = LATENCY_SECONDS * (0.5 + rng.random()) + seconds
        dice = rng.random() if any(network.odds) and not sure else 1.0
        lost, doubled, late, overtaken = accumulate(network.odds)
        if doubled <= dice < late:  # and all behind it
            network.fault("packet late", what)
            delay += rng.random() * LATE_SECONDS
        self.go(packet, delay)
        if dice < lost:
            network.lose(packet)
        elif dice < doubled:
            network.double(packet)
        elif late <= dice < overtaken:
            network.delay(packet, delay + 20 * LATENCY_SECONDS * rng.random(), "packet overtaken")

    def go(self, packet: Packet, delay: float) -> None:
        """Send a packet behind all others of this lane."""
        network = self.network
        now, last = network.timeline.now, self.last + 1e-9
        self.last = last = max(last, now + delay)
        network.under_way[packet] = None
        network.timeline.after(last - now, partial(network.deliver, packet))


class Network:
    """All connections. ``under_way``: the packets that have not arrived, in the order in which they were sent."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.odds = Odds()
        self.faults: Counter[str] = Counter()
        self.packets = self.digest = 0  # how many have arrived; a digest of when and where
        self.under_way: dict[Packet, None] = {}
        self.listeners: dict[tuple[str, int], SimListener] = {}
        self.hosts: dict[int, Any] = {}  # all processes that live
        self.streams: dict[bytes, Any] = {}  # ends at D whose other end P has not accepted
        self.links: dict[tuple[int, int], dict[Any, Callable[[str], None]]] = {}
        self._cut: dict[tuple[int, int], deque[Packet]] = {}  # pairs that do not reach each other, with what waits
        self.counts: Counter[str] = Counter()
        self._connections = self._processes = self._prompts = 0

    def fault(self, kind: str, what: str) -> None:
        self.faults[kind] += 1
        self.timeline.note(kind, what)

    def new_number(self) -> int:
        """The number of a new process; never used again."""
        self._processes += 1
        return self._processes

    def new_prompt(self) -> int:
        """The number of a new prompt; never used again."""
        self._prompts += 1
        return self._prompts

    def name(self) -> bytes:
        """An identity that no other connection has."""
        self._connections += 1
        return b"\0" + self._connections.to_bytes(4, "big")

    def deliver(self, packet: Packet) -> None:
        """A packet has come to its end, or waits there until two hosts reach each other again."""
        lane = packet.lane
        if self._cut and (held := self._cut.get(_pair(lane.of, lane.to))) is not None:
            held.append(packet)
            return
        if self.under_way.pop(packet, 0) is not None or packet.lost or not lane.to.alive:
            return
        self.packets += 1
        self.digest = zlib.crc32(struct.pack("<dI", self.timeline.now, lane.to.number), self.digest)
        packet.arrive()

    # --- faults of one packet ---------------------------------------------------------------------------------------

    def lose(self, packet: Packet) -> None:
        self.fault("packet lost", packet.what)
        del self.under_way[packet]

    def double(self, packet: Packet) -> None:
        """The packet arrives, and again behind all others."""
        self.fault("packet doubled", packet.what)
        packet.lane.go(Packet(packet.lane, packet.what, packet.arrive), LATENCY_SECONDS)

    def delay(self, packet: Packet, seconds: float, kind: str = "packet late") -> None:
        """The packet arrives in ``seconds``; those behind it do not wait."""
        self.fault(kind, packet.what)
        del self.under_way[packet]
        late = Packet(packet.lane, packet.what, packet.arrive)
        self.under_way[late] = None
        self.timeline.after(seconds, lambda: self.deliver(late))

    # --- who hears of a loss --------------------------------------------------------------------------------------

    def join(self, a: Host, b: Host, end: object, lost: Callable[[str], None]) -> None:
        """``lost`` will be called at ``end`` of a connection if the other process ends, or stays out of reach."""
        self.links.setdefault(_pair(a, b), {})[end] = lost

    def leave(self, a: Host, b: Host, end: object) -> None:
        """This end of a connection is closed."""
        pair = _pair(a, b)
        ends = self.links.get(pair)
        if ends is not None:
            ends.pop(end, None)
            if not ends:
                del self.links[pair]

    def ended(self, host: Host, *, silently: bool) -> None:
        """A process has ended. Its system closes its connections; a host without power closes nothing."""
        seconds = SILENCE_SECONDS if silently else LATENCY_SECONDS
        for pair in [pair for pair in self.links if host.number in pair]:
            for lost in list(self.links[pair].values()):
                self.timeline.after(seconds, lambda lost=lost: lost("the peer is gone"))  # type: ignore[misc]

    def cut(self, a: Host, b: Host, seconds: float) -> None:
        """No packet passes between two hosts for ``seconds``; those under way wait."""
        pair = _pair(a, b)
        if pair in self._cut:
            return
        self.fault("link cut", f"{pair} for {seconds:.3f} s")
        self._cut[pair] = deque()
        self.timeline.after(seconds, lambda: self._heal(pair))
        if seconds > SILENCE_SECONDS:
            self.timeline.after(SILENCE_SECONDS, lambda: self._give_up(pair))

    def _heal(self, pair: tuple[int, int]) -> None:
        for packet in self._cut.pop(pair):
            self.deliver(packet)

    def _give_up(self, pair: tuple[int, int]) -> None:
        for packet in self._cut[pair]:
            packet.lost = True
        for lost in list(self.links.get(pair, {}).values()):
            lost("no answer")

    def reaches(self, a: Host, b: Host) -> bool:
        return _pair(a, b) not in self._cut


def _pair(a: Host, b: Host) -> tuple[int, int]:
    return (a.number, b.number) if a.number < b.number else (b.number, a.number)


# --- the control plane --------------------------------------------------------------------------------------------
class SimListener:
    """P's end, in the place of ``Listener``."""

    def __init__(self, network: Network, host: Host, address: tuple[str, int]) -> None:
        self.network, self.host, self.address = network, host, address
        self.fd = LISTENER_FD
        self.port, self.endpoint = address[1], f"sim://{address[0]}:{address[1]}"
        self.dropped: Counter[str] = Counter()
        self.peers: dict[bytes, SimConnection] = {}
        self.ended: list[bytes] = []
        self.inbox: list[Any] = []
        network.listeners[address] = self

    def receive(self) -> list[Any]:
        inbox, self.inbox = self.inbox[:256], self.inbox[256:]
        if self.inbox:
            self.host.mark(self.fd)
        return inbox

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        peer = self.peers.get(identity)
        if peer is None:
            self.dropped["gone"] += 1
            return False
        assert peer.back is not None
        peer.back.send("reply", lambda: peer.arrived(frames))
        return True

    def take(self, connection: SimConnection, frames: list[bytes]) -> None:
        """A message of a D has arrived."""
        self.inbox.append((connection.identity, frames, LOOPBACK))
        self.host.mark(self.fd)

    def gone(self, connection: SimConnection) -> None:
        self.peers.pop(connection.identity, None)
        self.ended.append(connection.identity)
        self.network.leave(connection.host, self.host, (connection, "listener"))

    def close(self) -> None:
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]
        for connection in list(self.peers.values()):
            self.network.timeline.after(LATENCY_SECONDS, lambda c=connection: c.lose("the peer closed"))  # type: ignore[misc]
            self.gone(connection)


class SimDialer:
    """All connections of one process, in the place of ``Dialer``."""

    def __init__(self, network: Network, host: Host) -> None:
        self.network, self.host = network, host
        self.fd = DIALER_FD
        self.connections: dict[SimConnection, None] = {}  # that are open

    def connect(self, host: str, port: int, *, key: str, timeout: float) -> SimConnection:
        return SimConnection(self, (host, port), timeout)

    def progress(self) -> bool:
        """Nothing to take in: messages are delivered at once."""
        return False

    def close(self) -> None:
        for connection in list(self.connections):
            connection.close()


class SimConnection:
    """D's end, in the place of ``Connection``. Its first packet finds P's listener, or nobody."""

    def __init__(self, dialer: SimDialer, where: tuple[str, int], timeout: float) -> None:
        self.network, self.host, self.where = dialer.network, dialer.host, where
        self.dialer = dialer
        self.address, self.connected, self.lost, self.reason = where[0], False, False, ""
        self.news, self.ends, self.failure = False, None, "unreachable"
        self.on_news: Callable[[], None] = lambda: None
        self.dropped: Counter[str] = Counter()
        self.identity = self.network.name()
        self.inbox: list[list[bytes]] = []
        self.listener: SimListener | None = None
        self.way: Lane | None = None
        self.back: Lane | None = None
        self._closed = False
        self._waiting: list[list[bytes]] = []
        dialer.connections[self] = None
        self.network.timeline.after(LATENCY_SECONDS, self._dial)
        self.network.timeline.after(timeout, self._late)

    def _dial(self) -> None:
        if self._closed or not self.host.alive:
            return
        listener = self.network.listeners.get(self.where)
        if listener is None or not listener.host.alive:
            self.lose("nobody listens there")
            return
        if not self.network.reaches(self.host, listener.host):
            self.network.timeline.after(0.2, self._dial)
            return
        self.listener, self.connected, self.failure = listener, True, ""
        self.way = Lane(self.network, self.host, listener.host)
        self.back = Lane(self.network, listener.host, self.host)
        listener.peers[self.identity] = self
        self.network.join(self.host, listener.host, self, self.lose)
        self.network.join(self.host, listener.host, (self, "listener"), lambda _: listener.gone(self))
        waiting, self._waiting = self._waiting, []
        for frames in waiting:
            self.send(frames)

    def _late(self) -> None:
        if not self.connected and not self._closed:
            self.lose("no answer in time")

    def _tell(self) -> None:
        """A poller would name the dialer."""
        self.host.mark(self.dialer.fd)
        if not self.news:
            self.news = True
            self.on_news()

    def receive(self) -> list[list[bytes]]:
        self.news = False
        inbox, self.inbox = self.inbox, []
        return inbox

    def arrived(self, frames: list[bytes]) -> None:
        if not self.lost and not self._closed:
            self.inbox.append(frames)
            self._tell()

    def send(self, frames: list[bytes]) -> bool:
        if self.lost or self._closed:
            self.dropped["gone"] += 1
            return False
        if self.way is None:
            self._waiting.append(frames)
            return True
        listener = self.listener
        assert listener is not None
        self.way.send("request", lambda: self._at_listener(listener, frames))
        return True

    def _at_listener(self, listener: SimListener, frames: list[bytes]) -> None:
        if self.identity in listener.peers:
            listener.take(self, frames)

    def lose(self, reason: str) -> None:
        if not self.lost:
            self.lost, self.connected, self.reason = True, False, f"{self.where}: {reason}"
            self._leave()
            self._tell()

    def close(self) -> None:
        if not self._closed:
            self._closed = self.lost = True
            self.on_news = lambda: None
            self.dialer.connections.pop(self, None)
            self._leave()

    def _leave(self) -> None:
        listener = self.listener
        if listener is not None:
            self.network.leave(self.host, listener.host, self)
            if self.way is not None:  # behind the last message
                self.way.send("end of connection", lambda: listener.gone(self), sure=True)
