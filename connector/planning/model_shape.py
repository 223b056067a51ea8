"""The KV cache of a model, from the ``config.json`` of Hugging Face. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvferry.connector.geometry.dtypes import CONVERTIBLE, canonical
from kvferry.connector.geometry.rank_geometry import MAX_REGION_LAYERS
from kvferry.connector.geometry.topology import MAX_HEADS
from kvferry.transport.errors import ConfigError, quoted

LAYERS = ("num_hidden_layers", "n_layer")
ATTENTION_HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd")
"""The names of one number in ``config.json``, as vLLM's ``ModelConfig`` looks for them."""

MAX_CONTENT = 1 << 20
"""Bound on the elements of one (head, token)."""

OTHER_CACHES = ("sliding_window", "attention_chunk_size", "index_topk", "state_size", "mamba_d_state", "ssm_cfg")
"""Keys that name a cache other than full attention or MLA: windows, the indexer of sparse MLA, recurrent states."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the hand-over of a prompt depends on. All layers have one form.

    ``total_heads``: global KV heads, 1 for MLA. ``content_bytes``: K and V of one (head, token) of one layer.
    """

    kind: Literal["full", "mla"]
    num_layers: int
    attention_heads: int
    total_heads: int
    content_bytes: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and heads, without replicas."""
        return self.num_layers * self.total_heads * self.content_bytes


def model_shape(config: Mapping[str, Any], kv_dtype: str = "auto") -> ModelShape:
    """The shape of the KV cache that vLLM keeps for a model.

    Args:
        config: ``config.json`` as a mapping; of a multimodal model, ``text_config`` counts.
        kv_dtype: vLLM's ``--kv-cache-dtype``; ``auto``: the model's.

    Raises:
        ConfigError: a number is missing or impossible, or the model has caches of a kind that is not planned.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config is {quoted(text)}, expected an object")
    _refuse_other_caches(text)
    layers = _number(text, LAYERS, MAX_REGION_LAYERS)
    heads = _number(text, ATTENTION_HEADS, MAX_HEADS)
    named = kv_dtype if kv_dtype != "auto" else text.get("dtype", text.get("torch_dtype"))
    named = named or config.get("dtype", config.get("torch_dtype"))
    dtype = canonical(named) if isinstance(named, str) else ""
    if dtype not in CONVERTIBLE:
        raise ConfigError(f"the KV dtype is {quoted(named)}, expected one of {', '.join(CONVERTIBLE)}; give --kv-dtype")
    itemsize = CONVERTIBLE[dtype].itemsize
    if text.get("kv_lora_rank") is not None:
        latent = _number(text, ("kv_lora_rank",), MAX_CONTENT) + _number(text, ("qk_rope_head_dim",), MAX_CONTENT)
        return ModelShape("mla", layers, heads, 1, latent * itemsize, dtype)
    kv_heads = _number(text, KV_HEADS, heads, default=heads)
    head_dim = _number(text, ("head_dim",), MAX_CONTENT, default=0) or _divided(text, heads)
    return ModelShape("full", layers, heads, kv_heads, 2 * head_dim * itemsize, dtype)


def _refuse_other_caches(text: Mapping[str, Any]) -> None:
    kinds = text.get("layer_types") or text.get("layers_block_type") or ()
    listed = {str(kind) for kind in kinds} if isinstance(kinds, list) else {str(kinds)} if kinds else set()
    other = sorted(listed - {"full_attention", "attention"})
    for name in OTHER_CACHES:
        off = name == "sliding_window" and (text.get("use_sliding_window") is False or bool(listed and not other))
        if text.get(name) is not None and not off:
            other.append(name)
    if other:
        raise ConfigError(
            f"the model has caches of another kind than full attention and MLA ({quoted(', '.join(other))}); "
            "kvferry plan does not know how many tokens of them move"
        )


def _number(text: Mapping[str, Any], names: tuple[str, ...], most: int, default: int | None = None) -> int:
    """The first of ``names`` that the configuration has, from 1 to ``most``."""
    for name in names:
        value = text.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"{name} is {quoted(value)}, expected a whole number from 1 to {most}")
        return value
    if default is None:
        raise ConfigError(f"{names[0]} is missing; give the config.json of a model with attention")
    return default


def _divided(text: Mapping[str, Any], heads: int) -> int:
    """The head dimension of a configuration that does not name it, by the rule of vLLM's ``get_head_size``."""
    hidden = _number(text, HIDDEN, MAX_CONTENT * heads)
    if hidden < heads:
        raise ConfigError(f"{HIDDEN[0]} is {hidden}, expected at least the {heads} attention heads")
    return hidden // heads
