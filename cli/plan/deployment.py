"""The ranks of an engine that does not run yet: their geometries, from the model and the parallel sizes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from kvferry.cli.plan.model_shape import ModelShape
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.recurrent_state import Section, sections, whole_page
from kvferry.connector.geometry.topology import MAX_RANKS, TpKVTopology
from kvferry.transport.errors import ConfigError

MAX_PLANNED_RANKS = 1024
"""Bound on the ranks of one engine: each rank of D is planned against each of P that it reads from."""

MAX_PLANNED_BLOCK = 1 << 16
"""Bound on the tokens of a block."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """How an engine divides its model. ``layout``: the order of the axes in a page, ``HND`` or ``NHD``."""

    tp_size: int = 1
    pp_size: int = 1
    block_size: int = 16
    layout: Literal["HND", "NHD"] = "NHD"


def rank_geometries(shape: ModelShape, deployment: Deployment, name: str) -> tuple[RankGeometry, ...]:
    """The geometry of each rank, stage by stage, as the rank itself would send it to its peers.

    Args:
        name: of the engine, for errors.

    Raises:
        ConfigError: vLLM starts no engine of these sizes.
    """
    tp, pp, block = deployment.tp_size, deployment.pp_size, deployment.block_size
    if tp < 1:
        raise ConfigError(f"{name}: TP is {tp}, expected 1 or more")
    if tp > MAX_RANKS or shape.attention_heads % tp:
        raise ConfigError(f"{name}: TP {tp} does not divide the {shape.attention_heads} attention heads of the model")
    if not 1 <= pp <= shape.num_layers:
        raise ConfigError(f"{name}: PP {pp} is outside 1..{shape.num_layers}; each stage needs one of the layers")
    if tp * pp > MAX_PLANNED_RANKS:
        raise ConfigError(f"{name}: TP {tp} x PP {pp} makes {tp * pp} ranks, at most {MAX_PLANNED_RANKS} are planned")
    if not 1 <= block <= MAX_PLANNED_BLOCK:
        raise ConfigError(f"{name}: block size {block} is outside 1..{MAX_PLANNED_BLOCK}")
    if deployment.layout not in ("HND", "NHD"):
        raise ConfigError(f"{name}: layout {deployment.layout!r}, expected HND or NHD")
    return tuple(
        _rank(shape, deployment, tp_rank, pp_rank, layers)
        for pp_rank, layers in enumerate(stage_layers(shape.num_layers, pp))
        for tp_rank in range(tp)
    )


def stage_layers(num_layers: int, pp_size: int) -> tuple[range, ...]:
    """The layers of each pipeline stage: the rule of vLLM's ``get_pp_indices``, where ``VLLM_PP_LAYER_PARTITION`` is
    not set. Layers that are left over go to the stages before the last one, from the back."""
    counts = [num_layers // pp_size] * pp_size
    for stage in range(2, num_layers % pp_size + 2):
        counts[-stage] += 1
    first = [sum(counts[:stage]) for stage in range(pp_size)]
    return tuple(range(start, start + count) for start, count in zip(first, counts, strict=True))


def _rank(shape: ModelShape, deployment: Deployment, tp_rank: int, pp_rank: int, layers: range) -> RankGeometry:
    regions = []
    for kind in dict.fromkeys(kind for kind in shape.layers if kind is not None):
        first, count = TpKVTopology.head_interval(tp_rank, deployment.tp_size, shape.total_heads)
        regions.append(
            RegionGeometry(
                kind=kind,
                layers=tuple(f"model.layers.{layer}.self_attn.attn" for layer in layers if shape.layers[layer] == kind),
                block_size=deployment.block_size,
                head_start=first,
                num_heads=count,
                total_heads=shape.total_heads,
                content_bytes=shape.content_bytes,
                dtype=shape.dtype,
                window=shape.window if kind in ("sliding_window", "chunked_local") else 0,
            )
        )
    states = () if shape.state is None else shape.state.layers
    for section in _sections(shape, deployment.tp_size):
        heads = TpKVTopology.head_interval(tp_rank, deployment.tp_size, section.total_heads)
        held = tuple(f"model.layers.{layer}.mixer" for layer in layers if layer in states)
        regions.append(section.region(held, *heads))
    return RankGeometry(
        tp_rank=tp_rank,
        tp_size=deployment.tp_size,
        pp_rank=pp_rank,
        pp_size=deployment.pp_size,
        head_counts=tuple(sorted({region.total_heads for region in regions})),
        regions=tuple(region for region in regions if region.layers),
    )


def _sections(shape: ModelShape, tp_size: int) -> tuple[Section, ...]:
    """Of the state of each recurrent layer, as ``from_vllm`` divides it."""
    state = shape.state
    if state is None:
        return ()
    arrays = state.arrays(tp_size)
    found = sections(state.family, arrays, tp_size, dim_first=False, group_counts=frozenset({state.groups}))
    return found or (whole_page(sum(prod(array.shape) * array.item for array in arrays), tp_size, state.family),)
