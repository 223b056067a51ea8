"""One process of the plane tests: serves a plane as the transfer thread does. Its methods are orders of the test."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import zlib
from collections import Counter, deque
from functools import partial
from typing import Any

import numpy as np
import torch

from kvferry.transport.channels import ByteRanges, Copy, PageRead, PullChannel, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import KVFerryError
from kvferry.transport.plane import PlaneContext, PlaneMemory
from kvferry.transport.registry import plane_spec
from tests.support.pair import enter
from tests.support.turns import resident_bytes
from tests.transport.plane_pair import pattern, plane_of

MEMORY_BYTES = 20 << 20
"""Of a process whose plane pulls: several turns of any plane."""
P_BYTES, D_BYTES = 1, 2
"""Tags of the patterns of a process's memory: what P has there, and what D has there before it reads."""
BLOCK_BYTES = 256
"""Reads of a GPU's memory are of whole blocks."""


class Read(PageRead):
    """Ranges between two memories, given by their offsets there."""

    def __init__(self, memory: torch.Tensor, theirs: int, dst: np.ndarray, src: np.ndarray, nbytes: np.ndarray) -> None:
        self._memory, self._theirs = memory, theirs
        self._dst, self._src, self._nbytes = dst, src, nbytes

    def byte_ranges(self) -> ByteRanges:
        return ByteRanges(self._memory.data_ptr() + self._dst, self._theirs + self._src, self._nbytes)

    def launch(self) -> Copy:
        from kvferry.kernels.paged_copy import Pages, copy_pages

        assert (self._nbytes == BLOCK_BYTES).all()
        dst, src = (
            Pages(np.array([base]), offsets // BLOCK_BYTES, 1, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES)
            for base, offsets in ((self._memory.data_ptr(), self._dst), (self._theirs, self._src))
        )
        device = self._memory.device
        copy_pages(
            dst, src, num_heads=1, num_tokens=len(self._dst), content_bytes=BLOCK_BYTES, device=device, over_link=True
        )
        torch.cuda.synchronize(device)
        return Copy(done=True, on_stream=True)


class PlanePeer:
    """``good``: tags of the messages that have come, by channel of D. ``host``: the address of this process."""

    def __init__(self, name: str, slot_bytes: int, staging_bytes: int, on: str, host: str, namespace: str) -> None:
        if namespace:
            enter(namespace)
        device = torch.device(*((on,) if on == "cpu" else (on, 0)))
        memory_bytes = MEMORY_BYTES if plane_spec(name.partition("-")[0]).load().pulls else 0
        self.own = torch.from_numpy(pattern(P_BYTES, memory_bytes).copy()).to(device)
        ranges = ((self.own.data_ptr(), memory_bytes),)
        memory = PlaneMemory(device, ranges if memory_bytes else ())
        self.plane = plane_of(name, PlaneContext(host, slot_bytes, staging_bytes, memory))
        self.channels: dict[str, Any] = {}
        self.to_send: dict[str, deque[tuple[int, int]]] = {}
        self.sent: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.good: dict[str, list[int]] = {}
        self.bad: list[str] = []
        self.taken: list[tuple[SendChannel, Slot]] = []
        self.held: list[Received] = []
        self.holds = False
        self.theirs: dict[str, int] = {}
        self.copies: list[Copy] = []

    # --- planes and channels

    def offer(self) -> bytes:
        return self.plane.offer()

    def connect(self, id: str, offer: bytes, host: str = "127.0.0.1") -> bytes:
        self.channels[id], payload = self.plane.connect(offer, host)
        self.good[id] = []
        return payload

    def accept(self, id: str, payload: bytes) -> bytes:
        self.channels[id], reply = self.plane.accept(payload)
        self.to_send[id] = deque()
        return reply

    def finish(self, id: str, reply: bytes) -> None:
        self.plane.finish(self.channels[id], reply)

    def close(self, id: str = "") -> None:
        """Of a channel; of nothing where the test has ended."""
        for _ in range(2 if id else 0):
            self.channels[id].close()

    def close_plane(self) -> None:
        self.plane.close()
        self.plane.close()

    def forget_channel(self, id: str) -> None:
        self.channels.pop(id)

    def reset(self) -> None:
        """Close all channels and start over, for the next test."""
        self.hold(on=False)
        self.give_back()
        for channel in self.channels.values():
            channel.close()
        tables = (self.channels, self.to_send, self.sent, self.refused, self.good, self.bad, self.theirs, self.copies)
        for table in tables:
            table.clear()
        self.own.copy_(torch.from_numpy(pattern(P_BYTES, self.own.numel()).copy()))

    def garbage(self, as_offer: list[bytes], as_attach: list[bytes]) -> list[str]:
        """What each malformed payload raises; anything but our own errors ends the process."""
        names = []
        connect = partial(self.plane.connect, host="127.0.0.1")
        for call, payload in [(connect, each) for each in as_offer] + [(self.plane.accept, each) for each in as_attach]:
            try:
                call(payload)
                names.append("accepted")
            except KVFerryError as error:
                assert "\n" not in str(error)
                names.append(type(error).__name__)
        return names

    # --- messages

    def slot_bytes(self, id: str) -> int:
        return int(self.channels[id].slot_bytes)

    def send(self, id: str, messages: list[tuple[int, int]]) -> None:
        self.to_send[id].extend(messages)

    def expect(self, id: str, messages: list[tuple[int, int]]) -> None:
        for tag, nbytes in messages:
            self.channels[id].expect(tag, nbytes)

    def forget(self, id: str, tags: list[int]) -> None:
        for tag in tags:
            self.channels[id].forget(tag)

    def hold(self, on: bool) -> None:
        """Whether messages are kept instead of released."""
        self.holds = on
        while self.held and not on:
            self.held.pop(0).release()

    def acquire(self, id: str) -> bool:
        slot = self.channels[id].acquire()
        if slot is not None:
            self.taken.append((self.channels[id], slot))
        return slot is not None

    def give_back(self) -> None:
        while self.taken:
            channel, slot = self.taken.pop()
            channel.give_back(slot)

    # --- reads

    def memory(self) -> tuple[int, int]:
        """Where our memory is, and how large."""
        return self.own.data_ptr(), self.own.numel()

    def translate(self, id: str, address: int, nbytes: int) -> None:
        self.theirs[id] = self.channels[id].translate(address, nbytes)

    def fill(self) -> None:
        """What D has before it reads."""
        self.own.copy_(torch.from_numpy(pattern(D_BYTES, self.own.numel()).copy()))

    def read(self, id: str, dst: list[int], src: list[int], nbytes: list[int]) -> int:
        """Begin to read; the number of the copy."""
        columns = [np.array(column, dtype=np.int64) for column in (dst, src, nbytes)]
        self.copies.append(self.channels[id].read(Read(self.own, self.theirs[id], *columns)))
        return len(self.copies) - 1

    def cancel(self, id: str, copy: int) -> None:
        self.channels[id].cancel(self.copies[copy])

    def differing(self, dst: list[int], src: list[int], nbytes: list[int]) -> int:
        """How many bytes of our memory are neither what D had there before, nor where ranges were read P's."""
        size = self.own.numel()
        wanted, theirs = pattern(D_BYTES, size).copy(), pattern(P_BYTES, size)
        for to, of, count in zip(dst, src, nbytes, strict=True):
            wanted[to : to + count] = theirs[of : of + count]
        return int((self.own.cpu().numpy() != wanted).sum())

    def checksum(self) -> int:
        return zlib.crc32(self.own.cpu().numpy().data)

    # --- the transfer thread's part

    def status(self) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        channels = self.channels.items()
        moving = [*getattr(self.plane, "transfers", ()), *getattr(self.plane, "fetches", ())]  # of ucx, and of nixl
        return {
            "sent": {id: self.sent[id] for id in self.to_send},
            "refused": {id: self.refused[id] for id in self.to_send},
            "good": self.good,
            "bad": self.bad,
            "held": len(self.held),
            "posted": {id: len(getattr(c, "receiving", ())) for id, c in channels if isinstance(c, RecvChannel)},
            "errors": {id: c.error and f"{type(c.error).__name__}: {c.error}" for id, c in channels},
            "ready": {id: c.ready for id, c in channels if isinstance(c, PullChannel)},
            "copies": [{"done": c.done, "error": c.error, "peer_lost": c.peer_lost} for c in self.copies],
            "retired": sum(each.channel is not None and each.channel.closed for each in moving),
            "rss": resident_bytes(),
            "fds": len(os.listdir("/proc/self/fd")),
            "cpu": usage.ru_utime + usage.ru_stime,
        }

    def step(self) -> bool:
        moved = self.plane.progress()
        for id, queue in self.to_send.items():
            channel = self.channels.get(id)
            while queue and channel is not None:
                slot = channel.acquire()
                if slot is None:
                    self.refused[id] += 1
                    break
                tag, nbytes = queue.popleft()
                slot.tensor[:nbytes].numpy()[:] = pattern(tag, nbytes)
                channel.send(slot, nbytes, tag)
                self.sent[id] += 1
                moved = True
        for id in self.good:
            channel = self.channels.get(id)
            for message in channel.poll() if isinstance(channel, RecvChannel) else ():
                moved = True
                self.take(id, message)
        return moved

    def take(self, id: str, message: Received) -> None:
        data = np.ctypeslib.as_array((ctypes.c_uint8 * message.nbytes).from_address(message.address))
        if np.array_equal(data, pattern(message.tag, message.nbytes)):
            self.good[id].append(message.tag)
        else:
            self.bad.append(f"{id}: message {message.tag} differs")
        if self.holds:
            self.held.append(message)
        else:
            message.release()

    def idle(self) -> float:
        """A turn of the transfer thread; where nothing moves, wait for the plane or an order."""
        if not self.step() and self.plane.arm():
            poll = select.poll()
            for fd, events in ((0, select.POLLIN), *self.plane.pollables()):
                poll.register(fd, events)
            poll.poll(100)
        return 0.0
