"""A process in which vLLM builds tiny models and lays out their caches, and prompts go from one engine to another.

A process of its own: vLLM's models want process groups, which the tests' process must not have. As on a GPU, caches are
not packed: what vLLM cannot run on a CPU is what this is for.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvferry.cli.plan.model import model_shape
from kvferry.connector.scheduler import scheduler
from kvferry.connector.vllm import from_vllm
from kvferry.connector.wire import params
from kvferry.transport.errors import ConfigError
from tests.support.families import ALL, WINDOW, Family
from tests.vllm.stepped import PREFILL, settle
from tests.vllm.stepped_family import FamilyEngine

LENGTHS = (2, 33, WINDOW + 31, 2 * WINDOW, 129, 500)
FEW_LENGTHS = (WINDOW + 31, 500)
SHARED = 6 * WINDOW
"""Whole blocks of every family."""
SIDES = {"p": (32, "LBHNC"), "d": (64, "BLNHC")}
"""Block size, where the model leaves it free, and layout. Each is P in its turn."""


def config_of(folder: Path, side: str) -> VllmConfig:
    block_size, layout = SIDES[side]
    arguments = EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=1024,
        max_num_batched_tokens=256, max_num_seqs=8, block_size=block_size, enforce_eager=True, seed=0,
        enable_prefix_caching=True, num_gpu_blocks_override=96,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFerryConnector", kv_connector_module_path="kvferry.connector.vllm.adapter",
            kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config={"slot_bytes": 1 << 20},
        ),
    )  # fmt: skip
    with mock.patch.object(torch.cpu, "_is_avx512_bf16_supported", lambda: False):  # it makes vLLM keep states in FP32
        config = arguments.create_engine_config()
    config.cache_config.kv_cache_layout = layout
    config.cache_config.enable_prefix_caching = True  # vLLM turns it off for MLA on a CPU without AMX
    return config


def engine(folder: Path, side: str) -> FamilyEngine:
    """vLLM builds the model, and every layer says what cache it needs."""
    config = config_of(folder, side)
    with set_current_vllm_config(config):
        with set_default_torch_dtype(config.model_config.dtype):
            initialize_model(config)
        current_platform.update_block_size_for_backend(config)  # a state must fit into a block of attention
        register_all_kvcache_specs(config)
        runner: Any = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
        specs = GPUModelRunner.get_kv_cache_spec(runner)
        return FamilyEngine(config, specs, int(side == "d"), runner.shared_kv_cache_layers)


def start_groups(folder: Path) -> None:
    """Process groups of one rank; vLLM makes that of experts only for a model that has any."""
    ALL["qwen3-moe"].configuration().save_pretrained(folder)
    with set_current_vllm_config(config_of(folder, "p")):
        init_distributed_environment(1, 0, f"file://{folder.resolve()}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)


def hand_over(
    p: FamilyEngine, d: FamilyEngine, tokens: int, shared: int = 0, *, at_once: bool = False
) -> dict[str, Any]:
    """One prompt from P to D; what D found at its first forward. ``shared`` tokens are those of all that share any.
    ``at_once``: D asks for it by name, before P computes it."""
    name, said = f"{tokens}-{shared}-{p.origin}-{at_once}", 40 if tokens == FEW_LENGTHS[0] and not at_once else 6
    own = 2 * tokens + p.origin + 5000 * at_once
    ids = [(position * 37 + (own if position >= shared else 0)) % 280 + 2 for position in range(tokens)]
    if at_once:
        d.add(ids, p.named(transfer_id=name), request_id=name, max_tokens=said)
        d.step()
    p.add(ids, PREFILL | {"transfer_id": name}, request_id=name)
    params = p.finish(name, beside=[d]).params
    if not at_once:
        d.add(ids, params, request_id=name, max_tokens=said)
    answer = d.finish(name, beside=[p])
    settle(p, d)
    theirs, ours = p.rank, d.rank
    return {
        "external": answer.external,
        "found": d.origins[name].theirs,
        "wanted": sum(1 if cache.is_state else tokens - 1 - cache.first_needed(tokens - 1) for cache in ours.views),
        "given back": any(
            one.first_kept(tokens - 1) > other.first_kept(tokens - 1)
            for one, other in zip(theirs.windowed(), ours.windowed(), strict=True)
        ),
    }


@contextmanager
def fault(name: str) -> Iterator[None]:
    """Damage done on purpose: D's checks must notice it."""
    half = scheduler.SchedulerHalf
    with mock.patch.object(params, "check_kept", lambda *_: None) if name else mock.MagicMock():
        if name == "P computes the last token too":
            with mock.patch.object(half, "num_tokens_for_d", lambda *_: 0):
                yield
        else:
            yield


def counted(folder: Path, d: FamilyEngine) -> dict[str, Any]:
    """Bytes of a token and windows: what ``kvferry plan`` counts, None if it refuses the model, and what vLLM keeps."""
    specs = [cache.spec for cache in d.rank.views]
    attention = [spec for spec in specs if not hasattr(spec, "shapes")]
    names = "sliding_window", "attention_chunk_size"
    windows = [max(getattr(spec, name, None) or 0 for name in names) for spec in attention]
    kept = [
        sum(spec.real_page_size_bytes // spec.block_size for spec in attention),
        sorted(windows),
    ]
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    try:
        shape = model_shape(config)
    except ConfigError:
        return {"kept": kept, "planned": None}
    return {"kept": kept, "planned": [shape.token_bytes, sorted(kv.window for kv in shape.kv for _ in kv.layers)]}


def report(family: Family, folder: Path, planted: str) -> dict[str, Any]:
    family.configuration().save_pretrained(folder)
    p, d = engine(folder, "p"), engine(folder, "d")
    few = () if planted else FEW_LENGTHS
    try:
        with fault(planted):
            loads = [
                {tokens: hand_over(*sides, tokens) for tokens in lengths}
                for sides, lengths in (((p, d), LENGTHS), ((d, p), few))
            ]
            at_once = [hand_over(p, d, tokens, at_once=True) for tokens in few]
            first, again = hand_over(p, d, SHARED + 1, SHARED), hand_over(p, d, SHARED + 150, SHARED)
    finally:
        p.close(), d.close()
    kinds = [type(group.kv_cache_spec).__name__ for group in d.kv_config.kv_cache_groups]
    blocks = [[group.kv_cache_spec.block_size for group in side.kv_config.kv_cache_groups] for side in (p, d)]
    return {
        "kinds": kinds,
        "blocks": blocks,
        "loads": loads,
        "at once": at_once,
        "again": [first, again],
        "failed": len(p.failed | d.failed),
        "counted": counted(folder, d),
    }


def reports(folder: Path, tasks: list[str]) -> Iterator[dict[str, Any]]:
    """Of each family; ``FAMILY:FAULT`` plants a fault."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # threads of the tests' process are not there
    unpacked = SimpleNamespace(is_cpu=lambda: False, is_fp8_fnuz=lambda: False)
    no_triton = "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn.set_triton_allocator"
    with mock.patch.object(from_vllm, "current_platform", unpacked), mock.patch(no_triton, lambda device: None):
        start_groups(folder)
        for name, _, planted in (task.partition(":") for task in tasks):
            try:
                answer = report(ALL[name], folder / f"{name}{planted and '-faulty'}", planted)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            yield {"family": name, "fault": planted, **answer}
