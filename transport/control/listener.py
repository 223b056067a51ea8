"""P's end of the control plane: one port, its connections from ranks of D, and the thread that lets them in."""

from __future__ import annotations

import errno
import ipaddress
import itertools
import logging
import resource
import socket
import ssl
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import ExitStack, suppress

from kvferry.transport.control.keys import GREETING_BYTES, WHO_LISTENS, Keys, UnknownKeyError, greeting
from kvferry.transport.control.stream import (
    ADMITTED,
    ANSWER,
    FULL,
    KEEP_ALIVE,
    Shared,
    Stream,
    StreamEndedError,
    silence,
)
from kvferry.transport.errors import ConfigError
from kvferry.transport.limited_log import RateLimitedLog
from kvferry.transport.sockets import HELLO_SECONDS, Sockets, Stranger, Strangers, tune
from kvferry.transport.wake import Waker

MAX_PORT = 65535
MAX_PEERS = 2048
"""Connections of one listener at once; at most half of the process's limit of open files."""
BATCH, BATCH_BYTES = 512, 4 << 20
"""Messages of one receive() call, and their bytes, those of the last read not counted: many messages, or large ones,
must not keep the serving thread from its other work."""
STRANGER_SECONDS, LATE_SECONDS = 0.1, 0.01
"""Seconds of the processor that handshakes of one address may take in ``HELLO_SECONDS`` without an admission. After
that, the handshakes of all such addresses have ``LATE_SECONDS`` between two looks for others."""
log = RateLimitedLog(logging.getLogger("vllm.kvferry.transport"))


class _Gate:
    """Accepts connections and does their handshakes, on a thread of its own: a handshake takes about a millisecond of a
    core, most of it without the GIL. What it admits goes to the listener."""

    def __init__(self, listener: Listener, server: socket.socket, keys: Keys) -> None:
        self._listener, self._server, self._keys, self._tls = listener, server, keys, keys.of_p
        self._greeting = greeting(keys.admitted[keys.fingerprint])
        self._closing = False
        self._spent: defaultdict[bytes, float] = defaultdict(float)  # seconds by network
        self._spent_since = self._late_seconds = 0.0
        self._sockets = Sockets()
        self._strangers = Strangers(self._sockets, server, self._hear)
        self._thread = threading.Thread(target=self._run, name="kvferry-gate", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be had
            self._sockets.close()
            raise

    def close(self) -> None:
        self._closing = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                if (now := time.monotonic()) > self._spent_since + HELLO_SECONDS:
                    self._spent.clear()
                    self._spent_since = now
                self._late_seconds = 0.0
                self._sockets.progress(self._strangers.expire())
            except Exception as error:  # no memory or no descriptor is left: the port must outlive that
                self._listener.refused("handshake", f"unexpected error: {error!r}")
                time.sleep(0.1)
        self._strangers.close()
        self._sockets.close()

    def _hear(self, stranger: Stranger) -> bool:
        """Go on with a handshake, unless others come first. Returns whether there is more to do."""
        late, begun = self._spent[stranger.network] > STRANGER_SECONDS, time.thread_time()
        if late and self._late_seconds > LATE_SECONDS:
            return True
        try:
            return self._go_on(stranger)
        finally:
            took = time.thread_time() - begun
            self._spent[stranger.network] += took
            self._late_seconds += took if late else 0.0

    def _go_on(self, stranger: Stranger) -> bool:
        verdict, reason, text = ADMITTED, "peers", "as many peers are connected as the limit allows"
        try:
            tls = self._tls_of(stranger)
            if tls is None:
                return True
            tls.do_handshake()
            self._keys.proven(tls)
            if not self._listener.has_room:
                verdict = FULL
            tls.send(verdict)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except (ssl.SSLCertVerificationError, UnknownKeyError):
            named = stranger.said.removeprefix(self._greeting).hex()
            lies = named in self._keys.admitted
            reason, text = "key", str(self._keys.unknown("not the one that it names" if lies else named))
        except (OSError, ValueError) as error:
            reason, text = "handshake", f"the handshake failed: {error}"
        else:
            if verdict == ADMITTED:
                self._spent.pop(stranger.network)
                self._sockets.mute(tls)
                self._listener.admit(tls)
                return False
        self._listener.refused(reason, "" if stranger.said == WHO_LISTENS else text)
        self._sockets.drop(stranger.sock)
        return False

    def _tls_of(self, stranger: Stranger) -> ssl.SSLSocket | None:
        """The TLS socket of a connection that has sent its greeting; ``None`` where it is not whole yet.

        Raises:
            OSError: the greeting is another one.
        """
        if isinstance(stranger.sock, ssl.SSLSocket):
            return stranger.sock
        said = stranger.sock.recv(GREETING_BYTES - len(stranger.said))
        stranger.said += said
        if said and len(stranger.said) < GREETING_BYTES:
            return None
        if not stranger.said.startswith(self._greeting):
            stranger.sock.send(ANSWER + self._keys.fingerprint.encode())
            with suppress(BlockingIOError):
                stranger.sock.recv(1 << 16)  # with unread bytes the connection would end before its peer has the answer
            raise OSError("it is no KVFerry engine, or takes this one for another")
        self._sockets.mute(stranger.sock)  # another object has its descriptor from now on
        tls = self._tls.wrap_socket(stranger.sock, server_side=True, do_handshake_on_connect=False)
        stranger.sock = tls
        return tls


class Listener:
    """P's end: receives messages from any number of peers, and sends each peer its answers.

    Args:
        host: the one address to bind, or a name of it; never all interfaces.
        port: 0 finds a free one.
        keys: only peers with these keys are admitted.
        max_message_bytes: bound on the sum of a message's frames.
        max_peers: bound on the connections at once.

    Attributes:
        port, endpoint: the port, and ``address:port``, on which it listens.
        fd: a descriptor that is readable while there is something to receive.
        ended: the identities of connections that have ended, until the caller of ``receive`` removes them.
        dropped: refusals by reason: "handshake", "key", "peers", "oversize", "flood" (too many bytes that are no whole
            message, or that it does not read) are connections; "gone" are messages not sent.

    Raises:
        ConfigError: the port is in use, the address is not ours, or means all interfaces; one line.
    """

    def __init__(self, host: str, port: int, *, keys: Keys, max_message_bytes: int, max_peers: int = MAX_PEERS) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._limit = min(max_peers, files // 2) if files > 0 else max_peers
        self.dropped: Counter[str] = Counter()
        self._shared = Shared(max_message_bytes)
        self.streams: dict[bytes, Stream] = {}
        self.ended: list[bytes] = []
        self._serial = itertools.count(1)
        self._admitted: deque[ssl.SSLSocket] = deque()
        self._arrived: list[tuple[bytes, list[bytes], str]] = []
        self._taken = self._taken_bytes = 0  # messages of this call, keep-alives too, and their bytes
        self._late: dict[Stream, None] = {}  # for which this call has no time
        self._closed = False
        try:
            with ExitStack() as undo:
                server = undo.enter_context(listening_socket(host, port))
                address, self.port = server.getsockname()[:2]
                self.endpoint = f"[{address}]:{self.port}" if ":" in address else f"{address}:{self.port}"
                self._waker = Waker()
                undo.callback(self._waker.close)
                undo.callback(self._shared.sockets.close)
                self._shared.sockets.watch(self._waker, self._welcome)
                self._gate = _Gate(self, server, keys)
                undo.pop_all()
        except OSError as error:
            raise ConfigError(_bind_failure(host, port, error)) from None
        self.fd = self._shared.sockets.fd

    def receive(self) -> list[tuple[bytes, list[bytes], str]]:
        """``(identity, frames, address)`` of the messages that are there now, at most some hundreds; ``fd`` stays
        readable where there are more. The identity names one connection: a D that reconnects gets a new one. The
        numeric address is that from which the connection came."""
        if self._closed:
            return []
        late, self._late = self._late, {}
        for peer in late:  # else who sends without end would come before them again
            self._serve(peer)
        self._shared.sockets.progress()
        self._end_excess()
        found, self._arrived, self._taken, self._taken_bytes = self._arrived, [], 0, 0
        return found

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Queue a message for one peer. False: the peer is gone, or its connection ends because it does not read."""
        peer = self.streams.get(identity)
        sent = peer is not None and peer.send(frames)
        if peer is not None and not sent:
            self._late[peer] = None  # what it said before still counts
        self._end_excess()
        if not sent:
            self.dropped["gone"] += 1
        return sent and identity in self.streams

    @property
    def peers(self) -> int:
        """The number of peers that are connected now."""
        return len(self.streams)

    def close(self) -> None:
        """Close the listener and drop unsent messages. Idempotent."""
        if not self._closed:
            self._closed = True
            self._gate.close()
            self._welcome()
            for peer in list(self.streams.values()):
                self._end(peer)
            self._waker.close()
            self._shared.sockets.close()

    # --- for the gate, on its thread ------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether one more peer may come."""
        return len(self.streams) + len(self._admitted) < self._limit

    def admit(self, tls: ssl.SSLSocket) -> None:
        """Take over the connection of a peer whose key is admitted."""
        self._admitted.append(tls)
        self._waker.wake()

    def refused(self, reason: str, text: str) -> None:
        """Count a connection that ends, and say why, unless ``text`` is empty."""
        self.dropped[reason] += 1
        label = f"control port {self.endpoint}"
        if text:
            log.warning(f"{label} {reason}", "%s: connection ended: %s", label, text)

    # --- on the thread that receives ------------------------------------------------------------------------------

    def _welcome(self) -> None:
        self._waker.drain()
        while self._admitted:
            tls = self._admitted.popleft()
            try:
                address = str(tls.getpeername()[0]).removeprefix("::ffff:")
                tune(tls, silence(address))
                peer = Stream(tls, address, self._shared, self._serve, next(self._serial).to_bytes(8, "big"))
                self.streams[peer.identity] = peer
            except OSError:  # it is gone already
                tls.close()

    def _serve(self, peer: Stream) -> None:
        if peer.identity not in self.streams:
            return
        if self._taken >= BATCH or self._taken_bytes >= BATCH_BYTES:
            self._late[peer] = None
            return
        try:
            messages = peer.receive()
            self._taken += len(messages)
            for frames in messages:
                if frames != KEEP_ALIVE:
                    self._taken_bytes += len(frames[2])
                    self._arrived.append((peer.identity, frames, peer.address))
            if KEEP_ALIVE in messages:
                peer.send(KEEP_ALIVE)
        except StreamEndedError as error:
            if error.reason != "gone":
                self.refused(error.reason, str(error))
            self._end(peer)

    def _end_excess(self) -> None:
        while self._shared.excess:
            peer = self._shared.excess.pop()
            if peer.identity in self.streams:
                self.refused("flood", "it sends bytes and no whole message, or does not read its answers")
                self._end(peer)

    def _end(self, peer: Stream) -> None:
        self.streams.pop(peer.identity, None)
        self.ended.append(peer.identity)
        peer.close()


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there, and does not block. Raises ConfigError, as ``Listener``."""
    address = _own_address(host)
    if port > MAX_PORT:
        raise ConfigError(
            f"side_channel_port: a rank would get port {port}; give one so low that no rank is above {MAX_PORT}"
        )
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.setblocking(False)
        server.bind((address, port))
        server.listen(socket.SOMAXCONN)
    except OSError as error:
        server.close()
        raise ConfigError(_bind_failure(host, port, error)) from None
    return server


def _own_address(host: str) -> str:
    """The numeric address of ``host``; never one that means all interfaces."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        address = str(found[0][4][0])
        number = ipaddress.ip_address(address)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"side_channel_host: {host!r} is not an address or the name of one ({error}); "
            "name an address of this host that peers reach"
        ) from None
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    if number.is_unspecified or (mapped is not None and mapped.is_unspecified) or not host:
        raise ConfigError(
            f"side_channel_host: {host!r} would listen on all interfaces; name the one address that peers reach"
        )
    return address


def _bind_failure(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"side_channel_port: port {port} of {host} is in use; "
            "give each engine on a host its own port, or 0 to find a free one"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"side_channel_host: {host} is not an address of this host; name one that `ip addr` lists"
    if error.errno == errno.EACCES:
        return f"side_channel_port: port {port} of {host} needs privileges; give one above 1023, or 0"
    return f"side_channel_host: cannot listen on {host} port {port}: {error}"
