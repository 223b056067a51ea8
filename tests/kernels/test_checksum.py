"""The checksums over host memory: they are what their text says, and every small fault changes them."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.kernels.checksum import (
    BLOCK_WORDS,
    DIFFERS,
    FITS,
    TRAILER_BYTES,
    ChecksumName,
    WireCheck,
    checksum,
    checksum_of_pieces,
    keys,
    trailer_fits,
    write_trailer,
)
from tests.kernels.checksum_cases import TAG, key, sum64

NAMES: list[ChecksumName] = ["xxh3", "sum64"]
TAGS = st.integers(0, (1 << 64) - 1)
MESSAGES = st.binary(min_size=1, max_size=300)


def of(name: ChecksumName, message: bytes, tag: int = TAG) -> int:
    array = np.frombuffer(message, dtype=np.uint8)
    return checksum(name, array.ctypes.data, len(message), tag)


@given(MESSAGES, TAGS)
@example(b"\x80", 0)
@example(b"\xff" * 16, (1 << 64) - 1)
def test_they_are_what_their_text_says(message: bytes, tag: int) -> None:
    assert of("sum64", message, tag) == sum64(message, tag)
    assert of("xxh3", message, tag) == xxhash.xxh3_64_intdigest(message, seed=tag)


def test_long_messages_and_their_last_words_too() -> None:
    message = np.random.default_rng(3).integers(0, 256, 4 * BLOCK_WORDS * 2 + 11, dtype=np.uint8).tobytes()
    assert of("sum64", message) == sum64(message, TAG)


def test_keys_differ_and_none_is_zero() -> None:
    """So a change of one word, and an exchange of two words, changes the sum for certain."""
    found = np.concatenate([np.stack(keys(block), axis=1).reshape(-1) for block in range(16)])
    assert len(np.unique(found)) == len(found) and found.min() > 0 and found.max() < 1 << 32
    assert found[:1000].tolist() == [key(number) for number in range(1000)]


def faulty(message: bytes, fault: str, data: st.DataObject) -> bytes:
    """A message with one fault."""
    at = data.draw(st.integers(0, len(message) - 1))
    if fault == "one bit":
        return message[:at] + bytes([message[at] ^ 1 << data.draw(st.integers(0, 7))]) + message[at + 1 :]
    if fault == "lost end":
        return message[:at]
    if fault == "zeros of a slot that nobody wrote":
        return message[:at] + bytes(len(message) - at)
    spoilt = bytearray(message.ljust(8 * 64, b"\0"))  # the same bit in two words: odd keys modulo 2**64 would miss it
    for word in data.draw(st.sets(st.integers(0, 63), min_size=2, max_size=2)):
        spoilt[8 * word + 7] ^= 0x80
    return bytes(spoilt)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["one bit", "lost end", "zeros of a slot that nobody wrote", "top bits"])
@given(message=MESSAGES, data=st.data())
@settings(max_examples=60)
def test_a_fault_anywhere(name: ChecksumName, fault: str, message: bytes, data: st.DataObject) -> None:
    spoilt = faulty(message, fault, data)
    if fault == "top bits":
        message = message.ljust(8 * 64, b"\0")
    assert not spoilt or (of(name, spoilt) == of(name, message)) == (spoilt == message)


@pytest.mark.parametrize("name", NAMES)
@given(
    size=st.sampled_from([1, 2, 3, 4, 8, 64]), count=st.integers(2, 12), seed=st.integers(0, 1 << 32), data=st.data(),
    equal_sums=st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_two_blocks_that_changed_places(
    name: ChecksumName, size: int, count: int, seed: int, equal_sums: bool, data: st.DataObject
) -> None:
    blocks = np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)
    one, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    if equal_sums and size >= 8:  # the same words in another order, which a sum with linear keys would miss
        blocks[other] = blocks[one].view(np.uint32)[::-1].copy().view(np.uint8)
    spoilt = blocks.copy()
    spoilt[[one, other]] = blocks[[other, one]]
    assert (of(name, spoilt.tobytes()) == of(name, blocks.tobytes())) == bool((spoilt == blocks).all())


@pytest.mark.parametrize("name", NAMES)
@given(message=MESSAGES, tags=st.lists(TAGS, min_size=2, max_size=2, unique=True))
@settings(max_examples=60)
def test_equal_bytes_under_another_tag(name: ChecksumName, message: bytes, tags: list[int]) -> None:
    assert of(name, message, tags[0]) != of(name, message, tags[1])


@given(message=MESSAGES, cuts=st.lists(st.integers(0, 300), max_size=6))
def test_pieces_in_order_are_one_message(message: bytes, cuts: list[int]) -> None:
    array = np.frombuffer(message, dtype=np.uint8)
    edges = sorted({0, len(message), *(cut for cut in cuts if cut < len(message))})
    starts, nbytes = np.array(edges[:-1]), np.diff(edges)
    assert checksum_of_pieces(array.ctypes.data + starts, nbytes, TAG) == of("xxh3", message)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nbytes", [1, 7, 8, 13, 4096])
def test_each_bit_of_a_message_and_its_trailer_counts(name: ChecksumName, nbytes: int) -> None:
    memory = np.random.default_rng(nbytes).integers(0, 256, nbytes + TRAILER_BYTES + 1, dtype=np.uint8)
    before, verdict = memory.copy(), np.full(1, -1, dtype=np.int64)
    write_trailer(WireCheck(name, TAG), memory.ctypes.data, nbytes)
    assert (memory[:nbytes] == before[:nbytes]).all() and memory[-1] == before[-1], "only the trailer is written"
    check = WireCheck(name, TAG, verdict.ctypes.data)
    assert trailer_fits(check, memory.ctypes.data, nbytes) and verdict[0] == FITS
    places = range(nbytes + TRAILER_BYTES)
    for at in places if nbytes < 100 else [*places[:20], *places[-20:]]:
        memory[at] ^= 1 << at % 8
        assert not trailer_fits(check, memory.ctypes.data, nbytes) and verdict[0] == DIFFERS, at
        memory[at] ^= 1 << at % 8
    assert trailer_fits(check, memory.ctypes.data, nbytes)
    assert not trailer_fits(check._replace(tag=TAG + 1), memory.ctypes.data, nbytes)
