"""Pages to pages over TCP: every byte in its place, and no page touched once it was let go."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.transport.channels import CPU, Pieces, Received
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import socket_plane, tcp
from kvferry.transport.planes.tcp import HEADER, TcpPlane, TcpRecvChannel, TcpSendChannel, Vector
from kvferry.transport.sockets import MAX_UNAUTHENTICATED
from tests.transport.plane_pair import Pair

SLOT = 4 << 20


class Memory:
    """Scattered pieces of one block of bytes, and what they hold in order."""

    def __init__(self, nbytes: int, piece: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        cuts = np.unique(np.concatenate([[0, nbytes], rng.integers(1, nbytes, max(0, nbytes // piece - 1))]))
        self.nbytes = np.diff(cuts).astype(np.int64)
        order = rng.permutation(len(self.nbytes))
        gaps = np.cumsum(self.nbytes[order] + 64) - self.nbytes[order]  # 64 bytes between two pieces, kept clear
        self.bytes = np.zeros(int((self.nbytes + 64).sum()) + 64, dtype=np.uint8)
        self.starts = np.empty(len(order), dtype=np.int64)
        self.starts[order] = gaps

    @property
    def pieces(self) -> Pieces:
        return Pieces(self.bytes.ctypes.data + self.starts, self.nbytes)

    def fill(self, data: np.ndarray) -> None:
        for start, part in zip(self.starts, np.split(data, np.cumsum(self.nbytes)[:-1]), strict=True):
            self.bytes[start : start + len(part)] = part

    def read(self) -> np.ndarray:
        return np.concatenate([self.bytes[s : s + n] for s, n in zip(self.starts, self.nbytes, strict=True)])


class Ends:
    """Both ends of one channel, in one process."""

    def __init__(self) -> None:
        self.p, self.d = (TcpPlane(PlaneContext("127.0.0.1", SLOT, 4 * SLOT)) for _ in range(2))
        receiver, payload = self.d.connect(self.p.offer(), "127.0.0.1")
        sender, _ = self.p.accept(payload)
        assert isinstance(sender, TcpSendChannel) and isinstance(receiver, TcpRecvChannel)
        self.sender, self.receiver = sender, receiver
        assert self.until(lambda: sender.ready)

    def until(self, condition: Callable[[], bool], seconds: float = 60) -> bool:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            self.p.progress()
            self.d.progress()
        return True

    def arrival(self) -> Received:
        found: list[Received] = []
        assert self.until(lambda: bool(found.extend(self.receiver.poll()) or found)), self.receiver.error
        (message,) = found
        return message

    def send_half(self, memory: Memory, tag: int) -> None:
        """Begin a message that the sockets cannot hold: D does not read."""
        assert self.sender.send_pieces(lambda: memory.pieces, tag)
        for _ in range(50):
            self.p.progress()
        assert self.sender.reading == tag


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.p.close()
    ends.d.close()


def data(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)  # never 0


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, SLOT])
@pytest.mark.parametrize("piece", [7, 2048, 1 << 20])
def test_every_byte_lands_in_its_place(ends: Ends, nbytes: int, piece: int) -> None:
    source, target, wanted = Memory(nbytes, max(piece, nbytes // 5000), 1), Memory(nbytes, piece, 2), data(nbytes)
    source.fill(wanted)
    ends.receiver.expect(5, nbytes, lambda: target.pieces)
    ends.sender.send_pieces(lambda: source.pieces, 5)
    message = ends.arrival()
    assert (message.tag, message.nbytes, message.placed) == (5, nbytes, True)
    assert np.array_equal(target.read(), wanted)
    assert int((target.bytes == 0).sum()) == len(target.bytes) - nbytes, "something was written between the pieces"
    assert ends.sender.reading is None


def test_either_side_may_go_through_a_slot(ends: Ends) -> None:
    nbytes = 300_000
    source, target, wanted = Memory(nbytes, 5000, 1), Memory(nbytes, 3000, 2), data(nbytes)
    source.fill(wanted)
    ends.receiver.expect(1, nbytes)
    ends.sender.send_pieces(lambda: source.pieces, 1)
    message = ends.arrival()
    assert not message.placed
    message.release()
    ends.receiver.expect(2, nbytes, lambda: target.pieces)
    assert ends.until(lambda: ends.sender.ready)
    slot = ends.sender.acquire()
    assert slot is not None
    slot.tensor[:nbytes].numpy()[:] = wanted
    ends.sender.send(slot, nbytes, 2)
    assert ends.arrival().placed
    assert np.array_equal(target.read(), wanted)
    assert ends.p.send_pool.free == ends.p.send_pool.capacity
    assert ends.d.recv_pool.free == ends.d.recv_pool.capacity


def test_pages_that_d_let_go_are_not_written(ends: Ends) -> None:
    source, target = Memory(SLOT, 8192, 1), Memory(SLOT, 8192, 2)
    source.fill(data(SLOT))
    ends.receiver.expect(1, SLOT, lambda: target.pieces)
    ends.send_half(source, 1)
    assert ends.until(lambda: bool(target.bytes.any()))
    assert ends.receiver.in_message, "it must be caught in the middle"
    ends.receiver.stop_writing(1)
    target.bytes[:] = 0
    message = ends.arrival()
    assert (message.tag, message.nbytes) == (1, SLOT)
    assert not target.bytes.any()
    follows(ends)


def test_what_d_let_go_before_it_came_is_not_written(ends: Ends) -> None:
    source, target = Memory(SLOT, 8192, 1), Memory(SLOT, 8192, 2)
    source.fill(data(SLOT))
    ends.receiver.expect(1, SLOT, lambda: target.pieces)
    ends.receiver.stop_writing(1)
    ends.sender.send_pieces(lambda: source.pieces, 1)
    assert ends.arrival().tag == 1
    assert not target.bytes.any()
    follows(ends)


def test_pages_that_p_let_go_are_not_read(ends: Ends) -> None:
    source, target, wanted = Memory(SLOT, 8192, 1), Memory(SLOT, 8192, 2), data(SLOT)
    source.fill(wanted)
    ends.receiver.expect(1, SLOT, lambda: target.pieces)
    ends.send_half(source, 1)
    ends.sender.stop_reading()
    assert ends.sender.reading is None
    source.bytes[:] = 77  # they are another's now
    assert ends.arrival().nbytes == 0, "the stream goes on, and says that this is not the message"
    came = target.read()
    first_zero = int(np.argmin(came))
    assert 0 < first_zero < SLOT and not came[first_zero:].any(), "zeros from where it was let go"
    assert np.array_equal(came[:first_zero], wanted[:first_zero])
    follows(ends)


@pytest.mark.parametrize("sent", [0, 5])
def test_a_message_let_go_before_its_header_was_sent(ends: Ends, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Memory(50_000, 8192, 1), Memory(50_000, 8192, 2)
    source.fill(data(50_000))
    ends.receiver.expect(1, 50_000, lambda: target.pieces)

    def full(vector: Vector, sock: socket.socket) -> int:
        if sent and not vector.done:
            vector.done += sock.send(HEADER.pack(1, 50_000)[:sent])
            return sent
        raise BlockingIOError

    monkeypatch.setattr(Vector, "send", full)
    ends.sender.send_pieces(lambda: source.pieces, 1)
    monkeypatch.undo()
    ends.sender.stop_reading()
    message = ends.arrival()
    assert (message.tag, message.nbytes) == (1, 0) and not target.read().any()
    follows(ends)


def follows(ends: Ends) -> None:
    """The next message is whole."""
    source, target, wanted = Memory(90_000, 4000, 3), Memory(90_000, 4000, 4), data(90_000, 5)
    source.fill(wanted)
    ends.receiver.expect(9, 90_000, lambda: target.pieces)
    assert ends.until(lambda: ends.sender.ready)
    ends.sender.send_pieces(lambda: source.pieces, 9)
    assert ends.arrival().tag == 9
    assert np.array_equal(target.read(), wanted)


def test_a_forgotten_message_is_not_reported(ends: Ends) -> None:
    source, target = Memory(SLOT, 8192, 1), Memory(SLOT, 8192, 2)
    source.fill(data(SLOT))
    ends.receiver.expect(1, SLOT, lambda: target.pieces)
    ends.send_half(source, 1)
    assert ends.until(lambda: ends.receiver.in_message)
    ends.receiver.forget(1)
    target.bytes[:] = 0
    follows(ends)
    assert not target.bytes.any()


def test_a_message_without_a_place_is_reported_empty(ends: Ends) -> None:
    source = Memory(90_000, 4000, 1)

    def nowhere() -> Pieces:
        raise RuntimeError("planted")

    ends.receiver.expect(1, 90_000, nowhere)
    ends.sender.send_pieces(lambda: source.pieces, 1)
    message = ends.arrival()
    assert (message.tag, message.nbytes) == (1, 0)
    follows(ends)


def test_a_producer_that_stops_in_the_middle(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "SILENCE_SECONDS", 0.3)
    assert not ends.until(lambda: ends.receiver.error is not None, 1), "idle is not silent"
    monkeypatch.undo()
    source, target = Memory(SLOT, 8192, 1), Memory(SLOT, 8192, 2)
    ends.receiver.expect(1, SLOT, lambda: target.pieces)
    ends.send_half(source, 1)
    for _ in range(2000):
        ends.d.progress()
    assert ends.receiver.error is None, "not at once"
    monkeypatch.setattr(tcp, "SILENCE_SECONDS", 0.3)
    end = time.monotonic() + 60
    while ends.receiver.error is None and time.monotonic() < end:
        ends.d.progress()
    assert "stopped in the middle" in str(ends.receiver.error)


@pytest.mark.parametrize("said", [b"", b"x", b"x" * 48], ids=["nothing", "half a hello", "a wrong hello"])
def test_strangers_do_not_keep_others_out(ends: Ends, said: bytes) -> None:
    """Twice as many as there are places come from D's own address, between D's connection and its hello."""
    offer = msgspec.msgpack.decode(ends.p.offer(), type=tcp.TcpOffer)
    pending = ends.p.pending
    assert pending is not None
    receiver, payload = ends.d.connect(ends.p.offer(), "127.0.0.1")
    sender, _ = ends.p.accept(payload)
    assert isinstance(sender, TcpSendChannel)
    with ExitStack() as stack:
        for _ in range(2 * MAX_UNAUTHENTICATED):
            stack.enter_context(socket.create_connection(("127.0.0.1", offer.port))).sendall(said)
            ends.p.progress()
        assert len(pending.strangers) <= MAX_UNAUTHENTICATED
        assert ends.until(lambda: sender.ready)
    assert receiver.error is None and sender.error is None


def test_strangers_of_one_address_do_not_displace_a_peer_of_another(ends: Ends) -> None:
    offer = msgspec.msgpack.decode(ends.p.offer(), type=tcp.TcpOffer)
    with ExitStack() as stack:
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", offer.port), 30.0, ("127.0.0.2", 0)))
        slow.sendall(offer.secret)
        for _ in range(2 * MAX_UNAUTHENTICATED):
            stack.enter_context(socket.create_connection(("127.0.0.1", offer.port))).sendall(b"x")
            ends.p.progress()
        channel = bytes(16)
        slow.sendall(channel)
        pending = ends.p.pending
        assert pending is not None and ends.until(lambda: pending.take(channel) is not None)


def test_a_stranger_is_shown_out(ends: Ends) -> None:
    offer = msgspec.msgpack.decode(ends.p.offer(), type=tcp.TcpOffer)
    for hello in (b"x" * 48, offer.secret + b"y" * 15, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", offer.port)) as stranger:
            stranger.sendall(hello)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(0.01)
            gone: list[bool] = []

            def closed(stranger: socket.socket = stranger, gone: list[bool] = gone) -> bool:
                try:
                    gone.extend([not stranger.recv(1)])
                except TimeoutError:
                    return False
                except OSError:
                    gone.append(True)
                return True

            assert ends.until(closed) and gone == [True]
    follows(ends)


def test_a_connection_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_plane, "CONNECT_SECONDS", 0.2)
    p, d = (TcpPlane(PlaneContext("127.0.0.1", SLOT, SLOT)) for _ in range(2))
    with socket.socket() as deaf:  # takes no connection: its queue is full
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        offer = p.offer()
        real = msgspec.msgpack.decode(offer, type=tcp.TcpOffer)
        theirs = msgspec.msgpack.encode(msgspec.structs.replace(real, port=deaf.getsockname()[1]))
        receiver, payload = d.connect(theirs, "127.0.0.1")
        sender, _ = p.accept(payload)
        deadline = time.monotonic() + 60
        while (receiver.error is None or sender.error is None) and time.monotonic() < deadline:
            p.progress()
            d.progress()
        assert "firewall" in str(receiver.error)
        assert "did not come" in str(sender.error)
        for filler in fillers:
            filler.close()
    p.close()
    d.close()


def test_a_connection_that_comes_after_its_deadline_is_joined_to_no_channel() -> None:
    """P would watch it for a channel that has failed, and never sleep."""
    with closing(Pair("tcp", 4, CPU)) as pair:
        receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
        sender: Any = pair.p.accept(payload)[0]
        sender.deadline = 0.0
        pair.p.progress()
        assert "did not come" in str(sender.error)
        joined: Any = receiver
        pair.turn(lambda: joined.deadline == math.inf)
        for _ in range(20):
            pair.p.progress()
            time.sleep(1e-3)
        assert sender.sock is None
