"""Connections to a data port before P serves them: bounded, and strangers do not displace peers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec
import pytest

from kvferry.transport import sockets
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import lent_files, shm, tcp
from kvferry.transport.planes.shm import ShmPlane
from kvferry.transport.planes.tcp import TcpPlane
from kvferry.transport.sockets import CHANNEL_BYTES, PendingConnections, Secrets

CONTEXT = PlaneContext("127.0.0.1", 64 << 10, 1 << 20)


@pytest.fixture
def p() -> Iterator[TcpPlane]:
    with closing(TcpPlane(CONTEXT)) as plane:
        yield plane


def pending(p: TcpPlane) -> PendingConnections:
    assert p.pending is not None
    return p.pending


def offer_of(p: TcpPlane) -> tcp.TcpOffer:
    return msgspec.msgpack.decode(p.offer(), type=tcp.TcpOffer)


def visit(p: TcpPlane, secret: bytes, channel: int) -> socket.socket:
    """A connection that says a secret and is never attached."""
    sock = socket.create_connection(("127.0.0.1", offer_of(p).port))
    sock.sendall(secret + channel.to_bytes(CHANNEL_BYTES, "big"))
    before = set(pending(p).waiting)
    until(lambda: bool(set(pending(p).waiting) - before), p)
    return sock


def until(condition: Callable[[], bool], *planes: TcpPlane) -> None:
    """Serve the planes until the condition holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        for plane in planes:
            plane.progress()


def kept(p: TcpPlane, sock: socket.socket) -> bool:
    """Whether P has left the connection open."""
    p.progress()
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_visitors_without_end_do_not_shut_others_out(p: TcpPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a secret of its own, from a Hello of its own; the oldest go, and who comes later is served."""
    monkeypatch.setattr(sockets, "MAX_WAITING", 20)
    visitors = [visit(p, offer_of(p).secret, number) for number in range(1, 60)]
    assert len(pending(p).waiting) == 20 and kept(p, visitors[-1]) and not kept(p, visitors[0])
    with closing(TcpPlane(CONTEXT)) as d:
        receiver, payload = d.connect(p.offer(), "127.0.0.1")
        sender, _ = p.accept(payload)
        until(lambda: sender.acquire() is not None, p, d)
        assert receiver.error is None and sender.error is None
    for each in visitors:
        each.close()


def test_a_session_has_one_waiting_connection(p: TcpPlane) -> None:
    ours, theirs = offer_of(p).secret, offer_of(p).secret
    assert ours != theirs
    other, first = visit(p, theirs, 1), visit(p, ours, 2)
    second = visit(p, ours, 3)
    assert [kept(p, each) for each in (other, first, second)] == [True, False, True]
    assert len(pending(p).waiting) == 2
    for each in (other, first, second):
        each.close()


def test_a_connection_that_is_taken_or_gone_frees_its_session(p: TcpPlane) -> None:
    secret = offer_of(p).secret
    gone = visit(p, secret, 1)
    gone.close()
    until(lambda: not pending(p).waiting, p)
    taken = visit(p, secret, 2)
    served = pending(p).take((2).to_bytes(CHANNEL_BYTES, "big"))
    assert served is not None
    assert pending(p).take(bytes(CHANNEL_BYTES)) is None
    again = visit(p, secret, 3)
    assert kept(p, taken), "the connection that waits now is the session's only one"
    for each in (again, taken, served):
        each.close()


def test_a_p_without_descriptors_refuses_a_channel_of_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with closing(ShmPlane(CONTEXT)) as p, closing(ShmPlane(CONTEXT)) as d:
        _, payload = d.connect(p.offer(), "127.0.0.1")
        monkeypatch.setattr("os.memfd_create", no_more)
        with pytest.raises(TransportError, match="no shared memory can be had: Too many open files"):
            p.accept(payload)


def test_secrets_are_of_one_maker() -> None:
    ours, theirs = Secrets(), Secrets()
    secret = ours.new()
    assert ours.session(secret) == secret[:16] and ours.session(ours.new()) != secret[:16]
    for wrong in (theirs.new(), bytes(32), secret[:16] + ours.new()[16:], secret[:31]):
        assert ours.session(wrong) is None


NAMES = (
    b"/tmp/kvferry-".ljust(41, b"0"),
    b"\0other-".ljust(41, b"0"),
    b"\0kvferry-" + b"/" * 32,
    b"\0kvferry-" + b"0" * 31,
)


def test_shm_connects_to_no_socket_of_another_name_or_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names the user of the process that listens; the offer may say anything."""
    with closing(ShmPlane(CONTEXT)) as p, closing(ShmPlane(CONTEXT)) as d:
        offer = msgspec.msgpack.decode(p.offer(), type=shm.ShmOffer)
        for name in NAMES:
            with pytest.raises(ProtocolError, match="shm offer"):
                d.connect(msgspec.msgpack.encode({**msgspec.structs.asdict(offer), "name": name}), "127.0.0.1")
        monkeypatch.setattr(lent_files, "same_user", lambda sock: False)
        with pytest.raises(PlaneUnavailableError, match="another user's"):
            d.connect(msgspec.msgpack.encode(offer), "127.0.0.1")
