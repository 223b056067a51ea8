"""Two planes of one process, of which one sends to the other."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.transport.channels import CPU, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.plane import Plane, PlaneContext, PlaneMemory
from kvferry.transport.planes.tcp import MOST_FLOWS, TcpPlane
from kvferry.transport.registry import PlaneSpec, make_plane, plane_specs
from kvferry.transport.staging import SlotPool
from tests.support.ranks import lanes_of

PUSH, PULL = False, True
ENCRYPTED = "-encrypted"
"""Behind the name of a plane: with the setting ``encrypt``."""
FLOWS = "-flows"
"""Behind the name ``tcp``: with several flows for each channel, as between GPUs, but in slots of host memory."""


def plane_of(name: str, context: PlaneContext) -> Plane:
    """The plane of a name that may end with ``FLOWS``, ``ENCRYPTED`` or both; ``nixl`` over TCP."""
    registered = name.removesuffix(ENCRYPTED).removesuffix(FLOWS)
    with lanes_of(name):
        plane = make_plane(registered, replace(context, encrypt=context.encrypt or name.endswith(ENCRYPTED)))
    if registered + FLOWS == name.removesuffix(ENCRYPTED):
        assert isinstance(plane, TcpPlane)
        plane.flows = MOST_FLOWS
    return plane


def pattern(tag: int, nbytes: int) -> np.ndarray:
    """What message ``tag`` holds: uint8 [nbytes], different for each tag and place."""
    start = np.uint64(tag * 2654435761 % 2**64)
    words = np.arange((nbytes + 7) // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    return words.view(np.uint8)[:nbytes]


def parameter(spec: PlaneSpec, device: str = "") -> Any:
    """A plane's name and a device type, marked where the plane needs an extra that a machine may lack."""
    marks = {"ucx": pytest.mark.ucx, "nixl": pytest.mark.nixl}
    return pytest.param(f"{spec.name} {device}".rstrip(), marks=marks.get(spec.name, ()))


def host_planes(*kinds: bool) -> list[Any]:
    """The names of all planes of these kinds that carry caches in host memory."""
    return [parameter(spec) for spec in plane_specs() if spec.host is not None and spec.load().pulls in kinds]


def planes_by_memory(kind: bool) -> list[Any]:
    """``name device`` of all planes of a kind, once for each type of device that they carry."""
    found = [spec for spec in plane_specs() if spec.load().pulls is kind]
    return [
        parameter(spec, device) for spec in found for device, use in (("cpu", spec.host), ("cuda", spec.gpu)) if use
    ]


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
