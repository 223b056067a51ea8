"""The plans of all P ranks together, made as D's consumer makes them: the topology names the ranks, each is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.topology import TpKVTopology

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
