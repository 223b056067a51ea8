"""Limits, socket options, and the framing of a message, for both ends of the control plane."""

from __future__ import annotations

import errno
import logging
import struct
from collections import Counter

import zmq

from kvferry.transport.host import is_ours
from kvferry.transport.wake import RateLimitedLog

SILENCE_SECONDS = 15.0
"""How long a peer on another host may send nothing. Hosts have been seen to stand still for seven seconds."""
SILENCE_HERE_SECONDS = 300.0
"""How long a peer on this host may send nothing; the kernel reports at once when a process of this host ends. Where
other threads spin on all cores with ``sched_yield``, as vLLM's workers do, a thread has been seen to wait 48 seconds
for a core (Linux 6.18)."""
HEARTBEATS = 10
"""Heartbeats within the time of silence; libzmq's own thread sends and answers them."""
CONNECT_TIMEOUT_SECONDS = 10.0
HANDSHAKE_SECONDS = 10.0
FRAMES = 1
"""ZMQ frames of one message, the routing identity not counted. CURVE encrypts each frame by itself, so that the three
frames of a message travel as one."""
CURVE_BYTES = 64
"""More than CURVE and the head of a message add to a frame; libzmq includes them in ``maxmsgsize``."""
_HEAD = struct.Struct("BB")
MAX_PEERS = 2048
"""Connections of one listener at once; at most half of the process's limit of open files."""
MAX_HALF_OPEN = 256
"""Connections of one listener at once on which no whole message has come yet; one more ends the oldest of them."""
MAX_HALF_OPEN_BYTES = 16 << 20
"""Bytes that half-open connections of a ZMQ listener may have sent, all together. libzmq accepts a message of the full
size before the handshake; an honest peer sends some hundred bytes then."""
MAX_UNFINISHED_BYTES = 64 << 20
"""Bytes of unfinished messages that one end holds, over all of its connections."""
UNFINISHED_SECONDS = 60.0
"""How long the bytes of one message may take to come."""
SEND_QUEUE, RECEIVE_QUEUE = 1024, 8
"""Messages that libzmq holds per connection. Beyond that, send() returns False, and the sender's TCP waits. Messages to
receive may be large: with 64 of them, two peers that sent without a pause took 350 MiB."""
BATCH, BATCH_BYTES = 512, 4 << 20
"""Messages of one receive() call, and their bytes, the last message not counted: many messages, or large ones, must not
keep the serving thread from its other work."""
_READABLE, _NOBLOCK, _MORE = int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
"""Ints: operators on the enumerations' members run Python code."""
_log = RateLimitedLog(logging.getLogger("vllm.kvferry.transport"))


def tune(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    """Bound the messages that libzmq holds, and their size."""
    socket.linger = 0
    socket.sndhwm, socket.rcvhwm = SEND_QUEUE, RECEIVE_QUEUE
    socket.maxmsgsize = max_message_bytes + CURVE_BYTES
    socket.handshake_ivl = int(HANDSHAKE_SECONDS * 1e3)
    socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, 10
    socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 5, 3
    socket.tcp_maxrt = int(SILENCE_SECONDS * 1e3)


def silence(address: str) -> float:
    """Seconds for which a peer at ``address`` may send nothing."""
    return SILENCE_HERE_SECONDS if is_ours(address) else SILENCE_SECONDS


def keep_watch(socket: zmq.Socket[bytes], seconds: float) -> None:
    """End connections on which nothing arrives for ``seconds``. Call it before bind or connect."""
    milliseconds = int(seconds * 1e3)
    socket.heartbeat_ivl = milliseconds // HEARTBEATS
    socket.heartbeat_timeout = milliseconds - milliseconds // HEARTBEATS


def url(address: str, port: int | str) -> str:
    """ZMQ's name of a numeric address and port; the port "*" lets ZMQ find a free one."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def waiting(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there. A receive without a message costs two to three times as much, because it raises."""
    try:
        return bool(int(socket.get(zmq.EVENTS)) & _READABLE)
    except zmq.ZMQError:  # the socket or the context is closed
        return False


def read(socket: zmq.Socket[bytes], max_frames: int) -> list[bytes] | None:
    """One message, of which at most ``max_frames + 1`` frames are kept; None where no message is there now."""
    if not waiting(socket):
        return None
    try:
        return rest(socket, [socket.recv(zmq.NOBLOCK)], max_frames)
    except zmq.ZMQError:  # EAGAIN, or the socket or the context is closed
        return None


def rest(socket: zmq.Socket[bytes], frames: list[bytes], max_frames: int) -> list[bytes]:
    """``frames`` and the frames that follow in the same message; libzmq delivers whole messages only."""
    while socket.get(zmq.RCVMORE):  # ``socket.rcvmore`` takes three times as long
        frame = socket.recv(zmq.NOBLOCK)
        if len(frames) <= max_frames:
            frames.append(frame)
    return frames


def pack(frames: list[bytes]) -> bytes:
    """A message of three frames as one, with the sizes of the first two before it."""
    return b"".join((_HEAD.pack(len(frames[0]), len(frames[1])), *frames))


def source(frame: zmq.Frame) -> int:
    """The file descriptor of the connection that a frame came by; -1 where libzmq does not report it."""
    try:
        return int(frame.get("__fd"))
    except (zmq.ZMQError, ValueError):
        return -1


def peer_address(frame: zmq.Frame) -> str:
    """The numeric address of the peer that sent a frame, as its connection has it; empty where libzmq does not report
    it. An IPv4 peer of an IPv6 socket has its IPv4 address."""
    try:
        return str(frame.get("Peer-Address")).removeprefix("::ffff:")
    except (zmq.ZMQError, ValueError):
        return ""


def send(socket: zmq.Socket[bytes], frames: list[bytes]) -> int:
    """Send a message without waiting. Returns 0, or the error number."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _MORE)
        socket.send(frames[-1], _NOBLOCK)
    except zmq.ZMQError as error:
        return error.errno or errno.EIO
    return 0


class Filter:
    """Drops messages that are not framed as ours are, and counts them."""

    def __init__(self, label: str, max_message_bytes: int, dropped: Counter[str]) -> None:
        self._label, self._max, self.dropped = label, max_message_bytes, dropped

    def unpack(self, frames: list[bytes]) -> list[bytes] | None:
        """The three frames of a message that :func:`pack` has made; None where it is no such message, or too large."""
        packed = frames[0] if len(frames) == FRAMES else b""
        size = len(packed) - _HEAD.size
        first, second = _HEAD.unpack_from(packed) if size >= 0 else (0, 0)
        if size < first + second:
            self._drop("frames", "it is no message of KVFerry")
            return None
        if size > self._max:
            self._drop("oversize", f"{size} bytes, limit {self._max}")
            return None
        at = _HEAD.size + first
        return [packed[_HEAD.size : at], packed[at : at + second], packed[at + second :]]

    def _drop(self, reason: str, text: str) -> None:
        self.dropped[reason] += 1
        _log.warning(f"{self._label} {reason}", "%s: message dropped: %s", self._label, text)
