"""The KV cache of a model, from the ``config.json`` of Hugging Face: which of its layers keep KV of which form, and the
states of the other ones. Pure.

A type stands here once its rule has been compared with vLLM's code for it. All other types are refused: a model that is
not known may keep KV in fewer layers or heads than its numbers say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from kvferry.connector.geometry.dtypes import CONVERTIBLE, canonical
from kvferry.connector.geometry.rank_geometry import MAX_REGION_LAYERS
from kvferry.connector.geometry.recurrent_state import StateArray
from kvferry.connector.geometry.topology import MAX_HEADS
from kvferry.transport.errors import ConfigError, did_you_mean, quoted

LAYERS = ("num_hidden_layers", "n_layer")
ATTENTION_HEADS = ("num_attention_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HIDDEN = ("hidden_size", "n_embd", "n_embed")
"""The names of one number in ``config.json``, as vLLM's ``ModelConfig`` looks for them."""

MAX_CONTENT = 1 << 20
"""Bound on the elements of one (head, token), and on each number of a state."""

AttentionKind = Literal["full", "mla", "sliding_window", "chunked_local"]
LayerCaches = tuple[AttentionKind | None, bool]
"""What a layer keeps: KV of a kind or none, and whether it keeps a state."""

MULTI_HEAD = frozenset({
    "bloom", "cohere", "gpt2", "gpt_neox", "gptj", "granite", "granitemoe", "llama", "nemotron", "olmo",
    "olmo2", "olmoe", "opt", "persimmon", "phi", "phi3",
})  # fmt: skip
"""Types with a KV head for each attention head where the configuration does not name the KV heads."""

GROUPED = frozenset({
    "apertus", "arcee", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3_text",
    "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "gpt_oss", "granitemoeshared", "helium", "internlm2",
    "internlm3", "llama4_text", "mimo_v2_flash", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo3", "phimoe",
    "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
MULTI_QUERY = frozenset({"falcon", "gpt_bigcode", "RefinedWeb", "RefinedWebModel"})
SPARSE = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Types with MLA and an index by which each token selects those that it attends to."""
MLA = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "kimi_linear"}) | SPARSE
RECURRENT = frozenset({
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "minimax", "minimax_m1",
    "minimax_text_01", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
})  # fmt: skip
KNOWN = MULTI_HEAD | GROUPED | MULTI_QUERY | MLA | RECURRENT
SHARED = frozenset({"gemma3n_text", "gemma4_text"})
"""Types whose last layers may use the KV of earlier ones."""

PACKED_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token where vLLM's sparse MLA packs numbers and scales, by its ``--kv-cache-dtype``."""

HEAD_DIM = {
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "qwen3_next", "qwen3_5_text",
         "qwen3_5_moe_text"), 256,
    ),
    **dict.fromkeys(
        ("ernie4_5", "glm", "glm4", "helium", "llama4_text", "minimax_m2", "ministral3", "nemotron_h", "qwen3",
         "qwen3_vl_text", "seed_oss"), 128,
    ),
    "gpt_oss": 64, "mimo_v2_flash": 192,
}  # fmt: skip
"""Elements of a head where the configuration leaves them out and the class of transformers has a number of its own."""

DEFAULTS = {"gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4}}
"""Other numbers that published configurations leave out."""

ALL_WINDOWS = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
"""Types of which ``sliding_window`` counts for all layers, where ``layer_types`` does not say for which."""

FULL_EVERY = {
    "gemma2": ("", 2), "gemma3_text": ("sliding_window_pattern", 6), "cohere2": ("sliding_window_pattern", 4),
    "olmo3": ("", 4), "gpt_oss": ("", 2), "llama4_text": ("no_rope_layer_interval", 4),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ("full_attention_interval", 4)),
}  # fmt: skip
"""Types of which every n-th layer has full attention where ``layer_types`` is missing: n's key and default."""

CACHES: Mapping[str, LayerCaches] = {
    **dict.fromkeys(("full_attention", "indexed_attention", "attention", "*", "1"), ("full", False)),
    "sliding_attention": ("sliding_window", False), "chunked_attention": ("chunked_local", False),
    **dict.fromkeys(("linear_attention", "mamba", "conv", "M", "0"), (None, True)),
    **dict.fromkeys(("mlp", "moe", "-", "E"), (None, False)),
    "hybrid": ("full", True),
}  # fmt: skip
"""What a layer keeps, by the names of its kind."""


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state that each of ``layers`` keeps of a request. ``family``: a name of vLLM's ``MambaAttentionBackendEnum``.
    ``taps`` inputs of ``channels`` channels, for Mamba2 without its B and C: these are ``groups`` of ``state[-1]``
    channels each. ``state``: the recurrent state; ranks share out its first axis."""

    layers: tuple[int, ...]
    family: str
    taps: int
    channels: int
    groups: int
    state: tuple[int, ...]
    conv_dtype: str
    state_dtype: str

    def arrays(self, tp_size: int) -> list[StateArray]:
        """What each of ``tp_size`` ranks keeps of one layer, by the rules of vLLM's ``MambaStateShapeCalculator``.
        Raises ConfigError: vLLM starts no engine of this size."""
        groups = tp_size if self.groups % tp_size else self.groups
        channels = self.channels + 2 * groups * (self.state[-1] if self.groups else 0)
        if channels % tp_size or self.channels % tp_size or (self.state and self.state[0] % tp_size):
            raise ConfigError(
                f"TP {tp_size} does not divide the state of the model's recurrent layers; give another TP"
            )
        conv, state = CONVERTIBLE[self.conv_dtype].itemsize, CONVERTIBLE[self.state_dtype].itemsize
        found = []
        if channels:
            found.append(StateArray((self.taps, channels // tp_size), self.conv_dtype, conv))
        if self.state:
            found.append(StateArray((self.state[0] // tp_size, *self.state[1:]), self.state_dtype, state))
        return found


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers that keep KV of one form. ``total_heads``: global KV heads, 1 for MLA. ``content_bytes``: K and V of one
    (head, token) of one layer. ``window``: the tokens of a sliding window or a local chunk. ``packing``: ``indexer``
    for the index of sparse attention, as in ``RegionGeometry``."""

    kind: AttentionKind
    layers: tuple[int, ...]
    total_heads: int
    content_bytes: int
    dtype: str
    window: int = 0
    packing: str = ""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the hand-over of a prompt depends on."""

    num_layers: int
    attention_heads: int
    kv: tuple[KvLayers, ...]
    state: RecurrentState | None = None

    @property
    def kv_layers(self) -> int:
        """How many layers keep KV."""
        return len({layer for kv in self.kv for layer in kv.layers})

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers that keep it, and all heads, without replicas."""
        return sum(len(kv.layers) * kv.total_heads * kv.content_bytes for kv in self.kv)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one request, without replicas."""
        if self.state is None:
            return 0
        return len(self.state.layers) * sum(prod(array.shape) * array.item for array in self.state.arrays(1))


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
    listed = text.get("layers_block_type")  # a new NemotronHConfig leaves the number out
    layers = number(text, LAYERS, MAX_REGION_LAYERS, len(listed) or None if isinstance(listed, list) else None)
    caches = layer_caches(text, model_type, layers)
    kinds = [kind for kind, _ in caches]
    if not any(kinds):
        raise ConfigError("no layer of the model has attention; give the config.json of a model with attention")
    heads = number(text, ATTENTION_HEADS, MAX_HEADS)
    named = text.get("dtype", text.get("torch_dtype")) or config.get("dtype", config.get("torch_dtype"))
    dtype = _dtype(config, text, named, kv_dtype)
    states = tuple([place for place, (_, state) in enumerate(caches) if state])
    state = None
    if states:
        runs_in = _model_dtype(named, "dtype", "a config.json that has it")
        state = recurrent_state(text, model_type, states, runs_in)
    forms: dict[KvLayers, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind is not None:
            own = _numbers_of_layer(text, model_type, layer, kind)
            forms.setdefault(_form(own, model_type, kind, heads, dtype), []).append(layer)
    kv = [replace(form, layers=tuple(held)) for form, held in forms.items()]
    if model_type in SPARSE:
        kv.append(_index(text, layers))
    return ModelShape(layers, heads, tuple(kv), state)


def _numbers_of_layer(text: Mapping[str, Any], model_type: str, layer: int, kind: AttentionKind) -> Mapping[str, Any]:
    """The configuration with the numbers of one layer, in models whose layers differ in their heads."""
    own: Any = {}
    layers = text.get("per_layer_config")
    if isinstance(layers, Mapping):  # its keys have leading zeros
        own = {key.zfill(3): numbers for key, numbers in layers.items()}.get(f"{layer:03}", own)
        if not isinstance(own, Mapping):
            raise ConfigError(f"per_layer_config has {quoted(own)} for layer {layer}, expected an object")
    elif model_type == "gemma4_text" and kind == "full":
        own = {"head_dim": text.get("global_head_dim") or 512}
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = text["num_global_key_value_heads"]
    elif model_type == "mimo_v2_flash" and kind == "sliding_window":
        names = "num_key_value_heads", "head_dim", "v_head_dim"
        own = {name: number(text, (f"swa_{name}",), MAX_CONTENT) for name in names}
    return {**text, **own}


def _form(text: Mapping[str, Any], model_type: str, kind: AttentionKind, heads: int, dtype: str) -> KvLayers:
    """The KV of a layer, without the layer. Raises ConfigError."""
    if kind == "mla":
        latent = sum(number(text, (name,), MAX_CONTENT) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        return KvLayers(kind, (), 1, PACKED_MLA.get(dtype) or latent * CONVERTIBLE[dtype].itemsize, dtype)
    window = 0
    if kind != "full":
        names = ("attention_chunk_size",) if kind == "chunked_local" else ("sliding_window_size", "sliding_window")
        window = number(text, names, 1 << 30) + (model_type == "cohere2")  # whose number leaves out the token itself
    head_dim = number(text, ("head_dim",), MAX_CONTENT, 0 if "head_dim" in text else HEAD_DIM.get(model_type, 0))
    if not head_dim:  # the rule of vLLM's ``get_head_size``
        hidden = number(text, HIDDEN, MAX_CONTENT * heads)
        if hidden < heads:
            raise ConfigError(f"{HIDDEN[0]} is {hidden}, expected at least the {heads} attention heads")
        head_dim = hidden // heads
    values = number(text, ("v_head_dim",), MAX_CONTENT) if model_type == "mimo_v2_flash" else head_dim
    content = (head_dim + values) * CONVERTIBLE[dtype].itemsize
    return KvLayers(kind, (), _kv_heads(text, model_type, heads), content, dtype, window)


def _index(text: Mapping[str, Any], num_layers: int) -> KvLayers:
    """The keys of the index, of the layers that do not use the selection of the one before: the rule of vLLM's
    ``DeepseekV2MLAAttention``. A key is in fp8, with a scale in float32 for each 128 elements. Raises ConfigError."""
    size = number(text, ("index_head_dim",), MAX_CONTENT)
    every, pattern = number(text, ("index_topk_freq",), num_layers, 1), text.get("index_topk_pattern")
    first = number(text, ("index_skip_topk_offset",), num_layers, 2)
    if pattern is not None and not isinstance(pattern, list | str):
        raise ConfigError(f"index_topk_pattern is {quoted(pattern)}, expected a list")
    if pattern is None:
        held = [layer for layer in range(num_layers) if max(layer - first + 1, 0) % every == 0]
    else:
        held = [layer for layer in range(num_layers) if layer >= len(pattern) or pattern[layer] != "S"]
    return KvLayers("mla", tuple(held), 1, size + size // 128 * 4, "uint8", packing="indexer")


def _kv_heads(text: Mapping[str, Any], model_type: str, heads: int) -> int:
    if model_type in MULTI_QUERY and text.get("new_decoder_architecture") is not True:
        if type(text.get("multi_query")) is not bool:
            raise ConfigError(f"multi_query is {quoted(text.get('multi_query'))}, expected true or false")
        return 1 if text["multi_query"] else number(text, KV_HEADS, heads, heads)
    without = heads if model_type in MULTI_HEAD or any(name in text for name in KV_HEADS) else None
    return number(text, KV_HEADS, heads, without)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], named: object, kv_dtype: str) -> str:
    """Of the KV. Raises ConfigError."""
    if text["model_type"] in SPARSE:
        if kv_dtype in PACKED_MLA:
            return kv_dtype
        if kv_dtype == "fp8" or (kv_dtype == "auto" and text["model_type"] == "glm_moe_dsa"):
            raise ConfigError(
                f"--kv-dtype {kv_dtype} depends on the GPU for {text['model_type']}: give fp8_ds_mla (fp8 on Hopper), "
                "fp8_e4m3 (fp8 on Blackwell, there the default of glm_moe_dsa) or bfloat16"
            )
    if kv_dtype != "auto":
        return _checked(kv_dtype, "the KV dtype", "--kv-dtype")
    for holder in (config, text):
        quantized = holder.get("quantization_config") or holder.get("compression_config")
        inner = quantized.get("quantization") if isinstance(quantized, Mapping) else None
        for place in (place for place in (quantized, inner) if isinstance(place, Mapping)):
            for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
                if (own := place.get(key)) is not None:
                    raise ConfigError(f"{key} is {quoted(own)}, the KV has a dtype of its own; give --kv-dtype")
    return _model_dtype(named, "the KV dtype", "--kv-dtype")


def _model_dtype(named: object, what: str, remedy: str) -> str:
    """vLLM runs a model in float32 as bfloat16."""
    dtype = _checked(named, what, remedy)
    return "bfloat16" if dtype == "float32" else dtype


def _checked(named: object, what: str, remedy: str = "") -> str:
    dtype = canonical(named) if isinstance(named, str) else ""
    if dtype not in CONVERTIBLE:
        give = f"; give {remedy}" if remedy else ""
        raise ConfigError(f"{what} is {quoted(named)}, expected one of {', '.join(CONVERTIBLE)}{give}")
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
    if text.get("index_topk") is not None and found not in SPARSE:
        raise ConfigError(f"index_topk is {quoted(text['index_topk'])}: the caches of sparse attention are not counted")
    return found


def layer_caches(text: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[LayerCaches, ...]:
    """What each layer keeps. Raises ConfigError: the configuration does not say it, or names an unknown kind."""
    key, kinds = _kinds(text, model_type, num_layers)
    if len(kinds) != num_layers:
        raise ConfigError(f"{key} names {len(kinds)} layers, expected {num_layers}")
    states = model_type in RECURRENT
    other = sorted({kind for kind in kinds if kind not in CACHES or (CACHES[kind][1] and not states)})
    if other:
        raise ConfigError(f"{key} has layers of kind {quoted(', '.join(other))}, whose caches are not known")
    found = [CACHES[kind] for kind in kinds]
    if model_type in SHARED:
        shared = text.get("num_kv_shared_layers")
        if type(shared) is not int or not 0 <= shared < num_layers:
            expected = f"expected a whole number from 0 to {num_layers - 1}"
            raise ConfigError(f"num_kv_shared_layers is {quoted(shared)}, {expected}")
        found[num_layers - shared :] = [(None, False)] * shared
    return tuple([("mla" if kind and model_type in MLA else kind, state) for kind, state in found])


def _kinds(text: Mapping[str, Any], model_type: str, num_layers: int) -> tuple[str, list[str]]:
    """The kind of each layer, and the key that says it. Raises ConfigError."""
    layers, windows = range(num_layers), text.get("use_sliding_window") is not False
    if model_type == "falcon_h1":
        return "model_type", ["hybrid"] * num_layers
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list"):
        value = text.get(key)
        if value is not None:
            if not isinstance(value, list | str):
                raise ConfigError(f"{key} is {quoted(value)}, expected a list")
            return key, [str(kind) for kind in value]
    if model_type == "mimo_v2_flash":
        return "hybrid_layer_pattern", [
            "sliding_attention" if kind else "full_attention" for kind in _places(text, "hybrid_layer_pattern")
        ]
    if model_type == "kimi_linear":
        inner = text.get("linear_attn_config")
        full, states = (_places(inner, key) for key in ("full_attn_layers", "kda_layers"))
        if sorted(full + states) != [layer + 1 for layer in layers]:
            raise ConfigError(f"full_attn_layers and kda_layers are not the layers 1 to {num_layers}")
        return "linear_attn_config", ["attention" if layer + 1 in full else "mamba" for layer in layers]
    if model_type == "jamba":
        period, offset = (text.get(f"attn_layer_{name}") for name in ("period", "offset"))
        if type(period) is not int or type(offset) is not int or not 0 <= offset < period:
            named = quoted((period, offset))
            raise ConfigError(f"attn_layer_period and attn_layer_offset are {named}, expected numbers")
        return "attn_layer_period", ["attention" if layer % period == offset else "mamba" for layer in layers]
    for name, key in (("bamba", "attn_layer_indices"), ("lfm2", "full_attn_idxs"), ("lfm2_moe", "full_attn_idxs")):
        if model_type == name:
            full = _places(text, key)
            return key, ["attention" if layer in full else "mamba" for layer in layers]
    if model_type in FULL_EVERY:
        key, every = FULL_EVERY[model_type]
        every = number(text, (key,), num_layers * every, every)
        local = "linear_attention" if model_type in RECURRENT else "sliding_attention"
        if model_type == "llama4_text":
            local = "full_attention" if text.get("attention_chunk_size") is None else "chunked_attention"
            ropes = text.get("no_rope_layers")
            if isinstance(ropes, list) and ropes:
                return "no_rope_layers", [local if rope else "full_attention" for rope in ropes]
        return key, ["full_attention" if (layer + 1) % every == 0 else local for layer in layers]
    if model_type in RECURRENT | SHARED:
        raise ConfigError("layer_types is missing; give a config.json that says which layers have attention")
    window = text.get("sliding_window") if windows else None
    if window and model_type not in ALL_WINDOWS:
        raise ConfigError(f"sliding_window is {quoted(window)}, and layer_types, the layers that have it, is missing")
    return "sliding_window", ["sliding_attention" if window else "full_attention"] * num_layers


def _places(inner: object, key: str) -> list[int]:
    """Numbers of layers. Raises ConfigError."""
    found = inner.get(key) if isinstance(inner, Mapping) else None
    if not isinstance(found, list) or not all(type(layer) is int for layer in found):
        raise ConfigError(f"{key} is {quoted(found)}, expected a list of numbers of layers")
    return found


def recurrent_state(text: Mapping[str, Any], model_type: str, layers: tuple[int, ...], dtype: str) -> RecurrentState:
    """The state of a model that runs in ``dtype``. Raises ConfigError."""

    def size(name: str, inner: Mapping[str, Any] = text) -> int:
        return number(inner, (name,), MAX_CONTENT)

    def taps(name: str, inner: Mapping[str, Any] = text) -> int:
        if size(name, inner) == 1:
            raise ConfigError(f"{name} is 1, expected 2 or more")
        return size(name, inner) - 1

    if model_type.startswith("minimax"):
        heads, width = size("num_attention_heads"), size("head_dim")
        return RecurrentState(layers, "LINEAR", 0, 0, 0, (heads, width, width), dtype, dtype)
    if model_type.startswith("lfm2"):
        channels = size("hidden_size" if model_type == "lfm2_moe" else "conv_dim")
        return RecurrentState(layers, "SHORT_CONV", taps("conv_L_cache"), channels, 0, (), dtype, dtype)
    if model_type == "kimi_linear":
        inner = text.get("linear_attn_config")
        inner = inner if isinstance(inner, Mapping) else {}
        heads, width, inputs = size("num_heads", inner), size("head_dim", inner), taps("short_conv_kernel_size", inner)
        return RecurrentState(layers, "GDN_ATTN", inputs, 3 * heads * width, 0, (heads, width, width), dtype, "float32")
    if model_type == "jamba":
        channels = size("mamba_expand") * size("hidden_size")
        shape = channels, size("mamba_d_state")
        return RecurrentState(layers, "MAMBA1", taps("mamba_d_conv"), channels, 0, shape, dtype, dtype)
    if model_type in ("nemotron_h", "falcon_h1", "bamba", "granitemoehybrid"):
        names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
        if model_type == "nemotron_h":
            names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
        heads, width, state, groups = (size(name) for name in names[:4])
        kept = text.get("mamba_ssm_cache_dtype") or "float32" if model_type == "nemotron_h" else dtype
        sizes, kept = (heads, width, state), _checked(kept, "the dtype of the state")
        return RecurrentState(layers, "MAMBA2", taps(names[4]), heads * width, groups, sizes, dtype, kept)
    key, value = (size(f"linear_{name}_head_dim") for name in ("key", "value"))
    keys, values = (size(f"linear_num_{name}_heads") for name in ("key", "value"))
    channels, inputs = 2 * keys * key + values * value, taps("linear_conv_kernel_dim")
    kept = text.get("mamba_ssm_dtype") or dtype if model_type.startswith("qwen3_5") else dtype
    return RecurrentState(
        layers, "GDN_ATTN", inputs, channels, 0, (values, value, key), dtype, _checked(kept, "the dtype of the state")
    )
