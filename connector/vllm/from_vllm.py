"""vLLM's configuration, cache specifications and requests as KVFerry's structs.

``cache_kinds`` says which specs are carried.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence, Set
from copy import copy
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheGroupRole, KVCacheSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from kvferry.connector.geometry import model_identity, packing
from kvferry.connector.geometry.dtypes import layer_cache_dtype
from kvferry.connector.geometry.engine_types import (
    BlockTable,
    KVContent,
    LayerGroup,
    RankInfo,
    RequestView,
    ScheduledTokens,
)
from kvferry.connector.geometry.recurrent_state import Section, StateArray, sections, whole_page
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.vllm.cache_kinds import cache_kind, entry_tokens, first_spec, is_ring, keeps_blocks, layer_specs
from kvferry.connector.vllm.lora_content import REPLACED, known_adapters, lora_content
from kvferry.connector.wire.params import from_p2p
from kvferry.connector.wire.step_plan import RankAddress
from kvferry.transport.errors import ConfigError
from kvferry.transport.tracing import sampled_traceparent

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from kvferry.connector.vllm.weights import EngineWeights

RING_TOKENS = 1 << 30  # of a block of a ring: more than a prompt has


def block_tables(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[BlockTable, ...]:
    """The block tables of vLLM's transferable KV cache groups.

    Raises:
        ConfigError: a kind of cache that is not known; names it.
    """
    tables = []
    for index, sharding in zip(
        kv_cache_config.transfer_group_ids, shardings(vllm_config, kv_cache_config), strict=True
    ):
        spec = first_spec(kv_cache_config.kv_cache_groups[index].kv_cache_spec)
        kind, window = cache_kind(spec)
        extra = getattr(spec, "extra_retained_tokens", 0)
        size = RING_TOKENS if is_ring(spec) else spec.block_size * sharding.size
        tables.append(BlockTable(kind, size, window, extra, sharding, spec.prefix_cacheable))
    return tuple(tables)


def layer_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[LayerGroup, ...]:
    """The layers of vLLM's transferable KV cache groups, those of one specification together.

    Raises:
        ConfigError: a kind of cache that is not known, or fp8 scales that are not carried; names it.
    """
    groups = []
    shared = shardings(vllm_config, kv_cache_config)
    layers = vllm_config.compilation_config.static_forward_context
    configured = str(vllm_config.cache_config.cache_dtype)
    for table, index in enumerate(kv_cache_config.transfer_group_ids):
        group = kv_cache_config.kv_cache_groups[index]
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # layers of one type whose sizes differ
        alike: dict[KVCacheSpec, list[str]] = {}
        for name in group.layer_names:
            alike.setdefault(inner[name] if inner else group.kv_cache_spec, []).append(name)
        for spec, names in (alike or {first_spec(group.kv_cache_spec): []}).items():
            kind, window = cache_kind(spec)
            heads = _total_heads(vllm_config, spec)
            if is_ring(spec):  # all ranks have all of it
                groups.append(LayerGroup(kind, tuple(names), spec.block_size, 1, table=table))
                continue
            if kind == "state":
                parts = _sections(vllm_config, spec, heads)
                groups.append(LayerGroup(kind, tuple(names), 1, heads, table=table, sections=parts))
                continue
            packing = packing_name(vllm_config, spec, [layers.get(name) for name in names])
            cache_dtype = layer_cache_dtype(spec, names, layers, configured, fnuz=current_platform.is_fp8_fnuz())
            groups.append(
                LayerGroup(
                    kind,
                    tuple(names),
                    spec.block_size,
                    heads,
                    window,
                    packing,
                    table,
                    shared[table],
                    cache_dtype=cache_dtype,
                    entry_tokens=entry_tokens(spec),
                )
            )
    return tuple(groups)


def element_order(vllm_config: VllmConfig, layer: str) -> NDArray[np.int64] | None:
    """Where vLLM's CPU attention puts each element inside a (block, head) of a layer's cache: ``packing.split``.

    Its own writer is asked, with the instruction set and cache dtype that the layer uses.

    Returns:
        [2, N, D] for keys and values, N tokens of a kernel block; None where another backend wrote the cache.
    """
    if not current_platform.is_cpu():
        return None
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    attention = vllm_config.compilation_config.static_forward_context.get(layer)
    impl, isa = getattr(attention, "impl", None), getattr(attention, "isa", None)
    if not isinstance(impl, CPUAttentionBackendImpl) or isa is None:
        return None
    cache, cache_dtype = attention.kv_cache, impl.kv_cache_dtype
    _, _, tokens, content = cache.shape
    held = cache.dtype
    if held == torch.uint8:
        held = torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn

    def write(*tensors: torch.Tensor) -> None:
        _custom_ops.cpu_attn_reshape_and_cache(*tensors, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype)

    given = vllm_config.model_config.dtype
    return packing.element_order(write, tokens, content // 2, given=given, stored=cache.dtype, held=held)


def draft_layers(vllm_config: VllmConfig, runner: object) -> dict[str, str]:
    """The attention layers of the model that drafts, and its name as ``RegionGeometry.draft``: its method, and a digest
    of its facts. Only what ``runner``, vLLM's model runner, knows for such layers counts: without its word a layer is
    one of the model itself, and a P must have it. ``extract_hidden_states`` drafts nothing, and keeps what clients ask
    for."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method == "extract_hidden_states":
        return {}
    v1, v2 = getattr(runner, "drafter", None), getattr(runner, "speculator", None)
    layers = getattr(v1, "_draft_attn_layer_names", None) or getattr(v2, "draft_attn_layer_names", None)
    if not layers:
        return {}
    model = speculative.draft_model_config
    facts = model_identity.model_identity(
        model.hf_config, model.hf_text_config, quantization=model.quantization,
        max_model_len=vllm_config.model_config.max_model_len,
    )  # fmt: skip
    digest = sha256(repr(sorted(facts.items())).encode()).hexdigest()
    return dict.fromkeys(layers, f"{speculative.method} {digest[:16]}")


def shardings(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[TokenSharding, ...]:
    """How ranks share out the tokens of each transferable KV cache group, under decode context parallelism.

    Every n-th ``cp_kv_cache_interleave_size`` tokens are a rank's (``_compute_slot_mappings_kernel``). vLLM's workers
    change that setting when they begin, and its scheduler does not hear of it, so the same is done to a copy here.
    """
    groups = [kv_cache_config.kv_cache_groups[index] for index in kv_cache_config.transfer_group_ids]
    size = vllm_config.parallel_config.decode_context_parallel_size
    if size == 1:
        return UNSHARDED * len(groups)
    config = copy(vllm_config)
    config.parallel_config = copy(vllm_config.parallel_config)
    config.adjust_dcp_kv_cache_interleave_size(kv_cache_config)
    sharding = TokenSharding(size, config.parallel_config.cp_kv_cache_interleave_size)
    shared = [group.kv_cache_spec.dcp_sharded and not is_ring(group.kv_cache_spec) for group in groups]
    return tuple(sharding if each else UNSHARDED[0] for each in shared)


def check_groups(kv_cache_config: KVCacheConfig) -> None:
    """Check the groups that are handed over, before the engine starts.

    Raises:
        ConfigError: a kind of cache that is not carried, KV in the host's memory, or an unknown role; names it.
    """
    for index in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[index]
        if group.role != KVCacheGroupRole.DEFAULT or group.host_resident:
            raise ConfigError(
                f"KV cache group {index} has the role {group.role.value!r}: KV that vLLM keeps on the host is not "
                "carried; leave out HiSparse, or run this model without KVFerry"
            )
        for spec in layer_specs(group.kv_cache_spec):
            if cache_kind(spec)[0] != "state":
                entry_tokens(spec)


def blocks_leave_at_end(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a request keeps its blocks until it ends or is preempted, and nobody but the model and a load writes
    them: vLLM takes blocks outside a window from running requests, and zeroes new blocks where it keeps states."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or kv_cache_config.needs_kv_cache_zeroing:
        return False
    return keeps_blocks(groups[0].kv_cache_spec)


def _total_heads(vllm_config: VllmConfig, spec: KVCacheSpec) -> int:
    """Heads of a cache over all tensor-parallel ranks; 1 where every rank holds the same.

    vLLM tells those of a rank: the model's over the ranks, and one where there are more ranks than heads. Then the
    configuration has the number; where layers differ, as in Gemma 4, that of the layers with heads of this size. Where
    more than one fits, the heads count as not replicated; a peer of another size then counts others, and is refused.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if isinstance(spec, MambaSpec):  # of a state that is of one piece
        return 1 if spec.tp_replicated else ranks
    if isinstance(spec, MLAAttentionSpec) or spec.max_tp_shards == 1:
        return 1
    held = int(spec.num_kv_heads)
    model = vllm_config.model_config
    named = {int(model.get_total_num_kv_heads())}
    config = vars(model.hf_text_config) if hasattr(model.hf_text_config, "__dict__") else {}
    named |= {value for name, value in config.items() if "key_value_heads" in name and isinstance(value, int)}
    arch = model.model_arch_config
    layers = [arch[number] for number, _ in enumerate(arch.per_layer_overrides or ())]
    named = {one.total_num_kv_heads for one in layers if one.head_size == spec.head_size} or named
    fitting = {heads for heads in named if max(1, heads // ranks) == held}
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
    if not spec.tp_replicated:
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


def packing_name(vllm_config: VllmConfig, spec: KVCacheSpec, layers: Sequence[object]) -> str:
    """The order that a backend keeps tokens in inside a block, where that is not one after the other.

    vLLM's CPU attention stores keys transposed or in pairs, by instruction set; the shape of its cache does not tell.
    On a GPU the indexer of sparse MLA keeps the scales of a block's keys behind all of them
    (``indexer_k_quant_and_cache``).
    """
    if not current_platform.is_cpu():
        return "indexer" if any("Indexer" in type(layer).__name__ for layer in layers) else ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    # Of the model's dtype, also where the cache is fp8.
    isa = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size)
    return f"cpu {platform.machine()} {isa}"


def tp_size(parallel: ParallelConfig) -> int:
    """The ranks of a stage. Those of prefill context parallelism share out the computation, not the KV: each gathers
    and writes all of it (``PCPManager``), so they count as further tensor-parallel ranks with the same heads."""
    return int(parallel.tensor_parallel_size * parallel.prefill_context_parallel_size)


def rank_info(vllm_config: VllmConfig, model: Mapping[str, str]) -> RankInfo:
    """This worker's place, from vLLM's own process groups. ``model``: ``model_identity_of`` its configuration.

    Ranks of one PCP group are neighbours here: that is the order in which vLLM's DCP groups take a stage's ranks
    (``initialize_model_parallel``), and not the order of its ranks, in which PCP groups lie ``tp`` apart.

    Raises:
        ConfigError: this vLLM orders the ranks of a DCP group otherwise.
    """
    parallel = vllm_config.parallel_config
    replicas, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    tp_rank = get_tensor_model_parallel_rank() * replicas + (get_pcp_group().rank_in_group if replicas > 1 else 0)
    if replicas > 1 < dcp and get_dcp_group().rank_in_group != tp_rank % dcp:
        raise ConfigError(
            f"prefill_context_parallel_size {replicas} with decode_context_parallel_size {dcp}: this vLLM numbers the "
            f"ranks that share tokens out otherwise than 0.32 ({get_dcp_group().rank_in_group}, not {tp_rank % dcp}); "
            "leave one of them out"
        )
    return RankInfo(
        engine_id=str(vllm_config.kv_transfer_config.engine_id),
        tp_rank=tp_rank,
        tp_size=tp_size(parallel),
        pp_rank=get_pp_group().rank_in_group,
        pp_size=parallel.pipeline_parallel_size,
        model=model,
        dp_rank=parallel.data_parallel_index,
    )


def addresses(vllm_config: VllmConfig, ours: RankAddress) -> tuple[RankAddress, ...]:
    """Where the ranks of this one's PCP group listen: all of them call this at once, as vLLM asks for handshakes. It
    keeps one for each tensor-parallel rank, and where DCP is off, that is one of a whole PCP group."""
    if vllm_config.parallel_config.prefill_context_parallel_size == 1:
        return (ours,)
    group = get_pcp_group()
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, ours, group=group.cpu_group)
    return tuple(found)


def model_identity_of(vllm_config: VllmConfig, weights: EngineWeights | None = None) -> dict[str, str]:
    """``model_identity`` of vLLM's configuration, and of the weights where they count."""
    model = vllm_config.model_config
    return model_identity.model_identity(
        model.hf_config,
        model.hf_text_config,
        quantization=model.quantization,
        max_model_len=model.max_model_len,
        tag=None if weights is None else weights.tag,
        weights=None if weights is None else weights.fact,
    )


def request_view(request: Request) -> RequestView:
    """What the scheduler half reads of a request."""
    extra, adapter = [feature.identifier for feature in request.mm_features], ""
    if (lora := request.lora_request) is not None:
        extra.append(f"lora:{lora.lora_name}")
        if (lora.lora_int_id, lora.lora_path) not in known_adapters:  # as vLLM loads it: ``kv_content`` compares
            lora_content(lora.lora_path, lora.lora_int_id)
        if request.kv_transfer_params:
            number = 0 if lora.load_inplace else lora.lora_int_id
            adapter = lora_content(lora.lora_path, number)
    return RequestView(
        request_id=request.request_id,
        params=from_p2p(request.kv_transfer_params),
        # Beside embeddings there are ids that stand for them, alike for all.
        prompt_token_ids=None if request.prompt_embeds is not None else request.prompt_token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        extra=tuple(extra),
        adapter=adapter,
        rejected=request.abort_immediately,
        whole_prompt=bool(request.get_skip_reading_prefix_cache()),
        # vLLM leaves them out where --otlp-traces-endpoint is not set.
        traceparent=sampled_traceparent(request.trace_headers),
    )


def kv_content(request: Request, tokens: int) -> KVContent | None:
    """What the KV of the first ``tokens`` tokens of a request depends on; ``None`` where that cannot be told."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return None
    lora = request.lora_request
    scope: tuple[str, ...] = (request.cache_salt or "",)
    if lora is not None:
        content = lora_content(lora.lora_path, lora.lora_int_id)
        if content in ("", REPLACED):
            return None
        scope = (*scope, lora.lora_name, content)
    inputs = tuple(
        (feature.mm_position.offset, feature.mm_position.length, feature.identifier) for feature in request.mm_features
    )
    return KVContent(request.all_token_ids[:tokens], scope, inputs)


def scheduled_tokens(
    scheduler_output: SchedulerOutput, request_ids: Set[str], groups: Sequence[int]
) -> Iterator[ScheduledTokens]:
    """What a step computes of some requests. ``groups``: the KV cache groups whose blocks count."""
    counts = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:  # model runner V2 gets resumed requests here, too
        if new.req_id in request_ids:
            ids = [new.block_ids[group] for group in groups]
            yield ScheduledTokens(new.req_id, new.num_computed_tokens, counts[new.req_id], ids, all_blocks=True)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, blocks, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        if request_id in request_ids:
            new_ids = [blocks[group] if blocks is not None else [] for group in groups]
            resumed = request_id in cached.resumed_req_ids
            yield ScheduledTokens(request_id, start, counts[request_id], new_ids, all_blocks=resumed)


def max_sizes(vllm_config: VllmConfig) -> tuple[int, int]:
    """The largest tensor- and pipeline-parallel sizes of an engine of this model: each rank has an attention head, each
    stage a layer. With MLA more ranks can hold the same, by prefill context parallelism."""
    config = vllm_config.model_config.hf_text_config
    sizes = [getattr(config, name, None) for name in ("num_attention_heads", "num_hidden_layers")]
    sizes[0] = MAX_RANKS if vllm_config.model_config.use_mla else sizes[0]
    heads, layers = (size if isinstance(size, int) and 0 < size < MAX_RANKS else MAX_RANKS for size in sizes)
    return heads, layers


def completed(request: Request) -> bool:
    """Whether a finished request ended by itself: by length or by a stop, not by abort or error."""
    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def loads_fail_requests(vllm_config: VllmConfig) -> bool:
    """Whether a failed load fails its request (vLLM's default) instead of being recomputed."""
    return bool(vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute")


def layers_run_once(vllm_config: VllmConfig) -> bool:
    """Whether each attention layer runs once in a step, with all tokens of the step: not in micro-batches (DBO), and
    not as a draft model, which runs once for each speculative token."""
    parallel = vllm_config.parallel_config
    return not parallel.use_ubatching and vllm_config.speculative_config is None
