"""What the two halves of an engine send each other in one step. Plain data.

The scheduler half sends one ``StepPlan``, the same to every rank. The worker half of each rank returns ``StepResults``.
``repr`` of a struct with a lease's token is only its request: vLLM writes the plan to its log when an engine dies.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.wire.metrics import LoadFailure, LocalReason

_T = TypeVar("_T")
ALONE_SECONDS = 0.05
"""The most for which a step may wait that computes for no other request. A request that arrives meanwhile waits."""


class RankAddress(msgspec.Struct, frozen=True):
    """Where one rank of an engine listens: ``pp_rank``, ``tp_rank``, at ``host`` and ``port``, in this ``incarnation``.
    ``key``: the fingerprint of its public key."""

    pp_rank: int
    tp_rank: int
    host: str
    port: int
    incarnation: bytes
    key: str = ""


class PeerEngine(msgspec.Struct, frozen=True):
    """A P engine as D knows it from ``kv_transfer_params``.

    ``lease_seconds``: a renewal extends the lease to this many seconds after its arrival. ``host_id``: P and D share a
    loopback where their values are equal; empty where it is unknown. ``shardings``: how its ranks divide the tokens,
    each for one or more block tables.
    """

    engine_id: str
    tp_size: int
    pp_size: int
    lease_seconds: float
    ranks: tuple[RankAddress, ...]
    host_id: str = ""
    shardings: tuple[TokenSharding, ...] = UNSHARDED


class _OfRequest(msgspec.Struct, frozen=True):
    request_id: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id!r})"


class LeaseGrant(_OfRequest, frozen=True):
    """P: a finished prompt whose blocks P holds. ``block_ids``: per block table, packed by ``pack_ids``. ``digest``:
    of the prompt's tokens. ``step``: the engine's last step that computed the prompt. ``params``: the lease's
    ``kv_transfer_params`` in MessagePack; empty where they are those of its ``Prefill``. ``traceparent``: the span that
    the spans of the lease belong to; empty where the request is not traced."""

    token: bytes
    num_tokens: int
    block_ids: tuple[bytes, ...]
    digest: str = ""
    step: int = 0
    params: bytes = b""
    traceparent: str = ""


class Prefill(_OfRequest, frozen=True):
    """P: a prompt that the engine begins to compute in this step, and that will be handed over. One precedes every
    lease and every ``PrefillStop``, if only in the same plan.

    ``names``: what D may know it by before it knows ``token``, the token of its later lease: its transfer id and its
    request id. ``params``: the ``kv_transfer_params`` of the later lease, in MessagePack; empty where the prompt will
    not be handed over, and a ``PrefillStop`` follows at once. ``found``: tokens found in the prefix cache.
    ``step_tokens``: tokens that this first step computes; 0 where that is unknown. ``streams``: ``PrefillChunk``
    follow, so parts of the prompt may be read before all of it is computed.
    """

    token: bytes
    num_tokens: int
    digest: str
    names: tuple[str, ...]
    params: bytes
    found: int
    step_tokens: int
    streams: bool


class QueuedPrompt(_OfRequest, frozen=True):
    """P: a prompt that will be handed over, and that the engine left in its queue when it scheduled this step. At most
    one precedes the ``Prefill`` of the same ``token``. ``names``: as there."""

    token: bytes
    names: tuple[str, ...]


class PrefillChunk(msgspec.Struct, frozen=True):
    """P: this step computes tokens ``[start, stop)`` of the prompt under ``token``. Those before ``ready`` are computed
    when all steps before this one have ended, those before ``start`` with this step at the latest: the engine finds a
    block in its prefix cache from the moment at which it schedules a request that fills it, also in the same step.

    ``block_ids``: per block table, the blocks that the prompt got since its last chunk, packed by ``pack_ids``.
    ``restarts``: the engine had preempted the request: all blocks of earlier chunks are lost, and these are all.
    """

    token: bytes
    start: int
    stop: int
    block_ids: tuple[bytes, ...]
    restarts: bool = False
    ready: int = 0

    def __repr__(self) -> str:
        return f"PrefillChunk({self.start}, {self.stop})"


class PrefillStop(msgspec.Struct, frozen=True):
    """P: the blocks of a prompt under ``token`` are lost from this step on. ``ended``: the prompt will not be handed
    over; else the engine has preempted its request, and a chunk that ``restarts`` follows."""

    token: bytes
    ended: bool

    def __repr__(self) -> str:
        return f"PrefillStop(ended={self.ended})"


class PrefixOffer(msgspec.Struct, frozen=True):
    """P: the blocks of a request that has ended. D may read its tokens there, until a block is among the plan's
    ``reused``. ``digests``: of the prefixes from number ``first`` on. ``block_ids``: those that these prefixes end in,
    in their order, packed by ``pack_ids``. ``params``: the ``kv_transfer_params`` that name this engine's ranks, in
    MessagePack; empty where the ranks know them."""

    first: int
    block_ids: bytes
    digests: bytes
    params: bytes = b""

    def __repr__(self) -> str:
        return f"PrefixOffer({self.first})"


class LeftAnswer(msgspec.Struct, frozen=True):
    """D: a request that does not need P's answer any more. ``digests``: those that its prompt may have at P. A
    name may be another prompt's too: D releases only a lease of one of these."""

    request_id: str
    digests: tuple[str, ...] = ()


class PromptLookup(_OfRequest, frozen=True):
    """D: a request whose P is known, but not yet the token of its lease. A rank of P at ``host`` and ``port`` tells it
    when it knows a prompt of this ``name``. ``engine_id``: of P; empty where it is unknown. ``key``: the fingerprint of
    P's public key; empty where it is that of D. ``ended``: of a request that has ended; D asks so that the lease is
    released. ``prefix``: D asks how much P has of the prompt with these digests, of which there is no lease and no
    ``name``."""

    host: str
    port: int
    engine_id: str
    name: str
    key: str = ""
    ended: LeftAnswer | None = None
    prefix: bytes = b""


class LookupResult(msgspec.Struct, frozen=True):
    """D: the end of a lookup. ``params``: the ``kv_transfer_params`` of P's lease, in MessagePack. ``streams``: P
    computes the prompt, and sends it meanwhile; then ``found`` and ``step_tokens`` are as in ``Prefill``. Of a prefix,
    ``found`` is how many of its tokens P has, and ``params`` name no lease. ``error``:
    why D must prefill; empty where it need not; ``reason``: in one word. ``known``: this is not the end, P's engine has
    the prompt now."""

    params: bytes = b""
    streams: bool = False
    found: int = 0
    step_tokens: int = 0
    error: str = ""
    known: bool = False
    reason: LocalReason = "no_lease"

    def __repr__(self) -> str:
        return f"LookupResult(error={self.error!r})"


class KeepLease(_OfRequest, frozen=True):
    """D: a request that will need this lease. D renews the lease until the request is loaded or dropped.

    ``siblings``: more requests of the same prompt may follow (``n > 1``), so the release waits a moment for them.
    """

    token: bytes
    peer: PeerEngine
    siblings: bool


class UnneededLease(msgspec.Struct, frozen=True):
    """D: a request that will load nothing under this lease. The token tells it from an earlier request with its id."""

    request_id: str
    token: bytes


class RemoteLease(msgspec.Struct, frozen=True):
    """D: a lease at a P engine, of the prompt with this ``digest``."""

    token: bytes
    peer: PeerEngine
    digest: str = ""

    def __repr__(self) -> str:
        return f"RemoteLease({self.peer.engine_id!r})"


class Load(_OfRequest, frozen=True):
    """D: fetch tokens ``[start, stop)`` of every block table into its ``block_ids`` (packed by ``pack_ids``).

    ``digest``: of the prompt that P must hold under this lease; empty where D does not check it. D
    must check because the lease's parameters came with the client's request. ``now``: the engine computes with the
    loaded tokens in the step of this plan. ``behind``: a step in flight may still use the blocks, so the copies wait
    for the work that the device was given before this step. ``alternatives``: where to load from if ``peer`` fails.
    ``found`` and ``step_tokens``: as in ``Prefill``, where P still computes the prompt; else 0. ``traceparent``: as of
    ``LeaseGrant``. ``prefix``: the digests of a prefix that P must lend under ``token``, which D has drawn; else empty.
    """

    token: bytes
    peer: PeerEngine
    block_ids: tuple[bytes, ...]
    tokens: tuple[tuple[int, int], ...]
    digest: str = ""
    now: bool = False
    behind: bool = True
    alternatives: tuple[RemoteLease, ...] = ()
    found: int = 0
    step_tokens: int = 0
    traceparent: str = ""
    prefix: bytes = b""
    seconds: float = math.inf  # Of its copies; where P still computes, after P's last; infinite: reported at its end

    @property
    def num_tokens(self) -> int:
        """Of the table that lacks most."""
        return max([stop - start for start, stop in self.tokens], default=0)


class StepPlan(msgspec.Struct, frozen=True):
    """The work of one engine step.

    ``decode_engine`` names this life of this engine to P. ``leases``: of prompts that P has computed. ``keeps``: leases
    that D needs. ``loads``: what D loads. ``cancels``: loads to cancel. ``releases``: kept leases
    under which a request will load nothing. ``idle``: the engine computes nothing in this step, so a worker may wait
    for its loads. ``step``: the number of this step. ``after_prefill``: the step before computed a prompt that will be
    handed over from here. Its lease comes with a later plan, and is granted when that step has ended. ``queued``: the
    prompts that wait to be computed, each in one plan. ``prefills``, ``prefill_chunks`` and ``stops``: of the prompts
    that P computes; where several concern one prompt, prefills come before stops, stops before chunks, chunks before
    leases. ``ends_leases``: all leases end now, those of this plan too. ``lookups``: requests of D whose P must be
    asked for the token; ``left``: requests of earlier plans that do not need their answer any more. ``offers``: what D
    may read from now on; ``reused``: the blocks that the engine has given to other requests since the last plan, of
    these offers too, packed by ``pack_ids``. ``lead``: a rank reports a load once it should end in so many seconds.
    ``joins``: loads that some rank has reported so; the step waits for them, as for ``loads`` inside it.
    """

    decode_engine: bytes = bytes(16)
    leases: tuple[LeaseGrant, ...] = ()
    keeps: tuple[KeepLease, ...] = ()
    loads: tuple[Load, ...] = ()
    cancels: tuple[str, ...] = ()
    releases: tuple[UnneededLease, ...] = ()
    idle: bool = False
    step: int = 0
    after_prefill: bool = False
    nothing: bool = False
    """There is no work: the plan has neither parts nor a ``step``, and may be one object for many steps."""
    queued: tuple[QueuedPrompt, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    prefill_chunks: tuple[PrefillChunk, ...] = ()
    stops: tuple[PrefillStop, ...] = ()
    lookups: tuple[PromptLookup, ...] = ()
    left: tuple[LeftAnswer, ...] = ()
    ends_leases: bool = False
    offers: tuple[PrefixOffer, ...] = ()
    reused: bytes = b""
    lead: float = -math.inf
    joins: tuple[Load, ...] = ()

    @property
    def wakes_thread(self) -> bool:
        """Whether the transfer thread is woken for it: it has other work than ``prefill_chunks``, of which
        nothing leaves before the step advances, and than ``offers`` and ``reused``, which the engine's thread takes."""
        return bool(
            self.leases or self.keeps or self.loads or self.cancels or self.releases
            or self.queued or self.prefills or self.stops or self.lookups or self.left or self.ends_leases
        )  # fmt: skip


class LoadEnd(msgspec.Struct, frozen=True):
    """D: the end of a load on one rank, or on several. ``failed``: why its tokens are not in the blocks; empty where
    they are. ``plane``: the data plane. ``milliseconds``: from the request to the last byte. ``peer``: the first
    characters of P's engine id. ``ranks``: how many."""

    failed: LoadFailure = ""
    plane: str = ""
    milliseconds: float = 0.0
    peer: str = ""
    ranks: int = 1


LOST = LoadEnd("internal")
"""The end of a load of which the transfer thread has reported nothing."""


def of_both(one: LoadEnd, other: LoadEnd) -> LoadEnd:
    """The end of a load on two sets of ranks: the one that failed, or took longer."""
    worse = max(one, other, key=lambda end: (bool(end.failed), end.milliseconds))
    return msgspec.structs.replace(worse, ranks=one.ranks + other.ranks)


@dataclass(slots=True)
class StepResults:
    """The hand-overs that ended on one rank since its last step, by request id. A rank reports each id once.

    ``sent``: nothing reads the blocks of this prompt on this rank any more. ``received``: the load has ended, or is
    reported early. ``failed``: the requests in ``received`` whose tokens are not in the blocks. ``ends``: how the loads
    in ``received`` ended here that have. ``KVOutputAggregator`` makes one report from the results of all ranks.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    ends: dict[str, LoadEnd] = field(default_factory=dict)


def by_region(plan: StepPlan, tables: tuple[int, ...]) -> StepPlan:
    """The plan with block ids and tokens per region of a rank instead of per block table of the engine. ``tables``: the
    block table of each region; a pipeline stage may hold layers of only some tables."""
    parts = plan.leases or plan.loads or plan.prefill_chunks
    if not parts or tables == tuple(range(len(parts[0].block_ids))):  # as with one kind of layers
        return plan

    def ours(of_tables: tuple[_T, ...]) -> tuple[_T, ...]:
        return tuple(map(of_tables.__getitem__, tables))

    return replace(
        plan,
        leases=tuple([replace(lease, block_ids=ours(lease.block_ids)) for lease in plan.leases]),
        loads=tuple([replace(load, block_ids=ours(load.block_ids), tokens=ours(load.tokens)) for load in plan.loads]),
        prefill_chunks=tuple([replace(chunk, block_ids=ours(chunk.block_ids)) for chunk in plan.prefill_chunks]),
    )


ID_BYTES = 4


def pack_ids(block_ids: list[int]) -> bytes:
    """Block ids as little-endian int32, of ``ID_BYTES`` each."""
    return struct.pack(f"<{len(block_ids)}i", *block_ids)  # takes half the time of numpy for a list


def unpack_ids(packed: bytes) -> npt.NDArray[np.int64]:
    """The inverse of ``pack_ids``, as int64."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)
