"""Hand-overs of one test: ranks, a prompt in scattered blocks, a stage that stands still, peers that speak by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kvferry.connector.geometry.spans import Span
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, StepPlan, pack_ids
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.shm import ShmPlane
from tests.support.inside import leases_of
from tests.support.pair import RemoteRank
from tests.support.ranks import Rank, Timed, grant, load_plan, peer, wait
from tests.transport.control_ends import Dialed
from tests.transport.plane_pair import PULL, PUSH, host_planes

TOKENS, THEIRS, OURS = 100, [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]
"""A prompt, and its blocks on P and on D."""
OTHERS = [20, 14, 12, 21, 13, 15, 22]
"""Blocks of D for a second load."""
PLANES = host_planes(PUSH, PULL)
"""Those of caches in host memory."""
PATIENT: dict[str, Any] = {
    "handshake_timeout_seconds": 600.0, "transfer_timeout_seconds": 600.0, "ask_hold_seconds": 600.0,
    "lease_seconds": 600.0, "handover_timeout_seconds": 600.0,
}  # fmt: skip
"""Settings: nothing ends because time is over, and no attempt follows one that failed."""
SMALL: dict[str, Any] = {"slot_bytes": 64 << 10, "staging_bytes": 1 << 20}
"""Slots so small that a hand-over takes several."""
WIDE: dict[str, Any] = {"content": 512, "layers": 16}
"""A hand-over of 13 MB."""

ReplyT = TypeVar("ReplyT")
Pair = tuple[Rank, Rank]


class RankGroup:
    """Makes ranks for one test. Their options are those of ``Rank``, and settings by their names."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.made: list[Any] = []

    def rank(self, **options: Any) -> Rank:
        own = {name: options.pop(name) for name in Timed.__struct_fields__ if name in options}
        if own:
            options["settings"] = Timed(**own)
        rank = Rank(**options)
        self.ranks.append(rank)
        return rank

    def process(self, **options: Any) -> RemoteRank:
        own = {name: options.pop(name) for name in Timed.__struct_fields__ if name in options}
        process = RemoteRank(settings=own, **options)
        self.made.append(process)
        return process

    def pair(
        self, of_d: dict[str, Any] | None = None, of_p: dict[str, Any] | None = None, **both: Any
    ) -> tuple[Rank, Rank]:
        """P, which has computed the prompt, and D."""
        p = self.rank(**{"engine_id": "engine-p", **both, **(of_p or {})})
        d = self.rank(**{"engine_id": "engine-d", **both, **(of_d or {})})
        p.fill(THEIRS, TOKENS)
        return p, d

    def raw(self, p: Rank, like: Rank, *, attached: bool = True) -> RawD:
        raw = RawD(p, like)
        self.made.append(raw)
        if attached:
            raw.attach(raw.greet())
            raw.answer(messages.Attached)
        return raw

    def close(self) -> None:
        for each in (*self.made, *self.ranks):
            each.close()


class Gate:
    """Replaces ``owner.name`` by something that returns ``shut`` until ``open``."""

    def __init__(self, owner: Any, name: str, shut: Callable[..., Any]) -> None:
        self._owner, self._name, self._real = owner, name, getattr(owner, name)
        self.calls = 0

        def gate(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return shut(*args, **kwargs)

        setattr(owner, name, gate)

    def open(self) -> None:
        setattr(self._owner, self._name, self._real)


def breaks(*_: Any, **__: Any) -> Any:
    """In place of any function."""
    raise OSError(24, "planted")


def lease_plan(token: bytes, name: str = "req", **options: Any) -> StepPlan:
    """P's engine leases the prompt."""
    return StepPlan(leases=(LeaseGrant(f"{name}-p", token, TOKENS, (pack_ids(THEIRS),), **options),))


def leased(p: Rank, name: str = "req") -> bytes:
    """The token of a lease that P has of the prompt."""
    token = grant([p], f"{name}-p", THEIRS, TOKENS)
    assert wait(lambda: token in leases_of(p))
    return token


def load_from(p: Rank, d: Rank, token: bytes, name: str = "req", **options: Any) -> None:
    """Load the prompt on D as ``name-d``."""
    d.worker.post(load_plan(f"{name}-d", token, peer([p]), OURS, 0, TOKENS, **options))


def begin(
    p: Rank, d: Rank, name: str = "req",
    tokens: int = TOKENS, theirs: Sequence[int] = THEIRS, ours: Sequence[int] = OURS, now: bool = False,
) -> bytes:  # fmt: skip
    """Lease a prompt on P as ``name-p`` and load it on D as ``name-d``; the token."""
    token = grant([p], f"{name}-p", theirs, tokens)
    d.worker.post(load_plan(f"{name}-d", token, peer([p]), ours, 0, tokens, now=now))
    return token


def ended(p: Rank, d: Rank, name: str = "req") -> bool:
    """Wait until a hand-over is reported and its lease has ended. Whether it was loaded; then D has P's bytes."""
    assert wait(lambda: f"{name}-d" in d.received and f"{name}-p" in p.sent, [p, d])
    loaded = f"{name}-d" not in d.failed
    assert not loaded or has_all(d)
    return loaded


def has_all(d: Rank, blocks: Sequence[int] = OURS) -> bool:
    """Whether D has all bytes of the prompt."""
    return torch.equal(d.read(blocks, TOKENS), d.wanted(TOKENS))


def another_works(p: Rank, d: Rank, name: str = "again") -> None:
    """One more hand-over of what P was filled with: every byte arrives, and the lease ends."""
    begin(p, d, name)
    assert ended(p, d, name)


def wipe(rank: Rank, value: int = -7) -> None:
    """The engine has all blocks back, and writes into them."""
    for cache in rank.caches.values():
        cache.fill_(value)


def is_wiped(rank: Rank, value: int = -7) -> bool:
    """Whether nothing has been written since ``wipe``."""
    return all(bool((cache == value).all()) for cache in rank.caches.values())


def forget(*ranks: Rank) -> None:
    """What was reported before."""
    for rank in ranks:
        rank.sent.clear()
        rank.received.clear()


def ask(read: int, token: bytes = b"t" * 16, spans: Sequence[Span] = (), **options: Any) -> messages.Ask:
    """An ask of a D of one rank, in the smallest chunks."""
    usual: dict[str, Any] = {"decode_engine": b"h" * 16, "decode_rank": 0, "expected": (0,)}
    usual["chunk_bytes"] = messages.MIN_SLOT_BYTES
    return messages.Ask(read=read, token=token, spans=tuple(spans), **usual | options)


WHOLE = Span(0, 0, 1, 0, 4, 0, TOKENS)
"""All tokens of one layer."""


class RawD:
    """A rank of D that speaks the protocol by hand, over the shm plane. ``like``: whose Hello it sends."""

    def __init__(self, p: Rank, like: Rank) -> None:
        self._p, self._like = p, like
        self.connection = Dialed(p.address.port, limit=8 << 20)
        self._replies: list[Any] = []
        self._plane = ShmPlane(PlaneContext("127.0.0.1", 64 << 10, 1 << 20))

    def send(self, message: messages.Request) -> None:
        """Also where the queue is full at the moment."""
        assert wait(lambda: self.connection.send(messages.encode(message)))

    def reply(self) -> Any:
        """The next one."""

        def arrived() -> bool:
            self._replies.extend(messages.decode_reply(frames) for frames in self.connection.receive())
            return bool(self._replies)

        assert wait(arrived, [self._p]), "no reply came"
        return self._replies.pop(0)

    def answer(self, kind: type[ReplyT]) -> ReplyT:
        """The next reply; it must be of that kind."""
        reply = self.reply()
        assert isinstance(reply, kind), reply
        return reply

    def settled(self) -> None:
        """P has answered all that this peer has sent."""
        last = messages.Commit(read=(1 << 32) - 1, token=bytes(16))
        self.send(last)

        def answered() -> bool:
            replies = [messages.decode_reply(frames) for frames in self.connection.receive()]
            return any(isinstance(reply, messages.Committed) and reply.read == last.read for reply in replies)

        assert wait(answered)

    @property
    def hello(self) -> messages.Hello:
        context = self._like.context
        return messages.Hello(
            engine_id=context.engine_id, incarnation=context.incarnation, geometry=context.caches.geometry,
            model=dict(context.model),
        )  # fmt: skip

    def greet(self) -> messages.Welcome:
        self.send(self.hello)
        return self.answer(messages.Welcome)

    def attach(self, welcome: messages.Welcome) -> None:
        """Send an Attach; the answer is the caller's."""
        offers = {offer.name: offer.payload for offer in welcome.planes}
        self.send(messages.Attach(plane="shm", payload=self._plane.connect(offers["shm"], "127.0.0.1")[1]))

    def close(self) -> None:
        self.connection.close()
        self._plane.close()
