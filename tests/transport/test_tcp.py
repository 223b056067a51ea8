"""Plane ``tcp``: one flow and several, encrypted or not; every byte in its place, strangers kept out."""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.transport import sockets, staging
from kvferry.transport.channels import CPU, Pieces, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import tcp, tcp_flows
from kvferry.transport.planes.tcp import (
    TcpAttach,
    TcpFlows,
    TcpOffer,
    TcpPlane,
    TcpRecvChannel,
    TcpSendChannel,
    most_flows,
    most_threads,
)
from kvferry.transport.planes.tcp_flows import (
    HEADER,
    KEY_BYTES,
    TAG_BYTES,
    Cipher,
    Flow,
    Outgoing,
    ReceiveFlow,
    SendFlow,
    Vector,
)
from kvferry.transport.registry import make_plane
from kvferry.transport.sockets import HELLO_BYTES, MAX_UNAUTHENTICATED, SILENCE_SECONDS
from tests.transport.plane_pair import ENCRYPTED, FLOWS, SLOT, Pair, intact, pattern

GPU = torch.device("cuda", 0)


class Ends(Pair):
    """Both ends of a channel of four flows, in one process."""

    def __init__(self, name: str = f"tcp{FLOWS}", slots: int = 16) -> None:
        super().__init__(name, slots)
        sender, receiver = self.join()
        assert isinstance(sender, TcpSendChannel) and isinstance(receiver, TcpRecvChannel)
        self.sender, self.receiver = sender, receiver
        self.turn(lambda: sender.open and len(receiver.flows) == len(sender.flows) == 4)

    def post(self, tag: int, *, announced: bool = True) -> None:
        """P sends a whole slot, as soon as it has one."""
        nbytes = self.sender.slot_bytes
        if announced:
            self.receiver.expect(tag, nbytes)
        slot = self.acquired(self.sender)
        slot.tensor[:nbytes].numpy()[:] = pattern(tag, nbytes)
        self.sender.send(slot, nbytes, tag)

    def follows(self, tags: range = range(100, 140)) -> None:
        """All of these come, whole, over the flows; then no slot is out."""
        for tag in tags:
            self.receiver.expect(tag, self.sender.slot_bytes)
        came: list[int] = []

        def take() -> bool:
            for message in self.receiver.poll():
                assert intact(message) and not message.placed
                came.append(message.tag)
                message.release()
            return sorted(came) == list(tags)

        for tag in tags:
            self.turn(lambda: take() or self.sender.in_use < self.sender.window)
            self.post(tag, announced=False)
        self.turn(take)
        self.turn(lambda: not self.slots_out)
        assert self.sender.error is None and self.receiver.error is None

    @property
    def ended(self) -> bool:
        """Whether no thread is left, and no slot is out."""
        return not (self.p.threads.flows or self.d.threads.flows or self.slots_out)  # type: ignore[attr-defined]


@pytest.fixture(params=["", ENCRYPTED])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with closing(Ends(f"tcp{FLOWS}{request.param}")) as ends:
        yield ends


def test_messages_take_all_flows(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Flow] = []
    sent = SendFlow.sent

    def seen(self: SendFlow, message: Outgoing) -> None:
        used.append(self)
        sent(self, message)

    monkeypatch.setattr(SendFlow, "sent", seen)
    ends.follows(range(100))
    assert set(used) == set(ends.sender.flows) and all(flow.threaded for flow in used)
    assert not any(flow.left for flow in ends.sender.flows)


def test_a_slot_that_comes_back_wakes_p_only_where_one_may_be_waited_for(ends: Ends) -> None:
    plane: Any = ends.p
    poll = select.poll()
    for fd, events in plane.pollables():
        poll.register(fd, events)

    def sent() -> None:
        """The slot is no more in use, as P sees once it looks; D serves meanwhile."""
        end = time.monotonic() + 60
        while not plane.threads.told:
            assert time.monotonic() < end, "no flow said that it has sent the slot"
            ends.d.progress()

    def arm() -> None:
        ends.turn(lambda: not plane.progress() and plane.arm())

    arm()
    ends.post(1)
    sent()
    assert not poll.poll(0), "P may sleep on"
    assert not plane.arm(), "but it does not go to sleep"
    plane.progress()
    assert ends.sender.in_use == 0
    slots = [ends.acquired(ends.sender) for _ in range(ends.sender.window)]
    assert ends.sender.acquire() is None
    arm()
    ends.receiver.expect(2, ends.sender.slot_bytes)
    ends.sender.send(slots.pop(), ends.sender.slot_bytes, 2)
    sent()
    assert poll.poll(60_000), "P sleeps, and a read waits for the slot"
    ends.turn(lambda: ends.sender.in_use < ends.sender.window)
    for slot in slots:
        ends.sender.give_back(slot)


def test_each_flow_has_a_key_and_a_hello_of_its_own() -> None:
    with closing(Pair(f"tcp{FLOWS}{ENCRYPTED}", 16)) as pair:
        _, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
        reply = msgspec.msgpack.decode(pair.p.accept(payload)[1], type=TcpFlows)
        assert len(set(reply.keys)) == 4 and len(set(reply.hellos)) == 3


@pytest.mark.parametrize("victim", ["P", "D"])
@pytest.mark.parametrize("number", [0, 3])
def test_a_flow_that_dies_in_a_message_ends_the_channel(ends: Ends, victim: str, number: int) -> None:
    ends.receiver.expect(1, ends.sender.slot_bytes)
    flow = ends.sender.flows[number]
    flow.sock.sendall(HEADER.pack(1, SLOT) + bytes(1000))  # encrypted, it fills the slot as well
    ends.turn(lambda: ends.slots_out)
    (flow if victim == "P" else ends.receiver.flows[number]).sock.shutdown(socket.SHUT_RDWR)
    ends.turn(lambda: ends.sender.error is not None and ends.receiver.error is not None)
    assert str(ends.receiver.error).startswith("tcp: the prefill rank ") and not ends.receiver.poll()
    assert str(ends.sender.error).startswith("tcp: the decode rank ")
    ends.turn(lambda: ends.ended)
    ends.sender.close()
    ends.receiver.close()
    new = ends.join()  # all slots and threads are to be had again
    ends.carry(*new, tag=7).release()


@pytest.mark.parametrize("first", ["P", "D"])
def test_slots_that_wait_for_a_d_that_reads_nothing_come_back(ends: Ends, first: str) -> None:
    for tag in range(10_000):
        ends.receiver.expect(tag, ends.sender.slot_bytes)
    for each in (*ends.sender.flows, *ends.receiver.flows):  # the sockets soon hold all that they can
        each.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        each.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    held: list[Received] = []

    def stuck() -> bool:
        held.extend(ends.receiver.poll())  # and D unpacks none of them
        if ends.sender.in_use < ends.sender.window and (slot := ends.sender.acquire()) is not None:
            slot.tensor[: ends.sender.slot_bytes].numpy()[:] = pattern(len(sent), ends.sender.slot_bytes)
            ends.sender.send(slot, ends.sender.slot_bytes, len(sent))
            sent.append(slot)
        return len(held) == 16 and ends.sender.in_use == ends.sender.window

    sent: list[Slot] = []
    ends.turn(stuck)
    assert not ends.d.recv_pool.free  # type: ignore[attr-defined]
    (ends.sender if first == "P" else ends.receiver).close()
    other = ends.receiver if first == "P" else ends.sender
    ends.turn(lambda: other.error is not None)
    ends.turn(lambda: ends.slots_out == len(held))
    assert all(map(intact, held))
    for message in held:
        message.release()
    ends.turn(lambda: ends.ended)


def test_a_message_that_comes_before_its_announcement_is_not_dropped(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D announces what it has asked for after the ask: meanwhile P may have answered."""
    asked: list[int] = []
    place = ReceiveFlow.place

    def seen(self: ReceiveFlow) -> None:
        asked.append(len(self.channel.expected))
        place(self)

    monkeypatch.setattr(ReceiveFlow, "place", seen)
    ends.post(5, announced=False)
    while not ends.d.threads.told:  # type: ignore[attr-defined]  # D's transfer thread is busy
        ends.p.progress()
    ends.receiver.expect(5, ends.sender.slot_bytes)
    message = ends.arrived(ends.receiver)
    assert asked == [1] and message.tag == 5 and intact(message)
    message.release()


def test_messages_that_d_does_not_want_are_dropped(ends: Ends) -> None:
    ends.post(5, announced=False)
    for tag in (6, 7, 8):
        ends.post(tag)
        ends.receiver.forget(tag)
    ends.follows()
    assert not ends.receiver.poll()


def test_a_flow_that_waits_for_a_slot_for_a_forgotten_message(ends: Ends) -> None:
    pool = ends.d.recv_pool  # type: ignore[attr-defined]
    taken = [pool.take() for _ in range(pool.capacity)]
    ends.post(6)
    ends.turn(lambda: any(flow.starved for flow in ends.receiver.flows))
    ends.receiver.forget(6)
    for slot in taken:
        pool.put(slot)
    assert not ends.d.arm(), "nothing on a socket will say that there is a slot now"
    ends.turn(lambda: not ends.slots_out)
    ends.follows()


def test_a_message_that_is_sent_twice_comes_once() -> None:
    with closing(Ends()) as ends:
        ends.receiver.expect(5, 100)
        ends.receiver.expect(6, 100)
        for flow in ends.sender.flows[:2]:
            flow.sock.sendall(HEADER.pack(5, 100) + pattern(5, 100).tobytes() + b"\1")
        message = ends.arrived(ends.receiver)
        assert message.tag == 5 and intact(message)
        message.release()
        ends.receiver.forget(6)
        ends.follows()


@pytest.mark.parametrize("said", [HEADER.pack(1, 101), HEADER.pack(1, 0), HEADER.pack(9, 1 << 40)])
def test_a_header_that_may_not_be_breaks_the_channel(said: bytes) -> None:
    with closing(Ends()) as ends:
        ends.receiver.expect(1, 100)
        ends.sender.flows[1].sock.sendall(said)
        ends.turn(lambda: ends.receiver.error is not None and ends.sender.error is not None)
        assert "bytes, " in str(ends.receiver.error)
        ends.turn(lambda: ends.ended)


def test_bytes_of_d_break_the_channel(ends: Ends) -> None:
    ends.receiver.flows[1].sock.sendall(b"x")
    ends.turn(lambda: ends.sender.error is not None)
    assert "sent what it may not" in str(ends.sender.error)


@pytest.mark.parametrize("begun", [b"", HEADER.pack(1, 100)[:7], HEADER.pack(1, 100), HEADER.pack(1, 100) + bytes(60)])
def test_a_producer_that_stops_in_the_middle(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not one that sends nothing between two messages."""
    monkeypatch.setattr(tcp_flows, "SILENCE_SECONDS", 0.2)
    with closing(Ends()) as ends:
        ends.receiver.expect(1, 100)
        waits = ends.receiver.flows[2].sock
        waits_for = waits.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        assert any(waits_for)
        ends.sender.flows[2].sock.sendall(begun)
        if begun:
            ends.turn(lambda: ends.receiver.error is not None)
            assert "stopped in the middle" in str(ends.receiver.error)
            return
        ends.receiver.flows[1].ended.wait(0.7)  # several of its waits
        ends.turn(lambda: True)
        assert ends.receiver.error is None
        ends.receiver.forget(1)
        ends.follows()


def test_a_flow_with_a_thread_is_judged_by_that_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one could see its bytes before the time at which they came."""
    with closing(Ends()) as ends:
        ends.receiver.expect(1, 100)
        ends.sender.flows[2].sock.sendall(HEADER.pack(1, 100) + bytes(60))
        ends.turn(lambda: any(flow.arriving for flow in ends.receiver.flows))
        for module in (tcp, tcp_flows):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1000))
        ends.d.progress()
        assert ends.receiver.error is None
        ends.sender.flows[2].sock.sendall(bytes(40) + b"\1")  # the last one says that all came
        ends.arrived(ends.receiver).release()


@pytest.mark.parametrize("hello", ["of no maker", "of the first connection", "of a flow that is joined", "of no flow"])
def test_a_strangers_connection_joins_no_channel(hello: str) -> None:
    with closing(Pair(f"tcp{FLOWS}", 16)) as pair:
        offer = msgspec.msgpack.decode(pair.p.offer(), type=TcpOffer)
        receiver, payload = pair.d.connect(msgspec.msgpack.encode(offer), "127.0.0.1")
        sender, reply = pair.p.accept(payload)
        pair.d.finish(receiver, reply)
        assert isinstance(sender, TcpSendChannel) and isinstance(receiver, TcpRecvChannel)
        pair.turn(lambda: sender.open and len(receiver.flows) == 4)
        said = {
            "of no maker": bytes(HELLO_BYTES),
            "of the first connection": offer.secret + msgspec.msgpack.decode(payload, type=TcpAttach).channel,
            "of a flow that is joined": msgspec.msgpack.decode(reply, type=TcpFlows).hellos[1],
            "of no flow": offer.secret + b"f" * 16,
        }[hello]
        with socket.create_connection(("127.0.0.1", offer.port)) as stranger:
            stranger.sendall(said + HEADER.pack(1, 100))
            for _ in range(50):
                pair.p.progress()
            assert len(sender.flows) == 4
            pair.carry(sender, receiver, 1).release()


@pytest.mark.parametrize("where", [0, 777, SLOT - 17, SLOT - 16, SLOT - 1, "header", "last byte"])
def test_a_changed_byte_is_noticed(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Cipher.seal

    def seal(self: Cipher, slot: Any, nbytes: int, header: bytes) -> int:
        if where == "header":
            header = header[:-1] + bytes([header[-1] ^ 1])
        sealed = real(self, slot, nbytes, header)
        if isinstance(where, int):
            slot.tensor[where] ^= 1
        return sealed

    monkeypatch.setattr(Cipher, "seal", seal)
    if where == "last byte":
        monkeypatch.setattr(tcp_flows, "COMPLETE", np.zeros(1, dtype=np.uint8))
    with closing(Ends(f"tcp{FLOWS}{ENCRYPTED}")) as ends:
        ends.post(7)
        ends.turn(lambda: ends.receiver.error is not None)
        assert "was changed on its way" in str(ends.receiver.error) and not ends.receiver.poll()
        ends.turn(lambda: ends.ended)


@pytest.mark.parametrize("moving", [0, 12])
@pytest.mark.parametrize("leaver", ["P", "D", "both planes"])
def test_close_while_messages_move_or_are_due(ends: Ends, leaver: str, moving: int) -> None:
    for tag in range(moving):
        ends.receiver.expect(tag, ends.sender.slot_bytes)
    for tag in range(moving):
        ends.post(tag, announced=False)
    if leaver == "both planes":
        ends.close()
        assert ends.ended
        return
    (ends.sender if leaver == "P" else ends.receiver).close()
    ends.follow(ends.receiver if leaver == "P" else ends.sender)
    ends.turn(lambda: ends.ended)


def test_after_an_error_in_one_call_the_others_are_made(ends: Ends) -> None:
    made: list[int] = []

    def broken() -> None:
        raise RuntimeError("planted")

    for call in (broken, lambda: made.append(1)):
        ends.d.threads.tell(call)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="planted"):
        ends.d.progress()
    ends.turn(lambda: bool(made))


def change(reply: TcpFlows, **other: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(reply, **other))


def test_replies_of_other_forms_are_refused() -> None:
    with closing(Pair(f"tcp{FLOWS}{ENCRYPTED}", 16)) as pair:
        receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
        reply = msgspec.msgpack.decode(pair.p.accept(payload)[1], type=TcpFlows)
        hellos, keys = reply.hellos, reply.keys
        for wrong in (
            b"", b"k" * 32, change(reply, keys=()), change(reply, keys=keys[:3]), change(reply, hellos=hellos[:2]),
            change(reply, hellos=hellos * 2, keys=keys * 2), change(reply, hellos=(*hellos[:2], b"short")),
        ):  # fmt: skip
            with pytest.raises(ProtocolError, match=r"key|malformed|flows"):
                pair.d.finish(receiver, wrong)


def test_a_port_that_is_gone_at_the_second_connection() -> None:
    with closing(Pair(f"tcp{FLOWS}", 16)) as pair:
        receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
        _, reply = pair.p.accept(payload)
        pair.turn(lambda: not receiver.incomplete)  # type: ignore[union-attr]
        pair.p.close()
        try:
            pair.d.finish(receiver, reply)
        except PlaneUnavailableError:
            return
        while receiver.error is None:
            pair.d.progress()


# --- how many -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cores", "flows"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 2), (8, 4), (64, 4)])
def test_few_cores_have_few_flows(cores: int, flows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert most_flows(GPU) == flows
    assert most_flows(torch.device("cpu")) == 1
    monkeypatch.setattr(staging, "empty_page_locked", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    with closing(Pair("tcp", 16, GPU)) as pair:
        sender, receiver = pair.join()
        assert isinstance(sender, TcpSendChannel) and isinstance(receiver, TcpRecvChannel)
        pair.carry(sender, receiver, 1).release()
        assert flows == len(sender.flows) == len(receiver.flows)
        assert sender.threaded == receiver.threaded == (flows > 1)


@pytest.mark.parametrize(("p", "d", "flows"), [(4, 2, 2), (2, 4, 2), (4, 1, 1), (1, 4, 1)])
def test_the_smaller_number_counts(p: int, d: int, flows: int) -> None:
    with closing(Pair("tcp", 16)) as pair:
        pair.p.flows, pair.d.flows = p, d  # type: ignore[attr-defined]
        sender, receiver = pair.join()
        assert isinstance(sender, TcpSendChannel) and isinstance(receiver, TcpRecvChannel)
        for tag in range(20):
            pair.carry(sender, receiver, tag).release()
        assert len(sender.flows) == len(receiver.flows) == flows


def test_the_threads_of_a_plane_are_bounded() -> None:
    assert most_threads(10**6) == 64 and most_threads(3) == 0
    with closing(Pair(f"tcp{FLOWS}", 24)) as pair:  # six threads: of four flows, of two, and of none
        pairs = [pair.join() for _ in range(4)]
        kinds = [getattr(sender, "ids", ()) for sender, _ in pairs]
        assert [len(ids) for ids in kinds] == [4, 2, 1, 1]
        for each in pairs:
            pair.carry(*each, tag=3).release()
        assert len(pair.p.threads.flows) == 6  # type: ignore[attr-defined]
        for sender, receiver in pairs[:1]:
            sender.close()
            pair.follow(receiver)
        until: Callable[[], bool] = lambda: len(pair.p.threads.flows) == len(pair.d.threads.flows) == 2  # type: ignore[attr-defined]  # noqa: E731
        pair.turn(until)
        assert len(pair.join()[0].ids) == 4  # type: ignore[attr-defined]


def test_without_a_thread_the_channel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with closing(Pair(f"tcp{FLOWS}", 16)) as pair:
        monkeypatch.setattr("threading.Thread.start", no_more)
        sender, receiver = pair.join()
        pair.turn(lambda: sender.error is not None and receiver.error is not None)
        assert "no thread can be had" in str(sender.error) + str(receiver.error)
        for end in (sender, receiver):
            end.close()
        monkeypatch.undo()
        pair.carry(*pair.join(), tag=1).release()


LARGE = 4 << 20


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


class PieceEnds(Pair):
    """Both ends of one channel, in one process."""

    sender: TcpSendChannel
    receiver: TcpRecvChannel
    p: TcpPlane
    d: TcpPlane

    def __init__(self) -> None:
        super().__init__("tcp", 4, CPU, LARGE)
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
def piece_ends() -> Iterator[PieceEnds]:
    with closing(PieceEnds()) as piece_ends:
        yield piece_ends


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, LARGE])
@pytest.mark.parametrize("piece", [7, 2048, 1 << 20])
def test_every_byte_lands_in_its_place(piece_ends: PieceEnds, nbytes: int, piece: int) -> None:
    source, target = Memory(nbytes, max(piece, nbytes // 5000), 1, fill=True), Memory(nbytes, piece, 2)
    piece_ends.begin(source, target, 5)
    message = piece_ends.arrival()
    assert (message.tag, message.nbytes, message.placed) == (5, nbytes, True)
    assert np.array_equal(target.read(), source.read())
    assert int((target.bytes == 0).sum()) == len(target.bytes) - nbytes, "something was written between the pieces"
    assert piece_ends.sender.reading is None


@pytest.mark.parametrize("when", ["before it came", "in the middle"])
def test_pages_that_d_let_go_are_not_written(piece_ends: PieceEnds, when: str) -> None:
    source, target = Memory(LARGE, 8192, 1, fill=True), Memory(LARGE, 8192, 2)
    if when == "before it came":
        piece_ends.receiver.expect(1, LARGE, lambda: target.pieces)
        piece_ends.receiver.forget(1)
        piece_ends.sender.send_pieces(lambda: source.pieces, 1)
    else:
        piece_ends.send_half(source, target)
        piece_ends.turn(lambda: bool(target.bytes.any()))
        assert piece_ends.receiver.flows[0].arriving, "it must be caught in the middle"
        piece_ends.receiver.forget(1)
        target.bytes[:] = 0
    piece_ends.follows()
    assert not target.bytes.any()


def test_pages_that_p_let_go_are_not_read(piece_ends: PieceEnds) -> None:
    source, target = Memory(LARGE, 8192, 1, fill=True), Memory(LARGE, 8192, 2)
    wanted = source.read()
    piece_ends.send_half(source, target)
    piece_ends.sender.stop_reading()
    assert piece_ends.sender.reading is None
    source.bytes[:] = 77  # they are another's now
    assert piece_ends.arrival().nbytes == 0, "the stream goes on, and says that this is not the message"
    came = target.read()
    first_zero = int(np.argmin(came))
    assert 0 < first_zero < LARGE and not came[first_zero:].any(), "zeros from where it was let go"
    assert np.array_equal(came[:first_zero], wanted[:first_zero])
    piece_ends.follows()


@pytest.mark.parametrize("sent", [0, 5])
def test_a_message_let_go_before_its_header_was_sent(
    piece_ends: PieceEnds, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Memory(50_000, 8192, 1, fill=True), Memory(50_000, 8192, 2)

    def full(vector: Vector, sock: socket.socket) -> int:
        if sent and not vector.done:
            vector.done += sock.send(HEADER.pack(1, 50_000)[:sent])
            return sent
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(Vector, "send", full)
        piece_ends.begin(source, target)
    piece_ends.sender.stop_reading()
    message = piece_ends.arrival()
    assert (message.tag, message.nbytes) == (1, 0) and not target.read().any()
    piece_ends.follows()


def test_a_message_without_a_place_is_reported_empty(piece_ends: PieceEnds) -> None:
    def nowhere() -> Pieces:
        raise RuntimeError("planted")

    source = Memory(90_000, 4000, 1)
    piece_ends.receiver.expect(1, 90_000, nowhere)
    piece_ends.sender.send_pieces(lambda: source.pieces, 1)
    message = piece_ends.arrival()
    assert (message.tag, message.nbytes) == (1, 0)
    piece_ends.follows()


def test_a_producer_that_stops_in_the_middle_of_pieces(piece_ends: PieceEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not one that sends nothing between two messages."""
    piece_ends.follows()
    now, seconds = time.monotonic, 0.0
    for module in (tcp, tcp_flows):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now() + seconds))
    seconds = 2 * SILENCE_SECONDS
    piece_ends.d.progress()
    assert piece_ends.receiver.error is None
    source, target = Memory(LARGE, 8192, 1), Memory(LARGE, 8192, 2)
    piece_ends.send_half(source, target)
    for _ in range(2000):
        piece_ends.d.progress()
    assert piece_ends.receiver.error is None and piece_ends.receiver.flows[0].arriving, "not at once"
    seconds = 4 * SILENCE_SECONDS
    piece_ends.d.progress()
    assert "stopped in the middle" in str(piece_ends.receiver.error)


@pytest.mark.parametrize("said", [b"", b"x", b"x" * 48], ids=["nothing", "half a hello", "a wrong hello"])
def test_strangers_do_not_keep_others_out(piece_ends: PieceEnds, said: bytes) -> None:
    """Twice as many as there are places come from D's own address, between D's connection and its hello."""
    offer = msgspec.msgpack.decode(piece_ends.p.offer(), type=tcp.TcpOffer)
    pending = piece_ends.p.pending
    assert pending is not None
    receiver, payload = piece_ends.d.connect(piece_ends.p.offer(), "127.0.0.1")
    sender, _ = piece_ends.p.accept(payload)
    assert isinstance(sender, TcpSendChannel)
    with ExitStack() as stack:
        for _ in range(2 * MAX_UNAUTHENTICATED):
            stack.enter_context(socket.create_connection(("127.0.0.1", offer.port))).sendall(said)
            piece_ends.p.progress()
        assert len(pending.strangers) <= MAX_UNAUTHENTICATED
        piece_ends.turn(lambda: sender.ready)
    assert receiver.error is None and sender.error is None


def test_a_stranger_is_shown_out(piece_ends: PieceEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its word; or at its deadline, where that is too short."""
    offer = msgspec.msgpack.decode(piece_ends.p.offer(), type=tcp.TcpOffer)
    for hello in (b"x" * 48, offer.secret + b"y" * 15, b"GET / HTTP/1.1\r\n\r\n"):
        if len(hello) < 48:
            monkeypatch.setattr(sockets, "HELLO_SECONDS", 0.5)
        with socket.create_connection(("127.0.0.1", offer.port)) as stranger:
            stranger.sendall(hello)
            piece_ends.turn(lambda stranger=stranger: select.select([stranger], [], [], 0.01)[0])  # type: ignore[misc]
    piece_ends.follows()


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


CONTEXT = PlaneContext("127.0.0.1", SLOT, 8 * SLOT)
BYTES = 5000
PAGES: list[torch.Tensor] = []
"""What the messages of this module lie in."""


@pytest.fixture
def encrypted() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def make(*, p: bool = True, d: bool = True) -> Pair:
            return stack.enter_context(closing(Pair("tcp", 8, p={"encrypt": p}, d={"encrypt": d})))

        yield make


def send(both: Pair, sender: SendChannel, receiver: RecvChannel, tag: int) -> None:
    """Begin a message that P sends from its pages and that D wants in its own, both in two pieces."""
    data = torch.from_numpy(pattern(tag, BYTES))
    into = torch.zeros(BYTES, dtype=torch.uint8)

    def halves(of: torch.Tensor) -> Callable[[], Pieces]:
        return lambda: Pieces(of.data_ptr() + np.array([0, 3000]), np.array([3000, BYTES - 3000]))

    PAGES.extend((data, into))
    receiver.expect(tag, BYTES, halves(into))
    both.turn(lambda: sender.send_pieces(halves(data), tag))


def tapped(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytearray], None] = lambda data: None) -> bytearray:
    """All bytes that P sends from now on, after ``change``, which gets a whole message."""
    seen = bytearray()

    def send(self: Vector, sock: Any) -> int:
        data = bytearray(b"".join(ctypes.string_at(int(address), int(nbytes)) for address, nbytes in self._iov))
        change(data)
        seen.extend(data)
        self.done = self.nbytes
        assert sock.send(data) == len(data), "it fits into the socket's buffer"
        return len(data)

    monkeypatch.setattr(Vector, "send", send)
    return seen


@pytest.mark.parametrize(("p", "d"), [(True, True), (True, False), (False, True)])
def test_one_side_is_enough(encrypted: Any, p: bool, d: bool) -> None:
    both = encrypted(p=p, d=d)
    sender, receiver = both.join()
    assert not sender.sends_in_place and receiver.encrypted
    for tag in (7, 8, 9):
        send(both, sender, receiver, tag)
        while not (arrived := receiver.poll()):
            both.d.progress()
        [message] = arrived
        assert (message.tag, message.nbytes, message.placed) == (tag, BYTES, False) and intact(message)
        message.release()
    assert sender.error is None and receiver.error is None


@pytest.mark.parametrize("encrypt", [True, False])
def test_the_wire_has_no_plain_byte(encrypted: Any, monkeypatch: pytest.MonkeyPatch, encrypt: bool) -> None:
    both = encrypted(p=encrypt, d=False)
    sender, receiver = both.join()
    both.turn(lambda: sender.open)
    wire = tapped(monkeypatch)
    send(both, sender, receiver, 7)
    both.turn(receiver.poll)
    plain = pattern(7, BYTES).tobytes()
    found = any(plain[at : at + 16] in wire for at in range(0, BYTES - 16, 16))
    assert found is not encrypt, "without the setting the bytes are plain, so this test can see them"


@pytest.mark.parametrize("where", [0, HEADER.size, HEADER.size + 1000, HEADER.size + BYTES, -2, -1])
def test_a_changed_byte_of_pieces_is_noticed(encrypted: Any, monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    both = encrypted()
    sender, receiver = both.join()
    both.turn(lambda: sender.open)

    def change(data: bytearray) -> None:
        data[where] ^= 1

    tapped(monkeypatch, change)
    send(both, sender, receiver, 7)
    if where == 0:  # the tag of another message, which D does not want: what comes next does not fit any more
        monkeypatch.undo()  # the next message is good, and D has dropped this one
        send(both, sender, receiver, 9)
        both.turn(lambda: receiver.error or receiver.poll())
        assert receiver.error is None
        return
    both.turn(lambda: receiver.error)
    assert "was changed on its way" in str(receiver.error) and not receiver.poll()


def test_a_message_in_another_ones_place_is_noticed() -> None:
    slots = [Slot(torch.from_numpy(np.append(pattern(n, 64), np.zeros(TAG_BYTES, np.uint8))), n) for n in (1, 2)]
    p, d = (Cipher(key) for key in [secrets.token_bytes(KEY_BYTES)] * 2)
    header = HEADER.pack(1, 64 + TAG_BYTES)
    sizes = [p.seal(slot, 64, header) for slot in slots]
    assert sizes == [80, 80]
    assert not d.open(slots[1], 80, header), "the second message came first"


def test_a_wrong_key_is_refused(encrypted: Any) -> None:
    both = encrypted()
    receiver, _ = both.d.connect(both.p.offer(), "127.0.0.1")
    for reply in (b"", b"k" * 31):
        with pytest.raises(ProtocolError, match="key"):
            both.d.finish(receiver, reply)


def test_planes_that_cannot_encrypt_are_left_out() -> None:
    with pytest.raises(PlaneUnavailableError, match="does not encrypt"):
        make_plane("ucx", replace(CONTEXT, encrypt=True))
    for name in ("shm", "cma", "tcp", "zmq"):
        make_plane(name, replace(CONTEXT, encrypt=True)).close()
