"""UCXX refuses some memory: that is one channel's error, and its slot comes back. What it lacks is said at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count
from typing import Any

import pytest
import torch

from kvferry.transport import cuda
from kvferry.transport.channels import CPU
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.plane import PlaneContext, PlaneMemory
from kvferry.transport.planes.ucx import UcxPlane
from tests.support.inside import forget_driver
from tests.transport.plane_pair import SLOT, Pair

pytestmark = pytest.mark.ucx
SLOTS = 8


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair("ucx", SLOTS, CPU)) as pair:
        yield pair


def refuse(plane: object, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have UCXX refuse one of the memories that it is shown, counted from 1."""
    assert isinstance(plane, UcxPlane)
    make, turns = plane.make_array, count(1)

    def refusing(memory: Any) -> Any:
        if next(turns) == number:
            raise MemoryError("refused")
        return make(memory)

    monkeypatch.setattr(plane, "make_array", refusing)


@pytest.mark.parametrize("nbytes", [SLOT, SLOT // 2])
def test_a_slot_that_cannot_be_sent_comes_back(pair: Pair, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    sender, receiver = pair.join()
    refuse(pair.p, monkeypatch, 1)
    sender.send(pair.acquired(sender), nbytes, 1)
    assert "refused" in str(sender.error)
    sender.close()
    pair.follow(receiver)
    pair.turn(lambda: not pair.slots_out)
    sender, receiver = pair.join()
    pair.carry(sender, receiver, 2).release()


def test_a_message_that_cannot_be_received_takes_no_other_with_it(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also none of those that wait for their turn in the same round."""
    monkeypatch.setattr(pair.d, "receives", 1)
    (sender, receiver), (other_sender, other_receiver) = pair.join(), pair.join()
    for tag in (1, 2, 3):
        pair.send(sender, receiver, tag)
    pair.send(other_sender, other_receiver, 9)
    refuse(pair.d, monkeypatch, 2)
    arrived = []
    for _ in range(3):
        message = pair.arrived(receiver)
        arrived.append(message.tag)
        message.release()
    assert arrived == [1, 2, 3] and receiver.error is None
    assert "refused" in str(other_receiver.error) and not other_receiver.poll()


def test_on_a_gpu_what_its_slots_need_is_there_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is opened before the first hand-over, so a missing one is known before a hand-over fails."""
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-missing.so.1")
    forget_driver()
    with pytest.raises(PlaneUnavailableError, match="NVIDIA's driver is not installed"):
        UcxPlane(PlaneContext("127.0.0.1", 1 << 20, 4 << 20, memory=PlaneMemory(torch.device("cuda", 0))))
