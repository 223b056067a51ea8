"""The messages of plane ``tcp``: their form, their encryption, and the channels that move them by several flows.

A message: ``HEADER``, its bytes, and a last byte, ``COMPLETE``.

A flow is a connection of a channel that has a thread at either end. One call of that thread sends or receives a whole
slot, and other threads have the interpreter meanwhile. P puts each message into the flow that has least to do; its tag
says what it is, so messages of different flows may come in any order. What a flow's thread has to say is a call, which
the transfer thread makes (``FlowThreads``); everything else of a channel is the transfer thread's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvferry.transport.channels import Received, Slot
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.planes.push import Expected
from kvferry.transport.planes.socket_plane import CONNECT_SECONDS, AwaitedSender, ConnectingReceiver
from kvferry.transport.sockets import ENDED, EXHAUSTED, SILENCE_SECONDS, Sockets, tune
from kvferry.transport.wake import Waker, keep_time_exactly

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from kvferry.transport.planes.tcp import TcpPlane

logger = logging.getLogger("vllm.kvferry.tcp")

Memory = memoryview | bytes | bytearray
MOST_FLOWS = 4
_MOST_THREADS = 64
_WINDOW = 3
"""Slots of P for each flow: a GPU packs one, one waits, and one is on the link."""
_AHEAD = 2
"""Slots of D for each flow: one that is received, and the next one."""
_WASTE_BYTES = 256 << 10

LATE = f"no connection to the prefill rank's data port in {CONNECT_SECONDS:g} s; is a firewall between?"
UNREACHABLE = "the prefill rank's data port cannot be reached: %s; is a firewall between?"
GONE = "tcp: the prefill rank closed the channel or died"
SILENT = f"tcp: the prefill rank stopped in the middle of a message, {SILENCE_SECONDS} s ago"
CHANGED = "tcp: an encrypted message is not what the prefill rank sent: it was changed on its way"
"""Why a channel fails; both forms of a channel fail for the same reasons."""


# --- messages -------------------------------------------------------------------------------------------------------

HEADER = struct.Struct("<QQ")
"""The tag, and the number of bytes that follow without the last byte."""
COMPLETE: npt.NDArray[np.uint8] = np.ones(1, dtype=np.uint8)
"""The last byte of a message whose bytes are all P's. Zero where P stopped reading its pages before they were sent: P's
control message about that goes over another socket, and may arrive later."""


def misfit(tag: int, nbytes: int, more: int, expected: Expected | None, limit: int) -> str:
    """Why a message with this header is not what D announced; empty where it may come. ``more``: what encryption adds
    to it. ``limit``: the bytes of a slot."""
    if more < nbytes <= limit and (expected is None or expected.nbytes + more == nbytes):
        return ""
    wanted = f"expected {expected.nbytes}" if expected else f"limit {limit - more}"
    return f"tcp: message {tag:#x} has {nbytes - more} bytes, {wanted}"


# --- encryption -----------------------------------------------------------------------------------------------------

KEY_BYTES = 32
TAG_BYTES = 16
"""What a message grows by."""


class Cipher:
    """One end of an encrypted channel: AES-256-GCM with a key of the channel's own.

    P makes the key, and D has it by the control connection, which is encrypted. Only P sends on the channel, so each
    key and nonce is used once: the nonce is the number of the message. The header of a message is authenticated with
    it. So bytes that were changed, left out, repeated or moved are never taken for P's.

    Over it, ``tcp`` moves twice the bytes in a second that ``zmq`` moves over CURVE (benchmarks/planes/planes.py). The
    kernel's TLS would need its module on both hosts. Raises PlaneUnavailableError: this machine lacks the package
    ``cryptography``, or its version is too old."""

    def __init__(self, key: bytes) -> None:
        self._aead = aead()(key)
        self._messages = 0

    def seal(self, slot: Slot, nbytes: int, header: bytes) -> int:
        """P: encrypt the first ``nbytes`` of a slot in place. Returns their number with the authentication tag."""
        memory = slot.tensor.numpy().data
        self._aead.encrypt_into(self._nonce(), memory[:nbytes], header, memory[: nbytes + TAG_BYTES])
        return nbytes + TAG_BYTES

    def open(self, slot: Slot, nbytes: int, header: bytes) -> bool:
        """D: decrypt the first ``nbytes`` of a slot in place. Whether they are what P sent."""
        from cryptography.exceptions import InvalidTag

        memory = slot.tensor.numpy().data
        try:
            self._aead.decrypt_into(self._nonce(), memory[:nbytes], header, memory[: nbytes - TAG_BYTES])
        except InvalidTag:
            return False
        return True

    def skip(self) -> None:
        """D: a message was received and is not needed."""
        self._messages += 1

    def _nonce(self) -> bytes:
        self._messages += 1
        return self._messages.to_bytes(12, "big")


def ciphers_of(keys: Sequence[bytes], flows: int) -> list[Cipher | None]:
    """One for each flow; without keys none has any."""
    return [Cipher(key) for key in keys] or [None] * flows


def aead() -> type[AESGCM]:
    """Raises PlaneUnavailableError where this machine cannot encrypt."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise PlaneUnavailableError(f"tcp: the setting encrypt needs the package cryptography: {error}") from None
    if not hasattr(AESGCM, "encrypt_into"):
        raise PlaneUnavailableError("tcp: the setting encrypt needs a newer version of the package cryptography")
    return AESGCM


# --- flows ----------------------------------------------------------------------------------------------------------


def most_flows(device: torch.device) -> int:
    """The flows of a channel of this process: several for caches of a GPU, whose messages all go through slots, where
    the cores suffice for their threads."""
    cores = len(os.sched_getaffinity(0)) if device.type == "cuda" else 1
    return MOST_FLOWS if cores >= 8 else 2 if cores >= 4 else 1


def most_threads(slots: int) -> int:
    """The flows that a plane with so many slots each way may have: the channels that have several may hold three
    quarters of the slots."""
    return min(_MOST_THREADS, slots // (_WINDOW + 1))


class FlowThreads:
    """The flows of a plane whose threads run, and what these tell the transfer thread."""

    def __init__(self, sockets: Sockets) -> None:
        self.flows: set[Flow] = set()
        self.short_of_slots = False
        """Whether a channel of P may wait for a slot. The transfer thread sets it before it sleeps."""
        self._sockets = sockets
        self._told: deque[Callable[[], object]] = deque()
        self._waker: Waker | None = None

    def start(self, flow: Flow) -> bool:
        """Start a flow's thread. False where the system has no thread or no descriptor for it: the flow's channel has
        failed, and its connection is closed."""
        try:
            if self._waker is None:
                waker = Waker()
                try:
                    self._sockets.watch(waker, self.serve)
                except OSError:
                    waker.close()
                    raise
                self._waker = waker
            flow.thread.start()
        except (OSError, RuntimeError) as error:
            self._sockets.drop(flow.sock)
            flow.channel.fail(f"tcp: no thread can be had for a flow: {error}")
            return False
        self.flows.add(flow)
        return True

    @property
    def waiting(self) -> int:
        """The calls that wait to be made."""
        return len(self._told)

    def tell(self, call: Callable[[], object], *, now: bool = True) -> None:
        """Have the transfer thread make a call. By any thread; the calls are made in order. ``now`` False: it may sleep
        on, unless it sleeps ``short_of_slots``. While it runs it takes the interpreter from P's engine."""
        self._told.append(call)
        assert self._waker is not None
        if now or self.short_of_slots:  # after the call is there: the transfer thread looks in the other order
            self._waker.wake()

    def serve(self) -> object:
        """Make the calls of the flows' threads. What they bring is looked at in the same turn."""
        if self._waker is not None:
            self._waker.drain()
        try:
            while self._told:
                self._told.popleft()()
        finally:
            if self._told and self._waker is not None:  # after an error the others are made in the next turn
                self._waker.wake()
        return EXHAUSTED

    def ended(self, flow: Flow, why: str) -> None:
        """A flow's thread has ended, and ``why``, unless it was told to: nobody uses its connection any more."""
        if why and not flow.channel.closed:
            flow.channel.fail(why)
        self.flows.discard(flow)
        self._sockets.drop(flow.sock)

    def close(self, seconds: float = 1.0) -> None:
        """All channels are closed: wait so long at most for their flows to let go of their slots."""
        until = time.monotonic() + seconds
        for flow in self.flows:
            flow.thread.join(max(0.0, until - time.monotonic()))
        self.serve()
        if self._waker is not None:
            self._waker.close()


class _FlowEnded(Exception):
    """A flow is at its end; the message says why, and is empty where its channel has told it to end."""


class Flow(ABC):
    """One connection ``sock`` of a channel, and the thread that uses it. ``cipher``: of this flow alone."""

    peer: str

    def __init__(
        self, threads: FlowThreads, channel: FlowsSender | FlowsReceiver, sock: socket.socket, cipher: Cipher | None
    ) -> None:
        self.sock, self.channel, self.cipher = sock, channel, cipher
        self._threads = threads
        sock.setblocking(True)
        self.thread = threading.Thread(target=self._run, name="kvferry-tcp-flow", daemon=True)

    def end(self) -> None:
        """Let the thread end, whatever it waits for. Idempotent, does not block."""
        with contextlib.suppress(OSError):  # the connection has ended already
            self.sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        keep_time_exactly()
        why = ""
        try:
            self._work()
        except _FlowEnded as end:
            why = str(end)
        except OSError as error:
            why = f"tcp: the {self.peer} rank is gone: {error.strerror}"
        except Exception as error:
            logger.exception("kvferry: unexpected error in a flow of tcp")
            why = f"tcp: unexpected error in a flow: {error!r}"
        self._threads.tell(partial(self._threads.ended, self, why))

    @abstractmethod
    def _work(self) -> None:
        """Send or receive until the connection ends, or ``end`` is called."""


def _without(parts: Sequence[Memory], done: int) -> list[memoryview]:
    """Pieces of memory without their first ``done`` bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(memoryview(part)[done:])
        done = max(0, done - len(part))
    return left


class SendFlow(Flow):
    """P's end. ``left``: bytes that it was given and has not sent."""

    peer = "decode"
    channel: FlowsSender

    def __init__(self, threads: FlowThreads, channel: FlowsSender, sock: socket.socket, cipher: Cipher | None) -> None:
        super().__init__(threads, channel, sock, cipher)
        self._todo: SimpleQueue[tuple[Slot, int, int] | None] = SimpleQueue()
        self.left = 0

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        self.left += nbytes
        self._todo.put((slot, nbytes, tag))

    def take_back(self) -> list[Slot]:
        """The slots that the thread has not begun to send. It may have one more, which its channel gets."""
        slots = []
        with contextlib.suppress(Empty):
            while True:
                if (item := self._todo.get_nowait()) is not None:
                    slots.append(item[0])
        return slots

    def end(self) -> None:
        super().end()
        self._todo.put(None)

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            slot, nbytes, tag = item
            try:
                self._send(slot, nbytes, tag)
            finally:
                self._threads.tell(partial(self.channel.let_go, self, slot, nbytes), now=False)

    def _send(self, slot: Slot, nbytes: int, tag: int) -> None:
        if self.cipher is not None:
            nbytes = self.cipher.seal(slot, nbytes, HEADER.pack(tag, nbytes + TAG_BYTES))
        parts = _without([HEADER.pack(tag, nbytes), slot.tensor.numpy().data[:nbytes], COMPLETE.data], 0)
        while parts:
            parts = _without(parts, self.sock.sendmsg(parts, [], socket.MSG_NOSIGNAL))


class ReceiveFlow(Flow):
    """D's end. ``hungry``: the thread waits for a slot."""

    peer = "prefill"
    channel: FlowsReceiver

    def __init__(
        self, threads: FlowThreads, channel: FlowsReceiver, sock: socket.socket, cipher: Cipher | None
    ) -> None:
        super().__init__(threads, channel, sock, cipher)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *_timeval(SILENCE_SECONDS)))
        self.answers: SimpleQueue[Expected | None] = SimpleQueue()
        self.hungry = self._ending = False
        self._header, self._complete = bytearray(HEADER.size), bytearray(1)
        self._waste = memoryview(bytearray())

    def end(self) -> None:
        self._ending = True
        super().end()
        self.answers.put(None)

    def _work(self) -> None:
        while True:
            self._fill([self._header], between=True)
            tag, nbytes = HEADER.unpack(self._header)
            expected = self.channel.expected.get(tag)
            if expected is None:  # D may have asked for it, and not have announced it yet
                if self._ending:  # nobody may answer
                    raise _FlowEnded
                self._threads.tell(partial(self.channel.look, self, tag))
                expected = self.answers.get()
                if self._ending:
                    raise _FlowEnded
            more = 0 if self.cipher is None else TAG_BYTES
            if why := misfit(tag, nbytes, more, expected, self.channel.most_bytes):
                raise _FlowEnded(why)
            if expected is None:
                self._drop(nbytes)
            else:
                self._receive(tag, nbytes, more)

    def _receive(self, tag: int, nbytes: int, more: int) -> None:
        slot = self._slot()
        came = None
        try:
            self._fill([slot.tensor.numpy().data[:nbytes], self._complete])
            whole = bool(self._complete[0])
            if self.cipher is not None and not (whole and self.cipher.open(slot, nbytes, bytes(self._header))):
                raise _FlowEnded(CHANGED)
            came = nbytes - more if whole else 0
        finally:
            self._threads.tell(partial(self.channel.take, tag, slot, came))

    def _drop(self, nbytes: int) -> None:
        """Receive a message that D does not want."""
        self._waste = self._waste or memoryview(bytearray(_WASTE_BYTES))
        while nbytes:
            part = min(nbytes, _WASTE_BYTES)
            self._fill([self._waste[:part]])
            nbytes -= part
        self._fill([self._complete])
        if self.cipher is not None:
            self.cipher.skip()

    def _slot(self) -> Slot:
        slots = self.channel.slots
        try:
            slot = slots.get_nowait()
        except Empty:
            self.hungry = True
            self._threads.tell(self.channel.supply)
            slot = slots.get()
            self.hungry = False
        if slot is None:
            raise _FlowEnded
        return slot

    def _fill(self, parts: Sequence[Memory], *, between: bool = False) -> None:
        """Fill memory with the bytes that come. ``between``: they are a message's first ones, for which P has time."""
        left = _without(parts, 0)
        while left:
            try:
                got = self.sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:  # nothing came for SILENCE_SECONDS
                if between and not self._ending:
                    continue
                raise _FlowEnded(SILENT) from None
            if not got:
                raise _FlowEnded(GONE)
            left, between = _without(left, got), False


def _timeval(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 1e6)


class FlowsSender(AwaitedSender):
    """P's end of a channel of several flows. ``ciphers``: of each flow, by the id in the hello of its connection."""

    def __init__(
        self, plane: TcpPlane, channel_id: bytes, slot_bytes: int, ciphers: dict[bytes, Cipher | None]
    ) -> None:
        super().__init__(plane.send_pool, channel_id, slot_bytes, _WINDOW * len(ciphers))
        self._plane, self._ciphers = plane, ciphers
        self.flows: list[SendFlow] = []

    @property
    def ids(self) -> tuple[bytes, ...]:
        return tuple(self._ciphers)

    @property
    def to_start(self) -> int:
        """The flows whose threads do not run yet."""
        return 0 if self.closed or self.error is not None else len(self._ciphers) - len(self.flows)

    def joined(self, channel_id: bytes, sock: socket.socket) -> None:
        end_with_process(sock)
        tune(sock)
        flow = SendFlow(self._plane.threads, self, sock, self._ciphers[channel_id])
        self.flows.append(flow)
        if self._plane.threads.start(flow):
            self._plane.sockets.watch(sock, partial(self._on_readable, sock))
            if not self.to_start:
                self.sock = sock  # the channel is open

    def let_go(self, flow: SendFlow, slot: Slot, nbytes: int) -> None:
        """A flow has sent a slot, or has given up."""
        flow.left -= nbytes
        self.free(slot.index)

    def _on_readable(self, sock: socket.socket) -> None:
        if why := said_by_d(sock):
            self.fail(why)

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        min(self.flows, key=lambda flow: flow.left).send(slot, nbytes, tag)

    def _give_up(self) -> None:
        """A slot that a flow is sending comes back by ``let_go``."""
        for flow in self.flows:
            self._plane.sockets.mute(flow.sock)
            for slot in flow.take_back():
                self.free(slot.index)
            flow.end()

    def _close(self) -> None:
        self._give_up()
        self._plane.drop(self, None)


class FlowsReceiver(ConnectingReceiver):
    """D's end of a channel of several flows, as many as P's answer says, up to ``wanted``; all receive into slots.

    ``address``: of P's data port. ``slots``: for the messages to come; ``None`` ends a flow."""

    late, unreachable = LATE, UNREACHABLE

    def __init__(
        self, plane: TcpPlane, sock: socket.socket, hello: bytes, address: tuple[str, int], wanted: int
    ) -> None:
        super().__init__(plane, sock, hello)
        self.wanted, self.most_bytes, self.few_bytes = wanted, plane.slot_bytes, plane.few_bytes
        self._plane, self._address = plane, address
        self.flows: list[ReceiveFlow] = []
        self.slots: SimpleQueue[Slot | None] = SimpleQueue()
        self._out = 0  # slots in ``slots``, and those that flows have
        self._gave_up = False
        self._socks = [sock]
        self._stand: list[int] = []  # connections that stand, and whose flow has no thread yet
        self._ciphers: Sequence[Cipher | None] = ()  # by connection, once P has answered

    @property
    def to_start(self) -> int:
        """The flows whose threads do not run yet."""
        return 0 if self.closed or self.error is not None else self.wanted - len(self.flows)

    def finish(self, hellos: Sequence[bytes], ciphers: Sequence[Cipher | None]) -> None:
        """P has answered: make a connection for each hello. Raises PlaneUnavailableError: there is no way to P."""
        self._ciphers, self.wanted = ciphers, len(ciphers)
        for hello in hellos if self.to_start else ():
            self._socks.append(self._plane.connect_tcp(*self._address))
            number = len(self._socks) - 1
            self.dial(self._plane, self._socks[-1], hello, partial(self._on_stands, number))
        self._start()

    def connected(self) -> None:
        self._on_stands(0)

    def _on_stands(self, number: int) -> None:
        self._plane.sockets.watch(self._socks[number], self._gone, ENDED)
        self._stand.append(number)
        self._start()

    def _start(self) -> None:
        while self._ciphers and self._stand and self.to_start:
            number = self._stand.pop()
            flow = ReceiveFlow(self._plane.threads, self, self._socks[number], self._ciphers[number])
            self.flows.append(flow)
            self._plane.threads.start(flow)

    def _gone(self) -> None:
        self._plane.threads.serve()  # what has arrived before counts
        self.fail(GONE)

    # --- slots

    @property
    def _due(self) -> int:
        """The slots that messages to come can use now."""
        if self.closed or self.error is not None:
            return 0
        hungry = sum(flow.hungry for flow in self.flows)  # one may wait for a slot for a forgotten message
        return min(_AHEAD * len(self.flows), max(len(self.expected), hungry))

    @property
    def starved(self) -> bool:
        """Whether a slot would be of use."""
        return self._out < self._due

    def supply(self) -> bool:
        """Keep the flows supplied with slots. Returns whether any was taken from the pool."""
        if self._gave_up:  # what lies in ``slots`` now tells the flows to end
            return False
        before = self._out
        while self.starved and (slot := self._plane.recv_pool.take()) is not None:
            self._out += 1
            self.slots.put(slot)
        taken = self._out > before
        with contextlib.suppress(Empty):
            while self._out > self._due and (spare := self.slots.get_nowait()) is not None:
                self._put(spare)
        return taken

    def _put(self, slot: Slot) -> None:
        self._out -= 1
        self._plane.recv_pool.put(slot)

    # --- what the flows tell

    def look(self, flow: ReceiveFlow, tag: int) -> None:
        """A message comes that was not announced when its header came. All that was asked for is announced by now."""
        flow.answers.put(self.expected.get(tag))

    def take(self, tag: int, slot: Slot, nbytes: int | None) -> None:
        """A slot comes back, with a message unless ``nbytes`` is ``None``."""
        if nbytes is None or self.closed or self.expected.pop(tag, None) is None:  # forgotten meanwhile, or sent twice
            self._put(slot)
            return
        self._out -= 1
        self.arrived.append(Received(tag, slot.address, nbytes, partial(self._plane.recv_pool.put, slot)))

    def _give_up(self) -> None:
        """A slot into which a flow receives comes back by ``take``."""
        self.supply()  # takes those back that no flow has
        self._gave_up = True
        for sock in self._socks:
            self._plane.sockets.mute(sock)
        for flow in self.flows:
            flow.end()
            self.slots.put(None)

    def _close(self) -> None:
        self._give_up()
        for sock in {*self._socks} - {flow.sock for flow in self.flows}:  # a flow's is closed when its thread has ended
            self._plane.sockets.drop(sock)
        self._plane.drop(self, None)
        self.release_arrived()


def said_by_d(sock: socket.socket) -> str:
    """P: why a channel whose socket is readable fails: D sends nothing, so the stream has ended. Empty where it has
    not."""
    try:
        data = sock.recv(256, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return ""
    except OSError as error:
        return f"tcp: the decode rank is gone: {error.strerror}"
    return "tcp: the decode rank sent what it may not" if data else "tcp: the decode rank closed the channel or died"


def end_with_process(sock: socket.socket) -> None:
    """P: end the stream at once when this process ends: otherwise the kernel would first deliver the unsent bytes, and
    a D that takes no bytes at that time would not notice our death."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
