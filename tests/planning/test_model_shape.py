"""The KV cache of a model from its config.json, beside what vLLM makes of the same file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan.handover import stage_layers
from kvferry.cli.plan.model import KNOWN, MULTI_QUERY, SHARED, KvLayers, ModelShape, model_shape, uniform_shape
from kvferry.cli.plan.model import MLA as MLA_TYPES
from kvferry.transport.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512,
    "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64, "dtype": "float16"}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 64, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 8,
}  # fmt: skip


def published(
    model_type: str, layers: int, heads: int, kv_heads: int | None, hidden: int, **more: Any
) -> dict[str, Any]:
    """The numbers of a published ``config.json`` that say what KV the model keeps."""
    found = {"model_type": model_type, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    return found | ({} if kv_heads is None else {"num_key_value_heads": kv_heads}) | {"dtype": "bfloat16"} | more


MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
WINDOWS = [*["sliding_attention"] * 5, "full_attention"]
GEMMA4 = published("gemma4_text", 30, 16, 8, 2816, head_dim=256, global_head_dim=512, num_global_key_value_heads=2,
                   attention_k_eq_v=True, num_kv_shared_layers=0, sliding_window=1024,
                   layer_types=WINDOWS * 5)  # fmt: skip
MIMO = published("mimo_v2_flash", 48, 64, 4, 4096, head_dim=192, v_head_dim=128, swa_num_key_value_heads=8,
                 swa_head_dim=192, swa_v_head_dim=128, sliding_window_size=128,
                 hybrid_layer_pattern=[0, 1, 1, 1, 1, 0] + [1, 1, 1, 1, 1, 0] * 7)  # fmt: skip
SPARSE = published("deepseek_v32", 61, 128, 128, 7168, index_topk=2048, index_head_dim=128, **MLA)


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA, "auto", uniform_shape(4, 8, 2, 2 * 32 * 2, "bfloat16")),
        (LLAMA, "fp8", uniform_shape(4, 8, 2, 2 * 32, "float8_e4m3fn")),
        (QWEN3, "auto", uniform_shape(4, 8, 2, 2 * 64 * 2, "float16")),
        (DEEPSEEK, "auto", uniform_shape(4, 8, 1, (64 + 16) * 2, "bfloat16", "mla")),
        ({"text_config": LLAMA | {"torch_dtype": None}, "dtype": "half"}, "auto",
         uniform_shape(4, 8, 2, 2 * 32 * 2, "float16")),
        ({"model_type": "gpt2", "n_layer": 3, "n_head": 4, "n_embd": 64, "dtype": "float32"}, "auto",
         uniform_shape(3, 4, 4, 2 * 16 * 2, "bfloat16")),
        (LLAMA | {"sliding_window": 64, "use_sliding_window": False}, "auto",
         uniform_shape(4, 8, 2, 2 * 32 * 2, "bfloat16")),
    ],
)  # fmt: skip
def test_shapes(config: dict[str, Any], dtype: str, expected: ModelShape) -> None:
    assert model_shape(config, dtype) == expected


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        ({"model_type": "llama"}, "auto", "num_hidden_layers is missing"),
        (LLAMA | {"model_type": "lama"}, "auto", "did you mean 'llama'?"),
        (LLAMA | {"model_type": ["llama"]}, "auto", "model_type is ['llama']"),
        (LLAMA | {"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "auto", "kv_cache_quant_algo is 'FP8'"),
        (QWEN3 | {"num_key_value_heads": None, "model_type": "falcon"}, "auto", "multi_query is None"),
        (DEEPSEEK | {"index_topk": 2048}, "auto", "index_topk is 2048"),
        (DEEPSEEK | {"kv_lora_rank": None}, "auto", "kv_lora_rank is missing"),
        (LLAMA | {"num_hidden_layers": "many"}, "auto", "num_hidden_layers is 'many', expected a whole number"),
        (LLAMA | {"num_key_value_heads": 9}, "auto", "num_key_value_heads is 9, expected a whole number from 1 to 8"),
        (LLAMA | {"torch_dtype": None}, "auto", "the KV dtype is None"),
        (LLAMA, "int7", "the KV dtype is 'int7'"),
        (LLAMA | {"sliding_window": 64}, "auto", "sliding_window"),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"] * 2}, "auto", "linear_attention"),
        (LLAMA | {"layer_types": ["full_attention"] * 3}, "auto", "layer_types names 3 layers, expected 4"),
        (LLAMA | {"layer_types": ["rwkv"] * 4}, "auto", "layers of kind 'rwkv'"),
        ({"text_config": 3}, "auto", "text_config is 3"),
        (LLAMA | {"model_type": "qwen4_exp_text"}, "auto", "which KV it keeps is not known"),
        (LLAMA | {"model_type": "gemma4_text"}, "auto", "layer_types is missing"),
        (GEMMA4 | {"num_kv_shared_layers": None}, "auto", "num_kv_shared_layers is None, expected a whole number"),
        (GEMMA4 | {"num_kv_shared_layers": 30}, "auto", "num_kv_shared_layers is 30, expected a whole number"),
        (GEMMA4 | {"per_layer_config": {"05": 7}}, "auto", "per_layer_config has 7 for layer 5"),
        (MIMO | {"swa_num_key_value_heads": None}, "auto", "swa_num_key_value_heads is missing"),
        (SPARSE, "fp8", "--kv-dtype fp8 depends on the GPU for deepseek_v32: give fp8_ds_mla (fp8 on Hopper)"),
        (SPARSE | {"model_type": "glm_moe_dsa"}, "auto", "--kv-dtype auto depends on the GPU for glm_moe_dsa"),
        (SPARSE | {"index_head_dim": None}, "auto", "index_head_dim is missing"),
        (SPARSE | {"index_topk_pattern": 4}, "auto", "index_topk_pattern is 4, expected a list"),
        (DEEPSEEK, "fp8_ds_mla", "the KV dtype is 'fp8_ds_mla'"),
    ],
)
def test_what_is_not_planned_is_refused_in_one_line(config: dict[str, Any], dtype: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        model_shape(config, dtype)
    assert message in str(refused.value) and "\n" not in str(refused.value)


GDN = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
       "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip
KIMI = {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [n for n in range(1, 27) if n % 4],
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}  # fmt: skip
NEMOTRON = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
MAMBA2 = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}
H1 = {"mamba_n_heads": 24, "mamba_d_head": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
JAMBA = {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
SCOUT = {"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": []}

PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "Qwen3-Next-80B": (published("qwen3_next", 48, 16, 2, 2048, head_dim=256, full_attention_interval=4, **GDN),
                       24_576, 39_518_208, 0),
    "Nemotron-H-8B": (published("nemotron_h", 52, 32, 8, 4096, **NEMOTRON,
                                hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
                      16_384, 102_137_856, 0),
    "Kimi-Linear-48B": (published("kimi_linear", 27, 32, 32, 2304, head_dim=72, **MLA, linear_attn_config=KIMI),
                        8_064, 43_417_600, 0),
    "MiniMax-Text-01": (published("minimax_text_01", 80, 64, 8, 6144, head_dim=128,
                                  attn_type_list=([0] * 7 + [1]) * 10),
                        40_960, 146_800_640, 0),
    "Falcon-7B": (published("falcon", 32, 71, None, 4544, multi_query=True, new_decoder_architecture=False),
                  8_192, 0, 0),
    "StarCoder": ({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True,
                   "torch_dtype": "float16"}, 20_480, 0, 0),
    "Falcon-40B": (published("falcon", 60, 128, None, 8192, multi_query=True, new_decoder_architecture=True,
                             num_kv_heads=8), 122_880, 0, 0),
    "Llama-2-7B": (published("llama", 32, 32, None, 4096), 524_288, 0, 0),
    "Llama-4-Scout": ({"model_type": "llama4", "text_config": published("llama4_text", 48, 40, 8, 5120, **SCOUT)},
                      196_608, 0, 8192),
    "Mistral-7B-v0.1": (published("mistral", 32, 32, 8, 4096, sliding_window=4096), 131_072, 0, 4096),
    "Qwen2.5-7B": (published("qwen2", 28, 28, 4, 3584, sliding_window=131072, use_sliding_window=False), 57_344, 0, 0),
    "Gemma-2-9B": (published("gemma2", 42, 16, 8, 3584, head_dim=256, sliding_window=4096), 344_064, 0, 4096),
    "Gemma-3-12B": ({"model_type": "gemma3", "text_config": published("gemma3_text", 48, 16, 8, 3840,
                                                                      sliding_window=1024)}, 393_216, 0, 1024),
    "Phi-3-mini": (published("phi3", 32, 32, 32, 3072, sliding_window=2047), 393_216, 0, 2047),
    "DeepSeek-V3": (published("deepseek_v3", 61, 128, 128, 7168, **MLA), 70_272, 0, 0),
    "DeepSeek-V3.2": (SPARSE, 61 * (1152 + 132), 0, 0),
    "Gemma-4-26B-A4B": (GEMMA4, 225_280, 0, 1024),
    "Gemma-3n-E4B": (published("gemma3n_text", 35, 8, 2, 2048, head_dim=256, sliding_window=512,
                               layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
                               num_kv_shared_layers=15), 40_960, 0, 512),
    "MiMo-V2-Flash": (MIMO, 222_720, 0, 128),
    "GPT-OSS-20B": (published("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128), 49_152, 0, 128),
    "Command-A": (published("cohere2", 64, 96, 8, 12288, head_dim=128, sliding_window=4096, sliding_window_pattern=4),
                  262_144, 0, 4097),
    "Falcon-H1-7B": (published("falcon_h1", 44, 12, 2, 3072, head_dim=128, **H1), 45_056, 70_152_192, 0),
    "Jamba-v0.1": (published("jamba", 32, 32, 8, 4096, **JAMBA), 16_384, 8_716_288, 0),
    "Bamba-9B": (published("bamba", 32, 32, 8, 4096, attn_layer_indices=[9, 18, 27], **MAMBA2), 12_288, 62_287_360, 0),
    "Granite-4.0-H-Small": (published("granitemoehybrid", 40, 32, 8, 4096, **MAMBA2, layer_types=[
        "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)]), 16_384, 77_322_240, 0),
    "LFM2-1.2B": (published("lfm2", 16, 32, 8, 2048, full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_dim=2048,
                            conv_L_cache=3), 12_288, 81_920, 0),
}  # fmt: skip
"""Bytes of KV of a token, bytes of the states of a request, tokens of a window. vLLM 0.32 has built all of them with
these numbers but MiniMax-Text-01, Kimi-Linear, Bamba, DeepSeek-V3.2, Gemma-4, Gemma-3n and MiMo-V2."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    config, token_bytes, state_bytes, window = PUBLISHED[name]
    shape = model_shape(config)
    assert (shape.token_bytes, shape.state_bytes) == (token_bytes, state_bytes)
    assert max(kv.window for kv in shape.kv) == window


def test_layers_that_differ_are_of_several_forms() -> None:
    """As vLLM's model classes have them: heads of windows and of full attention, and layers with the KV of others."""
    windows = tuple(layer for layer in range(30) if layer % 6 < 5)
    full = tuple(range(5, 30, 6))
    expected = (
        KvLayers("sliding_window", windows, 8, 1024, "bfloat16", 1024),
        KvLayers("full", full, 2, 2048, "bfloat16"),
    )
    assert model_shape(GEMMA4) == ModelShape(30, 16, expected)
    saved = {name: GEMMA4[name] for name in GEMMA4 if "global" not in name} | {
        "per_layer_config": {f"{layer:02}": {"head_dim": 512, "num_key_value_heads": 2} for layer in full}
    }
    assert model_shape(saved) == model_shape(GEMMA4), "as transformers writes it"
    own = model_shape(GEMMA4 | {"attention_k_eq_v": False, "num_kv_shared_layers": 12}).kv
    assert [(kv.layers[-1], kv.total_heads, kv.content_bytes) for kv in own] == [(16, 8, 1024), (17, 8, 2048)]
    windows_of_mimo, full_of_mimo = sorted(model_shape(MIMO).kv, key=lambda kv: -kv.window)
    assert (windows_of_mimo.total_heads, windows_of_mimo.content_bytes, len(windows_of_mimo.layers)) == (8, 640, 39)
    assert (full_of_mimo.total_heads, full_of_mimo.content_bytes, full_of_mimo.layers[:2]) == (4, 640, (0, 5))


@pytest.mark.parametrize(
    ("changes", "dtype", "content", "indexed"),
    [
        ({}, "auto", 1152, range(61)),
        ({}, "fp8_ds_mla", 656, range(61)),
        ({}, "fp8_e4m3", 576, range(61)),
        ({"index_topk_freq": 4}, "auto", 1152, [0, *range(1, 61, 4)]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "auto", 1152, [0, 1, *range(2, 61, 4)]),
        ({"index_topk_pattern": "FSS" * 3}, "auto", 1152, [0, 3, 6, *range(9, 61)]),
        ({"model_type": "glm_moe_dsa"}, "bfloat16", 1152, range(61)),
    ],
)
def test_the_index_of_sparse_attention(changes: dict[str, Any], dtype: str, content: int, indexed: Any) -> None:
    latent, index = model_shape(SPARSE | changes, dtype).kv
    assert (latent.kind, latent.content_bytes, latent.layers) == ("mla", content, tuple(range(61)))
    assert index == KvLayers("mla", tuple(indexed), 1, 132, "uint8", packing="indexer")


@pytest.mark.parametrize("model_type", ["chatglm", "deepseek_v4", "mamba", "minicpm3", "t5", "zamba2"])
def test_a_type_that_is_not_known_is_refused(model_type: str) -> None:
    with pytest.raises(ConfigError, match=f"model_type is '{model_type}'"):
        model_shape(LLAMA | {"model_type": model_type})


@pytest.mark.vllm
@pytest.mark.parametrize(
    "model_type", sorted(KNOWN - MLA_TYPES - MULTI_QUERY - SHARED - {"falcon_h1", "mimo_v2_flash"})
)
def test_what_a_configuration_leaves_out_is_refused_or_means_what_transformers_says(model_type: str) -> None:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return
    theirs: dict[str, Any] = {"num_attention_heads": 24, "hidden_size": 24 * 40}
    try:
        found = AutoConfig.for_model(model_type, **theirs).get_text_config()
    except (ValueError, AttributeError, TypeError):
        return  # there is no model of these sizes
    ours = theirs | {"model_type": model_type, "num_hidden_layers": 4, "dtype": "bfloat16"}
    ours |= {"layer_types": ["full_attention"] * 4}
    try:
        shape = model_shape(ours)
    except ConfigError as error:
        assert "is missing" in str(error)
        shape = model_shape(ours | {"num_key_value_heads": 24})
    else:
        assert shape.kv[0].total_heads == (getattr(found, "num_key_value_heads", None) or 24)
    head_dim = getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads
    assert shape.kv[0].content_bytes == 4 * head_dim


def test_the_page_lists_the_known_types() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()
    assert set(re.findall(r"`(\w+)`", page.split("known types:")[1].split("\n\n")[0])) == KNOWN


@pytest.mark.vllm
@pytest.mark.parametrize("config", [LLAMA, QWEN3, DEEPSEEK], ids=["llama", "qwen3", "deepseek"])
def test_numbers_are_those_of_vllm(tmp_path: Path, config: dict[str, Any]) -> None:
    from vllm.config import ModelConfig

    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, tokenizer=str(tmp_path))
    shape = model_shape(config)
    (kv,) = shape.kv
    assert str(theirs.dtype) == f"torch.{kv.dtype}" and theirs.get_total_num_hidden_layers() == shape.num_layers
    mla = kv.kind == "mla"
    assert theirs.use_mla is mla and theirs.get_head_size() * (2 if mla else 4) == kv.content_bytes
    assert mla or theirs.get_total_num_kv_heads() == kv.total_heads


@pytest.mark.vllm
def test_stages_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.utils import get_pp_indices

    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for pp_size in range(1, 9):
        for layers in range(pp_size, 40):
            theirs = [range(*get_pp_indices(layers, rank, pp_size)) for rank in range(pp_size)]
            assert list(stage_layers(layers, pp_size)) == theirs
