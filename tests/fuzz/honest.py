"""What honest peers say, from which the inputs are mutated, and what a decoder is."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.connector.config import Settings
from kvferry.connector.engine.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.geometry.spans import Span
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine, pack_ids
from kvferry.transport import grant_board
from kvferry.transport.errors import ProtocolError
from tests.support.ranks import Rank

Errors = tuple[type[BaseException], ...]
encode = msgspec.msgpack.encode
FOUND: Mapping[str, Sequence[bytes]] = {
    # A counter below 0: OverflowError on D's thread in place of no grant.
    "slots of a grant board": [struct.pack("<q16s16sI", -500, bytes(range(16)), bytes(16), 134) + bytes(134)]
}
"""Inputs that once did what they must not do, by decoder. They are in the corpus of every run."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """``run`` takes one input. ``may_raise``: the documented errors. ``codec``: as ``Mutator`` takes it. ``share``: how
    many of all inputs it gets, against the others; slow ones get few."""

    name: str
    corpus: list[bytes]
    run: Callable[[bytes], object]
    may_raise: Errors = (ProtocolError,)
    codec: str = "msgpack"
    share: float = 1.0


class Honest:
    """What an honest pair says: the corpus. A rank without a peer, whose planes make real offers."""

    def __init__(self) -> None:
        rank = Rank(engine_id="engine-f", blocks=32, settings=Settings(plane="shm"))
        context = rank.worker.rank_context
        assert context is not None
        self.geometry, self.model, self.address = context.caches.geometry, dict(context.model), rank.address
        self.pages = context.caches.page_layouts()
        life, token = context.incarnation, bytes(range(16))
        span = Span(0, 0, 4, 0, 4, 0, 100)
        ranks = (0, 1, 2)
        self.hello = messages.Hello(engine_id="e", incarnation=life, geometry=self.geometry, model=self.model)
        offers = (messages.PlaneOffer("shm", encode({"a": b"x" * 40})), messages.PlaneOffer("tcp", b""))
        self.welcome = messages.Welcome(
            engine_id="e", incarnation=life, geometry=self.geometry, model=self.model, planes=offers
        )
        board = grant_board.BoardAddress(7, token)
        self.attached = messages.Attached(plane="cma", slot_bytes=1 << 20, payload=b"x", board=board, pages=self.pages)
        self.ask = messages.Ask(
            read=1, token=token, decode_engine=life, decode_rank=0, expected=ranks, spans=(span,), chunk_bytes=1 << 16
        )
        self.grant = messages.Grant(read=1, num_tokens=100, chunks=3, digest="ab", block_ids=(pack_ids([1, 2, 9]),))
        self.requests: list[messages.Request] = [
            self.hello, self.ask, messages.Attach(plane="tcp", payload=b"y" * 30), messages.Cancel(read=3),
            messages.Commit(read=3, token=token), messages.Renew(tokens=(token, token)),
            messages.Release(token=token, decode_engine=life, decode_rank=1, expected=ranks),
            messages.Resolve(number=1, name="tx-1", engine_id="e"), messages.LeaveName(number=1),
            messages.FindPrefix(number=1, digests=bytes(range(32))), messages.LendPrefix(token=life, digests=life * 2),
        ]  # fmt: skip
        self.replies: list[messages.Reply] = [
            self.welcome, self.attached, self.grant, messages.Refused(field="f", ours="a", theirs="b"),
            messages.AttachRefused(plane="tcp", reason="r"), messages.Deny(read=1, reason="expired", detail="d"),
            messages.Stopped(read=1, sent=2), messages.Committed(read=1, ok=True), messages.Closing(reason="r"),
            messages.Unresolved(number=1, final=True, detail="d"),
        ]  # fmt: skip
        self.peer = PeerEngine("engine-f", 1, 1, 30.0, (self.address,))
        self.params = to_transfer_params(RemotePrompt(token, 100, prompt_digest(list(range(100))), self.peer))
        self.answer = msgspec.msgpack.encode(self.params)
        self.replies.append(messages.Resolved(number=1, params=self.answer, streams=True, found=16, step_tokens=64))
        rank.close()
