"""The control plane's sockets: frames in, frames out, from one thread that polls; no call waits for a peer.

P has one :class:`Listener`, D one :class:`Connection` per rank of P. What the frames mean is not known here.
Peers are noticed to be gone by TCP and, when a host, a link or a process just stops, by heartbeats that libzmq's own
thread answers: a peer whose Python is busy for seconds stays alive, one that is stopped is lost after
``HEARTBEAT_SECONDS + HEARTBEAT_TIMEOUT_SECONDS``.
"""

from kvferry.transport.connection import Connection
from kvferry.transport.gate import CurveKeys, configure_curve
from kvferry.transport.listener import Listener
from kvferry.transport.wake import RateLimitedLog, Waker

__all__ = ["Connection", "CurveKeys", "Listener", "RateLimitedLog", "Waker", "configure_curve"]
