"""The control plane's sockets: frames in, frames out, from one thread that polls; no call waits for a peer.

P has one :class:`Listener`, D one :class:`Connection` per rank of P. What the frames mean is not known here.
Peers are noticed to be gone by TCP, which its own time-outs end where a host or a link stops. A process that stops is
noticed by heartbeats, which libzmq's own thread answers: one whose Python is busy for seconds stays alive. See
``framing.SILENCE_SECONDS`` and ``framing.SILENCE_HERE_SECONDS``.
"""

from kvferry.transport.connection import Connection
from kvferry.transport.gate import CurveKeys, configure_curve
from kvferry.transport.listener import Listener
from kvferry.transport.wake import RateLimitedLog, Waker

__all__ = ["Connection", "CurveKeys", "Listener", "RateLimitedLog", "Waker", "configure_curve"]
