"""A process between D and P that passes every byte on: ``relay.py PORT_OF_P``. It prints its own port."""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress


def pump(of: socket.socket, to: socket.socket) -> None:
    """Pass bytes on in one direction until they end."""
    with suppress(OSError):
        while data := of.recv(1 << 16):
            to.sendall(data)
    of.close(), to.close()


listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    d, _ = listener.accept()
    p = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    for ends in ((d, p), (p, d)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
