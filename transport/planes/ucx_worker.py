"""UCXX from one thread: a worker, and links to the workers of peers. This module alone imports UCXX."""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.planes.ucx_settings import failing_as, settings_for

UcxArray = Any
"""UCXX's ``Array``: the memory of a tensor in the form that UCXX takes. It keeps the tensor alive; ``nbytes``."""
UcxRequest = Any
"""UCXX's request, a send or a receive: ``completed``: UCX uses the memory no more; ``status`` then is ``DONE``, or an
error."""
DONE = 0
"""UCS_OK."""
_CLOSE_ROUNDS = 100
"""Rounds of progress for closing the endpoints. Endpoints that are still open then end with the worker."""


def load_ucxx() -> tuple[Any, Any]:
    """UCXX's binding (``ucxx._lib.libucxx``), and its ``Array``, the form in which it takes memory.

    Raises:
        PlaneUnavailableError: it is not installed, does not load, or is too old.
    """
    # UCXX itself sets variables, and builds of UCX without CUDA warn about them.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ModuleNotFoundError as error:
        raise PlaneUnavailableError(f"ucx: {error.name} is not installed; pip install 'kvferry[ucx]'") from None
    except (ImportError, OSError) as error:
        raise PlaneUnavailableError(f"ucx: UCXX does not load: {str(error).splitlines()[0]}") from None
    if not hasattr(libucxx.UCXEndpoint, "tag_recv_with_handle"):
        raise PlaneUnavailableError(f"ucx: UCXX {ucxx.__version__} is too old, 0.47 is the first that will do")
    return libucxx, Array


class UcxEndpoint:
    """An endpoint to one peer process, always with error handling, so that the death of the peer is noticed."""

    def __init__(self, library: Any, endpoint: Any) -> None:
        self._library, self._endpoint = library, endpoint

    @property
    def alive(self) -> bool:
        """False once the peer is gone."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    @property
    def reason(self) -> str:
        """UCX's name of the error that ended the link."""
        try:
            if self._endpoint is not None:
                self._endpoint.raise_on_error()
        except Exception as error:  # UCXX has a dozen exception types, all of them mean this
            return str(error)
        return "closed"

    def send(self, data: UcxArray, tag: int) -> UcxRequest:
        """Send all of ``data``, which must live until the request is completed.

        Raises:
            TransportError: the peer is gone.
        """
        if not self.alive:
            raise TransportError(f"ucx: the link is down: {self.reason}")
        with failing_as(TransportError, "ucx: sending failed"):
            return self._endpoint.tag_send(data, self._library.UCXXTag(tag))

    def close(self) -> Any:
        """Begin to close. Returns the request, or ``None`` where there is nothing to close."""
        endpoint, self._endpoint = self._endpoint, None
        # UCXX returns a null request for a broken endpoint, and any use of that request crashes.
        if endpoint is not None and endpoint.alive:
            with contextlib.suppress(Exception):
                return endpoint.close()
        return None


class UcxAnnouncement(NamedTuple):
    """A message that a peer has sent, or has announced."""

    worker: UcxWorker
    probe: Any
    tag: int
    nbytes: int

    def receive(self, into: UcxArray) -> UcxRequest:
        """Receive into ``into``, which must hold at least ``nbytes``.

        Raises:
            TransportError: UCX refused.
        """
        assert into.nbytes >= self.nbytes
        with failing_as(TransportError, "ucx: receiving failed"):
            return self.worker.native.tag_recv_with_handle(into, self.probe)


class UcxWorker:
    """One UCX worker, without thread mode and without asyncio; all calls from one thread.

    There is one link per peer process, and it stays until that process is gone: UCX over TCP leaves a connection
    behind for each endpoint that is closed between two living workers.

    From its construction on UCX listens, see ``ucx_settings.settings_for``.

    Raises:
        PlaneUnavailableError: UCXX or UCX cannot be had.
    """

    def __init__(self, host: str, *, here: bool) -> None:
        self._host = host
        self._library, _ = load_ucxx()
        settings = settings_for(host, os.environ, here=here)
        feature = self._library.Feature
        with failing_as(PlaneUnavailableError, f"ucx: UCX does not start on {host}"):
            self._context = self._library.UCXContext(settings, (feature.TAG, feature.WAKEUP))
            self.native = self._library.UCXWorker(self._context)
            self.native.init_blocking_progress_mode()
        self.fd: int = self.native.epoll_file_descriptor
        self.address = bytes(self.native.address)
        self._any = self._library.UCXXTag(0), self._library.UCXXTagMask(0)
        self._links: dict[bytes, UcxEndpoint] = {}

    def link(self, address: bytes) -> UcxEndpoint:
        """The link to the worker of this address.

        Raises:
            PlaneUnavailableError: UCX finds no way to it.
        """
        link = self._links.get(address)
        if link is not None and link.alive:
            return link
        if address[0] != self.address[0]:  # the version and flags of the format; UCX aborts the process on others
            raise PlaneUnavailableError(
                f"ucx: the peer's worker address is of format {address[0]:#x}, ours is {self.address[0]:#x}; "
                "run the same UCX release on both sides"
            )
        hint = "; both sides need an address (side_channel_host) on a network that they share"
        with failing_as(PlaneUnavailableError, f"ucx: the peer cannot be reached from {self._host}", hint):
            peer = self._library.UCXAddress.create_from_buffer(address)
            endpoint = self._library.UCXEndpoint.create_from_worker_address(self.native, peer, True)
        self._links[address] = UcxEndpoint(self._library, endpoint)
        return self._links[address]

    def progress(self) -> None:
        """Move the bytes that can move now. UCXX loops inside, without the GIL, until nothing more moves."""
        self.native.progress()

    def prune(self) -> None:
        """Drop the links to peers that are gone."""
        self._links = {address: link for address, link in self._links.items() if link.alive}

    def arm(self) -> bool:
        """True: ``fd`` becomes readable with the next event. False: an event is there already."""
        return bool(self.native.arm())

    def probe(self) -> UcxAnnouncement | None:
        """The next message that is not received yet. The caller must receive it, or its sender waits for ever."""
        probe = self.native.tag_probe(*self._any, True)
        return UcxAnnouncement(self, probe, int(probe.sender_tag.value), int(probe.length)) if probe.matched else None

    def close(self) -> None:
        """Close the links and the worker. Messages in flight break off, and peers see that their link is down."""
        self.native.progress()  # sends the messages that were just handed to UCX
        closing = [request for link in self._links.values() if (request := link.close()) is not None]
        for _ in range(_CLOSE_ROUNDS):
            self.native.progress()
            if all(request.completed for request in closing):
                break
        self._links.clear()
        del self.native, self._context
