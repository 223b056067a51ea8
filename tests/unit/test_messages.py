"""The control protocol: what is sent comes back the same, and whatever else arrives is one ProtocolError."""

from __future__ import annotations

import pickle
import random
import struct
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.spans import MAX_SPANS, Span
from kvferry.connector.wire import messages as m
from kvferry.connector.wire.messages import MAGIC, PROTOCOL_VERSION, decode_reply, decode_request, encode
from kvferry.transport.errors import ProtocolError

TOKEN, LIFE = bytes(range(16)), bytes(16)
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
GROUP = RegionGeometry(
    kind="full", layers=LAYERS, block_size=32, head_start=0, num_heads=8, total_heads=8, content_bytes=512,
    dtype="bfloat16",
)  # fmt: skip
GEOMETRY = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(8,), regions=(GROUP,))
SPAN = Span(0, 0, 2, 0, 8, 0, 100)
FACTS: Any = {"engine_id": "P-é-1", "incarnation": LIFE, "geometry": GEOMETRY, "model": {"dtype": "bfloat16"}}
HELLO, ATTACH = m.Hello(**FACTS), m.Attach(plane="ucx", payload=b"\0\xff")
ASK = m.Ask(read=1, token=TOKEN, decode_engine=LIFE, decode_rank=0, expected=(0, 1), spans=(SPAN,), chunk_bytes=1 << 20)
CANCEL, RENEW = m.Cancel(read=1), m.Renew(tokens=(TOKEN, LIFE))
WELCOME = m.Welcome(**FACTS, planes=(m.PlaneOffer("ucx", b"x"),))
REFUSED = m.Refused(field="dtype", ours="float16", theirs="bfloat16")
GRANT = m.Grant(read=1, num_tokens=100, chunks=4, block_ids=(struct.pack("<3i", 5, 0, 7),))
REQUESTS: list[Any] = [
    HELLO, ATTACH, ASK, CANCEL, RENEW,
    m.Commit(read=(1 << 32) - 1, token=TOKEN),
    m.Release(token=TOKEN, decode_engine=LIFE, decode_rank=0, expected=(0,)),
    m.Resolve(number=7, name="tx-é", engine_id="P-é-1", until="granted"),
    m.Resolve(number=7, name="", engine_id="P-é-1", prefix=bytes(32)),
    replace(ASK, prefix=bytes(range(16))),
]  # fmt: skip
REPLIES: list[Any] = [
    WELCOME, REFUSED, GRANT,
    m.AttachRefused(plane="shm", reason="no room", detached=True),
    m.Attached(plane="ucx", slot_bytes=4 << 20),
    m.Deny(read=1, reason="expired"),
    m.Committed(read=1, ok=True),
    m.Closing(reason="the engine ends"),
    m.Resolved(number=7, params=b"\x80", streams=True, found=16, step_tokens=512),
    m.Unresolved(number=7, final=False, detail="no such prompt came in time"),
]  # fmt: skip
EVERY_MESSAGE = pytest.mark.parametrize("message", REQUESTS + REPLIES, ids=lambda message: type(message).__name__)


def refused(frames, *, seconds=1.0):
    """Both decoders refuse, quickly, in one short line."""
    texts = []
    for decode in (decode_request, decode_reply):
        begun = time.thread_time()  # of the processor: a loaded machine may take a break
        with pytest.raises(ProtocolError) as error:
            decode(frames)
        assert time.thread_time() - begun < seconds
        assert not isinstance(error.value, m.VersionError)
        texts.append(str(error.value))
        assert texts[-1].isprintable() and len(texts[-1]) < 1000
    return texts


def body(message):
    return encode(message)[2]


def wrapped(content):
    return [*encode(HELLO)[:2], content]


@EVERY_MESSAGE
def test_messages_come_back_the_same(message):
    decode, other = (decode_request, decode_reply) if message in REQUESTS else (decode_reply, decode_request)
    frames = encode(message)
    assert len(frames) == 3 and decode(frames) == message
    with pytest.raises(ProtocolError):
        other(frames)  # D's word is no answer


def test_every_message_is_tested():
    assert {type(message) for message in REQUESTS} == set(m.Request.__args__)
    assert {type(message) for message in REPLIES} == set(m.Reply.__args__)
    with pytest.raises(AttributeError):
        CANCEL.read = 2  # type: ignore[misc]


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, 65535])
@pytest.mark.parametrize("content", [body(HELLO), b"", b"\xc1 of a later version"])
def test_another_version_is_named_whatever_it_says(version, content):
    for decode in (decode_request, decode_reply):
        with pytest.raises(m.VersionError) as error:
            decode([MAGIC, version.to_bytes(2, "big"), content])
        assert error.value.theirs == version
        text = str(error.value)
        assert f"ours is {PROTOCOL_VERSION}" in text and f"the peer's is {version}" in text and "\n" not in text


@pytest.mark.parametrize(
    "frames",
    [
        [], [b""], [MAGIC], encode(HELLO)[:2], [*encode(HELLO), b""], [b"", *encode(HELLO)],
        [b"KVFERRY", *encode(HELLO)[1:]], [MAGIC, b"", body(HELLO)], [MAGIC, b"\1", body(HELLO)],
        [MAGIC, bytes(3), body(HELLO)], [b"GET / HTTP/1.1\r\n" * 100, b"", b""], [b"\n" * 3, b"\n", b"\n"],
    ],
)  # fmt: skip
def test_what_is_not_ours_is_refused(frames):
    refused(frames)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xc0", b"\xc1", b"\x80", b"\x90",
        msgspec.json.encode(HELLO), pickle.dumps(CANCEL.read), pickle.dumps({"type": "Hello"}, protocol=0),
        b"cos\nsystem\n(S'true'\ntR.", b"\x91" * 100_000, b"\x81\xa1a" * 100_000,
        *(header + b"\xff" * 4 for header in (b"\xdd", b"\xdf", b"\xdb", b"\xc6")), b"\xc9\xff\xff\xff\xff\0",
        *(msgspec.msgpack.encode({"type": kind}) for kind in ("Nonsense", 5, "Hello", "x\n\x1b[31m" * 1000)),
        body(CANCEL) + b"\0", body(CANCEL) * 2,
    ],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_malformed_bodies_are_refused(content):
    refused(wrapped(content))


def test_a_body_over_the_limit_is_refused_before_it_is_read():
    texts = refused(wrapped(bytes(m.MAX_REPLY_BYTES + 1)))
    for text, limit in zip(texts, (m.MAX_REQUEST_BYTES, m.MAX_REPLY_BYTES), strict=True):
        assert str(m.MAX_REPLY_BYTES + 1) in text and f"limit {limit}" in text


def raw(message, **changes):
    """The body of ``message`` with fields replaced by anything."""
    fields = msgspec.msgpack.decode(body(message))
    return msgspec.msgpack.encode({**fields, **changes})


FORM, REGION = msgspec.to_builtins(GEOMETRY), msgspec.to_builtins(GROUP)


@pytest.mark.parametrize(
    ("message", "field", "values"),
    [
        (ASK, "read", [-1, 1 << 32, 1.0, "1", True, None]),
        (ASK, "token", [b"short", bytes(17), 5]),
        (ASK, "decode_engine", [bytes(15)]),
        (ASK, "decode_rank", [1 << 40]),
        (ASK, "expected", [[], [0] * 4097, [-1]]),
        (ASK, "spans", [[[0, 0, 2, 0, 8, 0]], [[0, 0, 2, 0, 8, 0, 100, 1]], [[0, 0, 0, 0, 8, 0, 100]],
                        [[0, 0, 2, 0, 8, 0, 1 << 63]], [[0, 0, 2, 0, 8, 0, 1]] * 8193]),
        (ASK, "chunk_bytes", [0]),
        (ASK, "more", [1]),
        (GRANT, "chunks", [1 << 33]),
        (GRANT, "block_ids", [[b""] * 257, [bytes((4 << 20) + 1)], [[1, 2, 3]]]),
        (m.Deny(read=1, reason="expired"), "reason", ["because"]),
        (m.Deny(read=1, reason="expired"), "detail", ["x" * 1025, "two\nlines"]),
        (REFUSED, "theirs", ["\x1b[31mred", "end\n", "a\u2028b"]),
        (HELLO, "engine_id", ["", "x" * 257, "a\r\nb"]),
        (HELLO, "model", [{str(n): "" for n in range(65)}, {"a": 1}]),
        (HELLO, "geometry", [{}, {**FORM, "tp_size": 0}]),
        (HELLO, "geometry", [{**FORM, "regions": [{**REGION, **wrong}]} for wrong in ({"x": 1}, {"kind": "?"})]),
        (HELLO, "geometry", [{**FORM, "regions": [REGION] * 257}]),
        (RENEW, "tokens", [[TOKEN] * 65537, TOKEN]),
        (ATTACH, "payload", [bytes((64 << 10) + 1)]),
        (WELCOME, "planes", [[["ucx", b""]] * 9]),
    ],
    ids=lambda value: value if isinstance(value, str) else "" if isinstance(value, list) else type(value).__name__,
)  # fmt: skip
def test_every_field_is_bounded(message, field, values):
    assert (decode_request if message in REQUESTS else decode_reply)(wrapped(raw(message))) == message
    for value in values:
        refused(wrapped(raw(message, **{field: value})))


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
@settings(deadline=None)
def test_random_bytes(content):
    refused(wrapped(content))


@EVERY_MESSAGE
def test_truncations_and_mutations_are_refused_or_still_within_bounds(message):
    """Whatever gets through encodes again to something that gets through: no value escapes the declared bounds."""
    source = random.Random(str(type(message)))
    decode, content = decode_request if message in REQUESTS else decode_reply, body(message)
    for length in range(len(content)):
        refused(wrapped(content[:length]))
    for _ in range(500):
        mutant = bytearray(content)
        for _ in range(source.randrange(1, 4)):
            place = source.randrange(len(mutant))
            match source.randrange(3):
                case 0:
                    mutant[place] = source.randrange(256)
                case 1 if len(mutant) > 5:
                    del mutant[place : place + source.randrange(1, 5)]
                case _:
                    mutant[place:place] = source.randbytes(source.randrange(1, 5))
        try:
            found = decode(wrapped(bytes(mutant)))
        except ProtocolError as error:
            assert str(error).isprintable()
        else:
            assert decode(encode(found)) == found


def test_the_largest_real_messages_fit():
    """8192 layer names, a grant for 2**20 tokens, and an ask with all the spans that one may have."""
    names = tuple(f"language_model.model.layers.{n}.self_attn.attn" for n in range(512))
    geometry = replace(GEOMETRY, regions=(replace(GROUP, layers=names),) * 16)
    for message, decode, limit in (
        (replace(HELLO, geometry=geometry), decode_request, m.MAX_REQUEST_BYTES),
        (replace(ASK, spans=(SPAN,) * MAX_SPANS), decode_request, m.MAX_REQUEST_BYTES),
        (replace(GRANT, block_ids=(bytes(4 << 20),)), decode_reply, m.MAX_REPLY_BYTES),
    ):
        frames = encode(message)
        assert sum(map(len, frames)) <= limit and decode(frames) == message
