"""Pages to pages over TCP: every byte in its place, and no page touched once it was let go."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.transport import sockets
from kvferry.transport.channels import CPU, Pieces, Received
from kvferry.transport.planes import tcp, tcp_flows
from kvferry.transport.planes.tcp import TcpPlane, TcpRecvChannel, TcpSendChannel
from kvferry.transport.planes.tcp_flows import HEADER, Vector
from kvferry.transport.sockets import MAX_UNAUTHENTICATED, SILENCE_SECONDS
from tests.transport.plane_pair import Pair

SLOT = 4 << 20


class Memory:
    """Scattered pieces of one block of bytes, and what they hold in order."""

    def __init__(self, nbytes: int, piece: int, seed: int, *, fill: bool = False) -> None:
        rng = np.random.default_rng(seed)
        cuts = np.unique(np.concatenate([[0, nbytes], rng.integers(1, nbytes, max(0, nbytes // piece - 1))]))
        self.nbytes = np.diff(cuts).astype(np.int64)
        order = rng.permutation(len(self.nbytes))
        gaps = np.cumsum(self.nbytes[order] + 64) - self.nbytes[order]  # 64 bytes between two pieces, kept clear
        self.bytes = np.zeros(int((self.nbytes + 64).sum()) + 64, dtype=np.uint8)
        self.starts = np.empty(len(order), dtype=np.int64)
        self.starts[order] = gaps
        if fill:  # never with 0
            for start, size in zip(self.starts, self.nbytes, strict=True):
                self.bytes[start : start + size] = rng.integers(1, 256, size, dtype=np.uint8)

    @property
    def pieces(self) -> Pieces:
        return Pieces(self.bytes.ctypes.data + self.starts, self.nbytes)

    def read(self) -> np.ndarray:
        return np.concatenate([self.bytes[s : s + n] for s, n in zip(self.starts, self.nbytes, strict=True)])


class Ends(Pair):
    """Both ends of one channel, in one process."""

    sender: TcpSendChannel
    receiver: TcpRecvChannel
    p: TcpPlane
    d: TcpPlane

    def __init__(self) -> None:
        super().__init__("tcp", 4, CPU, SLOT)
        self.sender, self.receiver = self.join()  # type: ignore[assignment]
        self.turn(lambda: self.sender.ready)

    def arrival(self) -> Received:
        return self.arrived(self.receiver)

    def begin(self, memory: Memory, target: Memory | None, tag: int = 1) -> None:
        """P sends what is in one memory, and D wants it in another one, or anywhere."""
        self.receiver.expect(tag, int(memory.nbytes.sum()), None if target is None else lambda: target.pieces)
        self.turn(lambda: self.sender.ready)
        assert self.sender.send_pieces(lambda: memory.pieces, tag)

    def send_half(self, memory: Memory, target: Memory) -> None:
        """Begin a message that the sockets cannot hold: D does not read."""
        self.begin(memory, target)
        for _ in range(50):
            self.p.progress()
        assert self.sender.reading == 1

    def follows(self) -> None:
        """The next message is whole."""
        source, target = Memory(90_000, 4000, 3, fill=True), Memory(90_000, 4000, 4)
        self.begin(source, target, 9)
        assert self.arrival().tag == 9
        assert np.array_equal(target.read(), source.read())


@pytest.fixture
def ends() -> Iterator[Ends]:
    with closing(Ends()) as ends:
        yield ends


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, SLOT])
@pytest.mark.parametrize("piece", [7, 2048, 1 << 20])
def test_every_byte_lands_in_its_place(ends: Ends, nbytes: int, piece: int) -> None:
    source, target = Memory(nbytes, max(piece, nbytes // 5000), 1, fill=True), Memory(nbytes, piece, 2)
    ends.begin(source, target, 5)
    message = ends.arrival()
    assert (message.tag, message.nbytes, message.placed) == (5, nbytes, True)
    assert np.array_equal(target.read(), source.read())
    assert int((target.bytes == 0).sum()) == len(target.bytes) - nbytes, "something was written between the pieces"
    assert ends.sender.reading is None


@pytest.mark.parametrize("when", ["before it came", "in the middle", "forgotten"])
def test_pages_that_d_let_go_are_not_written(ends: Ends, when: str) -> None:
    source, target = Memory(SLOT, 8192, 1, fill=True), Memory(SLOT, 8192, 2)
    if when == "before it came":
        ends.receiver.expect(1, SLOT, lambda: target.pieces)
        ends.receiver.stop_writing(1)
        ends.sender.send_pieces(lambda: source.pieces, 1)
    else:
        ends.send_half(source, target)
        ends.turn(lambda: bool(target.bytes.any()))
        assert ends.receiver.flows[0].arriving, "it must be caught in the middle"
        (ends.receiver.forget if when == "forgotten" else ends.receiver.stop_writing)(1)
        target.bytes[:] = 0
    if when != "forgotten":  # which is not reported
        message = ends.arrival()
        assert (message.tag, message.nbytes) == (1, SLOT)
    ends.follows()
    assert not target.bytes.any()


def test_pages_that_p_let_go_are_not_read(ends: Ends) -> None:
    source, target = Memory(SLOT, 8192, 1, fill=True), Memory(SLOT, 8192, 2)
    wanted = source.read()
    ends.send_half(source, target)
    ends.sender.stop_reading()
    assert ends.sender.reading is None
    source.bytes[:] = 77  # they are another's now
    assert ends.arrival().nbytes == 0, "the stream goes on, and says that this is not the message"
    came = target.read()
    first_zero = int(np.argmin(came))
    assert 0 < first_zero < SLOT and not came[first_zero:].any(), "zeros from where it was let go"
    assert np.array_equal(came[:first_zero], wanted[:first_zero])
    ends.follows()


@pytest.mark.parametrize("sent", [0, 5])
def test_a_message_let_go_before_its_header_was_sent(ends: Ends, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Memory(50_000, 8192, 1, fill=True), Memory(50_000, 8192, 2)

    def full(vector: Vector, sock: socket.socket) -> int:
        if sent and not vector.done:
            vector.done += sock.send(HEADER.pack(1, 50_000)[:sent])
            return sent
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(Vector, "send", full)
        ends.begin(source, target)
    ends.sender.stop_reading()
    message = ends.arrival()
    assert (message.tag, message.nbytes) == (1, 0) and not target.read().any()
    ends.follows()


def test_a_message_without_a_place_is_reported_empty(ends: Ends) -> None:
    def nowhere() -> Pieces:
        raise RuntimeError("planted")

    source = Memory(90_000, 4000, 1)
    ends.receiver.expect(1, 90_000, nowhere)
    ends.sender.send_pieces(lambda: source.pieces, 1)
    message = ends.arrival()
    assert (message.tag, message.nbytes) == (1, 0)
    ends.follows()


def test_a_producer_that_stops_in_the_middle(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not one that sends nothing between two messages."""
    ends.follows()
    now, seconds = time.monotonic, 0.0
    for module in (tcp, tcp_flows):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now() + seconds))
    seconds = 2 * SILENCE_SECONDS
    ends.d.progress()
    assert ends.receiver.error is None
    source, target = Memory(SLOT, 8192, 1), Memory(SLOT, 8192, 2)
    ends.send_half(source, target)
    for _ in range(2000):
        ends.d.progress()
    assert ends.receiver.error is None and ends.receiver.flows[0].arriving, "not at once"
    seconds = 4 * SILENCE_SECONDS
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
        ends.turn(lambda: sender.ready)
    assert receiver.error is None and sender.error is None


def test_a_stranger_is_shown_out(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its word; or at its deadline, where that is too short."""
    offer = msgspec.msgpack.decode(ends.p.offer(), type=tcp.TcpOffer)
    for hello in (b"x" * 48, offer.secret + b"y" * 15, b"GET / HTTP/1.1\r\n\r\n"):
        if len(hello) < 48:
            monkeypatch.setattr(sockets, "HELLO_SECONDS", 0.5)
        with socket.create_connection(("127.0.0.1", offer.port)) as stranger:
            stranger.sendall(hello)
            ends.turn(lambda stranger=stranger: select.select([stranger], [], [], 0.01)[0])  # type: ignore[misc]
    ends.follows()


def test_a_connection_that_does_not_come() -> None:
    with closing(Pair("tcp", 4, CPU)) as pair, socket.socket() as deaf, ExitStack() as fillers:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)  # it takes no connection: its queue is full
        for _ in range(3):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        real = msgspec.msgpack.decode(pair.p.offer(), type=tcp.TcpOffer)
        theirs = msgspec.structs.replace(real, port=deaf.getsockname()[1])
        receiver: Any
        receiver, payload = pair.d.connect(msgspec.msgpack.encode(theirs), "127.0.0.1")
        sender: Any = pair.p.accept(payload)[0]
        receiver.deadline = sender.deadline = 0.0
        pair.turn(lambda: receiver.error is not None and sender.error is not None)
        assert "firewall" in str(receiver.error) and "did not come" in str(sender.error)


def test_a_connection_that_comes_after_its_deadline_is_joined_to_no_channel() -> None:
    """P would watch it for a channel that has failed, and never sleep."""
    with closing(Pair("tcp", 4, CPU)) as pair:
        receiver: Any
        receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
        sender: Any = pair.p.accept(payload)[0]
        sender.deadline = 0.0
        pair.p.progress()
        assert "did not come" in str(sender.error)
        pair.turn(lambda: not receiver.incomplete)
        for _ in range(20):
            pair.p.progress()
            time.sleep(1e-3)
        assert not sender.flows and sender.missing
