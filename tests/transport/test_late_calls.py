"""Slots that come back late: a GPU's kernel is done with them after their channel has failed or was closed.

Staging memory is so small that an arena which does not come back is missed by the next channel; pools are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvferry.transport.channels import CPU
from kvferry.transport.planes.push import WindowedSender
from tests.transport.plane_pair import PLANES, SLOT, Pair, intact, mapped


@pytest.fixture(params=PLANES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with closing(Pair(request.param, 2, CPU)) as pair:
        yield pair


def works(pair: Pair) -> None:
    """All slots have come back, and a new channel has what it needs."""
    pair.turn(lambda: not pair.slots_out)
    sender, receiver = pair.join()
    for tag in range(4):
        pair.carry(sender, receiver, tag).release()
    receiver.close()
    pair.follow(sender)


@pytest.mark.parametrize("sent", [True, False], ids=["sent", "given back"])
@pytest.mark.parametrize("ended", ["producer", "consumer", "plane"])
def test_an_acquired_slot_outlives(pair: Pair, ended: str, sent: bool) -> None:
    sender, receiver = pair.join()
    slot, before = pair.acquired(sender), pair.p.staging_bytes
    if ended == "producer":
        sender.close()
        assert mapped(slot.address) and pair.p.staging_bytes == before >= SLOT
    elif ended == "consumer":
        receiver.close()
        pair.turn(lambda: sender.error is not None)
    else:
        pair.p.close()
    slot.tensor.fill_(7)
    if sent:
        sender.send(slot, SLOT, 99)
    else:
        sender.give_back(slot)
    if ended == "plane":
        assert not pair.p.progress() and not pair.slots_out
        return
    assert sender.acquire() is None
    del slot
    if ended == "producer":
        pair.follow(receiver)
    sender.close()
    works(pair)


@pytest.mark.parametrize("ended", ["consumer", "producer", "plane"])
def test_a_message_outlives(pair: Pair, ended: str) -> None:
    sender, receiver = pair.join()
    message = pair.carry(sender, receiver, 5)
    if ended == "consumer":
        receiver.close()
        pair.follow(sender)
    elif ended == "producer":
        sender.close()
        pair.turn(lambda: receiver.error is not None)
    else:
        pair.d.close()
        pair.p.close()
    assert intact(message)
    message.release()
    if ended == "plane":
        pair.turn(lambda: not pair.slots_out)
        return
    receiver.close()
    works(pair)


def test_a_message_that_nobody_took_leaves_its_slot(pair: Pair) -> None:
    sender, receiver = pair.join()
    pair.send(sender, receiver, 5)
    pair.turn(lambda: bool(receiver.arrived))  # type: ignore[attr-defined]
    receiver.close()
    pair.follow(sender)
    works(pair)


@pytest.mark.ucx
def test_a_peer_that_takes_nothing_leaves_a_slot_and_lets_the_plane_sleep() -> None:
    """With GPU memory the worker is polled while something moves: one that waits for slots does not move."""
    with closing(Pair("ucx", 4, CPU)) as pair:
        plane: Any = pair.p
        plane.on_gpu = True
        sender, _ = pair.join()
        taken = [slot for _ in range(4) if (slot := sender.acquire()) is not None]
        assert len(taken) == 3 and plane.send_pool.free == 1, "for the others"
        plane.moved_at = 0.0
        assert sender.acquire() is None and plane.moved_at == 0.0
        for slot in taken:
            sender.give_back(slot)


def test_a_p_that_minds_no_credit_is_given_up() -> None:
    """No queue of libzmq has a bound, so D itself holds no more than its window."""
    with closing(Pair("zmq", 64, CPU)) as pair:
        sender, receiver = pair.join()
        assert isinstance(sender, WindowedSender)
        window, sender.window = sender.window, 64
        for tag in range(window + 1):
            receiver.expect(tag, SLOT)
            sender.send(pair.acquired(sender), SLOT, tag)
        pair.turn(lambda: receiver.error is not None)
        assert f"sent more than {window} messages without credit" in str(receiver.error)
