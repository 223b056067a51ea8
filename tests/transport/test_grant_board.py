"""Notes on a board: found by their key, true as long as they stand, none of another process's."""

from __future__ import annotations

import os
import secrets

import msgspec
import pytest

from kvferry.transport import grant_board
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.grant_board import PROBES, SLOT_BYTES, SLOTS, BoardAddress, BoardReader, GrantBoard
from tests.support.fork_server import fork_server


def key() -> bytes:
    return secrets.token_bytes(16)


def near(first: bytes, number: int) -> bytes:
    """Another key that looks in the same slots first."""
    return first[:8] + number.to_bytes(8, "little")


def test_a_note_is_found_and_falls_when_it_is_retracted() -> None:
    writer = GrantBoard()
    reader, one = BoardReader(writer.place), key()
    assert reader.find(one) is None
    at = writer.post(one, b"text")
    assert at is not None
    note = reader.find(one)
    assert note is not None and note.text == b"text" and note.is_current
    assert reader.find(key()) is None
    writer.withdraw(at)
    assert not note.is_current and reader.find(one) is None


def test_a_slot_that_is_used_again_does_not_make_an_old_note_stand() -> None:
    writer = GrantBoard()
    reader, one = BoardReader(writer.place), key()
    for _ in range(3):
        at = writer.post(one, b"a")
        old = reader.find(one)
        assert at is not None and old is not None
        writer.withdraw(at)
        again = writer.post(one, b"a")
        assert again == at and not old.is_current
        writer.withdraw(again)


def test_crowded_keys_go_to_the_next_slots_and_beyond_them_nowhere() -> None:
    writer = GrantBoard()
    reader, first = BoardReader(writer.place), key()
    keys = [near(first, number) for number in range(PROBES)]
    places = [writer.post(each, each) for each in keys]
    assert None not in places and len(set(places)) == PROBES
    assert writer.post(near(first, PROBES), b"") is None
    assert [note.text for each in keys if (note := reader.find(each)) is not None] == keys
    assert places[0] is not None
    writer.withdraw(places[0])
    assert writer.post(near(first, PROBES), b"in its place") == places[0]
    assert reader.find(keys[0]) is None


def test_what_is_too_long_is_not_posted_and_the_longest_is() -> None:
    writer = GrantBoard()
    assert writer.post(key(), bytes(SLOT_BYTES)) is None
    longest, one = secrets.token_bytes(SLOT_BYTES - grant_board._HEADER.size), key()
    assert writer.post(one, longest) is not None
    found = BoardReader(writer.place).find(one)
    assert found is not None and found.text == longest


def test_a_note_that_is_being_written_is_not_found() -> None:
    writer = GrantBoard()
    one = key()
    at = writer.post(one, b"text")
    assert at is not None
    writer._counters[at // 8] += 1
    assert BoardReader(writer.place).find(one) is None


def test_notes_fall_when_the_board_closes() -> None:
    writer, one = GrantBoard(), key()
    writer.post(one, b"text")
    reader = BoardReader(writer.place)
    note = reader.find(one)
    writer.close()
    writer.close()
    assert note is not None and not note.is_current


def test_a_note_that_is_retracted_twice_stays_down() -> None:
    writer, one = GrantBoard(), key()
    at = writer.post(one, b"text")
    reader = BoardReader(writer.place)
    assert at is not None and reader.find(one) is not None
    writer.withdraw(at)
    writer.withdraw(at)
    assert reader.find(one) is None


@pytest.mark.parametrize("change", ["secret", "fd", "pid"])
def test_another_board_is_refused(change: str) -> None:
    writer = GrantBoard()
    other = {"secret": secrets.token_bytes(16), "fd": os.open("/dev/null", os.O_RDONLY), "pid": 1 << 29}
    place = msgspec.structs.replace(writer.place, **{change: other[change]})
    with pytest.raises(PlaneUnavailableError, match="P's board"):
        BoardReader(place)
    os.close(int(other["fd"]))


def test_it_is_seen_from_another_process() -> None:
    writer, one = GrantBoard(), key()
    writer.post(one, b"text")
    place = msgspec.msgpack.encode(writer.place).hex()
    script = (
        "import sys, msgspec; from kvferry.transport.grant_board import *\n"
        f"reader = BoardReader(msgspec.msgpack.decode(bytes.fromhex({place!r}), type=Place))\n"
        f"note = reader.find(bytes.fromhex({one.hex()!r}))\n"
        "print(note.text.decode(), note.stands, flush=True); sys.stdin.readline(); print(note.stands)\n"
    )
    with fork_server().start("-c", script, text=True) as process:
        assert process.stdout.readline().split() == ["text", "True"]
        writer.close()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(60) == 0 and process.stdout.read().split() == ["False"]


def test_memory_is_taken_when_it_is_used() -> None:
    writer = GrantBoard()
    writer.post(key(), b"text")
    assert os.stat(f"/proc/self/fd/{writer.place.fd}").st_blocks * 512 < SLOTS * SLOT_BYTES // 8
    assert isinstance(writer.place, BoardAddress)
