"""A process at one end of a control connection: ``control_peer.py listen PORT`` or ``connect PORT``.

``listen`` prints its port, and answers every message by its own frames. ``connect`` sends its process id every 50 ms.
"""

from __future__ import annotations

import os
import sys
import time

import zmq

from kvferry.transport.control.connection import Connection
from kvferry.transport.control.listener import Listener


def main() -> None:
    role, port = sys.argv[1], int(sys.argv[2])
    if role == "listen":
        listener = Listener("127.0.0.1", port, max_message_bytes=1 << 20)
        print(listener.port, flush=True)
        while True:
            listener.socket.poll(1000)
            for identity, frames in listener.receive():
                listener.send(identity, frames)
    connection = Connection("127.0.0.1", port, max_message_bytes=1 << 20)
    poller = zmq.Poller()
    poller.register(connection.monitor, zmq.POLLIN)
    while not connection.lost:
        connection.send([b"kvferry", b"\0\1", b"%d" % os.getpid()])
        connection.poll_monitor()
        time.sleep(0.05)
    print(connection.reason, flush=True)


if __name__ == "__main__":
    main()
