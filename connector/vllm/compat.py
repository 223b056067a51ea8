"""The one file that imports vLLM: what differs between its releases, and its objects turned into ours.

Supported are 0.26 and 0.32. Releases between and after are expected to work; one is refused only where an API that is
needed is missing.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import vllm
from kvferry.connector.geometry import model_identity, packing
from kvferry.connector.geometry.cache_dtype import layer_cache_dtype
from kvferry.connector.geometry.engine_types import BlockTable, LayerGroup, RankInfo, RequestView
from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.geometry.recurrent_state import Section, StateArray, sections, whole_page
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.transport.errors import ConfigError
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

try:  # 0.32: completions and failures in one answer
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    HAS_TRANSFER_RESULTS = True
except ImportError:  # 0.26: get_finished, and failures by block id

    @dataclass
    class KVConnectorTransferResults:  # type: ignore[no-redef]
        finished_sending: set[str] = field(default_factory=set)
        finished_recving: set[str] = field(default_factory=set)
        failed_recving: set[str] = field(default_factory=set)

    HAS_TRANSFER_RESULTS = False

try:  # 0.32: where cache hits came from
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    P2P_SOURCE: Any = CacheHitSource.P2P
except ImportError:
    P2P_SOURCE = None

__all__ = [
    "HAS_TRANSFER_RESULTS",
    "P2P_SOURCE",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "PromMetric",
    "PromMetricT",
    "SupportsHMA",
    "block_tables",
    "check_config",
    "completed",
    "element_order",
    "layer_groups",
    "loads_fail_requests",
    "model_identity_of",
    "prefill_lookahead",
    "rank_info",
    "register_connector",
    "request_view",
    "shardings",
    "speaks_for_engine",
    "transfer_group_ids",
    "truncate_prompt",
]


def register_connector(name: str, module: str) -> None:
    """Make the connector known by its class name alone. Safe to call again: vLLM loads plug-ins in every process."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def permit_amx() -> None:
    """Ask the kernel for AMX on behalf of this process, where the processor has it.

    vLLM's AMX attention uses the tiles without asking; some other kernel usually has before. Where a prompt was loaded,
    D's first forward is a single token, which none of those take part in, and the worker would die of SIGILL.
    """
    if current_platform.is_cpu() and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)  # EINVAL without AMX


def check_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what cannot be served, at start-up and in one line.

    Raises:
        ConfigError: names the option and what to do.
    """
    parallel = vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError(
            f"prefill_context_parallel_size {parallel.prefill_context_parallel_size} is not carried yet, expected 1"
        )
    if parallel.decode_context_parallel_size > 1:
        if not hasattr(vllm_config, "adjust_dcp_kv_cache_interleave_size"):
            raise ConfigError(
                f"decode_context_parallel_size {parallel.decode_context_parallel_size} is not carried from or to "
                f"vLLM {vllm.__version__}, expected 1; or run vLLM 0.32"
            )
        for table, sharding in zip(
            transfer_group_ids(kv_cache_config), shardings(vllm_config, kv_cache_config), strict=True
        ):
            block_size = kv_cache_config.kv_cache_groups[table].kv_cache_spec.block_size
            if block_size % sharding.interleave:
                raise ConfigError(
                    f"cp_kv_cache_interleave_size {sharding.interleave} does not divide the blocks of KV cache group "
                    f"{table}, {block_size} tokens; expected a divisor"
                )
    cache = vllm_config.cache_config
    if getattr(cache, "calculate_kv_scales", False) and "fp8" in str(cache.cache_dtype):  # gone in 0.32
        raise ConfigError(
            f"calculate_kv_scales gives every engine scales of its own making (kv_cache_dtype {cache.cache_dtype}); "
            "use a checkpoint that has scales, or leave it out"
        )
    groups = len(kv_cache_config.kv_cache_groups)
    if not HAS_TRANSFER_RESULTS:
        for group in kv_cache_config.kv_cache_groups:
            kind, _ = _kind(_first(group.kv_cache_spec))
            if kind not in ("full", "mla"):
                raise ConfigError(
                    f"vLLM {vllm.__version__} computes on over blocks given back when a load of a {kind} cache fails; "
                    "run vLLM 0.32, or this model without KVFerry"
                )
    if groups > 1 and not HAS_TRANSFER_RESULTS:
        raise ConfigError(
            f"vLLM {vllm.__version__} dies when a load fails with {groups} KV cache groups; "
            "start it with --disable-hybrid-kv-cache-manager"
        )


def speaks_for_engine(connector: KVConnectorBase_V1) -> bool:
    """On a worker: whether the engine's connector is this one, and not MultiConnector, with this one below."""
    return has_kv_transfer_group() and get_kv_transfer_group() is connector


def loads_fail_requests(vllm_config: VllmConfig) -> bool:
    """Whether a failed load fails its request (vLLM's default) instead of being recomputed."""
    return bool(vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute")


def transfer_group_ids(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """The KV cache groups that are handed over; in 0.26 all are."""
    ids = getattr(kv_cache_config, "transfer_group_ids", None)
    return tuple(range(len(kv_cache_config.kv_cache_groups))) if ids is None else tuple(ids)


def shardings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[TokenSharding, ...]:
    """How ranks share out the tokens of each transferable KV cache group, under decode context parallelism.

    Every n-th ``cp_kv_cache_interleave_size`` tokens are a rank's (``_compute_slot_mappings_kernel``). vLLM's workers
    change that setting when they begin, and its scheduler does not hear of it, so the same is done to a copy here.
    """
    groups = [kv_cache_config.kv_cache_groups[index] for index in transfer_group_ids(kv_cache_config)]
    size = vllm_config.parallel_config.decode_context_parallel_size
    if size == 1:
        return UNSHARDED * len(groups)
    config = copy(vllm_config)
    config.parallel_config = copy(vllm_config.parallel_config)
    config.adjust_dcp_kv_cache_interleave_size(kv_cache_config)
    sharding = TokenSharding(size, config.parallel_config.cp_kv_cache_interleave_size)
    return tuple(sharding if group.kv_cache_spec.dcp_sharded else UNSHARDED[0] for group in groups)


def block_tables(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[BlockTable, ...]:
    """The block tables of vLLM's transferable KV cache groups.

    Raises:
        ConfigError: a kind of cache that is not known; names it.
    """
    tables = []
    for index, sharding in zip(
        transfer_group_ids(kv_cache_config), shardings(vllm_config, kv_cache_config), strict=True
    ):
        spec = _first(kv_cache_config.kv_cache_groups[index].kv_cache_spec)
        kind, window = _kind(spec)
        extra = getattr(spec, "extra_retained_tokens", 0)
        tables.append(BlockTable(kind, spec.block_size * sharding.size, window, extra, sharding))
    return tuple(tables)


def layer_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[LayerGroup, ...]:
    """The layers of vLLM's transferable KV cache groups, those of one specification together.

    Raises:
        ConfigError: a kind of cache that is not known, or fp8 scales that are not carried; names it.
    """
    groups = []
    shared = shardings(vllm_config, kv_cache_config)
    layers = vllm_config.compilation_config.static_forward_context
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    for table, index in enumerate(transfer_group_ids(kv_cache_config)):
        group = kv_cache_config.kv_cache_groups[index]
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # layers of one type whose sizes differ
        alike: dict[KVCacheSpec, list[str]] = {}
        for name in group.layer_names:
            alike.setdefault(inner[name] if inner else group.kv_cache_spec, []).append(name)
        for spec, names in (alike or {_first(group.kv_cache_spec): []}).items():
            kind, window = _kind(spec)
            heads = _total_heads(vllm_config, spec)
            if kind == "state":
                parts = _sections(vllm_config, spec, heads)
                groups.append(LayerGroup(kind, tuple(names), 1, heads, table=table, sections=parts))
                continue
            packing = _packing(vllm_config, spec, [layers.get(name) for name in names])
            numbers = layer_cache_dtype(spec, names, layers, cache_dtype, fnuz=current_platform.is_fp8_fnuz())
            groups.append(
                LayerGroup(
                    kind, tuple(names), spec.block_size, heads, window, packing, table, shared[table], numbers=numbers
                )
            )
    return tuple(groups)


def _first(spec: KVCacheSpec) -> KVCacheSpec:
    inner = getattr(spec, "kv_cache_specs", None)
    return next(iter(inner.values())) if inner else spec


def _total_heads(vllm_config: VllmConfig, spec: KVCacheSpec) -> int:
    """Heads of a cache over all tensor-parallel ranks; 1 where every rank holds the same.

    vLLM tells those of a rank: the model's over the ranks, and one where there are more ranks than heads. Then the
    configuration has the number, and where it has more than one that fits, the heads count as not replicated.
    """
    shards = getattr(spec, "max_tp_shards", None)  # 0.32
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if isinstance(spec, MLAAttentionSpec) or shards == 1:
        return 1
    if isinstance(spec, MambaSpec):  # of a state that is of one piece
        return 1 if getattr(spec, "tp_replicated", False) else ranks
    held = int(getattr(spec, "num_kv_heads", 1))
    model = vllm_config.model_config
    told = {int(model.get_total_num_kv_heads())}
    config = vars(model.hf_text_config) if hasattr(model.hf_text_config, "__dict__") else {}
    told |= {value for name, value in config.items() if "key_value_heads" in name and isinstance(value, int)}
    fitting = {heads for heads in told if max(1, heads // ranks) == held}
    return fitting.pop() if len(fitting) == 1 else held * ranks


def _sections(vllm_config: VllmConfig, spec: MambaSpec, pieces: int) -> tuple[Section, ...]:
    """Of a state, whose cache is raw bytes. Where every rank holds all of it, or it is not known how they share it, the
    page as a whole, of which there are ``pieces`` different ones."""
    arrays = [
        StateArray(tuple(shape), str(dtype).removeprefix("torch."), dtype.itemsize)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]
    conv_order = os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT") or "SD"
    order = " cpu" if current_platform.is_cpu() else ""  # vLLM's CPU kernels keep a head's state transposed
    found: tuple[Section, ...] = ()
    if not getattr(spec, "tp_replicated", False):
        config = vllm_config.model_config.hf_text_config
        groups = (getattr(config, name, None) for name in ("n_groups", "mamba_n_groups", "mamba_ngroups"))
        found = sections(
            getattr(spec.mamba_type, "name", ""),
            arrays,
            vllm_config.parallel_config.tensor_parallel_size,
            dim_first=conv_order == "DS",
            group_counts=frozenset(count for count in groups if isinstance(count, int)),
            order=order,
        )
    content = sum(prod(array.shape) * array.item for array in arrays)
    named = "+".join(f"{list(array.shape)} {array.dtype}" for array in arrays)
    return found or (whole_page(content, pieces, f"{conv_order} {named}{order}"[:256]),)


def _packing(vllm_config: VllmConfig, spec: KVCacheSpec, layers: Sequence[object]) -> str:
    """The order that a backend keeps tokens in inside a block, where that is not one after the other.

    vLLM's CPU attention stores keys transposed or in pairs, by instruction set; the shape of its cache does not tell.
    On a GPU the indexer of sparse MLA keeps the scales of a block's keys behind all of them
    (``indexer_k_quant_and_cache``).
    """
    if not current_platform.is_cpu():
        return "indexer" if any("Indexer" in type(layer).__name__ for layer in layers) else ""
    head_size = getattr(spec, "head_size", None)
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # Of the model's dtype, also where the cache is fp8.
        isa = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, head_size)
    except (ImportError, AttributeError, TypeError):  # another vLLM: packed all the same, the order has no name
        isa = "unknown"
    return f"cpu {platform.machine()} {isa}"


def element_order(vllm_config: VllmConfig, layer: str) -> NDArray[np.int64] | None:
    """Where vLLM's CPU attention puts each element inside a (block, head) of a layer's cache: ``packing.split``.

    Its own writer is asked, with the instruction set and cache dtype that the layer uses.

    Returns:
        [2, N, D] for keys and values, N tokens of a kernel block; None where another backend wrote the cache, or its
        writer is not as it is known, so that nothing can be said of its order.
    """
    if not current_platform.is_cpu():
        return None
    try:
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        attention = vllm_config.compilation_config.static_forward_context[layer]
        cache, isa, impl = attention.kv_cache, attention.isa, attention.impl
        if not isinstance(impl, CPUAttentionBackendImpl):
            return None
        writer, cache_dtype = _custom_ops.cpu_attn_reshape_and_cache, impl.kv_cache_dtype
        _, _, tokens, content = cache.shape
    except (ImportError, AttributeError, KeyError, ValueError):  # another vLLM
        return None
    held = cache.dtype
    if held == torch.uint8:
        held = torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn

    def write(*tensors: torch.Tensor) -> None:
        writer(*tensors, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype)

    given = vllm_config.model_config.dtype
    return packing.element_order(write, tokens, content // 2, given=given, stored=cache.dtype, held=held)


def _kind(spec: KVCacheSpec) -> tuple[CacheKind, int]:
    """By name: a kind that came after this was written may give blocks back by rules of its own."""
    name = type(spec).__name__
    if name in ("MLAAttentionSpec", "HiddenStateCacheSpec"):
        return "mla", 0
    if name in ("SlidingWindowSpec", "SlidingWindowMLASpec"):
        return "sliding_window", int(spec.sliding_window)
    if name == "ChunkedLocalAttentionSpec":
        return "chunked_local", int(spec.attention_chunk_size)
    if name in ("FullAttentionSpec", "SinkFullAttentionSpec"):
        return "full", 0
    if name == "MambaSpec":
        return "state", 0
    raise ConfigError(f"KV caches of kind {name} are not carried; run this model without KVFerry")


def rank_info(vllm_config: VllmConfig, model_tag: str | None = None) -> RankInfo:
    """This worker's place, from vLLM's own process groups. ``model_tag``: that of the settings."""
    parallel = vllm_config.parallel_config
    return RankInfo(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        tp_rank=get_tensor_model_parallel_rank(),
        tp_size=parallel.tensor_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        pp_size=parallel.pipeline_parallel_size,
        model=model_identity_of(vllm_config, model_tag),
        dp_rank=getattr(parallel, "data_parallel_index", 0),
    )


def model_identity_of(vllm_config: VllmConfig, tag: str | None = None) -> dict[str, str]:
    """``model_identity`` of vLLM's configuration. ``tag``: ``model_tag`` of the settings."""
    model = vllm_config.model_config
    return model_identity.model_identity(
        model.hf_config,
        model.hf_text_config,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        tag=tag,
    )


def request_view(request: Request) -> RequestView:
    """What the scheduler half reads of a request."""
    extra = [feature.identifier for feature in getattr(request, "mm_features", None) or ()]
    if request.lora_request is not None:
        extra.append(f"lora:{request.lora_request.lora_name}")
    return RequestView(
        request_id=request.request_id,
        params=request.kv_transfer_params,
        # Beside embeddings there are ids that stand for them, alike for all.
        prompt_token_ids=None if getattr(request, "prompt_embeds", None) is not None else request.prompt_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        extra=tuple(extra),
        rejected=bool(getattr(request, "abort_immediately", False)),
        whole_prompt=bool(request.get_skip_reading_prefix_cache()),
    )


def truncate_prompt(request: Request, count: int) -> None:
    """Take the last ``count`` tokens off a request that P has not begun. D has them from its client."""
    assert request.prompt_token_ids is not None and request.num_computed_tokens == 0
    request.prompt_token_ids = request.prompt_token_ids[:-count]  # not in place: the list may be the caller's
    del request._all_token_ids[-count:]
    request.num_prompt_tokens -= count
    request.max_tokens = 1  # what it samples continues another prompt
    # Else a block that the sampled token ends would go by the hash of one that the prompt's token ends.
    request.block_hashes.clear()
    request.update_block_hashes()


def prefill_lookahead(vllm_config: VllmConfig) -> int:
    """Tokens at the end of a prompt that D must compute itself: a drafter of several modules has read as far ahead as
    that on P, in drafts that D never saw (0.32)."""
    return max(0, int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0)) - 1)


def completed(request: Request) -> bool:
    """Whether a finished request ended by itself: by length or by a stop, not by abort or error."""
    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def num_blocks(kv_cache_config: KVCacheConfig) -> int:
    """Manager blocks of the device pool."""
    return int(kv_cache_config.num_blocks)
