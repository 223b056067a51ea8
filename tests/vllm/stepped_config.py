"""vLLM's configuration of an engine that is stepped by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

from tests.support.tiny_model import ModelSpec, build_model
from tests.vllm.labelled import CONTENT, HEADS, LAYERS


def tiny_model(folder: Path) -> ModelConfig:
    """vLLM's configuration of a model of a few kilobytes, which is written to ``folder``. Nothing reads its weights."""
    spec = ModelSpec(
        layers=LAYERS, hidden=32, heads=HEADS, kv_heads=HEADS, head_dim=CONTENT // 2, intermediate=32,
        vocabulary=300, max_tokens=1024,
    )  # fmt: skip
    return model_config(build_model(folder, spec))


def model_config(folder: Path) -> ModelConfig:
    """vLLM's configuration of a local model; no weights are read."""
    return ModelConfig(model=str(folder), tokenizer=str(folder), dtype="float32", max_model_len=512, seed=0)


def engine_config(
    model: ModelConfig,
    *,
    role: str,
    policy: str,
    extra: dict[str, Any],
    tp: int,
    max_batched: int,
    connector: str,
    module: str | None,
    ahead: bool,
    drafts: int,
    scheduling: str,
    dp_rank: int | None,
    block: int,
    dcp: int,
    interleave: int,
    engine_id: str | None = None,
) -> VllmConfig:
    """``policy`` is that of failed loads, ``scheduling`` the scheduler's, ``block`` a block's tokens; ``Engine`` says
    what the rest means."""
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=max_batched,
            max_model_len=512,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            policy=scheduling,
        ),
        speculative_config=_speculative(model, drafts) if drafts else None,
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=interleave,
            distributed_executor_backend="mp",
        ),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(
            engine_id=engine_id,
            kv_connector=connector,
            kv_connector_module_path=module,
            kv_role=role,
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        ),
    )
    config.scheduler_config.async_scheduling = ahead  # vLLM forces it off on the CPU
    if dp_rank is not None:  # as EngineCoreProc.run_engine_core does
        transfer = config.kv_transfer_config
        assert transfer is not None
        transfer.engine_id = f"{transfer.engine_id}_dp{dp_rank}"
        config.parallel_config.data_parallel_index = dp_rank
    return config


def _speculative(model: ModelConfig, drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=drafts,
        prompt_lookup_max=4,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )
