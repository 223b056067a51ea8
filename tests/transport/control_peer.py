"""A process at one end of a control connection: ``control_peer.py listen|connect PORT SECRET_KEY``.

``listen`` prints its port, and answers every message by its own frames. ``connect`` sends its process id every 50 ms.
"""

from __future__ import annotations

import os
import sys
import time

from kvferry.transport.control.dialer import Dialer
from kvferry.transport.control.keys import Keys
from kvferry.transport.control.listener import Listener


def main() -> None:
    role, port, keys = sys.argv[1], int(sys.argv[2]), Keys(sys.argv[3])
    if role == "listen":
        listener = Listener("127.0.0.1", port, keys=keys, max_message_bytes=1 << 20)
        print(listener.port, flush=True)
        while True:
            for identity, frames, _ in listener.receive():
                listener.send(identity, frames)
            time.sleep(0.005)
    dialer = Dialer(keys, max_message_bytes=1 << 20)
    connection = dialer.connect("127.0.0.1", port, key=keys.fingerprint)
    while not connection.lost:
        connection.send([b"kvferry", b"\0\1", b"%d" % os.getpid()])
        dialer.progress()
        time.sleep(0.05)
    print(connection.reason, flush=True)


if __name__ == "__main__":
    main()
