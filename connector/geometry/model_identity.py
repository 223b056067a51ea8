"""The facts of a model, by name, that must agree on P and D: only then do their KV caches mean the same. Pure.

Releases write the same model in different ways; this module writes it in one way, from configurations in Hugging Face's
form. It takes what K and V depend on: the computation of the layers, rotary positions, quantised weights. The geometry
has dtype, scales, heads and windows. It leaves out the release, the attention backend, parallel sizes, the longest
prompt, the dtype of the computation, and all after the last layer. Of the weights it has a digest beside their name
(``worker/weights.py``); ``model_tag`` in the settings takes the place of both, and of their quantisation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

WEIGHTS = "weights digest"
UNKNOWN = "unknown"
"""In place of a digest that cannot be had; then the names of the weights are compared."""
MAX_TEXT = 900  # Characters of a value. A longer value is cut and followed by a digest.

PLAIN = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "attention_bias",
    "qkv_bias", "mlp_bias", "use_qk_norm", "qk_norm", "qk_layernorm", "query_pre_attn_scalar", "attn_logit_softcapping",
    "attention_multiplier", "residual_multiplier", "embedding_multiplier", "attention_chunk_size",
    "num_kv_shared_layers", "cross_layer_attention_sharing", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "v_head_dim", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob",
    "no_rope_layers", "position_embedding_type", "alibi",
)  # fmt: skip
"""Facts that a configuration has under these names. A missing value, ``None`` and ``False`` count as equal."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the model's longest sequence."""
_ORIGINAL_LENGTH_ROPE = ("llama3", "yarn", "longrope")
_OLD_ROPE_TYPES = {"su": "longrope", "mrope": "default"}

QUANTIZATION = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "weight_block_size": ("weight_block_size",),
    "algorithm": ("quant_algo", "fmt", "format"),
    "activations": ("activation_scheme",),
    "symmetric": ("sym",),
    "zero_point": ("zero_point",),
    "act_order": ("desc_act",),
    "layers_left_out": ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules"),
    "groups": ("config_groups",),
}
_METHODS = {"awq_marlin": "awq", "auto_awq": "awq", "gptq_marlin": "gptq", "auto_gptq": "gptq"}
"""Names of kernels that vLLM uses as names of methods, and the method. The weights are the same."""


def model_identity(
    hf_config: Any, text_config: Any, *, quantization: str | None, max_model_len: int, tag: str | None = None,
    weights: str | None = None,
) -> dict[str, str]:  # fmt: skip
    """The facts of a model that are set. ``text_config``: of its language model, often ``hf_config`` itself.
    ``quantization``: the engine's name for that of the weights. ``max_model_len``: tokens that the engine admits; only
    longrope depends on it. ``tag``: the setting ``model_tag``. ``weights``: ``weights_fact``."""
    facts: dict[str, Any] = {
        "architectures": ",".join(getattr(hf_config, "architectures", None) or ()),
        "head_dim": _head_dim(text_config),
        "sliding_window": _sliding_window(text_config),
        "layer_types": _layer_types(text_config),
        "rope": rope(text_config, max_model_len),
        "model_tag": tag,
        WEIGHTS: None if tag else weights,
    }
    facts |= {name: _fact(text_config, name) for name in PLAIN}
    facts |= {} if tag else _quantization(hf_config, text_config, quantization)
    return {name: text(value) for name, value in facts.items() if not _unset(value)}


def weights_fact(digest: str, name: str) -> str:
    """``digest``: of the weights; empty where there is none. ``name``: theirs, with the revision."""
    return f"{digest or UNKNOWN} of {name}"


def agree(name: str, ours: str | None, theirs: str | None) -> bool:
    """Whether two ranks have the same fact ``name``; ``None``: a rank does not have it."""
    if name != WEIGHTS or ours is None or theirs is None:
        return ours == theirs
    (digest, _, mine), (other, _, its) = ours.partition(" of "), theirs.partition(" of ")
    return mine == its if UNKNOWN in (digest, other) else digest == other


def text(value: Any) -> str:
    """A value as one line of text. Equal values have equal lines: 10000 and 10000.0."""
    found = value if isinstance(value, str) else json.dumps(_plain(value), sort_keys=True)
    found = found.encode("unicode_escape").decode()
    if len(found) <= MAX_TEXT:
        return found
    return f"{found[:MAX_TEXT]}... sha256 {hashlib.sha256(found.encode()).hexdigest()[:16]}"


def rope(config: Any, max_model_len: int) -> dict[str, Any] | None:
    """Rotary positions, by layer type or for all layers. ``None``: the model has none. Releases of transformers before
    5 have ``rope_theta`` and ``rope_scaling``, Gemma 3 ``rope_local_base_freq`` for its windowed layers. Later releases
    have ``rope_parameters``, with an entry per layer type where layers differ."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = {name: inner for name, inner in parameters.items() if isinstance(inner, Mapping)}
    local = getattr(config, "rope_local_base_freq", None)
    if nested:
        found = {name: _rope(config, inner, max_model_len) for name, inner in nested.items()}
    elif local is not None:
        found = {
            "full_attention": _rope(config, parameters, max_model_len),
            "sliding_attention": _rope(config, {"rope_theta": local}, max_model_len),
        }
    elif parameters or getattr(config, "rope_theta", None) is not None:
        return _rope(config, parameters, max_model_len)
    else:
        return None
    every = list(found.values())
    return every[0] if all(one == every[0] for one in every) else found


def _rope(config: Any, parameters: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    """One set of rotary parameters, without the parameters that have their default value."""
    found = {name: value for name, value in parameters.items() if not _unset(value) and not isinstance(value, Mapping)}
    kind = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    kind = _OLD_ROPE_TYPES.get(kind, kind)
    found.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    found.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    longest = getattr(config, "max_position_embeddings", None)
    original = getattr(config, "original_max_position_embeddings", None)
    if kind in _ORIGINAL_LENGTH_ROPE:
        found["original_max_position_embeddings"] = original or found.get("original_max_position_embeddings") or longest
    else:
        found.pop("original_max_position_embeddings", None)
    if kind in LENGTH_DEPENDENT_ROPE:
        found["max_position_embeddings"] = longest
    if kind == "longrope":  # vLLM takes one set of factors for all prompts
        found["factors"] = "long" if max_model_len > (found["original_max_position_embeddings"] or 0) else "short"
    if found["partial_rotary_factor"] == 1:
        del found["partial_rotary_factor"]
    return {"rope_type": kind, **found}


def _fact(config: Any, name: str) -> Any:
    """A value, or that of each layer where the layers differ: there transformers raises an error of its own."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def _head_dim(config: Any) -> Any:
    if getattr(config, "kv_lora_rank", None):  # MLA has other names for its head sizes; head_dim is ambiguous there
        return None
    found, hidden, heads = (_fact(config, name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    return found or (hidden // heads if hidden and heads else None)


def _sliding_window(config: Any) -> Any:
    return _fact(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None


def _layer_types(config: Any) -> str | None:
    """The types of the layers in order, with the length of each run of a type; ``None`` if all have full attention."""
    types = getattr(config, "layer_types", None) or ()
    if set(types) <= {"full_attention"}:
        return None
    runs: list[tuple[str, int]] = []
    for kind in types:
        count = runs.pop()[1] if runs and runs[-1][0] == kind else 0
        runs.append((kind, count + 1))
    return " ".join(f"{count}x{kind}" for kind, count in runs)


def _quantization(hf_config: Any, text_config: Any, engine: str | None) -> dict[str, Any]:
    """Quantisation of the weights, in the checkpoint's own names if it has any: engines also name methods by kernel."""
    entries = getattr(hf_config, "quantization_config", None) or getattr(text_config, "quantization_config", None) or {}
    entries = entries.to_dict() if hasattr(entries, "to_dict") else entries
    inner = entries.get("quantization")
    entries = {**entries, **(inner if isinstance(inner, Mapping) else {})}
    method = str(entries.get("quant_method") or engine or "").lower()
    facts: dict[str, Any] = {"quantization": _METHODS.get(method, method)}
    for name, keys in QUANTIZATION.items():
        facts[f"quantization {name}"] = next((entries[key] for key in keys if not _unset(entries.get(key))), None)
    return facts


def _unset(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Sequence | Mapping) and not value)


def _plain(value: Any) -> Any:
    """A value for JSON: each number in one form, tuples and sets as lists."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        number = float(f"{value:.12g}")
        return int(number) if number.is_integer() else number
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    return str(value)
