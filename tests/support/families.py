"""Tiny models with random weights, one for each form of KV cache that vLLM has. No download, same bytes for same seed.

Only the structure is that of the family: which layers attend to what, what they keep, how vLLM groups their caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.tiny_model import ModelSpec, write_tokenizer

VOCABULARY = 1024
MAX_TOKENS = 4096
WINDOW = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": MAX_TOKENS,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False,
    "initializer_range": 0.1,  # wide enough that greedy decoding is far from ties
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MLA: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """``config_class`` and ``model_class`` are transformers' names; ``config`` what differs from the common sizes.

    ``layers`` counts those that have a cache of their own, ``states`` those of them that keep a state. ``exact``: a
    token's logits do not depend on how many others the step computes, so that D's tokens are those of an engine that
    computes the prompt itself.
    """

    config_class: str
    model_class: str
    config: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 4
    states: int = 0
    dtype: str = "float32"
    exact: bool = True
    arguments: tuple[str, ...] = ()

    def configuration(self) -> Any:
        """As transformers' object."""
        import transformers

        values = {name: value for name, value in (_COMMON | dict(self.config)).items() if value is not ...}
        return getattr(transformers, self.config_class)(**values, architectures=[self.model_class])

    def build(self, folder: Path, seed: int = 7) -> Path:
        """Write configuration, weights and tokenizer; returns the folder."""
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        config = self.configuration()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = getattr(transformers, self.model_class)(config).to(getattr(torch, self.dtype))
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        write_tokenizer(folder, ModelSpec(vocabulary=VOCABULARY, max_tokens=MAX_TOKENS))
        return folder


FAMILIES: dict[str, Family] = {
    "qwen3-moe": Family(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True}
    ),
    "deepseek": Family(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", {**_EXPERTS, **_MLA, "head_dim": ...},
        dtype="bfloat16",  # vLLM's experts and MLA on the CPU know no other
        exact=False,
    ),
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3ForCausalLM", layers=6,
        config={"num_hidden_layers": 6, "sliding_window": WINDOW, "query_pre_attn_scalar": 32,
                "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2},
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig", "Gemma3nForCausalLM",
        {"num_hidden_layers": 6, "tie_word_embeddings": True, "sliding_window": WINDOW,
         "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2, "laurel_rank": 8,
         "altup_num_inputs": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
         "activation_sparsity_pattern": [0.0] * 6},
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig", "Qwen3NextForCausalLM",
        {**_EXPERTS, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
         "layer_types": [*["linear_attention"] * 3, "full_attention"], "linear_num_key_heads": 1,
         "linear_num_value_heads": 2, "num_experts": 4, "shared_expert_intermediate_size": 64},
        states=3,
        dtype="bfloat16",  # vLLM's GDN on the CPU knows no other
        exact=False,
    ),
    "falcon-h1": Family(
        "FalconH1Config", "FalconH1ForCausalLM",
        {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
         "mamba_chunk_size": 64},
        layers=8, states=4,
        arguments=("--no-enable-prefix-caching",),  # with it, vLLM 0.32 dies on the CPU at a prompt of several blocks
    ),
}  # fmt: skip

ALL: dict[str, Family] = FAMILIES | {
    "llama-4": Family(
        "Llama4TextConfig", "Llama4ForCausalLM",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 128,
         "interleave_moe_layer_step": 1, "no_rope_layers": [1, 1, 1, 0], "use_qk_norm": False},
    ),
    "jamba": Family(
        "JambaConfig", "JambaForCausalLM",
        {"head_dim": ..., "attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1, "mamba_dt_rank": 8},
    ),
    "olmo-hybrid": Family("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "nemotron-h": Family(
        "NemotronHConfig", "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1,
         "ssm_state_size": 16},
    ),
    "gemma4": Family(
        "Gemma4TextConfig", "Gemma4ForCausalLM",
        {"num_hidden_layers": 6, "sliding_window": WINDOW, "global_head_dim": 64, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
         "vocab_size_per_layer_input": VOCABULARY, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    ),
    "lfm2": Family(
        "Lfm2Config", "Lfm2ForCausalLM",
        {"head_dim": ..., "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_dim": 64, "block_dim": 64,
         "block_ff_dim": 128, "block_multiple_of": 32, "block_auto_adjust_ff_dim": False, "block_use_swiglu": True},
    ),
}  # fmt: skip
"""With those that vLLM 0.32 does not run on a CPU, or not with prefix caching."""
