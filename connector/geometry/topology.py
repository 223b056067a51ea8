"""Which rank reads which KV heads from which rank, for any pair of tensor-parallel sizes. Pure integers.

``TpKVTopology`` answers every such question, by the arithmetic of ``head_split``. D is the consumer, the local
side of a read; P is the producer, the remote side. A rank holds an interval of global KV heads. D's rank takes from P's
rank the intersection of their intervals. MLA has one latent "head", and every rank holds it. Under context parallelism
the ranks that hold a head shard its tokens (``token_sharding.TokenSharding``).

Pipeline stages have no part in the choice of ranks: all stages have the same tensor-parallel structure, and layers are
matched by name (``read_plan``). So every answer holds for each pair of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from kvferry.connector.geometry import head_split
from kvferry.connector.geometry.head_split import MAX_HEADS, MAX_RANKS, HeadRead
from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.transport.errors import GeometryError, RatioError

__all__ = ["LOCAL", "MAX_HEADS", "MAX_RANKS", "REMOTE", "EngineForm", "HeadRead", "TpKVTopology"]

LOCAL, REMOTE = "local", "remote"
"""Engine ids in a topology that stands for engines of a form (``TpKVTopology.between``)."""


class EngineForm(Protocol):
    """The two facts about a remote engine on which the choice of ranks depends."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""

    @property
    def shardings(self) -> tuple[TokenSharding, ...]:
        """The ways in which its ranks shard tokens, one or more block tables each."""


@dataclass
class TpKVTopology:
    """How a rank of the local engine faces the ranks of remote engines: which ranks it reads from, which KV heads, and
    which ranks must release a lease. ``between`` makes the one that a hand-over uses.

    The first seven fields and the methods that share a name with vLLM's ``TpKVTopology`` mean the same as there.
    Questions without an argument for the remote engine are about the only remote engine that the topology knows.

    Args:
        tp_rank: the local rank.
        remote_tp_size: tensor-parallel size by engine id, the local engine's under ``engine_id``.
        is_mla: whether all layers are MLA.
        total_num_kv_heads: global KV heads; of the layers that have most, where layers differ.
        attn_backend: not used. Layouts are read from strides.
        engine_id: the local engine.
        remote_block_size: tokens per manager block by engine id, the local engine's under ``engine_id``.
        head_counts: global KV heads of each kind of layer, 1 for MLA; by default of one kind, ``total_num_kv_heads``.
        shardings: how local ranks shard tokens.
        remote_shardings: the same by engine id; an engine that is missing does not shard tokens.
        pp_size: the local engine's pipeline stages.
    """

    tp_rank: int
    remote_tp_size: dict[str, int]
    is_mla: bool
    total_num_kv_heads: int
    attn_backend: object
    engine_id: str
    remote_block_size: dict[str, int]
    head_counts: tuple[int, ...] = ()
    shardings: tuple[TokenSharding, ...] = UNSHARDED
    remote_shardings: dict[str, tuple[TokenSharding, ...]] = field(default_factory=dict)
    pp_size: int = 1

    def __post_init__(self) -> None:
        self.head_counts = self.head_counts or (1 if self.is_mla else self.total_num_kv_heads,)

    @classmethod
    def between(cls, local: RankGeometry, remote: EngineForm) -> TpKVTopology:
        """The topology of D's rank ``local`` and a P engine, under the engine ids ``LOCAL`` and ``REMOTE``.

        One object serves all peers of the same form, so no caller may change it. Its ``block_size`` is the block size
        of the rank's first region, 0 for a rank without regions.
        """
        return _between(
            local.tp_rank,
            local.tp_size,
            local.pp_size,
            bool(local.regions) and all(region.kind == "mla" for region in local.regions),
            local.head_counts,
            local.shardings,
            local.regions[0].block_size if local.regions else 0,
            remote.tp_size,
            remote.shardings,
        )

    @staticmethod
    def head_interval(rank: int, tp_size: int, total_heads: int) -> tuple[int, int]:
        """The global KV heads of a rank as ``(start, count)``; ``count`` is at least 1.

        The split is vLLM's where vLLM can split: ``total_heads / tp_size`` heads each, or one replicated head each
        where there are more ranks than heads. Sizes that do not divide give contiguous intervals whose counts differ by
        at most one.

        Raises:
            GeometryError: a rank or size is out of range.
        """
        return head_split.head_interval(rank, tp_size, total_heads)

    # --- sizes and ratios ---------------------------------------------------------------------------------------

    @property
    def tp_size(self) -> int:
        """The local engine's tensor-parallel size."""
        return self.remote_tp_size[self.engine_id]

    @property
    def block_size(self) -> int:
        """The local engine's tokens per block."""
        return self.remote_block_size[self.engine_id]

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local ranks per remote rank. Negative: remote ranks per local rank, where the remote side has more.

        Raises:
            RatioError: neither size divides the other. Nothing that moves bytes needs this number.
        """
        return _ratio("tp_ratio", self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks per local block. Negative: local blocks per remote block, where the remote block is larger.

        Raises:
            RatioError: neither size divides the other. Nothing that moves bytes needs this number.
        """
        return _ratio("block_size_ratio", self.block_size, remote_block_size)

    def tp_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """``tp_ratio`` of a known engine."""
        return self.tp_ratio(self.remote_tp_size[remote_engine_id])

    def block_size_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """``block_size_ratio`` of a known engine."""
        return self.block_size_ratio(self.remote_block_size[remote_engine_id])

    def is_kv_replicated(self, engine_id: str, total_heads: int | None = None) -> bool:
        """Whether several ranks of an engine hold the same KV head: the engine has more ranks than heads.

        Args:
            engine_id: a known engine, also the local one.
            total_heads: global KV heads of the layers in question; by default ``total_num_kv_heads``.
        """
        return self.remote_tp_size[engine_id] > (total_heads or self.total_num_kv_heads)

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Whether ranks of an engine hold equal caches, by replicated heads or because MLA cannot be split."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id)

    def describe(self, remote_block_size: int = 0) -> str:
        """For a log line: the remote ranks that the local rank reads from, and the ratios where there are integer ones.

        Args:
            remote_block_size: tokens per block of the remote engine, 0 where unknown.
        """
        peer = self._peer()
        size, ranks = self.remote_tp_size[peer], ", ".join(f"tp{rank}" for rank in self.source_ranks(peer))
        text = f"this rank reads from {ranks} of {size} tensor-parallel ranks, tp_ratio {_known(self.tp_ratio, size)}"
        if remote_block_size and self.block_size:
            text += f", block_size_ratio {_known(self.block_size_ratio, remote_block_size)}"
        return f"{text}, P replicates KV heads" if self.replicates_kv_cache(peer) else text

    # --- D's rank reads -----------------------------------------------------------------------------------------

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """The remote ranks that face the local rank, ascending; never empty, for any pair of sizes.

        Where sizes and heads divide as vLLM requires, these are the ranks that ``tp_ratio`` gives: one rank, or a run
        of ranks. Otherwise these are the ranks of ``overlaps``. ``source_ranks`` gives the ranks that are read.

        Raises:
            GeometryError: a size is out of range.
        """
        if self._divides(remote_tp_size):
            ratio = self.tp_ratio(remote_tp_size)
            if ratio > 0:
                return [self.tp_rank // ratio]
            return list(range(self.tp_rank * -ratio, (self.tp_rank + 1) * -ratio))
        return [read.p_rank for read in self.overlaps(remote_tp_size)]

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: str) -> list[int]:
        """``get_target_remote_ranks`` of a known engine."""
        return self.get_target_remote_ranks(self.remote_tp_size[remote_engine_id])

    def overlaps(self, remote_tp_size: int | None = None, total_heads: int | None = None) -> tuple[HeadRead, ...]:
        """Every remote rank that holds a KV head of the local rank, and which heads, in order of ranks. All replicas
        are listed.

        Args:
            remote_tp_size: by default the remote engine's.
            total_heads: global KV heads of the layers in question; by default ``total_num_kv_heads``, or 1 for MLA.

        Raises:
            GeometryError: a rank or size is out of range.
        """
        return head_split.overlaps(self.tp_rank, self.tp_size, self._size(remote_tp_size), self._heads(total_heads))

    def sources(
        self,
        remote_tp_size: int | None = None,
        total_heads: int | None = None,
        sharding: TokenSharding = UNSHARDED[0],
        remote_sharding: TokenSharding = UNSHARDED[0],
    ) -> tuple[HeadRead, ...]:
        """The reads of the local rank: each of its KV heads exactly once, in order of heads.

        Where the remote engine replicates a head (``is_kv_replicated``), the local ranks that hold this head spread
        evenly over the replicas. The choice depends on the sizes only, so both engines make the same choice. Where
        remote ranks shard the tokens of a head, each head comes once from every shard that has tokens of the local
        rank's.

        Args:
            remote_tp_size: by default the remote engine's.
            total_heads: global KV heads of the layers in question; by default ``total_num_kv_heads``, or 1 for MLA.
            sharding: how local ranks shard the tokens of these layers.
            remote_sharding: how remote ranks do.

        Raises:
            GeometryError: a rank or size is out of range.
        """
        size, heads = self._size(remote_tp_size), self._heads(total_heads)
        return head_split.sources(self.tp_rank, self.tp_size, size, heads, sharding, remote_sharding)

    def source_ranks(self, remote_engine_id: str | None = None) -> tuple[int, ...]:
        """The remote ranks that the local rank reads from, ascending: those in ``sources`` of every head count and
        every pair of shardings. Empty where no remote rank holds tokens of the local rank's.

        Raises:
            GeometryError: a rank or size is out of range.
        """
        return head_split.source_ranks(self.tp_rank, *self._pair(remote_engine_id))

    # --- D's ranks release --------------------------------------------------------------------------------------

    def release_map(self, remote_engine_id: str | None = None) -> tuple[tuple[int, ...], ...]:
        """For each remote rank, the local tensor-parallel ranks that must release a lease there: never none.

        All local ranks that read from a remote rank are in its entry. A remote rank from which no rank reads (a
        replica) gets one local rank; these are spread evenly.

        Raises:
            GeometryError: a size is out of range.
        """
        return head_split.release_maps(*self._pair(remote_engine_id))[0]

    def release_ranks(self, remote_engine_id: str | None = None) -> tuple[int, ...]:
        """The remote ranks at which the local rank must release: the inverse of ``release_map``. May be empty.

        Raises:
            GeometryError: a rank or size is out of range.
        """
        head_split.check(self.tp_rank, self.tp_size, 1)
        return head_split.release_maps(*self._pair(remote_engine_id))[1][self.tp_rank]

    def expected_consumers(self, remote_rank: int, remote_engine_id: str | None = None) -> tuple[int, ...]:
        """The local ranks that must release at a remote rank, as ``pp_rank * tp_size + tp_rank``.

        A pipeline stage cannot know which layers another stage reads. So all local stages release at all remote stages.

        Raises:
            GeometryError: a rank or size is out of range.
        """
        if not 1 <= self.pp_size <= MAX_RANKS:
            raise GeometryError(f"pipeline-parallel size {self.pp_size} is outside 1..{MAX_RANKS}")
        peer = self._peer(remote_engine_id)
        head_split.check(remote_rank, self.remote_tp_size[peer], 1)
        stage = self.release_map(peer)[remote_rank]
        return tuple(pp_rank * self.tp_size + tp_rank for pp_rank in range(self.pp_size) for tp_rank in stage)

    # --- defaults -----------------------------------------------------------------------------------------------

    def _peer(self, remote_engine_id: str | None = None) -> str:
        """The engine that a question is about."""
        if remote_engine_id is not None:
            return remote_engine_id
        known = [*self.remote_tp_size.keys() - {self.engine_id}]
        if len(known) != 1:
            raise GeometryError(f"{len(known)} remote engines are known, expected one; name the engine or its size")
        return known[0]

    def _size(self, remote_tp_size: int | None) -> int:
        return self.remote_tp_size[self._peer()] if remote_tp_size is None else remote_tp_size

    def _heads(self, total_heads: int | None) -> int:
        return total_heads or (1 if self.is_mla else self.total_num_kv_heads)

    def _pair(
        self, remote_engine_id: str | None
    ) -> tuple[int, int, tuple[int, ...], tuple[TokenSharding, ...], tuple[TokenSharding, ...]]:
        """D's and P's tensor-parallel sizes, the model's head counts, D's and P's shardings."""
        peer = self._peer(remote_engine_id)
        return (
            self.tp_size,
            self.remote_tp_size[peer],
            self.head_counts,
            self.shardings,
            self.remote_shardings.get(peer, UNSHARDED),
        )

    def _divides(self, remote_tp_size: int) -> bool:
        sizes = sorted((self.tp_size, remote_tp_size))
        if sizes[0] < 1 or sizes[1] % sizes[0]:
            return False
        heads = self.total_num_kv_heads
        return self.is_mla or all(heads % size == 0 or size % heads == 0 for size in sizes)


@lru_cache(maxsize=256)
def _between(
    tp_rank: int,
    tp_size: int,
    pp_size: int,
    is_mla: bool,
    head_counts: tuple[int, ...],
    shardings: tuple[TokenSharding, ...],
    block_size: int,
    remote_tp_size: int,
    remote_shardings: tuple[TokenSharding, ...],
) -> TpKVTopology:
    return TpKVTopology(
        tp_rank=tp_rank,
        remote_tp_size={LOCAL: tp_size, REMOTE: remote_tp_size},
        is_mla=is_mla,
        total_num_kv_heads=max(head_counts),
        attn_backend=None,
        engine_id=LOCAL,
        remote_block_size={LOCAL: block_size},
        head_counts=head_counts,
        shardings=shardings,
        remote_shardings={REMOTE: remote_shardings},
        pp_size=pp_size,
    )


def _known(ratio: Callable[[int], int], remote: int) -> str:
    """A ratio for a log line, or the two sizes that have none."""
    try:
        return str(ratio(remote))
    except RatioError as error:
        return f"none ({error.local} to {error.remote})"


def _ratio(what: str, local: int, remote: int) -> int:
    """Positive ``local / remote`` where local is the greater or equal, else negative ``remote / local``."""
    if local < 1 or remote < 1:
        raise GeometryError(f"no {what} between local {local} and remote {remote}: sizes are at least 1")
    if local >= remote:
        ratio, rest = divmod(local, remote)
    else:
        ratio, rest = divmod(remote, local)
        ratio = -ratio
    if rest:
        raise RatioError(what, local, remote)
    return ratio
