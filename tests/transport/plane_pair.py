"""Two planes of one process, of which one sends to the other."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvferry.transport.channels import CPU, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.plane import Plane, PlaneContext, PlaneMemory
from kvferry.transport.staging import SlotPool
from tests.transport.plane_list import ENCRYPTED, FLOWS, PUSH, host_planes, pattern, plane_of

SLOT = 64 << 10
PLANES = [*host_planes(PUSH), f"tcp{ENCRYPTED}", f"tcp{FLOWS}", f"tcp{FLOWS}{ENCRYPTED}"]
"""Those that carry messages."""


def mapped(address: int) -> bool:
    """Whether this process may touch that address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
        if start <= address < end:
            return True
    return False


def intact(message: Received) -> bool:
    """Whether its bytes are there, and right."""
    if not mapped(message.address):
        return False
    data = np.ctypeslib.as_array((ctypes.c_uint8 * message.nbytes).from_address(message.address))
    return np.array_equal(data, pattern(message.tag, message.nbytes))


class Pair:
    """P and D on one plane, with ``slots`` slots of ``slot`` bytes each way; the caches on ``device``. ``p``, ``d``:
    what their contexts have beside that."""

    def __init__(
        self, name: str, slots: int, device: torch.device = CPU, slot: int = SLOT, *, p: Any = None, d: Any = None
    ) -> None:
        def plane(more: Any) -> Plane:
            context = PlaneContext("127.0.0.1", slot, slots * slot, PlaneMemory(device))
            return plane_of(name, replace(context, **(more or {})))

        self.p, self.d = plane(p), plane(d)

    def join(self) -> tuple[SendChannel, RecvChannel]:
        receiver, payload = self.d.connect(self.p.offer(), "127.0.0.1")
        assert not receiver.pulls
        sender, reply = self.p.accept(payload)
        assert not sender.pulls
        self.d.finish(receiver, reply)
        return sender, receiver

    def turn(self, until: Callable[[], object], seconds: float = 60) -> None:
        """Serve both until the condition holds."""
        end = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < end, "it never came"
            self.p.progress()
            self.d.progress()

    def acquired(self, sender: SendChannel) -> Slot:
        slots: list[Slot] = []

        def acquired() -> bool:
            slot = sender.acquire()
            slots.extend([slot] if slot is not None else [])
            return bool(slots)

        self.turn(acquired)
        return slots[0]

    def arrived(self, receiver: RecvChannel) -> Received:
        messages: list[Received] = []

        def arrived() -> bool:
            messages.extend(receiver.poll())
            return bool(messages)

        self.turn(arrived)
        (message,) = messages
        return message

    def send(self, sender: SendChannel, receiver: RecvChannel, tag: int) -> None:
        """A whole slot."""
        nbytes = sender.slot_bytes
        receiver.expect(tag, nbytes)
        slot = self.acquired(sender)
        slot.tensor[:nbytes].numpy()[:] = pattern(tag, nbytes)
        sender.send(slot, nbytes, tag)

    def carry(self, sender: SendChannel, receiver: RecvChannel, tag: int) -> Received:
        """A whole slot from one end to the other."""
        self.send(sender, receiver, tag)
        message = self.arrived(receiver)
        assert (message.tag, message.nbytes) == (tag, sender.slot_bytes) and intact(message)
        return message

    def follow(self, channel: SendChannel | RecvChannel) -> None:
        """Close this end once it has heard that the other is gone."""
        self.turn(lambda: channel.error is not None)
        channel.close()

    @property
    def slots_out(self) -> int:
        """Slots of either plane's pools that have not come back."""
        pools = [x for plane in (self.p, self.d) for x in vars(plane).values() if isinstance(x, SlotPool)]
        return sum(pool.capacity - pool.free for pool in pools)

    def close(self) -> None:
        self.p.close()
        self.d.close()
