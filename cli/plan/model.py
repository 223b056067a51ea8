"""The KV cache of a model, from the ``config.json`` of Hugging Face. Pure.

Layers keep KV of one form, of all tokens or of a sliding window. A type stands here once its rule has been compared
with vLLM's code for it. Others are refused: a model may keep KV in fewer layers or heads than its numbers say, or
states or an index beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.connector.geometry.dtypes import CONVERTIBLE, canonical
from kvferry.connector.geometry.rank_geometry import MAX_REGION_LAYERS
from kvferry.connector.geometry.topology import MAX_HEADS
from kvferry.transport.errors import ConfigError, did_you_mean, quoted

LAYERS = ("num_hidden_layers", "n_layer")
ATTENTION_HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "n_embed")
"""The names of one number in ``config.json``, as vLLM's ``ModelConfig`` looks for them."""

MAX_CONTENT = 1 << 20
"""Bound on the elements of one (head, token)."""

AttentionKind = Literal["full", "mla", "sliding_window"]

MULTI_HEAD = frozenset({
    "bloom", "cohere", "gpt2", "gpt_neox", "gptj", "granite", "granitemoe", "llama", "nemotron", "olmo",
    "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3",
})  # fmt: skip
"""Types with a KV head for each attention head where the configuration does not name the KV heads."""

GROUPED = frozenset({
    "apertus", "arcee", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "glm4_moe", "gpt_oss", "granitemoeshared", "helium", "internlm2", "internlm3", "minimax_m2",
    "ministral3", "mistral", "mixtral", "olmo3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe",
    "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3",
    "stablelm", "starcoder2",
})  # fmt: skip
MULTI_QUERY = frozenset({"falcon", "gpt_bigcode", "RefinedWeb", "RefinedWebModel"})
MLA = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"})
KNOWN = MULTI_HEAD | GROUPED | MULTI_QUERY | MLA

HEAD_DIM = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), 256),
    **dict.fromkeys(
        ("ernie4_5", "glm", "glm4", "helium", "minimax_m2", "ministral3", "qwen3", "qwen3_vl_text", "seed_oss"), 128
    ),
    "gpt_oss": 64,
}  # fmt: skip
"""Elements of a head where the configuration leaves them out and the class of transformers has a number of its own."""

DEFAULTS = {"gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4}}
"""Other numbers that published configurations leave out."""

ALL_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""Types of which ``sliding_window`` counts for all layers, where ``layer_types`` does not say for which."""

FULL_EVERY = {
    "gemma2": ("", 2), "gemma3_text": ("sliding_window_pattern", 6), "cohere2": ("sliding_window_pattern", 4),
    "olmo3": ("", 4), "gpt_oss": ("", 2),
}  # fmt: skip
"""Types of which every n-th layer has full attention where ``layer_types`` is missing: n's key and default."""

KINDS: Mapping[str, AttentionKind] = {"full_attention": "full", "sliding_attention": "sliding_window"}


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers that keep KV of one form."""

    kind: AttentionKind
    layers: tuple[int, ...]
    total_heads: int  # Global KV heads, 1 for MLA
    content_bytes: int  # K and V of one (head, token) of one layer
    dtype: str
    window: int = 0  # Tokens of a sliding window


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the hand-over of a prompt depends on."""

    num_layers: int
    attention_heads: int
    kv: tuple[KvLayers, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and all heads, without replicas."""
        return sum(len(kv.layers) * kv.total_heads * kv.content_bytes for kv in self.kv)


def uniform_shape(
    num_layers: int, attention_heads: int, total_heads: int, content_bytes: int, dtype: str,
    kind: AttentionKind = "full",
) -> ModelShape:  # fmt: skip
    """A model whose layers all keep KV of one form."""
    kv = KvLayers(kind, tuple(range(num_layers)), total_heads, content_bytes, dtype)
    return ModelShape(num_layers, attention_heads, (kv,))


def model_shape(config: Mapping[str, Any], kv_dtype: str = "auto") -> ModelShape:
    """The shape of the KV cache that vLLM keeps for a model. Of a multimodal ``config.json``, ``text_config`` counts.
    ``kv_dtype``: vLLM's ``--kv-cache-dtype``; ``auto``: the model's. Raises ConfigError: the type of the model is not
    known, or a number is missing or impossible."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config is {quoted(text)}, expected an object")
    model_type = known_type(text)
    text = DEFAULTS.get(model_type, {}) | dict(text)
    layers, heads = number(text, LAYERS, MAX_REGION_LAYERS), number(text, ATTENTION_HEADS, MAX_HEADS)
    dtype, kinds = _dtype(config, text, kv_dtype), layer_kinds(text, model_type, layers)
    places = {kind: tuple(layer for layer in range(layers) if kinds[layer] == kind) for kind in dict.fromkeys(kinds)}
    return ModelShape(layers, heads, tuple(_form(text, kind, held, heads, dtype) for kind, held in places.items()))


def _form(text: Mapping[str, Any], kind: AttentionKind, layers: tuple[int, ...], heads: int, dtype: str) -> KvLayers:
    """The KV of these layers. Raises ConfigError."""
    model_type = text["model_type"]
    if model_type in MLA:
        latent = sum(number(text, (name,), MAX_CONTENT) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        return KvLayers("mla", layers, 1, latent * CONVERTIBLE[dtype].itemsize, dtype)
    window = 0
    if kind == "sliding_window":  # the number of cohere2 leaves out the token itself
        window = number(text, ("sliding_window",), 1 << 30) + (model_type == "cohere2")
    head_dim = number(text, ("head_dim",), MAX_CONTENT, 0 if "head_dim" in text else HEAD_DIM.get(model_type, 0))
    if not head_dim:  # the rule of vLLM's ``get_head_size``
        hidden = number(text, HIDDEN, MAX_CONTENT * heads)
        if hidden < heads:
            raise ConfigError(f"{HIDDEN[0]} is {hidden}, expected at least the {heads} attention heads")
        head_dim = hidden // heads
    content = 2 * head_dim * CONVERTIBLE[dtype].itemsize
    return KvLayers(kind, layers, _kv_heads(text, model_type, heads), content, dtype, window)


def _kv_heads(text: Mapping[str, Any], model_type: str, heads: int) -> int:
    if model_type in MULTI_QUERY and text.get("new_decoder_architecture") is not True:
        if type(text.get("multi_query")) is not bool:
            raise ConfigError(f"multi_query is {quoted(text.get('multi_query'))}, expected true or false")
        return 1 if text["multi_query"] else number(text, KV_HEADS, heads, heads)
    without = heads if model_type in MULTI_HEAD or any(name in text for name in KV_HEADS) else None
    return number(text, KV_HEADS, heads, without)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], kv_dtype: str) -> str:
    """Of the KV. Raises ConfigError."""
    if kv_dtype != "auto":
        return _checked(kv_dtype)
    for holder in (config, text):
        quantized = holder.get("quantization_config") or holder.get("compression_config")
        inner = quantized.get("quantization") if isinstance(quantized, Mapping) else None
        for place in (place for place in (quantized, inner) if isinstance(place, Mapping)):
            for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if (own := place.get(key)) is not None:
                    raise ConfigError(f"{key} is {quoted(own)}, the KV has a dtype of its own; give --kv-dtype")
    named = text.get("dtype", text.get("torch_dtype")) or config.get("dtype", config.get("torch_dtype"))
    dtype = _checked(named)
    return "bfloat16" if dtype == "float32" else dtype  # in which vLLM runs such a model


def _checked(named: object) -> str:
    dtype = canonical(named) if isinstance(named, str) else ""
    if dtype not in CONVERTIBLE:
        expected = f"expected one of {', '.join(CONVERTIBLE)}; give --kv-dtype"
        raise ConfigError(f"the KV dtype is {quoted(named)}, {expected}")
    return dtype


def number(text: Mapping[str, Any], names: Sequence[str], most: int, default: int | None = None) -> int:
    """The first of ``names`` that the configuration has, from 1 to ``most``. Raises ConfigError."""
    for name in names:
        value = text.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{name} is {quoted(value)}, expected a whole number from 1 to {most}")
        return value
    if default is None:
        raise ConfigError(f"{names[0]} is missing; give a config.json that has it")
    return default


def known_type(text: Mapping[str, Any]) -> str:
    """``model_type``. Raises ConfigError: it is not known."""
    found = text.get("model_type")
    if not isinstance(found, str) or found not in KNOWN:
        hint = did_you_mean(found, KNOWN) if isinstance(found, str) else "; is this the config.json of a model?"
        expected = f"expected a type that docs/planning.md lists{hint}"
        raise ConfigError(f"model_type is {quoted(found)}, which KV it keeps is not known; {expected}")
    if text.get("index_topk") is not None:
        raise ConfigError(f"index_topk is {quoted(text['index_topk'])}: the caches of sparse attention are not counted")
    return found


def layer_kinds(text: Mapping[str, Any], model_type: str, num_layers: int) -> list[AttentionKind]:
    """What each layer keeps. Raises ConfigError: the configuration does not say it, or names an unknown kind."""
    kinds = text.get("layer_types")
    if kinds is None and model_type in FULL_EVERY:
        key, every = FULL_EVERY[model_type]
        every = number(text, (key,), num_layers * every, every)
        return ["full" if (layer + 1) % every == 0 else "sliding_window" for layer in range(num_layers)]
    if kinds is None:
        window = text.get("sliding_window") if text.get("use_sliding_window") is not False else None
        if window and model_type not in ALL_WINDOWS:
            raise ConfigError(
                f"sliding_window is {quoted(window)}, and layer_types, the layers that have it, is missing"
            )
        return ["sliding_window" if window else "full"] * num_layers
    if not isinstance(kinds, list):
        raise ConfigError(f"layer_types is {quoted(kinds)}, expected a list")
    if len(kinds) != num_layers:
        raise ConfigError(f"layer_types names {len(kinds)} layers, expected {num_layers}")
    if other := sorted({str(kind) for kind in kinds if not isinstance(kind, str) or kind not in KINDS}):
        raise ConfigError(f"layer_types has layers of kind {quoted(', '.join(other))}, whose caches are not known")
    return [KINDS[kind] for kind in kinds]
