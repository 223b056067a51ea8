"""The KV cache of a model from its config.json, beside what vLLM makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.planning.deployment import stage_layers
from kvferry.connector.planning.model_shape import ModelShape, model_shape
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


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA, "auto", ModelShape("full", 4, 8, 2, 2 * 32 * 2, "bfloat16")),
        (LLAMA, "fp8", ModelShape("full", 4, 8, 2, 2 * 32, "float8_e4m3fn")),
        (QWEN3, "auto", ModelShape("full", 4, 8, 2, 2 * 64 * 2, "float16")),
        (DEEPSEEK, "auto", ModelShape("mla", 4, 8, 1, (64 + 16) * 2, "bfloat16")),
        ({"text_config": LLAMA | {"torch_dtype": None}, "dtype": "half"}, "auto",
         ModelShape("full", 4, 8, 2, 2 * 32 * 2, "float16")),
        ({"n_layer": 3, "n_head": 4, "n_embd": 64, "dtype": "float32"}, "auto",
         ModelShape("full", 3, 4, 4, 2 * 16 * 4, "float32")),
        (LLAMA | {"sliding_window": 64, "use_sliding_window": False}, "auto",
         ModelShape("full", 4, 8, 2, 2 * 32 * 2, "bfloat16")),
    ],
)  # fmt: skip
def test_shapes(config: dict[str, Any], dtype: str, expected: ModelShape) -> None:
    assert model_shape(config, dtype) == expected


@pytest.mark.parametrize(
    ("config", "dtype", "message"),
    [
        ({}, "auto", "num_hidden_layers is missing"),
        (LLAMA | {"num_hidden_layers": "many"}, "auto", "num_hidden_layers is 'many', expected a whole number"),
        (LLAMA | {"num_attention_heads": True}, "auto", "num_attention_heads is True"),
        (LLAMA | {"num_key_value_heads": 9}, "auto", "num_key_value_heads is 9, expected a whole number from 1 to 8"),
        (LLAMA | {"hidden_size": 4}, "auto", "hidden_size is 4"),
        (LLAMA | {"torch_dtype": None}, "auto", "the KV dtype is None"),
        (LLAMA, "int7", "the KV dtype is 'int7'"),
        (LLAMA | {"sliding_window": 64}, "auto", "sliding_window"),
        (LLAMA | {"layer_types": ["full_attention", "linear_attention"]}, "auto", "linear_attention"),
        (LLAMA | {"state_size": 16}, "auto", "state_size"),
        ({"text_config": 3}, "auto", "text_config is 3"),
    ],
)
def test_what_is_not_planned_is_refused_in_one_line(config: dict[str, Any], dtype: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        model_shape(config, dtype)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.vllm
@pytest.mark.parametrize("config", [LLAMA, QWEN3, DEEPSEEK], ids=["llama", "qwen3", "deepseek"])
def test_numbers_are_those_of_vllm(tmp_path: Path, config: dict[str, Any]) -> None:
    from vllm.config import ModelConfig

    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, tokenizer=str(tmp_path))
    shape = model_shape(config)
    assert str(theirs.dtype) == f"torch.{shape.dtype}"
    assert theirs.get_total_num_hidden_layers() == shape.num_layers
    itemsize = 2
    if shape.kind == "mla":
        assert theirs.use_mla and theirs.get_head_size() * itemsize == shape.content_bytes
    else:
        assert 2 * theirs.get_head_size() * itemsize == shape.content_bytes
        assert theirs.get_total_num_kv_heads() == shape.total_heads


@pytest.mark.vllm
@pytest.mark.parametrize("pp_size", range(1, 9))
def test_stages_are_those_of_vllm(pp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.utils import get_pp_indices

    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    for layers in range(pp_size, 40):
        theirs = [range(*get_pp_indices(layers, rank, pp_size)) for rank in range(pp_size)]
        assert list(stage_layers(layers, pp_size)) == theirs
