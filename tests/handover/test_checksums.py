"""Checksums between real ranks, over every plane on which P sends: each fault on the wire fails its load, and only that
load; no load fails without a fault; neither side can be talked out of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvferry.connector.decode_side import link, load_state
from kvferry.connector.geometry.engine_types import CacheDtype
from kvferry.connector.pages.checksums import NO_CHECKSUM
from kvferry.connector.wire import messages
from kvferry.kernels.checksum import TRAILER_BYTES
from kvferry.transport.channels import Pieces, SendChannel, Slot
from kvferry.transport.errors import ConfigError
from tests.handover.scenario import OTHERS, PATIENT, Pair, RankGroup, another_works, begin, ended
from tests.support.inside import sessions_of
from tests.support.ranks import Rank, reason_of, wait
from tests.transport.plane_list import PUSH, host_planes

PLANES = host_planes(PUSH)
FORMS: dict[str, dict[str, Any]] = {
    "slots": {},
    "pieces": {"content": 64},  # blocks of 4 KiB, which tcp sends and receives in place
    "chunks": {"content": 64, "layers": 8, "slot_bytes": 112 << 10},  # several chunks of equal size
}
Fault = Callable[[int, bytearray], None]
"""Changes a message in place; the first argument is the number of the message since the fault was planted."""


class Spoiler:
    """Replaces the sends of P's only channel. The bytes are changed behind P's checksum, also in place."""

    def __init__(self, p: Rank) -> None:
        (session,) = sessions_of(p).values()
        channel = session.sender
        assert isinstance(channel, SendChannel)
        self.fault: Fault | None = None
        self.retag: Callable[[int], int] = lambda tag: tag
        self.lengths: list[int] = []
        self._keep: list[Any] = []
        send, send_pieces = channel.send, channel.send_pieces

        def spoil(message: bytearray) -> bytearray:
            if self.fault is not None:
                self.fault(len(self.lengths), message)
            self.lengths.append(len(message))
            return message

        def spoilt_send(slot: Slot, nbytes: int, tag: int) -> None:
            ctypes.memmove(slot.address, bytes(spoil(bytearray(ctypes.string_at(slot.address, nbytes)))), nbytes)
            send(slot, nbytes, self.retag(tag))

        def spoilt_pieces(pieces: Callable[[], Pieces], tag: int) -> bool:
            def spoilt() -> Pieces:
                runs = zip(*(column.tolist() for column in pieces()), strict=True)
                copy = np.frombuffer(spoil(bytearray(b"".join(ctypes.string_at(*run) for run in runs))), dtype=np.uint8)
                self._keep.append(copy)
                return Pieces(np.array([copy.ctypes.data]), np.array([len(copy)]))

            return send_pieces(spoilt, self.retag(tag))

        channel.send = spoilt_send  # type: ignore[method-assign]
        channel.send_pieces = spoilt_pieces  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """No attempt follows one that failed, so that a fault shows."""
    if "retried" not in request.node.name:
        monkeypatch.setattr(load_state, "ATTEMPTS_PER_PEER", 1)


def ranks(group: RankGroup, plane: str, form: str = "slots") -> Pair:
    p, d = group.pair(of_p={"checksum": True}, **{"plane": plane, "slot_bytes": 64 << 10, **PATIENT, **FORMS[form]})
    assert load(p, d, "first")
    return p, d


def load(p: Rank, d: Rank, name: str) -> bool:
    begin(p, d, name)
    return ended(p, d, name)


def spoilt(p: Rank, d: Rank, name: str) -> bool:
    """Whether D finds that a load is wrong."""
    return not load(p, d, name) and reason_of(d) == "checksum"


def flipped(at: int, bit: int = 0) -> Fault:
    """One wrong bit in the first message."""

    def fault(number: int, message: bytearray) -> None:
        if number == 0:
            message[at] ^= 1 << bit

    return fault


def exchanged(first: int, second: int, nbytes: int) -> Fault:
    """Two blocks of each message change places."""

    def fault(number: int, message: bytearray) -> None:
        one, other = message[first : first + nbytes], message[second : second + nbytes]
        message[first : first + nbytes], message[second : second + nbytes] = other, one

    return fault


def ends_in_zeros(kept: float) -> Fault:
    """Only a part of the first message was written before it went, and the checksum."""

    def fault(number: int, message: bytearray) -> None:
        end = len(message) - TRAILER_BYTES
        start = int(kept * end)
        if number == 0:
            message[start:end] = bytes(end - start)

    return fault


@pytest.mark.parametrize("function", ["xxh3", "sum64"])
@pytest.mark.parametrize("form", ["slots", "pieces"])
@pytest.mark.parametrize("plane", PLANES)
def test_each_fault_fails_its_load_and_no_other(
    group: RankGroup, plane: str, form: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong bit, a lost end, blocks that changed places. A D on a GPU has ``sum64`` only, so P computes it in host
    memory."""
    if function == "sum64":
        monkeypatch.setattr(link, "checksums_on", lambda device: ("sum64",))
    p, d = ranks(group, plane, form)
    (session,) = sessions_of(p).values()
    assert session.checksum == function
    spoiler = Spoiler(p)
    assert load(p, d, "relayed")
    length = spoiler.lengths[0]
    end = length - TRAILER_BYTES
    faults = {f"flip {at} of {length}": flipped(at, at % 8) for at in (0, 3, end // 2 + 1, end - 1, end, length - 1)}
    faults |= {"half": ends_in_zeros(0.5), "most": ends_in_zeros(0.999)}
    faults |= {"neighbours": exchanged(0, 1024, 1024), "words": exchanged(8, 4096, 8)}
    for name, fault in faults.items():
        spoiler.fault = fault
        spoiler.lengths.clear()
        assert spoilt(p, d, name), name
    spoiler.fault = None
    assert load(p, d, "last")


def test_a_load_with_a_wrong_byte_is_retried(group: RankGroup) -> None:
    p, d = ranks(group, "tcp")
    Spoiler(p).fault = flipped(9)
    assert load(p, d, "spoiled"), "the second attempt brings the right bytes"
    assert d.figures()["retried"] == {"checksum": 1}


@pytest.mark.parametrize("plane", PLANES)
def test_two_chunks_that_changed_places(group: RankGroup, plane: str) -> None:
    """Each is whole and carries a checksum of its own bytes, but under the tag of the other."""
    p, d = ranks(group, plane, "chunks")
    spoiler = Spoiler(p)
    assert load(p, d, "relayed")
    assert len(spoiler.lengths) >= 2 and spoiler.lengths[0] == spoiler.lengths[1]
    spoiler.retag = lambda tag: tag ^ 1 if tag & 0xFFFFFFFF < 2 else tag
    assert spoilt(p, d, "exchanged")
    spoiler.retag = lambda tag: tag
    assert load(p, d, "last")


def test_wrong_bytes_are_not_written_where_they_are_checked_before(group: RankGroup) -> None:
    p, d = ranks(group, "shm")
    Spoiler(p).fault = flipped(5)
    begin(p, d, "spoilt", ours=OTHERS)
    assert wait(lambda: "spoilt-d" in d.failed, [p, d])
    assert bool((d.read(OTHERS, 100)[0] == -1).all()), "the first chunk is not copied"


def test_bytes_that_d_converts_are_checked_too(group: RankGroup) -> None:
    p, d = group.pair(
        plane="tcp", **PATIENT, of_p={"cache_dtype": CacheDtype("float16")},
        of_d={"cache_dtype": CacheDtype("bfloat16"), "checksum": True, "convert_dtype": True},
    )  # fmt: skip
    begin(p, d, "first")
    assert wait(lambda: "first-d" in d.received, [p, d]) and not d.failed
    Spoiler(p).fault = flipped(100)
    assert spoilt(p, d, "spoilt")


# --- who decides ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("demands", [(True, False), (False, True), (False, False)], ids=["P", "D", "nobody"])
def test_either_side_demands_checksums(
    group: RankGroup, demands: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = group.pair(of_p={"checksum": demands[0]}, of_d={"checksum": demands[1]}, **PATIENT)
    with caplog.at_level("INFO", "vllm.kvferry"):
        another_works(p, d)
    (line,) = [line for line in caplog.messages if "data plane to" in line]
    if any(demands):
        assert "is shm with checksums (xxh3) (cma: " in line and "without messages" in line
    else:
        assert line.endswith("is cma")


def test_a_d_without_checksums_is_not_served_by_a_p_that_demands_them(group: RankGroup) -> None:
    p, d = group.pair(of_p={"checksum": True})
    raw = group.raw(p, d, attached=False)
    welcome = raw.greet()
    assert welcome.checksum and welcome.checksums == ("xxh3", "sum64")
    raw.attach(welcome)
    assert "the prefill engine demands them" in raw.answer(messages.AttachRefused).reason
    another_works(p, d)
    raw = group.raw(*group.pair(), attached=False)
    raw.greet()
    raw.send(messages.Attach(plane="cma", payload=b"", checksum="xxh3"))
    assert "cma has no checksums" in raw.answer(messages.AttachRefused).reason


def test_a_plane_without_messages_cannot_be_named(group: RankGroup, caplog: pytest.LogCaptureFixture) -> None:
    p, d = group.pair(of_p={"checksum": True}, of_d={"plane": "cma"})
    begin(p, d)
    assert not ended(p, d)
    assert "no data plane in common: cma: " in caplog.text
    with pytest.raises(ConfigError, match=f"plane: 'cma' cannot be used: {NO_CHECKSUM}"):
        group.rank(plane="cma", checksum=True)


def test_a_p_that_leaves_the_checksum_out_is_noticed(group: RankGroup) -> None:
    """D demands it, and P's messages have another length then."""
    p, d = group.pair(plane="shm", of_d={"checksum": True}, **PATIENT)
    assert load(p, d, "first")
    (session,) = sessions_of(p).values()
    session.checksum = None
    begin(p, d, "bare")
    assert wait(lambda: "bare-d" in d.received, [p, d]) and d.failed == {"bare-d"}
