"""Slots on a GPU: page-locked while mapped, back also where a kernel is done with them after their channel's end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from kvferry.transport import cuda, staging
from kvferry.transport.channels import CPU
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.plane import PlaneContext, PlaneMemory
from kvferry.transport.planes.push import WindowedSender
from kvferry.transport.planes.shm import Arena
from kvferry.transport.registry import best_slot_bytes, make_plane
from tests.transport.plane_pair import PLANES, SLOT, Pair, intact, mapped

GPU = torch.device("cuda", 0)


class Locks:
    """Stands in for CUDA: what is page-locked now, and ``(address, read_only)`` of all that ever was."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.ever: list[tuple[int, bool]] = []
        self.refuse: Callable[[bool], bool] = lambda read_only: False

    def register(self, address: int, nbytes: int, device: torch.device, *, read_only: bool) -> None:
        if self.refuse(read_only):
            raise TransportError("cannot be page-locked")
        assert device == GPU and address not in self.now and mapped(address) and mapped(address + nbytes - 1)
        self.now[address] = nbytes
        self.ever.append((address, read_only))

    def unregister(self, address: int, device: torch.device) -> None:
        nbytes = self.now.pop(address)
        assert device == GPU and mapped(address) and mapped(address + nbytes - 1), "unmapped before"


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Locks]:
    locks = Locks()
    monkeypatch.setattr(cuda, "register_host", locks.register)
    monkeypatch.setattr(cuda, "unregister_host", locks.unregister)
    monkeypatch.setattr(staging, "empty_page_locked", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    yield locks
    gc.collect()
    assert not locks.now
    assert not any(mapped(address) for address, _ in locks.ever if address), "still mapped"


@pytest.fixture
def pair(request: pytest.FixtureRequest, locks: Locks) -> Iterator[Pair]:
    name, slots = getattr(request, "param", ("shm", 8))
    pair = Pair(name, slots, GPU)
    yield pair
    pair.close()


def test_both_ends_lock_the_arena_each_in_its_way(pair: Pair, locks: Locks) -> None:
    sender, receiver = pair.join()
    for tag in range(20):
        pair.carry(sender, receiver, tag).release()
    assert [read_only for _, read_only in locks.ever] == [False, True]
    assert set(locks.now.values()) == {pair.p.staging_bytes}
    receiver.close()
    assert len(locks.now) == 1
    sender.close()
    assert not locks.now and pair.p.staging_bytes == 0


def test_a_slot_that_is_never_given_back_goes_with_its_last_tensor(pair: Pair, locks: Locks) -> None:
    sender, _ = pair.join()
    slot: Any = pair.acquired(sender)
    view = slot.tensor[10:20]
    pair.close()
    del sender, slot, _
    gc.collect()
    assert len(locks.now) == 1
    view.fill_(3)
    del view
    gc.collect()
    assert not locks.now


def test_a_message_that_is_being_unpacked_stays_locked(pair: Pair, locks: Locks) -> None:
    sender, receiver = pair.join()
    held = [pair.carry(sender, receiver, tag) for tag in range(2)]
    pair.close()
    for message in held:
        assert len(locks.now) == 1 and intact(message)
        message.release()
    assert not locks.now


def test_a_consumer_that_left_before_its_memory_came(pair: Pair, locks: Locks) -> None:
    receiver, payload = pair.d.connect(pair.p.offer(), "127.0.0.1")
    pair.p.progress()
    receiver.close()
    with pytest.raises(TransportError):
        pair.p.accept(payload)
    gc.collect()
    assert not locks.now and pair.p.staging_bytes == 0


@pytest.mark.parametrize("read_only", [False, True], ids=["P", "D"])
def test_memory_that_cannot_be_locked_costs_the_channel(pair: Pair, locks: Locks, read_only: bool) -> None:
    locks.refuse = lambda of: of is read_only
    if read_only:
        sender, receiver = pair.join()
        pair.turn(lambda: receiver.error is not None)
        assert "cannot be page-locked" in str(receiver.error)
        receiver.close()
        pair.follow(sender)
    else:
        with pytest.raises(TransportError, match="cannot be page-locked"):
            pair.join()
    gc.collect()
    assert not locks.now and pair.p.staging_bytes == 0
    locks.refuse = lambda _: False
    pair.carry(*pair.join(), tag=1).release()


def test_an_arena_for_caches_of_the_host_is_not_locked(locks: Locks) -> None:
    arena, fd = Arena.create(SLOT, 2)
    Arena.attach(fd, SLOT, 2).close()
    arena.close()
    assert not locks.ever


@pytest.mark.parametrize("pair", [("tcp", 8), ("zmq", 8)], indirect=True, ids=["tcp", "zmq"])
def test_messages_pass_through_locked_slots(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []

    def empty(nbytes: int) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(staging, "empty_page_locked", empty)
    sender, receiver = pair.join()
    for tag in range(20):
        message = pair.carry(sender, receiver, tag)
        assert message.address in [memory.data_ptr() for memory in made]
        message.release()
    assert sum(map(len, made)) == pair.p.staging_bytes + pair.d.staging_bytes <= 16 * SLOT


@pytest.mark.parametrize("pair", [("zmq", 4)], indirect=True)
def test_frames_wait_for_slots_that_are_held_elsewhere(pair: Pair) -> None:
    held = []
    for tag in range(2):  # D has two slots; closed channels leave their windows to others
        sender, receiver = pair.join()
        held.append(pair.carry(sender, receiver, tag))
        receiver.close()
        pair.follow(sender)
    sender, receiver = pair.join()
    pair.send(sender, receiver, 7)
    pair.turn(lambda: receiver.starved)  # type: ignore[attr-defined]
    assert not receiver.poll() and pair.d.staging_bytes == 2 * SLOT
    assert all(map(intact, held))
    held[0].release()
    assert not pair.d.arm(), "nothing on a socket will say that there is a slot now"
    message = pair.arrived(receiver)
    assert intact(message) and intact(held[1])
    message.release()
    held[1].release()
    assert pair.d.staging_bytes == 2 * SLOT


@pytest.mark.parametrize("pair", [("zmq", 2)], indirect=True)
def test_a_frame_that_waits_can_be_forgotten(pair: Pair) -> None:
    sender, receiver = pair.join()
    message = pair.carry(sender, receiver, 1)
    receiver.close()
    pair.follow(sender)
    sender, receiver = pair.join()
    pair.send(sender, receiver, 7)
    pair.turn(lambda: receiver.starved)  # type: ignore[attr-defined]
    receiver.forget(7)
    message.release()
    pair.carry(sender, receiver, 8).release()


@pytest.mark.parametrize("pair", [("tcp", 8)], indirect=True)
@pytest.mark.parametrize("first", ["P", "D"])
def test_slots_that_wait_for_a_full_socket_come_back(pair: Pair, first: str) -> None:
    sender, receiver = pair.join()
    sender.send(pair.acquired(sender), SLOT, 0)
    while (slot := sender.acquire()) is not None:  # D takes nothing
        sender.send(slot, SLOT, 0)
    assert pair.slots_out == 3
    (sender if first == "P" else receiver).close()
    pair.turn(lambda: receiver.error is not None if first == "P" else sender.error is not None)
    assert not pair.slots_out


@pytest.mark.parametrize(("device", "wanted"), [(GPU, 8 << 20), (CPU, 4 << 20)])
def test_slots_of_shm_are_larger_for_caches_on_gpus(locks: Locks, device: torch.device, wanted: int) -> None:
    assert best_slot_bytes("shm", device, 1 << 30) == wanted
    with closing(Pair("shm", 4, device, slot=16 << 20)) as pair:
        sender, receiver = pair.join()
        assert sender.slot_bytes == wanted
        pair.carry(sender, receiver, tag=1).release()


def test_cma_cannot_read_a_gpu() -> None:
    with pytest.raises(PlaneUnavailableError, match="carries host memory, the caches lie on cuda:0"):
        make_plane("cma", PlaneContext("127.0.0.1", SLOT, SLOT, memory=PlaneMemory(GPU)))


@pytest.fixture(params=PLANES)
def late_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with closing(Pair(request.param, 2, CPU)) as late_pair:
        yield late_pair


def works(late_pair: Pair) -> None:
    """All slots have come back, and a new channel has what it needs."""
    late_pair.turn(lambda: not late_pair.slots_out)
    sender, receiver = late_pair.join()
    for tag in range(4):
        late_pair.carry(sender, receiver, tag).release()
    receiver.close()
    late_pair.follow(sender)


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "given back"])
@pytest.mark.parametrize("ended", ["producer", "consumer", "plane"])
def test_an_acquired_slot_outlives(late_pair: Pair, ended: str, sent: bool) -> None:
    sender, receiver = late_pair.join()
    slot, before = late_pair.acquired(sender), late_pair.p.staging_bytes
    if ended == "producer":
        sender.close()
        assert mapped(slot.address) and late_pair.p.staging_bytes == before >= SLOT
    elif ended == "consumer":
        receiver.close()
        late_pair.turn(lambda: sender.error is not None)
    else:
        late_pair.p.close()
    slot.tensor.fill_(7)
    if sent:
        sender.send(slot, SLOT, 99)
    else:
        sender.give_back(slot)
    if ended == "plane":
        assert not late_pair.p.progress() and not late_pair.slots_out
        return
    assert sender.acquire() is None
    del slot
    if ended == "producer":
        late_pair.follow(receiver)
    sender.close()
    works(late_pair)


@pytest.mark.parametrize("ended", ["consumer", "producer", "plane"])
def test_a_message_outlives(late_pair: Pair, ended: str) -> None:
    sender, receiver = late_pair.join()
    message = late_pair.carry(sender, receiver, 5)
    if ended == "consumer":
        receiver.close()
        late_pair.follow(sender)
    elif ended == "producer":
        sender.close()
        late_pair.turn(lambda: receiver.error is not None)
    else:
        late_pair.d.close()
        late_pair.p.close()
    assert intact(message)
    message.release()
    if ended == "plane":
        late_pair.turn(lambda: not late_pair.slots_out)
        return
    receiver.close()
    works(late_pair)


def test_a_message_that_nobody_took_leaves_its_slot(late_pair: Pair) -> None:
    sender, receiver = late_pair.join()
    late_pair.send(sender, receiver, 5)
    late_pair.turn(lambda: bool(receiver.arrived))  # type: ignore[attr-defined]
    receiver.close()
    late_pair.follow(sender)
    works(late_pair)


@pytest.mark.ucx
def test_a_peer_that_takes_nothing_leaves_a_slot_and_lets_the_plane_sleep() -> None:
    """With GPU memory the worker is polled while something moves: one that waits for slots does not move."""
    with closing(Pair("ucx", 4, CPU)) as late_pair:
        plane: Any = late_pair.p
        plane.on_gpu = True
        sender, _ = late_pair.join()
        taken = [slot for _ in range(4) if (slot := sender.acquire()) is not None]
        assert len(taken) == 3 and plane.send_pool.free == 1, "for the others"
        plane.moved_at = 0.0
        assert sender.acquire() is None and plane.moved_at == 0.0
        for slot in taken:
            sender.give_back(slot)


def test_a_p_that_minds_no_credit_is_given_up() -> None:
    """No queue of libzmq has a bound, so D itself holds no more than its window."""
    with closing(Pair("zmq", 64, CPU)) as late_pair:
        sender, receiver = late_pair.join()
        assert isinstance(sender, WindowedSender)
        window, sender.window = sender.window, 64
        for tag in range(window + 1):
            receiver.expect(tag, SLOT)
            sender.send(late_pair.acquired(sender), SLOT, tag)
        late_pair.turn(lambda: receiver.error is not None)
        assert f"sent more than {window} messages without credit" in str(receiver.error)


def test_a_d_that_asks_twice_under_one_number_keeps_no_slot() -> None:
    """D holds the credit of the first message, and P sends another one under its tag."""
    with closing(Pair("zmq", 4, CPU)) as late_pair:
        sender, receiver = late_pair.join()
        receiver.expect(7, SLOT)
        for _ in range(2):
            sender.send(late_pair.acquired(sender), SLOT, 7)
        assert "under way already" in str(sender.error)
        sender.close()
        plane: Any = late_pair.p
        late_pair.turn(lambda: plane.send_pool.free == 4)
