"""A model in which every (layer, head, token) element has a label of its own, and what ranks of it hold."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvferry.connector.geometry.rank_geometry import CacheKind, RankGeometry, RegionGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.geometry.topology import TpKVTopology

CONTENT = 8
LABEL_TOKENS = 1000
"""A label modulo this is the number of its token."""


@dataclass(frozen=True)
class Model:
    """Layers by kind; layer i is named ``layers.i``."""

    kinds: tuple[CacheKind, ...]
    heads: int
    is_mla: bool

    def stage(self, pp_rank: int, pp_size: int, shuffle: random.Random | None = None) -> dict[CacheKind, list[str]]:
        """Layers of a pipeline stage by kind."""
        total = len(self.kinds)
        regions: dict[CacheKind, list[str]] = {}
        for layer in range(pp_rank * total // pp_size, (pp_rank + 1) * total // pp_size):
            regions.setdefault(self.kinds[layer], []).append(f"layers.{layer}")
        if shuffle:
            for layers in regions.values():
                shuffle.shuffle(layers)
            regions = dict(shuffle.sample(sorted(regions.items()), len(regions)))
        return regions

    def rank(
        self, tp: tuple[int, int], pp: tuple[int, int], block: int, shuffle: random.Random | None = None,
        shardings: tuple[TokenSharding, ...] = UNSHARDED * 2,
    ) -> RankGeometry:  # fmt: skip
        """``shardings``: of the tokens of layers with heads, and of those of MLA layers."""
        regions = []
        for kind, layers in self.stage(*pp, shuffle).items():
            is_mla = self.is_mla or kind == "mla"
            total = 1 if is_mla else self.heads
            start, count = TpKVTopology.head_interval(*tp, total)
            regions.append(RegionGeometry(
                kind=kind, layers=tuple(layers), block_size=block, head_start=start, num_heads=count,
                total_heads=total, content_bytes=CONTENT, dtype="bfloat16",
                window=64 if kind == "sliding_window" else 0, shard=shardings[is_mla].shard(tp[0]),
            ))  # fmt: skip
        return RankGeometry(
            tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1], shardings=tuple(sorted(set(shardings))),
            head_counts=tuple(sorted({1, self.heads})), regions=tuple(regions),
        )  # fmt: skip

    def cache(self, geometry: RankGeometry, tokens: int) -> list[np.ndarray]:
        """Labels that a rank holds, ``[L, H, T]`` per group, T in the rank's own numbering."""
        caches = []
        for region in geometry.regions:
            size, place, interleave = region.shard.size, region.shard.rank, region.shard.interleave
            own = np.array([t for t in range(tokens) if t // interleave % size == place], dtype=np.int64)
            layers = np.array([int(name.split(".")[1]) for name in region.layers])[:, None, None]
            heads = (region.head_start + np.arange(region.num_heads))[:, None]
            caches.append((layers * self.heads + heads) * LABEL_TOKENS + own)
        return caches


def edit(geometry: RankGeometry, region: int | None = None, **changes: object) -> RankGeometry:
    if region is None:
        return msgspec.structs.replace(geometry, **changes)
    regions = list(geometry.regions)
    regions[region] = msgspec.structs.replace(regions[region], **changes)
    return msgspec.structs.replace(geometry, regions=tuple(regions))


MODEL = Model(("full", "sliding_window", "full"), 8, False)
OURS = MODEL.rank((0, 2), (0, 1), 16)
Plans = dict[tuple[int, int], tuple[PlannedSpan, ...]]


def plan_all(
    local: RankGeometry, remotes: Mapping[tuple[int, int], RankGeometry], tokens: Sequence[tuple[int, int]]
) -> Plans:
    """All that D's rank reads, by (pipeline rank, tensor rank) of P. P ranks that are not read are left out.

    Args:
        local: D's rank.
        remotes: P's ranks, of every stage at least those in ``source_ranks``.
        tokens: as in ``plan_reads``.
    """
    form = next(iter(remotes.values()))
    ranks = TpKVTopology.between(local, form).source_ranks()
    places = [(stage, rank) for stage in range(form.pp_size) for rank in ranks]
    plans = {place: plan_reads(local, remotes[place], tokens) for place in places}
    check_complete(local, [item for spans in plans.values() for item in spans], tokens)
    return {place: spans for place, spans in plans.items() if spans}
