"""Notes on a board: found by their key, true as long as they stand, none of another process's."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import time

import pytest

from kvferry.connector.wire.messages import Grant, encode_grant
from kvferry.transport import grant_board
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.grant_board import PROBES, SLOT_BYTES, BoardAddress, BoardReader, GrantBoard
from kvferry.transport.peer_process import PeerProcess
from tests.support.fork_server import fork_server


def reader_of(writer: GrantBoard) -> BoardReader:
    return BoardReader(PeerProcess(os.getpid()), writer.place)


def key() -> bytes:
    return secrets.token_bytes(16)


def near(first: bytes, number: int) -> bytes:
    """Another key that looks in the same slots first."""
    return first[:8] + number.to_bytes(8, "little")


def test_a_note_is_found_and_falls_when_it_is_retracted() -> None:
    """Also once the same slot has the same note again, and where it is retracted twice."""
    writer = GrantBoard()
    reader, one = reader_of(writer), key()
    assert reader.find(one) is None
    places = set()
    for _ in range(3):
        at = writer.post(one, b"text")
        assert at is not None
        places.add(at)
        note = reader.find(one)
        assert note is not None and note.text == b"text" and note.is_current
        assert reader.find(key()) is None
        for _ in range(2):
            writer.withdraw(at)
            assert not note.is_current and reader.find(one) is None
        assert writer.post(one, b"text") == at and not note.is_current
        writer.withdraw(at)
    assert len(places) == 1


def test_crowded_keys_go_to_the_next_slots_and_beyond_them_nowhere() -> None:
    writer = GrantBoard()
    reader, first = reader_of(writer), key()
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
    longest, one = secrets.token_bytes(SLOT_BYTES - grant_board.HEADER.size), key()
    assert writer.post(one, longest) is not None
    found = reader_of(writer).find(one)
    assert found is not None and found.text == longest


def test_a_note_that_is_being_written_is_not_found() -> None:
    writer, one = GrantBoard(), key()
    at = writer.post(one, b"text")
    assert at is not None
    writer.counters[at // 8] += 1
    assert reader_of(writer).find(one) is None


def test_notes_fall_when_the_board_closes() -> None:
    writer, one = GrantBoard(), key()
    writer.post(one, b"text")
    reader = reader_of(writer)
    note = reader.find(one)
    writer.close()
    writer.close()
    assert note is not None and not note.is_current
    assert writer.post(one, b"text") is None and reader.find(one) is None, "another thread may come too late"


def test_who_has_its_descriptor_can_only_read() -> None:
    writer = GrantBoard()
    with pytest.raises(PermissionError):
        mmap.mmap(writer.place.fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(writer.place.fd, b"x", 0)
    assert writer.post(key(), b"text") is not None


@pytest.mark.parametrize("change", ["secret", "fd", "a file that may shrink", "another size"])
def test_another_file_is_refused(change: str) -> None:
    writer = GrantBoard()
    other = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(other, os.fstat(writer.place.fd).st_size + (change == "another size"))
    os.pwrite(other, writer.place.secret, 0)
    if change == "another size":
        fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    fd = os.open("/dev/null", os.O_RDONLY) if change == "fd" else other
    place = BoardAddress(writer.place.fd, key()) if change == "secret" else BoardAddress(fd, writer.place.secret)
    with pytest.raises(PlaneUnavailableError, match="the prefill engine's board"):
        BoardReader(PeerProcess(os.getpid()), place)
    for each in {fd, other}:
        os.close(each)


def test_a_grant_whose_stores_arrive_in_another_order_is_not_taken() -> None:
    """The key and the counter of a new grant with bytes of the slot's former one, as aarch64 may show them."""
    writer, one, two = GrantBoard(), key(), b""
    two = near(one, 2)
    reader = reader_of(writer)
    at = writer.post(one, b"blocks 1 2 3")
    assert at is not None
    old = writer.memory[at : at + SLOT_BYTES]
    writer.withdraw(at)
    assert writer.post(two, b"blocks 4 5 6") == at
    whole, text = writer.memory[at : at + SLOT_BYTES], at + grant_board.HEADER.size
    note = reader.find(two)
    assert note is not None and note.text == b"blocks 4 5 6"
    for cut in range(1, 12):  # the last bytes of the text are the old ones
        writer.memory[text + cut : text + 12] = old[grant_board.HEADER.size + cut : grant_board.HEADER.size + 12]
        found = reader.find(two)
        assert found is None or found.text == b"blocks 4 5 6"
        writer.memory[at : at + SLOT_BYTES] = whole
    header = grant_board.HEADER
    counter, found_key, digest, nbytes = header.unpack_from(whole)
    _, _, old_digest, old_nbytes = header.unpack_from(old)
    for torn in (
        (counter, found_key, old_digest, nbytes), (counter, found_key, digest, nbytes - 1),
        (counter, one, digest, nbytes), (counter + 2, found_key, digest, nbytes),
    ):  # fmt: skip
        header.pack_into(writer.memory, at, *torn)
        assert reader.find(two) is None and reader.find(one) is None
        writer.memory[at : at + SLOT_BYTES] = whole
    assert reader.find(two) is not None and old_nbytes == 12


RACE = """
import hashlib, random, sys, time
from kvferry.transport.grant_board import GrantBoard
seed, size = int(sys.argv[1]), 4096
rng, board = random.Random(seed), GrantBoard()
keys = [bytes(8) + number.to_bytes(8, "little") for number in range(1, 9)]
print(board.place.fd, board.place.secret.hex(), flush=True)
posted, serial, end = [], 0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    if posted and (len(posted) > 4 or rng.random() < 0.5):
        board.withdraw(posted.pop(rng.randrange(len(posted))))
    else:
        key, serial = rng.choice(keys), serial + 1
        content = key + serial.to_bytes(8, "little")
        at = board.post(key, content + hashlib.sha256(content).digest() * rng.randrange(1, 120))
        posted += [] if at is None else [at]
board.post(bytes(16), b"last")
print(serial, flush=True)
sys.stdin.readline()
board.close()
print("closed", flush=True)
sys.stdin.read()
"""


def whole_text(one: bytes, text: bytes) -> bool:
    """Whether a text is one that the writer of the race has posted under this key."""
    content, rest = text[:24], text[24:]
    digest = hashlib.sha256(content).digest()
    return content[:16] == one and len(rest) > 0 and rest == digest * (len(rest) // 32)


def test_a_reader_in_another_process_takes_no_torn_grant() -> None:
    """Eight keys crowd the same slots, so that each slot is written over and over while it is read."""
    keys = [bytes(8) + number.to_bytes(8, "little") for number in range(1, 9)]
    with fork_server().start("-c", RACE, "11", "0.6", text=True) as process:
        fd, secret = process.stdout.readline().split()
        reader = BoardReader(PeerProcess(process.pid), BoardAddress(int(fd), bytes.fromhex(secret)))
        found = stood = 0
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            for one in keys:
                note = reader.find(one)
                if note is not None:
                    assert whole_text(one, note.text), note.text[:64]
                    found, stood = found + 1, stood + note.is_current
        assert int(process.stdout.readline()) > 0 and found > 0, (found, stood)
        last = reader.find(bytes(16))
        assert last is not None and last.is_current
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n" and not last.is_current


def test_there_is_room_for_the_blocks_of_a_long_prompt() -> None:
    """128k tokens, in four tables with blocks of 16."""
    writer, one = GrantBoard(), key()
    reader = reader_of(writer)
    text = encode_grant(Grant(0, 128_000, 0, "d" * 64, (bytes(4 * 8_001),) * 4))
    assert writer.post(one, text) is not None
    found = reader.find(one)
    assert found is not None and found.text == text
    writer.close()
