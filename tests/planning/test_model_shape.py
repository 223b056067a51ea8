"""The KV cache of a model from its config.json, beside what vLLM makes of the same file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.plan.handover import stage_layers
from kvferry.cli.plan.model import KNOWN, MULTI_QUERY, ModelShape, model_shape, uniform_shape
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
GEMMA2 = published("gemma2", 42, 16, 8, 3584, head_dim=256, sliding_window=4096)


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
        (LLAMA | {"layer_types": [["full_attention"]] * 4}, "auto", "layer_types has layers of kind"),
        (LLAMA | {"layer_types": "full_attention"}, "auto", "layer_types is 'full_attention', expected a list"),
        (LLAMA | {"layer_types": ["full_attention"] * 3}, "auto", "layer_types names 3 layers, expected 4"),
        (LLAMA | {"layer_types": ["rwkv"] * 4}, "auto", "layers of kind 'rwkv'"),
        ({"text_config": 3}, "auto", "text_config is 3"),
        (LLAMA | {"model_type": "qwen4_exp_text"}, "auto", "which KV it keeps is not known"),
    ],
)
def test_what_is_not_planned_is_refused_in_one_line(config: dict[str, Any], dtype: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        model_shape(config, dtype)
    assert message in str(refused.value) and "\n" not in str(refused.value)


PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "Falcon-7B": (published("falcon", 32, 71, None, 4544, multi_query=True, new_decoder_architecture=False),
                  8_192, 0),
    "StarCoder": ({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True,
                   "torch_dtype": "float16"}, 20_480, 0),
    "Falcon-40B": (published("falcon", 60, 128, None, 8192, multi_query=True, new_decoder_architecture=True,
                             num_kv_heads=8), 122_880, 0),
    "Llama-2-7B": (published("llama", 32, 32, None, 4096), 524_288, 0),
    "Mistral-7B-v0.1": (published("mistral", 32, 32, 8, 4096, sliding_window=4096), 131_072, 4096),
    "Qwen2.5-7B": (published("qwen2", 28, 28, 4, 3584, sliding_window=131072, use_sliding_window=False), 57_344, 0),
    "Gemma-2-9B": (GEMMA2, 344_064, 4096),
    "Gemma-3-12B": ({"model_type": "gemma3", "text_config": published("gemma3_text", 48, 16, 8, 3840,
                                                                      sliding_window=1024)}, 393_216, 1024),
    "Phi-3-mini": (published("phi3", 32, 32, 32, 3072, sliding_window=2047), 393_216, 2047),
    "DeepSeek-V3": (published("deepseek_v3", 61, 128, 128, 7168, **MLA), 70_272, 0),
    "GPT-OSS-20B": (published("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128), 49_152, 128),
    "Command-A": (published("cohere2", 64, 96, 8, 12288, head_dim=128, sliding_window=4096, sliding_window_pattern=4),
                  262_144, 4097),
}  # fmt: skip
"""Bytes of KV of a token, tokens of a window. vLLM 0.32 has built all of them with these numbers."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    config, token_bytes, window = PUBLISHED[name]
    shape = model_shape(config)
    assert shape.token_bytes == token_bytes
    assert max(kv.window for kv in shape.kv) == window


@pytest.mark.parametrize("model_type", ["chatglm", "deepseek_v32", "gemma4_text", "qwen3_next", "t5"])
def test_a_type_that_is_not_known_is_refused(model_type: str) -> None:
    with pytest.raises(ConfigError, match=f"model_type is '{model_type}'"):
        model_shape(LLAMA | {"model_type": model_type})


@pytest.mark.vllm
@pytest.mark.parametrize("model_type", sorted(KNOWN - MLA_TYPES - MULTI_QUERY))
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
