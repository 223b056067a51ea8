"""The control protocol: tagged msgspec structs in MessagePack, every field bounded. Pure, no sockets.

A message is three frames: ``MAGIC``, the protocol version (2 bytes, big endian), the struct. The version stands
outside the struct, so that peers of different versions can still refuse each other by name.

D asks, P answers. One hand-over from one P rank to one D rank is a *read*, numbered by D::

    D                                   P
    Hello(geometry, model)          ──▶
                                    ◀── Welcome(geometry, planes on offer) | Refused
    Attach(plane, payload)          ──▶
                                    ◀── Attached | Refused            (once per pair of ranks)
    Renew(tokens)                   ──▶                               (any time while D waits)
    Ask(read, token, spans)         ──▶ held if the lease is not there yet
                                    ◀── Grant(read, ready, chunks) | Deny
                                    ◀══ chunks on the data plane
    Commit(read)                    ──▶                               (where D reads P's pages by itself)
                                    ◀── Committed(ok)
    Release(token)                  ──▶
    Cancel(read)                    ──▶                               (any time after Ask)
                                    ◀── Stopped(read, sent)

Streaming during prefill needs no new message: a Grant names the tokens that are ready, and more Grants of the same
read, with the same epoch, may follow.

Version history: 1, the first; 2, grants posted on a board, large messages smaller at both ends of a span; 3, a last
byte behind each message over TCP; 4, one small message at the end of a span; 5, fields by their present names, a
refusal with typed fields, grants without the unused ``epoch`` and ``ready``.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvferry.connector.geometry.rank_geometry import MAX_REGIONS, PRINTABLE, Count, Name, PageLayout, RankGeometry, Size
from kvferry.connector.geometry.spans import Span
from kvferry.transport.errors import ProtocolError
from kvferry.transport.grant_board import BoardAddress

MAGIC = b"kvferry"
PROTOCOL_VERSION = 5
MAX_MESSAGE_BYTES = 8 << 20
"""Bound on one control message; 8192 layer names or 2 million block ids fit."""

Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""Names a lease: 128 random bits, so that knowing one is permission to read."""
Incarnation = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""Names one life of one rank; new at every start."""
ReadNumber = Annotated[int, Meta(ge=0, lt=1 << 32)]
Text = Annotated[str, Meta(max_length=1024, pattern=PRINTABLE)]
PlanePayload = Annotated[bytes, Meta(max_length=64 << 10)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    pass


class PlaneOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data plane that P can serve; ``payload`` is the plane's own affair."""

    name: Name
    payload: PlanePayload


class Hello(_Message, frozen=True):
    """D's first word. ``model`` holds the facts that must agree, by name; ``converts``: dtypes need not."""

    engine_id: Name
    incarnation: Incarnation
    geometry: RankGeometry
    model: Annotated[dict[Name, Text], Meta(max_length=64)]
    converts: bool = False


class Welcome(_Message, frozen=True):
    engine_id: Name
    incarnation: Incarnation
    geometry: RankGeometry
    model: Annotated[dict[Name, Text], Meta(max_length=64)]
    planes: Annotated[tuple[PlaneOffer, ...], Meta(max_length=8)]


class Refused(_Message, frozen=True):
    """The handshake is over: which field, and both values."""

    field: Name
    ours: Text
    theirs: Text


class Attach(_Message, frozen=True):
    """D's choice of plane; ``payload`` answers the offer's."""

    plane: Name
    payload: PlanePayload


class Attached(_Message, frozen=True):
    """The plane is P's too. For planes where D reads P's pages, ``pages`` per region and ``board``, on which P's grants
    are posted."""

    plane: Name
    slot_bytes: Size
    payload: PlanePayload = b""
    board: BoardAddress | None = None
    pages: Annotated[tuple[PageLayout, ...], Meta(max_length=MAX_REGIONS)] = ()


class Ask(_Message, frozen=True):
    """Read ``spans`` under the lease ``token``.

    ``consumer`` names this life of D's engine, the same on all of its ranks. ``expected`` are D's ranks that will
    release the lease at this P rank (``TpKVTopology.expected_consumers``); the first ask of a consumer fixes them.
    ``chunk_bytes`` bounds one chunk; both sides cut spans by ``spans.chunks``.
    """

    read: ReadNumber
    token: Token
    consumer: Incarnation
    consumer_rank: Count
    expected: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]
    spans: Annotated[tuple[Span, ...], Meta(max_length=8192)]
    chunk_bytes: Size


class Grant(_Message, frozen=True):
    """The read may proceed: of its tokens ``ready`` are there, and ``chunks`` messages will come for them.

    ``prompt`` is the digest of what the lease covers (``params.prompt_digest``, which counts the tokens in).
    ``epoch`` changes when what was granted is no longer true (preemption of a running prompt).
    ``block_ids`` are packed little-endian int32, one run per region, for planes where D reads P's pages.
    """

    read: ReadNumber
    epoch: Count
    num_tokens: Count
    ready: Count
    chunks: Count
    prompt: Annotated[str, Meta(max_length=64)] = ""
    block_ids: Annotated[tuple[Annotated[bytes, Meta(max_length=4 << 20)], ...], Meta(max_length=MAX_REGIONS)] = ()


DenyReason = Literal["expired", "unknown", "bounds", "detached", "failed"]


class Deny(_Message, frozen=True):
    read: ReadNumber
    reason: DenyReason
    detail: Text = ""


class Cancel(_Message, frozen=True):
    """D gives the read up; ``posted`` chunks have receives that only a message can end."""

    read: ReadNumber
    posted: Count


class Stopped(_Message, frozen=True):
    """Of the read, ``sent`` chunks are or will be on the data plane, and no more."""

    read: ReadNumber
    sent: Count


class Commit(_Message, frozen=True):
    """Is all I read from your pages under this token still true?"""

    read: ReadNumber
    token: Token


class Committed(_Message, frozen=True):
    read: ReadNumber
    ok: bool


class Release(_Message, frozen=True):
    """A vote to free: rank ``consumer_rank`` of the D engine ``consumer`` will not read under this token again."""

    token: Token
    consumer: Incarnation
    consumer_rank: Count
    expected: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=4096)]


class Renew(_Message, frozen=True):
    tokens: Annotated[tuple[Token, ...], Meta(max_length=65536)]


Request = Hello | Attach | Ask | Cancel | Commit | Release | Renew
Reply = Welcome | Refused | Attached | Grant | Deny | Stopped | Committed
Message = Request | Reply

_grant_decoder: msgspec.msgpack.Decoder[Grant] = msgspec.msgpack.Decoder(Grant)
_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_VERSION_FRAME = PROTOCOL_VERSION.to_bytes(2, "big")


def encode(message: Message) -> list[bytes]:
    """The frames of a message."""
    return [MAGIC, _VERSION_FRAME, _encoder.encode(message)]


def encode_grant(grant: Grant) -> bytes:
    """A grant to whoever reads it, as a note on a board."""
    return _encoder.encode(grant)


def decode_grant(note: bytes) -> Grant:
    """The inverse. Raises ProtocolError."""
    return _decode(_grant_decoder, [MAGIC, _VERSION_FRAME, note])


def _body(frames: list[bytes]) -> bytes:
    if len(frames) != 3 or frames[0] != MAGIC or len(frames[1]) != 2:
        raise ProtocolError(f"not a KVFerry message: {len(frames)} frames, first {frames[0][:16] if frames else b''!r}")
    if frames[1] != _VERSION_FRAME:
        theirs = int.from_bytes(frames[1], "big")
        raise VersionError(theirs)
    if len(frames[2]) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frames[2])} bytes, limit {MAX_MESSAGE_BYTES}")
    return frames[2]


class VersionError(ProtocolError):
    """The peer speaks another protocol version."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"protocol version differs, ours is {PROTOCOL_VERSION}, the peer's is {theirs}; "
            "run the same KVFerry release on both sides"
        )
        self.theirs = theirs


def decode_request(frames: list[bytes]) -> Request:
    """What D sent. Raises ProtocolError (VersionError for another version) on anything else."""
    return _decode(_request_decoder, frames)


def decode_reply(frames: list[bytes]) -> Reply:
    """What P answered. Raises ProtocolError (VersionError for another version) on anything else."""
    return _decode(_reply_decoder, frames)


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], frames: list[bytes]) -> _T:
    try:
        return decoder.decode(_body(frames))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        # The text can quote the peer: one short line of it, escaped.
        raise ProtocolError(f"malformed message: {str(error)[:300].encode('unicode_escape').decode()}") from None
