"""Channels of plane ``tcp`` with several flows; that they work as every channel does is in test_planes.py."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.transport import staging
from kvferry.transport.channels import Received, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError
from kvferry.transport.planes import tcp_flows
from kvferry.transport.planes.tcp import (
    TcpAttach,
    TcpFlows,
    TcpOffer,
    TcpRecvChannel,
    TcpSendChannel,
    most_flows,
    most_threads,
)
from kvferry.transport.planes.tcp_flows import HEADER, Cipher, Flow, Outgoing, ReceiveFlow, SendFlow
from kvferry.transport.sockets import HELLO_BYTES
from tests.transport.plane_list import ENCRYPTED, FLOWS, pattern
from tests.transport.plane_pair import SLOT, Pair, intact

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
        each.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        each.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
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
