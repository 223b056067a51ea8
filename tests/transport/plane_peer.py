"""One process of the plane tests: serves a plane as the transfer thread does and obeys JSON lines on stdin.

``python plane_peer.py NAME SLOT_BYTES STAGING_BYTES DEVICE [HOST [NAMESPACE]]``. Every command is answered by one JSON
line.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import select
import sys
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
from tests.support.turns import resident_bytes
from tests.transport.plane_list import pattern, plane_of

HOST = sys.argv[5] if len(sys.argv) > 5 else "127.0.0.1"
"""The address of this process."""
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


class Peer:
    """Its ``do_`` methods are the commands. ``good``: tags of the messages that have come, by channel of D."""

    def __init__(self, name: str, slot_bytes: int, staging_bytes: int, device: torch.device, memory_bytes: int) -> None:
        self.memory = torch.from_numpy(pattern(P_BYTES, memory_bytes).copy()).to(device)
        ranges = ((self.memory.data_ptr(), memory_bytes),)
        memory = PlaneMemory(device, ranges if memory_bytes else ())
        self.plane = plane_of(name, PlaneContext(HOST, slot_bytes, staging_bytes, memory))
        self.channels: dict[str, Any] = {}
        self.to_send: dict[str, deque[tuple[int, int]]] = {}
        self.sent: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.good: dict[str, list[int]] = {}
        self.bad: list[str] = []
        self.taken: list[tuple[SendChannel, Slot]] = []
        self.held: list[Received] = []
        self.hold = False
        self.theirs: dict[str, int] = {}
        self.copies: list[Copy] = []

    # --- planes and channels

    def do_offer(self) -> str:
        return base64.b64encode(self.plane.offer()).decode()

    def do_connect(self, id: str, offer: str, host: str = "127.0.0.1") -> str:
        self.channels[id], payload = self.plane.connect(base64.b64decode(offer), host)
        self.good[id] = []
        return base64.b64encode(payload).decode()

    def do_accept(self, id: str, payload: str) -> str:
        self.channels[id], reply = self.plane.accept(base64.b64decode(payload))
        self.to_send[id] = deque()
        return base64.b64encode(reply).decode()

    def do_finish(self, id: str, reply: str) -> None:
        self.plane.finish(self.channels[id], base64.b64decode(reply))

    def do_close(self, id: str) -> None:
        self.channels[id].close()
        self.channels[id].close()

    def do_close_plane(self) -> None:
        self.plane.close()
        self.plane.close()

    def do_forget_channel(self, id: str) -> None:
        self.channels.pop(id)

    def do_reset(self) -> None:
        """Close all channels and start over, for the next test."""
        self.do_hold(False)
        self.do_give_back()
        for channel in self.channels.values():
            channel.close()
        tables = (self.channels, self.to_send, self.sent, self.refused, self.good, self.bad, self.theirs, self.copies)
        for table in tables:
            table.clear()
        self.memory.copy_(torch.from_numpy(pattern(P_BYTES, self.memory.numel()).copy()))

    def do_garbage(self, as_offer: list[str], as_attach: list[str]) -> list[str]:
        """What each malformed payload raises; anything but our own errors ends the process."""
        names = []
        connect = partial(self.plane.connect, host="127.0.0.1")
        for call, payload in [(connect, each) for each in as_offer] + [(self.plane.accept, each) for each in as_attach]:
            try:
                call(base64.b64decode(payload))
                names.append("accepted")
            except KVFerryError as error:
                assert "\n" not in str(error)
                names.append(type(error).__name__)
        return names

    # --- messages

    def do_slot_bytes(self, id: str) -> int:
        return int(self.channels[id].slot_bytes)

    def do_send(self, id: str, messages: list[tuple[int, int]]) -> None:
        self.to_send[id].extend(messages)

    def do_expect(self, id: str, messages: list[tuple[int, int]]) -> None:
        for tag, nbytes in messages:
            self.channels[id].expect(tag, nbytes)

    def do_forget(self, id: str, tags: list[int]) -> None:
        for tag in tags:
            self.channels[id].forget(tag)

    def do_hold(self, on: bool) -> None:
        """Whether messages are kept instead of released."""
        self.hold = on
        while self.held and not on:
            self.held.pop(0).release()

    def do_acquire(self, id: str) -> bool:
        slot = self.channels[id].acquire()
        if slot is not None:
            self.taken.append((self.channels[id], slot))
        return slot is not None

    def do_give_back(self) -> None:
        while self.taken:
            channel, slot = self.taken.pop()
            channel.give_back(slot)

    # --- reads

    def do_memory(self) -> tuple[int, int]:
        """Where our memory is, and how large."""
        return self.memory.data_ptr(), self.memory.numel()

    def do_translate(self, id: str, address: int, nbytes: int) -> None:
        self.theirs[id] = self.channels[id].translate(address, nbytes)

    def do_fill(self) -> None:
        """What D has before it reads."""
        self.memory.copy_(torch.from_numpy(pattern(D_BYTES, self.memory.numel()).copy()))

    def do_read(self, id: str, dst: list[int], src: list[int], nbytes: list[int]) -> int:
        """Begin to read; the number of the copy."""
        columns = [np.array(column, dtype=np.int64) for column in (dst, src, nbytes)]
        self.copies.append(self.channels[id].read(Read(self.memory, self.theirs[id], *columns)))
        return len(self.copies) - 1

    def do_cancel(self, id: str, copy: int) -> None:
        self.channels[id].cancel(self.copies[copy])

    def do_differing(self, dst: list[int], src: list[int], nbytes: list[int]) -> int:
        """How many bytes of our memory are neither what D had there before, nor where ranges were read P's."""
        size = self.memory.numel()
        wanted, theirs = pattern(D_BYTES, size).copy(), pattern(P_BYTES, size)
        for to, of, count in zip(dst, src, nbytes, strict=True):
            wanted[to : to + count] = theirs[of : of + count]
        return int((self.memory.cpu().numpy() != wanted).sum())

    def do_checksum(self) -> int:
        return zlib.crc32(self.memory.cpu().numpy().data)

    # --- the transfer thread's part

    def do_status(self) -> dict[str, Any]:
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
        if self.hold:
            self.held.append(message)
        else:
            message.release()

    def serve(self) -> None:
        os.set_blocking(0, False)
        buffered = b""
        while True:
            moved = self.step()
            try:
                data = os.read(0, 1 << 20)
                if not data:
                    return
            except BlockingIOError:
                data = b""
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                self.obey(json.loads(line))
            if not moved and not data and self.plane.arm():
                poll = select.poll()
                poll.register(0, select.POLLIN)
                for fd, events in self.plane.pollables():
                    poll.register(fd, events)
                poll.poll(100)

    def obey(self, command: dict[str, Any]) -> None:
        try:
            answer = {"ok": getattr(self, "do_" + command.pop("do"))(**command)}
        except KVFerryError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX logs to stdout; that must not look like an answer
    if len(sys.argv) > 6:
        from tests.support.rank_process import enter

        enter(sys.argv[6])
    device = torch.device(*((sys.argv[4],) if sys.argv[4] == "cpu" else (sys.argv[4], 0)))
    pulls = plane_spec(sys.argv[1].partition("-")[0]).load().pulls
    peer = Peer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), device, MEMORY_BYTES if pulls else 0)
    print(json.dumps({"ready": os.getpid()}), file=ANSWERS, flush=True)
    peer.serve()
