"""The control protocol: tagged msgspec structs in MessagePack, every field bounded. Pure, no sockets.

A message is three frames: ``MAGIC``, the protocol version (2 bytes, big endian), the struct. The version stands
outside the struct, so that peers of different versions can still refuse each other by name.

D asks, P answers. One hand-over from one P rank to one D rank is a *read*, numbered by D::

    D                                   P
    Hello(geometry, model)          ──▶
                                    ◀── Welcome(geometry, planes on offer) | Refused
    Attach(plane, payload)          ──▶
                                    ◀── Attached | AttachRefused      (once per pair of ranks)
    Resolve(number, name)           ──▶ held until P begins, or grants, a prompt of this name
                                    ◀── Resolved(number, params) | Unresolved
    Resolve(number, prefix)         ──▶
                                    ◀── Resolved(number, params, found) | Unresolved
    Renew(tokens)                   ──▶                               (any time while D waits)
    Ask(read, token, spans)         ──▶ held if the lease is not there yet
                                    ◀── Grant(read, chunks) | Deny
                                    ◀══ chunks on the data plane
    Commit(read)                    ──▶                               (where D reads P's pages by itself, and the
                                                                       grant board does not tell it as much)
                                    ◀── Committed(ok)
    Release(token)                  ──▶
    Cancel(read)                    ──▶                               (any time after Ask)
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvferry.connector.geometry.rank_geometry import MAX_REGIONS, Count, Name, PageLayout, RankGeometry
from kvferry.connector.geometry.spans import MAX_SPANS, Span
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.transport.errors import PRINTABLE, ProtocolError
from kvferry.transport.grant_board import BoardAddress

MAGIC = b"kvferry"
PROTOCOL_VERSION = 2
MAX_REPLY_BYTES = 8 << 20
"""Bound on one message of P; 2 million block ids fit."""
MAX_REQUEST_BYTES = 1 << 20
"""Bound on one message of D; 8192 layer names, or ``MAX_SPANS`` spans, fit. P serves many peers by one thread."""
IDLE_LINK_SECONDS = 120.0
"""D closes a link that was not used for this time, so that its staging memory serves other peers."""
MIN_SLOT_BYTES = (64 << 10) - 64
"""Bound on the size of a slot or chunk that a peer names: the least setting, less some bytes that a plane takes for
itself."""
MAX_RENEWED = 4096
"""Tokens of one Renew."""
DOCTORS_FIELD = "~kvferry doctor"
"""A field of the model identity that no engine has, and ``kvferry doctor`` names. It is the last one in the order of
comparison, so a Hello with it is refused even where all other fields agree."""
MAX_PARAMS_BYTES = 1 << 20
"""Bound on ``kv_transfer_params`` in MessagePack: the addresses of 4096 ranks fit."""

Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""Names a lease: 128 random bits. A D that sends this token may read."""
Incarnation = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""Names one life of one rank; new at every start."""
ReadNumber = Annotated[int, Meta(ge=0, lt=1 << 32)]
DecodeRank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
"""A rank of D's engine, over all pipeline stages. P keeps one bit for each."""
DecodeRanks = Annotated[tuple[DecodeRank, ...], Meta(min_length=1, max_length=MAX_RANKS)]
SlotBytes = Annotated[int, Meta(ge=MIN_SLOT_BYTES, le=1 << 31)]
Text = Annotated[str, Meta(max_length=1024, pattern=PRINTABLE)]
PlanePayload = Annotated[bytes, Meta(max_length=64 << 10)]
PREFIX_TOKENS = 16
"""Tokens between two prefixes that have a digest."""
DIGEST_BYTES = 16
MAX_DIGESTS = 1 << 15
"""Digests of one message; of a prompt of 512 K tokens."""
PrefixDigests = Annotated[bytes, Meta(max_length=MAX_DIGESTS * DIGEST_BYTES)]
"""Of a prompt's prefixes (``scheduler/prefixes.py``), one behind the other."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    pass


class PlaneOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data plane that P can serve. Only the plane itself interprets ``payload``."""

    name: Name
    payload: PlanePayload


class Hello(_Message, frozen=True):
    """D's first message. ``model``: the model identity, by field name; both sides must agree. ``converts``: D accepts
    other dtypes and converts them."""

    engine_id: Name
    incarnation: Incarnation
    geometry: RankGeometry
    model: Annotated[dict[Name, Text], Meta(max_length=64)]
    converts: bool = False


class Welcome(_Message, frozen=True):
    """P's answer."""

    engine_id: Name
    incarnation: Incarnation
    geometry: RankGeometry
    model: Annotated[dict[Name, Text], Meta(max_length=64)]
    planes: Annotated[tuple[PlaneOffer, ...], Meta(max_length=8)]


class Refused(_Message, frozen=True):
    """P does not serve this D: the field that differs, and both values."""

    field: Name
    ours: Text
    theirs: Text


class Attach(_Message, frozen=True):
    """D's choice of a data plane. ``payload`` answers the payload of the offer."""

    plane: Name
    payload: PlanePayload


class Attached(_Message, frozen=True):
    """P has attached the data plane too. Where D reads P's pages, ``pages`` holds the layout of each region, and
    ``board`` the address of the grant board, on which P posts its grants."""

    plane: Name
    slot_bytes: SlotBytes
    payload: PlanePayload = b""
    board: BoardAddress | None = None
    pages: Annotated[tuple[PageLayout, ...], Meta(max_length=MAX_REGIONS)] = ()


class AttachRefused(_Message, frozen=True):
    """P does not attach this data plane; D may choose another one. ``detached``: P has no session with this D, or ends
    it unasked, so it attaches none before another Hello."""

    plane: Name
    reason: Text
    detached: bool = False


class Ask(_Message, frozen=True):
    """Read ``spans`` under the lease ``token``.

    ``decode_engine`` names this life of D's engine, the same on all of its ranks. ``expected`` are D's ranks that will
    release the lease at this P rank (``TpKVTopology.expected_consumers``); the first ask of a decode engine fixes them.
    ``chunk_bytes`` bounds one chunk; both sides cut spans by ``spans.cut_span``. ``prefix``: D reads the prefix with
    the last of these digests, under a token that it has drawn; empty under a lease.
    """

    read: ReadNumber
    token: Token
    decode_engine: Incarnation
    decode_rank: DecodeRank
    expected: DecodeRanks
    spans: Annotated[tuple[Span, ...], Meta(max_length=MAX_SPANS)]
    chunk_bytes: SlotBytes
    prefix: PrefixDigests = b""


class Resolve(_Message, frozen=True):
    """D asks for the lease of the prompt that P knows by ``name``: a transfer id, or a request id. Needs no handshake.

    ``until``: P answers when it has begun to compute the prompt, or when it has granted its lease. Where that does not
    happen within ``ask_hold_seconds``, P answers ``Unresolved``, and D may ask again. ``engine_id``: the engine that D
    means; empty where D does not know it. ``prefix``: in place of a name; D asks how many leading tokens of a prompt P
    has now, and P answers at once.
    """

    number: ReadNumber
    name: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)]
    engine_id: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)] = ""
    until: Literal["begun", "granted"] = "begun"
    prefix: PrefixDigests = b""


class Resolved(_Message, frozen=True):
    """P's answer: ``params`` are the ``kv_transfer_params`` of the lease, in MessagePack. ``streams``, ``found`` and
    ``step_tokens``: as in ``step_plan.Prefill``. ``granted``: the lease is granted, or P has computed the
    prompt and has posted the grant; ``streams`` is false then. Of a prefix: ``found`` leading tokens of the
    prompt are here, and ``params`` name P's ranks, but no lease."""

    number: ReadNumber
    params: Annotated[bytes, Meta(max_length=MAX_PARAMS_BYTES)]
    granted: bool = False
    streams: bool = False
    found: Count = 0
    step_tokens: Count = 0


class Unresolved(_Message, frozen=True):
    """What D asked for has not happened. ``final``: D must not ask again, because P will hand no such prompt over.
    ``known``: P's engine has the prompt, in its queue or under way, and has taken a step since D asked."""

    number: ReadNumber
    final: bool
    known: bool = False
    detail: Text = ""


class Grant(_Message, frozen=True):
    """The read may proceed: ``chunks`` messages will come for its tokens. P repeats it without block ids while it
    computes tokens of the read, as a sign of life.

    ``num_tokens`` and ``digest`` describe the prompt that the lease covers: its length, and the digest of its tokens
    (``prompt_digest`` of ``params.py``).
    ``block_ids`` are packed little-endian int32, one run per region, for planes where D reads P's pages.
    """

    read: ReadNumber
    num_tokens: Count
    chunks: Count
    digest: Annotated[str, Meta(max_length=64)] = ""
    block_ids: Annotated[tuple[Annotated[bytes, Meta(max_length=4 << 20)], ...], Meta(max_length=MAX_REGIONS)] = ()


DenyReason = Literal["expired", "unknown", "bounds", "detached", "failed"]


class Deny(_Message, frozen=True):
    read: ReadNumber
    reason: DenyReason
    detail: Text = ""


class Cancel(_Message, frozen=True):
    """D cancels the read. D drops what P has sent, and what P sends before it takes this message."""

    read: ReadNumber


class Commit(_Message, frozen=True):
    """D asks whether the lease of this token still exists, so that all data that D read under it are valid."""

    read: ReadNumber
    token: Token


class Committed(_Message, frozen=True):
    read: ReadNumber
    ok: bool


class Closing(_Message, frozen=True):
    """P closes this connection: its leases have ended, and it grants no more under this incarnation."""

    reason: Text


class Release(_Message, frozen=True):
    """A vote to end the lease: this rank of this decode engine will not read under this token again. Fields as in
    ``Ask``."""

    token: Token
    decode_engine: Incarnation
    decode_rank: DecodeRank
    expected: DecodeRanks


class Renew(_Message, frozen=True):
    tokens: Annotated[tuple[Token, ...], Meta(max_length=MAX_RENEWED)]


Request = Hello | Attach | Ask | Cancel | Commit | Release | Renew | Resolve
HandshakeReply = Welcome | Refused | Attached | AttachRefused
Reply = HandshakeReply | Grant | Deny | Committed | Closing | Resolved | Unresolved
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
    """The bytes of a posted grant on a grant board."""
    return _encoder.encode(grant)


def decode_grant(note: bytes) -> Grant:
    """The inverse of ``encode_grant``. Raises ProtocolError for malformed bytes."""
    return _decode(_grant_decoder, [MAGIC, _VERSION_FRAME, note])


def _body(frames: list[bytes], limit: int) -> bytes:
    if len(frames) != 3 or frames[0] != MAGIC or len(frames[1]) != 2:
        raise ProtocolError(f"not a KVFerry message: {len(frames)} frames, first {frames[0][:16] if frames else b''!r}")
    if frames[1] != _VERSION_FRAME:
        theirs = int.from_bytes(frames[1], "big")
        raise VersionError(theirs)
    if len(frames[2]) > limit:
        raise ProtocolError(f"message of {len(frames[2])} bytes, limit {limit}")
    return frames[2]


VERSION = "protocol version"
"""The field of ``Refused`` to a peer of another version: P answers none of its messages."""


class VersionError(ProtocolError):
    """The peer uses another protocol version."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"protocol version differs, ours is {PROTOCOL_VERSION}, the peer's is {theirs}; "
            "run the same KVFerry release on both sides"
        )
        self.theirs = theirs


def decode_request(frames: list[bytes]) -> Request:
    """Decode a message of D. Raises VersionError for another version, and ProtocolError for any other fault."""
    return _decode(_request_decoder, frames, MAX_REQUEST_BYTES)


def decode_reply(frames: list[bytes]) -> Reply:
    """Decode a message of P. Raises VersionError for another version, and ProtocolError for any other fault."""
    return _decode(_reply_decoder, frames)


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], frames: list[bytes], limit: int = MAX_REPLY_BYTES) -> _T:
    try:
        return decoder.decode(_body(frames, limit))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        # The error text can quote the peer, so it is cut to one short line and escaped.
        raise ProtocolError(f"malformed message: {str(error)[:300].encode('unicode_escape').decode()}") from None
