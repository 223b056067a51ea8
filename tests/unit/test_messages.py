"""The control protocol: what is sent comes back the same, and whatever else arrives is one ProtocolError."""

from __future__ import annotations

import pickle
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.spans import MAX_SPANS, Span
from kvferry.connector.wire import messages
from kvferry.connector.wire.messages import (
    MAGIC,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Ask,
    Attach,
    Attached,
    AttachRefused,
    Cancel,
    Closing,
    Commit,
    Committed,
    Deny,
    Grant,
    Hello,
    LeaveName,
    PlaneOffer,
    Refused,
    Release,
    Renew,
    Resolve,
    Resolved,
    Stopped,
    Unresolved,
    VersionError,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)
from kvferry.transport.errors import ProtocolError

TOKEN, LIFE = bytes(range(16)), bytes(16)
GROUP = RegionGeometry(
    kind="full",
    layers=("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"),
    block_size=32,
    head_start=0,
    num_heads=8,
    total_heads=8,
    content_bytes=512,
    dtype="bfloat16",
)
GEOMETRY = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(8,), regions=(GROUP,))
SPAN = Span(0, 0, 2, 0, 8, 0, 100)
FACTS: dict[str, Any] = {
    "engine_id": "P-é-1",
    "incarnation": LIFE,
    "geometry": GEOMETRY,
    "model": {"dtype": "bfloat16"},
}
REQUESTS: list[Any] = [
    Hello(**FACTS),
    Attach(plane="ucx", payload=b"\0\xff"),
    Ask(read=1, token=TOKEN, consumer=LIFE, consumer_rank=0, expected=(0, 1), spans=(SPAN,), chunk_bytes=1 << 20),
    Cancel(read=1, posted=3),
    Commit(read=(1 << 32) - 1, token=TOKEN),
    Release(token=TOKEN, consumer=LIFE, consumer_rank=0, expected=(0,)),
    Renew(tokens=(TOKEN, LIFE)),
    Resolve(number=7, name="tx-é", engine_id="P-é-1", until="granted"),
    LeaveName(number=7),
]
REPLIES = [
    Welcome(**FACTS, planes=(PlaneOffer("ucx", b"x"),)),
    Refused(field="dtype", ours="float16", theirs="bfloat16"),
    AttachRefused(plane="shm", reason="no room", detached=True),
    Attached(plane="ucx", slot_bytes=4 << 20),
    Grant(read=1, num_tokens=100, chunks=4, block_ids=(struct.pack("<3i", 5, 0, 7),)),
    Deny(read=1, reason="expired"),
    Stopped(read=1, sent=0),
    Committed(read=1, ok=True),
    Closing(reason="the engine ends"),
    Resolved(number=7, params=b"\x80", streams=True, found=16, step_tokens=512),
    Unresolved(number=7, final=False, detail="no such prompt came in time"),
]
DECODERS = [decode_request, decode_reply]


def refused(frames, *, seconds=1.0):
    """Both decoders refuse, quickly, in one short line."""
    texts = []
    for decode in DECODERS:
        begun = time.thread_time()  # of the processor: a loaded machine may take a break
        with pytest.raises(ProtocolError) as error:
            decode(frames)
        assert time.thread_time() - begun < seconds
        assert not isinstance(error.value, VersionError)
        texts.append(str(error.value))
        assert texts[-1].isprintable() and len(texts[-1]) < 1000
    return texts


def body(message):
    return encode(message)[2]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda message: type(message).__name__)
def test_requests_come_back_the_same(message):
    frames = encode(message)
    assert len(frames) == 3 and decode_request(frames) == message
    with pytest.raises(ProtocolError):
        decode_reply(frames)  # D's word is no answer


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_replies_come_back_the_same(message):
    frames = encode(message)
    assert decode_reply(frames) == message
    with pytest.raises(ProtocolError):
        decode_request(frames)


def test_every_message_is_tested():
    assert {type(message) for message in REQUESTS} == set(messages.Request.__args__)
    assert {type(message) for message in REPLIES} == set(messages.Reply.__args__)


def test_nothing_is_changed_once_made():
    with pytest.raises(AttributeError):
        REQUESTS[3].read = 2


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 65535])
@pytest.mark.parametrize("content", [body(REQUESTS[0]), b"", b"\xc1 of a later version"])
def test_another_version_is_named_whatever_it_says(version, content):
    for decode in DECODERS:
        with pytest.raises(VersionError) as error:
            decode([MAGIC, version.to_bytes(2, "big"), content])
        assert error.value.theirs == version
        text = str(error.value)
        assert f"ours is {PROTOCOL_VERSION}" in text and f"the peer's is {version}" in text and "\n" not in text


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [MAGIC],
        encode(REQUESTS[0])[:2],
        [*encode(REQUESTS[0]), b""],
        [b"", *encode(REQUESTS[0])],
        [b"KVFERRY", *encode(REQUESTS[0])[1:]],
        [MAGIC, b"", body(REQUESTS[0])],
        [MAGIC, b"\1", body(REQUESTS[0])],
        [MAGIC, bytes(3), body(REQUESTS[0])],
        [b"GET / HTTP/1.1\r\n" * 100, b"", b""],
        [b"\n" * 3, b"\n", b"\n"],
    ],
)
def test_what_is_not_ours_is_refused(frames):
    refused(frames)


def wrapped(content):
    return [*encode(REQUESTS[0])[:2], content]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x80",
        b"\x90",
        msgspec.json.encode(REQUESTS[0]),
        pickle.dumps(REQUESTS[3].read),
        pickle.dumps({"type": "Hello"}, protocol=0),
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\0",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": 5}),
        msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode({"type": "x\n\x1b[31m" * 1000}),
        body(REQUESTS[3]) + b"\0",
        body(REQUESTS[3]) * 2,
    ],
    ids=lambda content: repr(content[:12]),
)
def test_malformed_bodies_are_refused(content):
    refused(wrapped(content))


def test_a_body_over_the_limit_is_refused_before_it_is_read():
    texts = refused(wrapped(bytes(MAX_REPLY_BYTES + 1)))
    for text, limit in zip(texts, (MAX_REQUEST_BYTES, MAX_REPLY_BYTES), strict=True):
        assert str(MAX_REPLY_BYTES + 1) in text and f"limit {limit}" in text


def raw(message, **changes):
    """The body of ``message`` with fields replaced by anything."""
    fields = msgspec.msgpack.decode(body(message))
    return msgspec.msgpack.encode({**fields, **changes})


ASK, GRANT, HELLO, RENEW = REQUESTS[2], REPLIES[4], REQUESTS[0], REQUESTS[6]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (ASK, {"read": -1}),
        (ASK, {"read": 1 << 32}),
        (ASK, {"read": 1.0}),
        (ASK, {"read": "1"}),
        (ASK, {"read": True}),
        (ASK, {"read": None}),
        (ASK, {"token": b"short"}),
        (ASK, {"token": bytes(17)}),
        (ASK, {"token": 5}),
        (ASK, {"consumer": bytes(15)}),
        (ASK, {"consumer_rank": 1 << 40}),
        (ASK, {"expected": []}),
        (ASK, {"expected": [0] * 4097}),
        (ASK, {"expected": [-1]}),
        (ASK, {"spans": [[0, 0, 2, 0, 8, 0]]}),
        (ASK, {"spans": [[0, 0, 2, 0, 8, 0, 100, 1]]}),
        (ASK, {"spans": [[0, 0, 0, 0, 8, 0, 100]]}),
        (ASK, {"spans": [[0, 0, 2, 0, 8, 0, 1 << 63]]}),
        (ASK, {"spans": [[0, 0, 2, 0, 8, 0, 1]] * 8193}),
        (ASK, {"chunk_bytes": 0}),
        (ASK, {"more": 1}),
        (GRANT, {"chunks": 1 << 33}),
        (GRANT, {"block_ids": [b""] * 257}),
        (GRANT, {"block_ids": [bytes((4 << 20) + 1)]}),
        (GRANT, {"block_ids": [[1, 2, 3]]}),
        (REPLIES[4], {"reason": "because"}),
        (REPLIES[4], {"detail": "x" * 1025}),
        (REPLIES[4], {"detail": "two\nlines"}),
        (REPLIES[1], {"theirs": "\x1b[31mred"}),
        (REPLIES[1], {"theirs": "end\n"}),
        (REPLIES[1], {"theirs": "a\u2028b"}),
        (HELLO, {"engine_id": ""}),
        (HELLO, {"engine_id": "x" * 257}),
        (HELLO, {"engine_id": "a\r\nb"}),
        (HELLO, {"model": {str(n): "" for n in range(65)}}),
        (HELLO, {"model": {"a": 1}}),
        (HELLO, {"geometry": {}}),
        (HELLO, {"geometry": {**msgspec.to_builtins(GEOMETRY), "groups": [msgspec.to_builtins(GROUP)] * 257}}),
        (HELLO, {"geometry": {**msgspec.to_builtins(GEOMETRY), "tp_size": 0}}),
        (HELLO, {"geometry": {**msgspec.to_builtins(GEOMETRY), "groups": [{**msgspec.to_builtins(GROUP), "x": 1}]}}),
        (
            HELLO,
            {"geometry": {**msgspec.to_builtins(GEOMETRY), "groups": [{**msgspec.to_builtins(GROUP), "kind": "?"}]}},
        ),
        (RENEW, {"tokens": [TOKEN] * 65537}),
        (RENEW, {"tokens": TOKEN}),
        (REQUESTS[1], {"payload": bytes((64 << 10) + 1)}),
        (REPLIES[0], {"planes": [["ucx", b""]] * 9}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else repr(value)[:40],
)
def test_every_field_is_bounded(message, changes):
    assert decode_request(wrapped(raw(message))) if message in REQUESTS else decode_reply(wrapped(raw(message)))
    refused(wrapped(raw(message, **changes)))


def test_a_claimed_length_reserves_no_memory():
    """4 billion spans, tokens, layer names or bytes that are announced and do not follow."""
    fields = msgspec.msgpack.decode(body(ASK))
    claims = []
    for header in (b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x00\x1f\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        for name in fields:
            content = msgspec.msgpack.encode({k: v for k, v in fields.items() if k != name})
            claims.append(bytes([content[0] + 1]) + content[1:] + msgspec.msgpack.encode(name) + header)
    tracemalloc.start()
    try:
        for content in claims:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            refused(wrapped(content))
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes(content):
    refused(wrapped(content))


@pytest.mark.parametrize("message", REQUESTS + REPLIES, ids=lambda message: type(message).__name__)
def test_every_truncation_is_refused(message):
    content = body(message)
    for length in range(len(content)):
        refused(wrapped(content[:length]))


@pytest.mark.parametrize("message", REQUESTS + REPLIES, ids=lambda message: type(message).__name__)
def test_mutations_are_refused_or_still_within_bounds(message):
    """Whatever gets through encodes again to something that gets through: no value escapes the declared bounds."""
    source = random.Random(str(type(message)))
    decode = decode_request if message in REQUESTS else decode_reply
    content = body(message)
    for _ in range(2000):
        mutant = bytearray(content)
        for _ in range(source.randrange(1, 4)):
            place = source.randrange(len(mutant))
            choice = source.randrange(3)
            if choice == 0:
                mutant[place] = source.randrange(256)
            elif choice == 1:
                del mutant[place : place + source.randrange(1, 5)]
            else:
                mutant[place:place] = source.randbytes(source.randrange(1, 5))
            if not mutant:
                break
        try:
            found = decode(wrapped(bytes(mutant)))
        except ProtocolError as error:
            assert str(error).isprintable()
        else:
            assert decode(encode(found)) == found


def test_the_largest_real_messages_fit():
    """8192 layer names, a grant for 2**20 tokens, and an ask with all the spans that one may have."""
    names = tuple(f"language_model.model.layers.{n}.self_attn.attn" for n in range(512))
    region = msgspec.structs.replace(GROUP, layers=names)
    geometry = msgspec.structs.replace(GEOMETRY, regions=(region,) * 16)
    hello = msgspec.structs.replace(HELLO, geometry=geometry)
    grant = msgspec.structs.replace(GRANT, block_ids=(bytes(4 << 20),))
    ask = msgspec.structs.replace(ASK, spans=(SPAN,) * MAX_SPANS)
    largest: list[tuple[Any, Callable[..., object]]] = [
        (hello, decode_request),
        (ask, decode_request),
        (grant, decode_reply),
    ]
    for message, decode in largest:
        frames = encode(message)
        limit = MAX_REPLY_BYTES if message is grant else MAX_REQUEST_BYTES
        assert sum(map(len, frames)) <= limit
        assert decode(frames) == message
