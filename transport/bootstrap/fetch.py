"""D's requests for bootstrap pages. P's address comes from a client, so everything about an answer is bounded."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from kvferry.transport.blocking_calls import BlockingCall, BlockingCalls
from kvferry.transport.bootstrap.page import PATH, checked_url
from kvferry.transport.host import numeric_address

READ_SECONDS = 5.0
"""How long a connection may be silent."""
FETCH_SECONDS = 10.0
"""How long the fetch of one page may take."""
MAX_PAGE_BYTES = 1 << 20
MAX_FETCHES = 4
"""Pages that are fetched at once."""
MAX_WAITING = 256
"""Pages that wait to be fetched; further ones are refused at once."""


def fetch(address: str, port: int) -> bytes:
    """The page at a numeric address. Blocks for ``FETCH_SECONDS`` at most.

    Raises:
        OSError: there is none.
    """
    ipaddress.ip_address(address)
    connection = http.client.HTTPConnection(address, port)
    connection.sock = socket.create_connection((address, port), READ_SECONDS)
    # Else a server could send byte by byte for ever. http.client forgets the socket where the length is not told.
    connected = connection.sock.dup()
    deadline = threading.Timer(FETCH_SECONDS, _shut, (connected,))
    deadline.daemon = True
    deadline.start()
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"the bootstrap page answers {answer.status}")
        if answer.getheader("Transfer-Encoding") is not None:  # http.client does not bound what it reads of a chunk
            raise OSError("the bootstrap page has a Transfer-Encoding, expected none")
        content = answer.read(MAX_PAGE_BYTES + 1)
    except http.client.HTTPException as error:
        raise OSError(f"the bootstrap page does not answer in HTTP: {type(error).__name__}") from None
    finally:
        deadline.cancel()
        connected.close()
        connection.close()
    if len(content) > MAX_PAGE_BYTES:
        raise OSError(f"the bootstrap page has more than {MAX_PAGE_BYTES} bytes")
    return content


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


FETCHES = BlockingCalls("kvferry-bootstrap", MAX_FETCHES, MAX_WAITING)


def fetch_page(url: str, refusal: Callable[[str], str], on_done: Callable[[], None]) -> BlockingCall[bytes]:
    """Begin to fetch a page.

    Args:
        url: as ``checked_url`` takes it.
        refusal: why there must be no connection to a numeric address; empty where there may be one.
        on_done: called from another thread.
    """

    def work() -> bytes:
        host, port = checked_url(url)
        address = numeric_address(host, port)
        if refused := refusal(address):
            raise OSError(refused)
        return fetch(address, port)

    return FETCHES.begin(work, on_done)
