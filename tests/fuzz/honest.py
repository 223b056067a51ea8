"""What honest peers say, how inputs are mutated from it, by a seed, and what a decoder is."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.geometry.spans import Span
from kvferry.connector.wire import messages
from kvferry.connector.wire.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.wire.step_plan import PeerEngine, pack_ids
from kvferry.transport import grant_board
from kvferry.transport.errors import ProtocolError
from tests.support.ranks import Rank

INTERESTING = [0, 1, 2, 15, 16, 127, 128, 255, 256, 4095, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
               1 << 32, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1, -1, -128, -(1 << 31),
               -(1 << 63)]  # fmt: skip
TEXTS = ["", "a", "\0", "\n", "\u2028", "\ud800", "é" * 300, "%s%n", "x" * 5000, "../" * 20, "127.0.0.1", "::1", "type"]
OTHERS: list[Any] = [float("nan"), float("inf"), -0.0, 1e308, 0.5, None, None, [], {"": 1}, {"type": -1}, True, False]
LARGE_IN = 4000
"""One input of so many is large: up to a MiB, or nested deeply."""
HEADS = bytes(range(0xC0, 0xE0)) + b"\x80\x8f\x90\x9f\xa0\xbf\x7f"
"""MessagePack's heads: nil, booleans, bin, ext, floats, integers, str, array and map with counts, short ones."""
COUNTS = (b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff", b"\x00\x10\x00\x00", b"\xff\xff", b"\0\1")


class Mutator:
    """Makes inputs from a corpus. The same seed and corpus give the same inputs."""

    def __init__(self, rng: random.Random, corpus: Sequence[bytes], codec: str = "msgpack") -> None:
        """``codec``: "msgpack", "json", or "" where the bytes have no such structure."""
        self._rng, self._corpus = rng, list(corpus)
        self._codec: Any = msgspec.json if codec == "json" else msgspec.msgpack
        self._values: list[Any] = []
        for item in corpus if codec else ():
            with suppress(msgspec.MsgspecError):
                self._values.append(self._codec.decode(item))

    def next(self) -> bytes:
        """One input; seldom a valid one."""
        rng = self._rng
        if rng.random() < 1 / LARGE_IN:
            return self._large()
        if not self._values or rng.random() < 0.5:
            return self._bytes(rng.choice(self._corpus))
        value = rng.choice(self._values)
        for _ in range(rng.choice((1, 2))):
            value = self._changed(value)
        try:
            return bytes(self._codec.encode(value))
        except (ValueError, OverflowError, TypeError, msgspec.MsgspecError):  # what it has no form for
            return b""

    def _bytes(self, changed: bytes) -> bytes:
        rng, data = self._rng, bytearray(changed)
        for _ in range(1 + int(rng.random() * 3)):
            at = int(rng.random() * (len(data) + 1))
            kind = int(rng.random() * 8)
            if kind == 0 and data:
                data[at % len(data)] ^= 1 << int(rng.random() * 8)
            elif kind == 1 and data:
                data[at % len(data)] = int(rng.random() * 256)
            elif kind == 2:
                del data[at : at + 1 + int(rng.random() * 8)]
            elif kind == 3:
                data[at:at] = rng.randbytes(1 + int(rng.random() * 8))
            elif kind == 4:
                data[at : at + 1] = bytes((rng.choice(HEADS),))
            elif kind == 5:
                data[at : at + 4] = rng.choice(COUNTS)
            elif kind == 6:
                other = rng.choice(self._corpus)
                begin = int(rng.random() * (len(other) + 1))
                data[at : at + int(rng.random() * 64)] = other[begin : begin + int(rng.random() * 64)]
            else:
                del data[at:]
        return bytes(data)

    def _large(self) -> bytes:
        """Long, or nested deeply: what costs a decoder most."""
        rng = self._rng
        piece = rng.choice([b"\x91", b"\x81\xa1a", b"\x90", b"\xc0", b"[", b'{"a":', b"\0", b"\xff", b"\xa1a\x01"])
        head = rng.choice([b"", b"\xdd\x00\x10\x00\x00", b"\xdf\x00\x08\x00\x00", b"\xdb\x00\x0f\xff\x00"])
        return self._bytes(rng.choice(self._corpus))[:200] + head + piece * ((1 << rng.randrange(10, 21)) // len(piece))

    def _changed(self, value: Any) -> Any:
        """A copy with one change, on the way down to a random node."""
        rng, kind = self._rng, self._rng.random()
        if isinstance(value, dict) and value and rng.random() < 0.9:
            changed = dict(value)
            key = rng.choice(list(changed))
            if kind < 0.08:
                del changed[key]
            elif kind < 0.14:
                changed[rng.choice(TEXTS)] = self._value()
            else:
                changed[key] = self._changed(changed[key])
            return changed
        if isinstance(value, list) and value and rng.random() < 0.9:
            items, at = list(value), rng.randrange(len(value))
            if kind < 0.1:
                del items[at]
            elif kind < 0.2:
                items.insert(at, self._value())
            elif kind < 0.25:
                items = (items * rng.choice((2, 10, 70)))[:5000]
            else:
                items[at] = self._changed(items[at])
            return items
        if isinstance(value, bytes) and kind < 0.7:
            return self._bytes(value) if rng.random() < 0.7 else rng.randbytes(len(value))
        if isinstance(value, int) and kind < 0.3:
            return value + rng.choice((-1, 1, 7, 1 << 20))
        return self._value()

    def _value(self) -> Any:
        rng = self._rng
        sizes = (0, 1, 16, 32, 33, 300)
        return rng.choice(rng.choice((INTERESTING, INTERESTING, TEXTS, OTHERS, [rng.randbytes(rng.choice(sizes))])))


Errors = tuple[type[BaseException], ...]
encode = msgspec.msgpack.encode
TOKEN = bytes(range(16))
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
        life, token = context.incarnation, TOKEN
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
            messages.Resolve(number=1, name="tx-1", engine_id="e"),
            messages.Resolve(number=1, name="", prefix=bytes(range(32))), replace(self.ask, prefix=life * 2),
        ]  # fmt: skip
        self.replies: list[messages.Reply] = [
            self.welcome, self.attached, self.grant, messages.Refused(field="f", ours="a", theirs="b"),
            messages.AttachRefused(plane="tcp", reason="r"), messages.Deny(read=1, reason="expired", detail="d"),
            messages.Committed(read=1, ok=True), messages.Closing(reason="r"),
            messages.Unresolved(number=1, final=True, detail="d"),
        ]  # fmt: skip
        self.peer = PeerEngine("engine-f", 1, 1, 30.0, (self.address,))
        self.params = to_transfer_params(RemotePrompt(token, 100, prompt_digest(list(range(100))), self.peer))
        self.answer = msgspec.msgpack.encode(self.params)
        self.replies.append(messages.Resolved(number=1, params=self.answer, streams=True, found=16, step_tokens=64))
        rank.close()
