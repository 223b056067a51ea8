"""Two data planes of another distribution: all of them is in this file. They are registered by entry point, pass the
contract of every plane, and carry hand-overs, without an edit elsewhere."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import runpy
import secrets
import socket
import struct
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import pytest
from msgspec import Meta

from kvferry.connector.config import Settings, load_settings
from kvferry.transport.channels import CPU, ByteRanges, Copy, PageRead, Received, Slot
from kvferry.transport.errors import ConfigError, PlaneUnavailableError, ProtocolError
from kvferry.transport.peer_process import PeerProcess
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.pull import ProcessChannel, PullPlane, Ranges, joined
from kvferry.transport.planes.push import PushReceiver, WindowedSender
from kvferry.transport.planes.socket_plane import SocketAttach, SocketPlane
from kvferry.transport.registry import PlaneSpec, Use, make_plane, plane_names, plane_spec, preferred_planes
from kvferry.transport.sockets import ENDED, READABLE, WRITABLE
from kvferry.transport.staging import SlotPool

PUSH = PlaneSpec(
    "toy_push", "test_toy_plane:ToyPushPlane", "same host", "a stream over a Unix socket, slots at both ends",
    host=Use(90, slot_bytes=1 << 20), extra="toy-planes",
)  # fmt: skip
PULL = PlaneSpec("toy_pull", "test_toy_plane:ToyPullPlane", "same host", "D reads `/proc/PID/mem` of P", host=Use(80))
ENTRY_POINTS = "toy_push = test_toy_plane:PUSH\ntoy_pull = test_toy_plane:PULL"

# --- a PUSH plane -------------------------------------------------------------------------------------------------

HEADER = struct.Struct("<QQ")
"""Tag, bytes that follow."""
WINDOW = 2
"""Messages of one channel that P packs, or that wait for the socket."""


class PushOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[bytes, Meta(min_length=2, max_length=107)]
    secret: Annotated[bytes, Meta(min_length=32, max_length=32)]


class ToySender(WindowedSender):
    def __init__(self, plane: ToyPushPlane, sock: socket.socket, slot_bytes: int) -> None:
        super().__init__(plane.send_pool, slot_bytes, WINDOW)
        self.sock = sock
        self._plane = plane
        self._queue: deque[memoryview] = deque()
        plane.sockets.watch(sock, self._on_ready)

    @property
    def in_use(self) -> int:
        return super().in_use + len(self._queue)

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        self._queue.append(memoryview(HEADER.pack(tag, nbytes) + slot.tensor[:nbytes].numpy().tobytes()))
        self.free(slot.index)
        self._write()

    def _give_up(self) -> None:
        self._plane.sockets.mute(self.sock)

    def _close(self) -> None:
        self._plane.drop(self, self.sock)

    def _on_ready(self) -> None:
        try:
            self.sock.recv(1)  # D sends nothing: this is the end of the stream
            self.fail("toy: the consumer closed the channel or died")
        except BlockingIOError:
            self._write()
        except OSError as error:
            self.fail(f"toy: the consumer is gone: {error}")

    def _write(self) -> None:
        try:
            while self._queue:
                sent = self.sock.send(self._queue[0], socket.MSG_NOSIGNAL)
                self._queue[0] = self._queue[0][sent:]
                if not self._queue[0]:
                    self._queue.popleft()
            self._plane.sockets.watch(self.sock, self._on_ready)
        except BlockingIOError:
            self._plane.sockets.watch(self.sock, self._on_ready, READABLE | WRITABLE)
        except OSError as error:
            self.fail(f"toy: the consumer is gone: {error}")


class ToyReceiver(PushReceiver):
    plane_name = "toy"

    def __init__(self, plane: ToyPushPlane, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock
        self.starved = False
        self._plane = plane
        self._head = b""
        self._slot: Slot | None = None
        self._got = 0
        plane.sockets.watch(sock, self.on_readable)

    def on_readable(self) -> None:
        try:
            for _ in range(64):  # then it is another's turn
                if self.error is not None or not self._take_in():
                    return
        except BlockingIOError:
            return
        except ProtocolError as error:
            self.fail(str(error))
        except OSError as error:
            self.fail(f"toy: the producer is gone: {error}")

    def _take_in(self) -> bool:
        """Receive something; False where no slot is free."""
        if len(self._head) < HEADER.size:
            data = self.sock.recv(HEADER.size - len(self._head))
            self._head += data
            if not data:
                self.fail("toy: the producer closed the channel or died")
            return True
        tag, nbytes = HEADER.unpack(self._head)
        if not 0 < nbytes <= self._plane.slot_bytes:
            raise ProtocolError(f"toy: message {tag:#x} has {nbytes} bytes, limit {self._plane.slot_bytes}")
        self.check_size(tag, nbytes)
        if self._slot is None:
            self._slot = self._plane.recv_pool.take()
            self.starved = self._slot is None
            self._plane.sockets.watch(self.sock, *((self._on_end, ENDED) if self.starved else (self.on_readable,)))
            if self._slot is None:
                return False
        got = self.sock.recv_into(self._slot.tensor.numpy().data[self._got : nbytes])
        self._got += got
        if not got:
            self.fail("toy: the producer closed the channel or died")
        elif self._got == nbytes:
            slot, self._slot, self._head, self._got = self._slot, None, b"", 0
            if self.expected.pop(tag, None) is None:  # forgotten, or never announced
                self._plane.recv_pool.put(slot)
            else:
                release = partial(self._plane.recv_pool.put, slot)
                self.arrived.append(Received(tag, slot.address, nbytes, release))
        return True

    def _on_end(self) -> None:
        self.fail("toy: the producer closed the channel or died")

    def _give_up(self) -> None:
        self.starved = False
        self._plane.sockets.mute(self.sock)
        slot, self._slot = self._slot, None
        if slot is not None:
            self._plane.recv_pool.put(slot)

    def _close(self) -> None:
        self._give_up()
        self.release_arrived()
        self._plane.drop(self, self.sock)


class ToyPushPlane(SocketPlane):
    name: ClassVar[str] = "toy_push"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context.slot_bytes)
        self.send_pool, self.recv_pool = (SlotPool(context.slot_bytes, context.staging_bytes) for _ in range(2))
        self._name = b""

    def offer(self) -> bytes:
        if not self._name:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            name = b"\0toy-" + secrets.token_hex(16).encode()
            listener.bind(name)
            listener.listen(64)
            self.listen(listener)
            self._name = name
        return msgspec.msgpack.encode(PushOffer(self._name, self.secrets.new()))

    def connect(self, offer: bytes, host: str) -> tuple[ToyReceiver, bytes]:
        theirs = decode_payload(offer, PushOffer, "toy offer")
        try:
            sock, attach = self.connect_unix(socket.SOCK_STREAM, theirs.name, theirs.secret)
        except OSError as error:
            raise PlaneUnavailableError(f"the producer cannot be reached: {error.strerror}") from None
        channel = ToyReceiver(self, sock)
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[ToySender, bytes]:
        attach = decode_payload(payload, SocketAttach, "toy attach")
        channel = ToySender(self, self.take_connection(attach.channel), min(self.slot_bytes, attach.slot_bytes))
        self.channels[channel] = None
        return channel, b""

    def progress(self) -> bool:
        moved = super().progress()
        for channel in self._starved:
            if self.recv_pool.free:
                channel.on_readable()
                moved = True
        return moved

    @property
    def _starved(self) -> list[ToyReceiver]:
        return [channel for channel in self.receivers(ToyReceiver) if channel.starved]

    def arm(self) -> bool:
        return not (self._starved and self.recv_pool.free)


# --- a PULL plane -------------------------------------------------------------------------------------------------


class ToyMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ranges: Ranges


class ToyCopy(Copy):
    def __init__(self, channel: ToyReader, ranges: ByteRanges) -> None:
        super().__init__()
        self.channel = channel
        self._left = deque(zip(*(column.tolist() for column in ranges), strict=True))

    def turn(self) -> None:
        """Copy the next few ranges."""
        try:
            for _ in range(min(256, len(self._left))):
                dst, src, nbytes = self._left.popleft()
                into = memoryview((ctypes.c_uint8 * nbytes).from_address(dst))
                if os.preadv(self.channel.fd, [into], src) != nbytes:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        except (OSError, OverflowError) as error:
            self.end(f"toy: P's memory cannot be read: {error}")
            self.peer_lost = True
        self.done |= not self._left

    def end(self, why: str) -> None:
        self._left.clear()
        self.error, self.done = why, True


class ToyReader(ProcessChannel):
    def __init__(self, plane: ToyPullPlane, process: PeerProcess) -> None:
        super().__init__("toy", process)
        self._plane = plane
        self.fd = os.open(f"/proc/{process.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, request: PageRead) -> Copy:
        copy = ToyCopy(self, request.byte_ranges())
        self._plane.copies.append(copy)
        return copy

    def _close(self) -> None:
        for copy in [copy for copy in self._plane.copies if copy.channel is self]:
            self._plane.copies.remove(copy)
            copy.end("toy: the channel was closed")
        self.process.close()
        os.close(self.fd)


class ToyPullPlane(PullPlane[ToyReader, ToyMemory]):
    name: ClassVar[str] = "toy_pull"
    memory = ToyMemory

    def __init__(self, context: PlaneContext) -> None:
        super().__init__()
        self.copies: list[ToyCopy] = []
        self.publish(ToyMemory(joined(context.memory.ranges)))

    def join(self, process: PeerProcess) -> ToyReader:
        return ToyReader(self, process)

    def begin(self, channel: ToyReader, memory: ToyMemory) -> None:
        channel.ranges = memory.ranges

    @property
    def active(self) -> bool:
        return bool(self.copies)

    def progress(self) -> bool:
        for copy in list(self.copies):
            copy.turn()
            if copy.done:
                self.copies.remove(copy)
        return self.watch() or bool(self.copies)

    def arm(self) -> bool:
        return not self.copies


# --- the tests ----------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
CONTEXT = PlaneContext("127.0.0.1", 1 << 20, 4 << 20)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What an installer leaves of a distribution that registers these entry points; also child processes find it."""

    def installed(entry_points: str) -> None:
        info = tmp_path / "toy_planes-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_planes\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[kvferry.planes]\n{entry_points}\n")
        for folder in (str(Path(__file__).parent), str(tmp_path)):
            monkeypatch.syspath_prepend(folder)
            monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)

    return installed


CONTRACT = {
    "tests/transport/test_planes.py": 18, "tests/transport/test_pull_planes.py": 14,
    "tests/transport/test_late_calls.py": 10, "tests/handover/test_handover.py": 8,
}  # fmt: skip
"""The files of the contract, and of hand-overs, with how many of their tests the toy planes take at least."""


@pytest.mark.timeout(1800)
def test_they_pass_the_contract_and_carry_hand_overs(install: Callable[[str], None]) -> None:
    install(ENTRY_POINTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", "toy", *CONTRACT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    summary = run.stdout.splitlines()[-1]
    assert run.returncode == 0 and not re.search("failed|error|skipped", summary), run.stdout[-8000:] + run.stderr
    passed = Counter(re.findall(r"^PASSED ([^:]+)::", run.stdout, re.MULTILINE))
    assert all(passed[file] >= least for file, least in CONTRACT.items()), passed


def test_they_are_registered(install: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="'toy_push' is not usable: expected one of"):
        load_settings({"plane": "toy_push"}, {})
    install(ENTRY_POINTS)
    assert {"toy_push", "toy_pull"} < set(plane_names())
    names = preferred_planes(CPU)
    assert names[:1] == ("cma",) and names[-2:] == ("toy_pull", "toy_push")
    plane = make_plane("toy_pull", CONTEXT)
    assert plane.name == "toy_pull" and plane.pulls
    plane.close()
    assert load_settings({"plane": "toy_push"}, {}) == Settings(plane="toy_push")
    with pytest.raises(ConfigError, match=r"expected one of auto, .*, toy_pull, toy_push, .*did you mean 'toy_push'"):
        load_settings({"plane": "toy_posh"}, {})
    runpy.run_module("kvferry.transport.registry", run_name="__main__")
    table = capsys.readouterr().out
    assert "| `toy_pull` | same host | host |  | D reads `/proc/PID/mem` of P |" in table.splitlines()
    assert "| `pip install 'toy-planes'` |" in table and "| `cuda_ipc` |" in table


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:SPEC", "does not load: ModuleNotFoundError"),
        ("test_toy_plane:ROOT", "is no PlaneSpec named 'broken'"),
        ("test_toy_plane:PUSH", "is no PlaneSpec named 'broken'"),
    ],
)
def test_a_broken_distribution_costs_its_own_plane_only(
    value: str, why: str, install: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    install(f"broken = {value}")
    with pytest.raises(PlaneUnavailableError, match=why):
        make_plane("broken", CONTEXT)
    with caplog.at_level(logging.WARNING):
        assert preferred_planes(CPU)[0] == "cma"
    assert sum("no data plane broken" in line for line in caplog.messages) == 1


def test_a_class_that_cannot_be_imported_is_named() -> None:
    spec = PlaneSpec("broken", "no_such_module:Plane", "same host", "does not exist", host=Use(1))
    with pytest.raises(PlaneUnavailableError, match="no_such_module:Plane cannot be imported"):
        spec.load()


def test_another_distribution_cannot_replace_one_of_ours(install: Callable[[str], None]) -> None:
    install("cma = test_toy_plane:PULL")
    assert plane_spec("cma").plane == "kvferry.transport.planes.cma:CmaPlane"
