"""Plane ``tcp`` with the setting ``encrypt``; that it works as every plane does is in test_planes.py and others."""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.transport.channels import Pieces, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.tcp_flows import HEADER, KEY_BYTES, TAG_BYTES, Cipher, Vector
from kvferry.transport.registry import make_plane
from tests.transport.plane_list import pattern
from tests.transport.plane_pair import SLOT, Pair, intact

CONTEXT = PlaneContext("127.0.0.1", SLOT, 8 * SLOT)
BYTES = 5000


PAGES: list[torch.Tensor] = []
"""What the messages of this module lie in."""


@pytest.fixture
def ends() -> Iterator[Callable[..., Pair]]:
    with ExitStack() as stack:

        def make(*, p: bool = True, d: bool = True) -> Pair:
            return stack.enter_context(closing(Pair("tcp", 8, p={"encrypt": p}, d={"encrypt": d})))

        yield make


def send(both: Pair, sender: SendChannel, receiver: RecvChannel, tag: int) -> None:
    """Begin a message that P sends from its pages and that D wants in its own, both in two pieces."""
    data = torch.from_numpy(pattern(tag, BYTES))
    into = torch.zeros(BYTES, dtype=torch.uint8)

    def halves(of: torch.Tensor) -> Callable[[], Pieces]:
        return lambda: Pieces(of.data_ptr() + np.array([0, 3000]), np.array([3000, BYTES - 3000]))

    PAGES.extend((data, into))
    receiver.expect(tag, BYTES, halves(into))
    both.turn(lambda: sender.send_pieces(halves(data), tag))


def tapped(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytearray], None] = lambda data: None) -> bytearray:
    """All bytes that P sends from now on, after ``change``, which gets a whole message."""
    seen = bytearray()

    def send(self: Vector, sock: Any) -> int:
        data = bytearray(b"".join(ctypes.string_at(int(address), int(nbytes)) for address, nbytes in self._iov))
        change(data)
        seen.extend(data)
        self.done = self.nbytes
        assert sock.send(data) == len(data), "it fits into the socket's buffer"
        return len(data)

    monkeypatch.setattr(Vector, "send", send)
    return seen


@pytest.mark.parametrize(("p", "d"), [(True, True), (True, False), (False, True)])
def test_one_side_is_enough(ends: Any, p: bool, d: bool) -> None:
    both = ends(p=p, d=d)
    sender, receiver = both.join()
    assert not sender.sends_in_place and receiver.encrypted
    for tag in (7, 8, 9):
        send(both, sender, receiver, tag)
        while not (arrived := receiver.poll()):
            both.d.progress()
        [message] = arrived
        assert (message.tag, message.nbytes, message.placed) == (tag, BYTES, False) and intact(message)
        message.release()
    assert sender.error is None and receiver.error is None


@pytest.mark.parametrize("encrypt", [True, False])
def test_the_wire_has_no_plain_byte(ends: Any, monkeypatch: pytest.MonkeyPatch, encrypt: bool) -> None:
    both = ends(p=encrypt, d=False)
    sender, receiver = both.join()
    both.turn(lambda: sender.open)
    wire = tapped(monkeypatch)
    send(both, sender, receiver, 7)
    both.turn(receiver.poll)
    plain = pattern(7, BYTES).tobytes()
    found = any(plain[at : at + 16] in wire for at in range(0, BYTES - 16, 16))
    assert found is not encrypt, "without the setting the bytes are plain, so this test can see them"


@pytest.mark.parametrize("where", [0, HEADER.size, HEADER.size + 1000, HEADER.size + BYTES, -2, -1])
def test_a_changed_byte_is_noticed(ends: Any, monkeypatch: pytest.MonkeyPatch, where: int) -> None:
    both = ends()
    sender, receiver = both.join()
    both.turn(lambda: sender.open)

    def change(data: bytearray) -> None:
        data[where] ^= 1

    tapped(monkeypatch, change)
    send(both, sender, receiver, 7)
    if where == 0:  # the tag of another message, which D does not want: what comes next does not fit any more
        monkeypatch.undo()  # the next message is good, and D has dropped this one
        send(both, sender, receiver, 9)
        both.turn(lambda: receiver.error or receiver.poll())
        assert receiver.error is None
        return
    both.turn(lambda: receiver.error)
    assert "was changed on its way" in str(receiver.error) and not receiver.poll()


def test_a_message_in_another_ones_place_is_noticed() -> None:
    slots = [Slot(torch.from_numpy(np.append(pattern(n, 64), np.zeros(TAG_BYTES, np.uint8))), n) for n in (1, 2)]
    p, d = (Cipher(key) for key in [secrets.token_bytes(KEY_BYTES)] * 2)
    header = HEADER.pack(1, 64 + TAG_BYTES)
    sizes = [p.seal(slot, 64, header) for slot in slots]
    assert sizes == [80, 80]
    assert not d.open(slots[1], 80, header), "the second message came first"


def test_a_wrong_key_is_refused(ends: Any) -> None:
    both = ends()
    receiver, _ = both.d.connect(both.p.offer(), "127.0.0.1")
    for reply in (b"", b"k" * 31):
        with pytest.raises(ProtocolError, match="key"):
            both.d.finish(receiver, reply)


def test_planes_that_cannot_encrypt_are_left_out() -> None:
    with pytest.raises(PlaneUnavailableError, match="does not encrypt"):
        make_plane("ucx", replace(CONTEXT, encrypt=True))
    for name in ("shm", "cma", "tcp", "zmq"):
        make_plane(name, replace(CONTEXT, encrypt=True)).close()
