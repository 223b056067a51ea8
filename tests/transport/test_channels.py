"""What all planes share: memory in pieces on either side of a channel, handshake payloads, memory for slots."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.transport import staging
from kvferry.transport.channels import CPU, Pieces
from kvferry.transport.errors import TransportError
from tests.support.fork_server import fork_server
from tests.transport.plane_list import pattern
from tests.transport.plane_pair import PLANES, Pair

ROOT = Path(__file__).parents[2]
NBYTES = 50_000
CUTS = [0, 1, 2000, 2001, 40_000, NBYTES]


@pytest.fixture(params=PLANES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(request.param, 4, CPU)
    yield pair
    pair.close()


def scattered(memory: np.ndarray) -> Pieces:
    """``NBYTES`` of the memory in pieces, the last of them first."""
    sizes = np.diff(CUTS)
    return Pieces(memory.ctypes.data + len(memory) - np.cumsum(sizes + 10), sizes)


def content(memory: np.ndarray) -> np.ndarray:
    """The bytes of these pieces, in order."""
    places = scattered(memory)
    starts = places.addresses - memory.ctypes.data
    return np.concatenate([memory[s : s + n] for s, n in zip(starts, places.nbytes, strict=True)])


def test_pieces_arrive_as_one_message(pair: Pair) -> None:
    sender, receiver = pair.join()
    source, target = pattern(1, 2 * NBYTES), np.zeros(2 * NBYTES, dtype=np.uint8)
    for tag in range(6):  # more than there are slots
        receiver.expect(tag, NBYTES, lambda: scattered(target))
        pair.turn(lambda tag=tag: sender.send_pieces(lambda: scattered(source), tag))  # type: ignore[misc]
        message = pair.arrived(receiver)
        assert (message.tag, message.nbytes) == (tag, NBYTES)
        if message.placed:
            assert np.array_equal(content(target), content(source))
            target[:] = 0
        else:
            assert not target.any()
            slot = (ctypes.c_uint8 * NBYTES).from_address(message.address)
            assert np.array_equal(np.ctypeslib.as_array(slot), content(source))
        message.release()
        pair.turn(lambda: sender.reading is None)
    sender.stop_reading()
    receiver.stop_writing(5)
    assert sender.error is None and receiver.error is None
    pair.turn(lambda: not pair.slots_out)


def test_pieces_that_cannot_be_found_cost_no_slot(pair: Pair) -> None:
    sender, receiver = pair.join()

    def broken() -> Pieces:
        raise RuntimeError("planted")

    def raises() -> bool:
        try:
            return sender.send_pieces(broken, 1)
        except RuntimeError:
            return True

    for _ in range(6):
        pair.turn(raises)
    pair.turn(lambda: not pair.slots_out)
    pair.carry(sender, receiver, 2).release()


def test_the_connector_tells_no_channels_apart_by_their_class() -> None:
    """It asks ``channel.pulls`` and what else a channel declares, so that a new plane needs no edit there."""
    sources = {path: path.read_text() for path in (ROOT / "connector").rglob("*.py")}
    assert len(sources) > 40
    assert not [path for path, text in sources.items() if re.search(r"isinstance\([^()]*(Channel|Plane)\b", text)]
    told = {path: text for path, text in sources.items() if "doctor" not in path.parts}  # which says what planes lack
    assert not [path for path, text in told.items() if "transport.planes" in text]


DECODING = """
import sys, threading
from typing import Annotated
import msgspec
from msgspec import Meta
from kvferry.transport.plane import decode_payload

sys.setswitchinterval(1e-6)
wrong = []


def decode(kind, barrier, payload):
    barrier.wait()
    if decode_payload(payload, kind, "payload").port != 7:
        wrong.append(kind)


for number in range(1000):
    class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        port: Annotated[int, Meta(ge=0, le=number + 7)]
        host: Annotated[str, Meta(max_length=number + 9)] = ""
        key: Annotated[bytes, Meta(max_length=number + 11)] = b""
        ids: Annotated[tuple[Annotated[int, Meta(ge=number)], ...], Meta(max_length=number + 3)] = ()

    barrier = threading.Barrier(4)
    arguments = Payload, barrier, msgspec.msgpack.encode({"port": 7})
    threads = [threading.Thread(target=decode, args=arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
sys.exit(bool(wrong))
"""


def test_several_threads_decode_a_kind_for_the_first_time() -> None:
    """In a process of its own: without a lock msgspec takes it along."""
    ended = fork_server().run("-c", DECODING, timeout=800)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_page_locked_memory_that_the_driver_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link then takes another plane; any other exception would end it."""

    def refused(nbytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(staging, "empty_page_locked", refused)
    pool = staging.SlotPool(1 << 20, 4 << 20, page_locked=True, in_one_piece=True)
    with pytest.raises(
        TransportError, match=r"no 4 MiB of page-locked host memory.*out of memory; lower staging_bytes"
    ):
        pool.take()
