"""The digest of a model: for each fact a pair that passes and one that is refused by name.

Configurations are objects with the names that vLLM and transformers 4 and 5 give them.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.geometry import model_identity as module
from kvferry.connector.geometry.model_identity import model_identity, weights_fact
from kvferry.connector.pages.rank_context import check_model
from kvferry.transport.errors import IncompatiblePeerError
from tests.handover.scenario import RankGroup, another_works

OLD: dict[str, Any] = {  # transformers 4
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 300, "intermediate_size": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": None, "max_position_embeddings": 4096, "attention_bias": False,
}  # fmt: skip
NEW: dict[str, Any] = {  # transformers 5
    **{name: value for name, value in OLD.items() if name not in ("rope_theta", "rope_scaling")},
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000}, "head_dim": 8, "attention_bias": None,
    "layer_types": ["full_attention"] * 4,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}
LONG = {"short_factor": [1.0] * 48, "long_factor": [1.5] * 48}


def facts(*changes: dict[str, Any]) -> dict[str, str]:
    """Of a configuration. ``engine``: what stands outside of it."""
    config = {name: value for change in changes for name, value in change.items()}
    engine = {"quantization": None, "max_model_len": 2048, **config.pop("engine", {})}
    hf_config = SimpleNamespace(**config)
    return model_identity(hf_config, hf_config, **engine)


def weights(digest: str, name: str = "base, revision 1", **engine: Any) -> dict[str, Any]:
    return {"engine": {"weights": weights_fact(digest, name), **engine}}


def awq(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, **changes}}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ((OLD,), (NEW,)),
        ((OLD,), (OLD, {"engine": {"max_model_len": 99}})),
        ((OLD,), (OLD, {"max_position_embeddings": 131072})),
        ((OLD,), (OLD, {"_name_or_path": "/models/x", "transformers_version": "4.57", "torch_dtype": "float16"})),
        ((OLD,), (OLD, {"dtype": "bfloat16", "tie_word_embeddings": True, "use_cache": False, "eos_token_id": 7})),
        (
            (OLD, {"rope_scaling": {"type": "yarn", **YARN}}),
            (NEW, {"rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 5e5, **YARN}}),
        ),
        (
            (OLD, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
            (NEW, {"rope_parameters": {
                "rope_type": "llama3", "factor": 8, "rope_theta": 5e5, "original_max_position_embeddings": 4096}}),
        ),
        (
            (OLD, {"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 1024}),
            (NEW, {"rope_parameters": {
                "rope_type": "longrope", "rope_theta": 5e5, "original_max_position_embeddings": 1024, **LONG}}),
        ),
        ((OLD, {"partial_rotary_factor": 0.5}), (NEW, {"rope_parameters": {
            "rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5}})),
        (
            (OLD, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}),
            (NEW, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": (16, 24, 24)}}),
        ),
        (
            (OLD, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
            (NEW, {"rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
                "full_attention": {"rope_type": "default", "rope_theta": 1000000}}}),
        ),
        ((NEW,), (NEW, {"rope_parameters": {"full_attention": NEW["rope_parameters"]}})),
        ((OLD, {"sliding_window": 4096, "use_sliding_window": False}), (OLD, {"sliding_window": None})),
        ((OLD, awq(), {"engine": {"quantization": "awq"}}), (OLD, awq(), {"engine": {"quantization": "awq_marlin"}})),
        ((OLD, awq(version="gemm")), (OLD, {"quantization_config": {
            "quant_method": "awq_marlin", "w_bit": 4, "q_group_size": 128, "zero_point": True}})),
        ((OLD, {"engine": {"quantization": "fp8"}}), (OLD, {"engine": {"quantization": "fp8"}})),
        ((OLD, {"engine": {"tag": "v2"}}), (NEW, {"engine": {"tag": "v2"}})),
        ((OLD, weights("1")), (OLD, weights("1", "elsewhere"))),
        ((OLD, weights("1")), (OLD, weights(""))),
        ((OLD, weights("")), (OLD, weights(""))),
        ((OLD, awq(), weights("1", tag="v2")), (OLD, weights("2", "elsewhere", tag="v2"))),
    ],
)  # fmt: skip
def test_the_same_model_passes(theirs: tuple[dict[str, Any], ...], ours: tuple[dict[str, Any], ...]) -> None:
    check_model(facts(*ours), facts(*theirs))


def layer_types(full: int) -> dict[str, Any]:
    return {"layer_types": ["full_attention" if n == full else "sliding_attention" for n in range(4)]}


@pytest.mark.parametrize(
    ("theirs", "ours", "line"),
    [
        ({"architectures": ["Other"]}, {}, "architectures differs, ours is LlamaForCausalLM, the peer's is Other"),
        ({"num_hidden_layers": 5}, {}, "num_hidden_layers differs, ours is 4, the peer's is 5"),
        ({"hidden_size": 128, "head_dim": 8}, {}, "hidden_size differs, ours is 64, the peer's is 128"),
        ({"num_key_value_heads": 2}, {}, "num_key_value_heads differs, ours is 4, the peer's is 2"),
        ({"head_dim": 16}, {}, "head_dim differs, ours is 8, the peer's is 16"),
        ({"vocab_size": 301}, {}, "vocab_size differs, ours is 300, the peer's is 301"),
        ({"rms_norm_eps": 1e-6}, {}, "rms_norm_eps differs, ours is 1e-05, the peer's is 1e-06"),
        ({"attention_bias": True}, {}, "attention_bias differs, ours is unset, the peer's is true"),
        ({"sliding_window": 4096}, {}, "sliding_window differs, ours is unset, the peer's is 4096"),
        (layer_types(3), layer_types(2),
         "layer_types differs, ours is 2xsliding_attention 1xfull_attention 1xsliding_attention, the peer's is 3x"),
        ({"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping differs, ours is unset, the peer's is 50"),
        ({"query_pre_attn_scalar": 256}, {"query_pre_attn_scalar": 224}, "query_pre_attn_scalar differs, ours is 224"),
        ({"qk_norm": True}, {}, "qk_norm differs"),
        ({"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}, "num_experts_per_tok differs, ours is 4"),
        ({"rope_theta": 1e4}, {},
         'rope differs, ours is {"rope_theta": 500000, "rope_type": "default"}, the peer\'s is {"rope_theta": 10000,'),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}, "rope differs"),
        ({"rope_scaling": {"type": "yarn", **YARN}}, {"rope_scaling": {"type": "yarn", **YARN, "factor": 8.0}},
         "rope differs"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8192},
         {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope differs"),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, {"rope_theta": 1e6, "rope_local_base_freq": 2e4},
         "rope differs"),
        ({"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.5}, "rope differs"),
        ({"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 1024},
         {"rope_scaling": {"type": "longrope", **LONG}, "original_max_position_embeddings": 1024,
          "engine": {"max_model_len": 1024}}, "rope differs"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [*range(300), 1]}},
         {"rope_scaling": {"type": "longrope", "long_factor": [*range(300), 2]}}, "rope differs"),
        (awq(), {}, "quantization differs, ours is unset, the peer's is awq"),
        ({"engine": {"quantization": "fp8"}}, {}, "quantization differs, ours is unset, the peer's is fp8"),
        (awq(), awq(bits=8), "quantization bits differs, ours is 8, the peer's is 4"),
        (awq(), awq(group_size=64), "quantization group_size differs, ours is 64, the peer's is 128"),
        (awq(modules_to_not_convert=["a"]), awq(modules_to_not_convert=["b"]),
         'quantization layers_left_out differs, ours is ["b"]'),
        ({"quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}},
         {"quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}},
         "quantization algorithm differs, ours is NVFP4, the peer's is FP8"),
        ({"engine": {"tag": "base"}}, {"engine": {"tag": "tuned"}},
         "model_tag differs, ours is tuned, the peer's is base"),
        ({"engine": {"tag": "base"}}, {}, "model_tag differs, ours is unset, the peer's is base"),
        (weights("1", tag="base"), weights("1"), "model_tag differs, ours is unset, the peer's is base"),
        (weights("1", "tuned, revision 2"), weights("3"),
         "weights digest differs, ours is 3 of base, revision 1, the peer's is 1 of tuned, revision 2; to hand over "
         "all the same, set one model_tag on both engines"),
        (weights("", "tuned, revision 2"), weights("3"), "weights digest differs, ours is 3 of base, revision 1, the "
         "peer's is unknown of tuned, revision 2; to"),
        (weights("", "tuned"), weights(""), "weights digest differs, ours is unknown of base, revision 1, the peer's"),
        ({}, weights("3"), "weights digest differs, ours is 3 of base, revision 1, the peer's is unset; to"),
    ],
)  # fmt: skip
def test_another_model_is_refused_by_name(theirs: dict[str, Any], ours: dict[str, Any], line: str) -> None:
    with pytest.raises(IncompatiblePeerError, match=rf"^peer refused: {re.escape(line)}[^\n]*$"):
        check_model(facts(OLD, ours), facts(OLD, theirs))


class LayersThatDiffer(SimpleNamespace):
    """As transformers 5 has a model whose layers differ: it refuses to name one value for all of them."""

    @property
    def head_dim(self) -> int:
        raise RuntimeError("'head_dim' is a per-layer attribute and may vary across layers")


def test_values_that_differ_from_layer_to_layer_are_facts() -> None:
    def of(*head_dims: int) -> dict[str, str]:
        layers = [SimpleNamespace(head_dim=size) for size in head_dims]
        config = LayersThatDiffer(**OLD, per_layer_config=layers)
        return model_identity(config, config, quantization=None, max_model_len=2048)

    check_model(of(32, 64), of(32, 64))
    with pytest.raises(IncompatiblePeerError, match=r"head_dim differs, ours is \[32, 64\], the peer's is \[64, 32\]"):
        check_model(of(32, 64), of(64, 32))


def test_every_fact_there_is_fits_into_a_message(group: RankGroup) -> None:
    """However long the values, whatever is in them."""
    every: dict[str, Any] = {name: f"line\n\u2028 {name} " * 400 for name in module.PLAIN}
    every |= {
        "rope_scaling": {"rope_type": "yarn", "long": "x" * 5000},
        "layer_types": [f"kind {n}" for n in range(900)],
        "quantization_config": {name: "y" * 3000 for names in module.QUANTIZATION.values() for name in names},
        "architectures": ["\x1b[1m" * 600], "head_dim": 8, "sliding_window": 9,
        **weights("3", "long\u2028" * 300, quantization="fp8"),
    }  # fmt: skip
    model = facts(OLD, every) | facts({"engine": {"tag": "t"}})
    assert {"rope", "quantization", "model_tag", "weights digest", "no_rope_layers", "layer_types"} < set(model)
    another_works(*group.pair(model=model))
