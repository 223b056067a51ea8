"""The KV cache of a model, from the ``config.json`` of Hugging Face. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kvferry.cli.plan.model_types import (
    DEFAULTS,
    HEAD_DIM,
    MLA,
    MULTI_HEAD,
    MULTI_QUERY,
    AttentionKind,
    RecurrentState,
    known_type,
    layer_caches,
    number,
    recurrent_state,
)
from kvferry.connector.geometry.dtypes import CONVERTIBLE, canonical
from kvferry.connector.geometry.rank_geometry import MAX_REGION_LAYERS
from kvferry.connector.geometry.topology import MAX_HEADS
from kvferry.transport.errors import ConfigError, quoted

LAYERS = ("num_hidden_layers", "n_layer")
ATTENTION_HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "n_embed")
"""The names of one number in ``config.json``, as vLLM's ``ModelConfig`` looks for them."""

MAX_CONTENT = 1 << 20
"""Bound on the elements of one (head, token), and on each number of a state."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the hand-over of a prompt depends on.

    ``layers``: the kind of KV of each layer, ``None`` for none. ``total_heads``: global KV heads, 1 for MLA.
    ``content_bytes``: K and V of one (head, token) of one layer. ``window``: the tokens of a sliding window or a local
    chunk.
    """

    layers: tuple[AttentionKind | None, ...]
    attention_heads: int
    total_heads: int
    content_bytes: int
    dtype: str
    window: int = 0
    state: RecurrentState | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_layers(self) -> int:
        return sum(kind is not None for kind in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers that keep it, and all heads, without replicas."""
        return self.kv_layers * self.total_heads * self.content_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request, without replicas."""
        if self.state is None:
            return 0
        return len(self.state.layers) * sum(prod(array.shape) * array.item for array in self.state.arrays(1))


def model_shape(config: Mapping[str, Any], kv_dtype: str = "auto") -> ModelShape:
    """The shape of the KV cache that vLLM keeps for a model.

    Args:
        config: ``config.json`` as a mapping; of a multimodal model, ``text_config`` counts.
        kv_dtype: vLLM's ``--kv-cache-dtype``; ``auto``: the model's.

    Raises:
        ConfigError: the type of the model is not known, or a number is missing or impossible.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config is {quoted(text)}, expected an object")
    model_type = known_type(text)
    text = DEFAULTS.get(model_type, {}) | dict(text)
    listed = text.get("layers_block_type")  # a new NemotronHConfig leaves the number out
    layers = number(text, LAYERS, MAX_REGION_LAYERS, len(listed) or None if isinstance(listed, list) else None)
    caches = layer_caches(text, model_type, layers)
    kinds = tuple([kind for kind, _ in caches])
    if not any(kinds):
        raise ConfigError("no layer of the model has attention; give the config.json of a model with attention")
    heads = number(text, ATTENTION_HEADS, MAX_HEADS)
    named = text.get("dtype", text.get("torch_dtype")) or config.get("dtype", config.get("torch_dtype"))
    dtype = _dtype(config, text, named, kv_dtype)
    itemsize = CONVERTIBLE[dtype].itemsize
    states = tuple([place for place, (_, state) in enumerate(caches) if state])
    state = None
    if states:
        runs_in = _model_dtype(named, "dtype", "a config.json that has it")
        state = recurrent_state(text, model_type, states, runs_in, MAX_CONTENT)
    if model_type in MLA:
        latent = sum(number(text, (name,), MAX_CONTENT) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        return ModelShape(kinds, heads, 1, latent * itemsize, dtype, 0, state)
    window = 0
    for kind, name in (("sliding_window", "sliding_window"), ("chunked_local", "attention_chunk_size")):
        window = number(text, (name,), 1 << 30) if kind in kinds else window
    if window and model_type == "cohere2":  # its number leaves out the token itself
        window += 1
    named_dim = number(text, ("head_dim",), MAX_CONTENT, 0 if "head_dim" in text else HEAD_DIM.get(model_type, 0))
    head_dim = named_dim or _divided(text, heads)
    return ModelShape(kinds, heads, _kv_heads(text, model_type, heads), 2 * head_dim * itemsize, dtype, window, state)


def _kv_heads(text: Mapping[str, Any], model_type: str, heads: int) -> int:
    if model_type in MULTI_QUERY and text.get("new_decoder_architecture") is not True:
        if type(text.get("multi_query")) is not bool:
            raise ConfigError(f"multi_query is {quoted(text.get('multi_query'))}, expected true or false")
        return 1 if text["multi_query"] else number(text, KV_HEADS, heads, heads)
    without = heads if model_type in MULTI_HEAD or any(name in text for name in KV_HEADS) else None
    return number(text, KV_HEADS, heads, without)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], named: object, kv_dtype: str) -> str:
    """Of the KV. Raises ConfigError."""
    if kv_dtype == "auto":
        for holder in (config, text):
            quantized = holder.get("quantization_config") or holder.get("compression_config")
            inner = quantized.get("quantization") if isinstance(quantized, Mapping) else None
            for place in (quantized, inner):
                for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
                    if isinstance(place, Mapping) and place.get(key) is not None:
                        raise ConfigError(
                            f"{key} is {quoted(place[key])}, the KV has a dtype of its own; give --kv-dtype"
                        )
        return _model_dtype(named, "the KV dtype", "--kv-dtype")
    return _checked(kv_dtype, "the KV dtype", "--kv-dtype")


def _model_dtype(named: object, what: str, remedy: str) -> str:
    """vLLM runs a model in float32 as bfloat16."""
    dtype = _checked(named, what, remedy)
    return "bfloat16" if dtype == "float32" else dtype


def _checked(named: object, what: str, remedy: str) -> str:
    dtype = canonical(named) if isinstance(named, str) else ""
    if dtype not in CONVERTIBLE:
        raise ConfigError(f"{what} is {quoted(named)}, expected one of {', '.join(CONVERTIBLE)}; give {remedy}")
    return dtype


def _divided(text: Mapping[str, Any], heads: int) -> int:
    """The head dimension of a configuration that does not name it, by the rule of vLLM's ``get_head_size``."""
    hidden = number(text, HIDDEN, MAX_CONTENT * heads)
    if hidden < heads:
        raise ConfigError(f"{HIDDEN[0]} is {hidden}, expected at least the {heads} attention heads")
    return hidden // heads
