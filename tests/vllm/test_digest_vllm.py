"""What the digest and the numbers are of vLLM's own configurations, attention layers and cache writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.device import DeviceConfig
from vllm.model_executor.layers.attention import Attention

from kvferry.connector.geometry.dtypes import layer_cache_dtype
from kvferry.connector.pages.rank_context import check_model
from kvferry.connector.vllm import compat, from_vllm
from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.float_formats import Conversion
from kvferry.kernels.paged_copy import wire_pages
from kvferry.transport.errors import ConfigError, IncompatiblePeerError
from tests.support.tiny_model import ModelSpec, build_model

pytestmark = pytest.mark.vllm
SPEC = ModelSpec(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=32, intermediate=32, vocabulary=300, max_tokens=1024
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "tiny", SPEC)


def engine(folder: Path, cache: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
    options = {"dtype": "float32", "max_model_len": 512, **options}
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), tokenizer=str(folder), **options),
        cache_config=CacheConfig(block_size=32, **(cache or {})),
        device_config=DeviceConfig(device="cpu"),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 256},
        {"dtype": "bfloat16"},
        {"seed": 5},
        {"served_model_name": "another"},
        {"hf_overrides": {"max_position_embeddings": 4096}},
        {"hf_overrides": {"tie_word_embeddings": True}},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}},
        {"enforce_eager": True},
    ],
    ids=str,
)
def test_what_may_differ(folder: Path, options: dict[str, Any]) -> None:
    check_model(from_vllm.model_identity_of(engine(folder)), from_vllm.model_identity_of(engine(folder, **options)))


def test_weights_elsewhere(folder: Path, tmp_path: Path) -> None:
    theirs = engine(build_model(tmp_path / "elsewhere", SPEC))
    check_model(from_vllm.model_identity_of(engine(folder)), from_vllm.model_identity_of(theirs))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
            "rope differs, ours is .*",
        ),
        ({"hf_overrides": {"num_hidden_layers": 1}}, "num_hidden_layers differs, ours is 2, the peer's is 1"),
        (
            {"hf_overrides": {"architectures": ["MistralForCausalLM"]}},
            "architectures differs, ours is .*, the peer's .*",
        ),
        ({"quantization": "fp8_per_tensor"}, "quantization differs, ours is unset, the peer's is fp8_per_tensor"),
    ],
    ids=str,
)
def test_what_must_not(folder: Path, options: dict[str, Any], text: str) -> None:
    ours, theirs = (from_vllm.model_identity_of(engine(folder, dtype="bfloat16", **more)) for more in ({}, options))
    with pytest.raises(IncompatiblePeerError, match=rf"^peer refused: {text}$"):
        check_model(ours, theirs)


# --- numbers ------------------------------------------------------------------------------------------------------


def attention(config: VllmConfig, name: str, **options: Any) -> Attention:
    with set_current_vllm_config(config):
        return Attention(4, 32, 1.0, num_kv_heads=2, cache_config=config.cache_config, prefix=name, **options)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "expected"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "bfloat16"),
        ("float16", "auto", "float16"),
        ("bfloat16", "fp8", "float8_e4m3fn"),
        ("bfloat16", "fp8_e4m3", "float8_e4m3fn"),
        ("float32", "fp8_e5m2", "float8_e5m2"),
    ],
)
def test_dtype_and_scales_of_real_layers(folder: Path, dtype: str, cache_dtype: str, expected: str) -> None:
    config = engine(folder, {"cache_dtype": cache_dtype}, dtype=dtype)
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    layers = {name: attention(config, name) for name in names}
    layers[names[1]]._k_scale_float, layers[names[1]]._v_scale_float = 0.5, 0.25  # as a checkpoint with scales
    spec = layers[names[0]].get_kv_cache_spec(config)
    forward_context = config.compilation_config.static_forward_context
    numbers = layer_cache_dtype(spec, names, forward_context, config.cache_config.cache_dtype)
    assert numbers is not None and (numbers.dtype, numbers.keys) == (expected, 32)
    scaled = expected.startswith("float8")
    assert dict(numbers.scales) == ({names[0]: (1.0, 1.0), names[1]: (0.5, 0.25)} if scaled else {})


def test_layers_left_out_of_an_fp8_cache_have_a_dtype_of_their_own(folder: Path) -> None:
    config = engine(folder, {"cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}, dtype="bfloat16")
    found = {}
    for name in ("model.layers.0.attn", "model.layers.1.attn"):
        spec = attention(config, name).get_kv_cache_spec(config)
        numbers = layer_cache_dtype(spec, [name], config.compilation_config.static_forward_context, "fp8")
        assert numbers is not None
        found[name] = numbers.dtype
    assert list(found.values()) == ["float8_e4m3fn", "bfloat16"]
    layers = config.compilation_config.static_forward_context
    with pytest.raises(ConfigError, match="have KV caches of dtypes bfloat16, float8_e4m3fn"):
        layer_cache_dtype(spec, list(found), layers, "fp8")
    layers = {"a": SimpleNamespace(kv_cache_dtype="auto"), "b": SimpleNamespace(kv_cache_dtype="bfloat16")}
    same = layer_cache_dtype(spec, ["a", "b"], layers, "auto")
    assert same is not None and same.dtype == "bfloat16", "by two names"


def test_mla_and_packed_and_amd(folder: Path) -> None:
    kvi = pytest.importorskip("vllm.v1.kv_cache_interface")
    layer = SimpleNamespace(kv_cache_dtype="fp8", _k_scale_float=0.5, _v_scale_float=9.0)
    spec = kvi.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.uint8)
    numbers = layer_cache_dtype(spec, ["a"], {"a": layer}, "fp8")
    assert numbers is not None and (numbers.keys, dict(numbers.scales)) == (576, {"a": (0.5, 0.5)})
    amd = layer_cache_dtype(spec, ["a"], {"a": layer}, "fp8", fnuz=True)
    assert amd is not None and amd.dtype == "float8_e4m3fnuz", "other bytes for the same numbers"
    opaque = replace(spec, state_content_bytes=656)
    inline = layer_cache_dtype(opaque, ["a"], {"a": SimpleNamespace(kv_cache_dtype="fp8_ds_mla")}, "fp8_ds_mla")
    assert inline is not None and (inline.dtype, inline.keys, dict(inline.scales)) == ("fp8_ds_mla", None, {})
    layer._k_scale = torch.ones(8)
    with pytest.raises(ConfigError, match=r"^layer 'a': an fp8 KV cache with 8 scales, one per head, is not carried"):
        layer_cache_dtype(spec, ["a"], {"a": layer}, "fp8")


def test_scales_that_every_engine_makes_up_are_refused_by_name(folder: Path) -> None:
    """An option of vLLM 0.26."""
    config = engine(folder, {"cache_dtype": "fp8"})
    caches = SimpleNamespace(kv_cache_groups=[])
    compat.check_config(config, caches)
    config.cache_config.calculate_kv_scales = True
    with pytest.raises(ConfigError, match=r"^calculate_kv_scales [^\n]*kv_cache_dtype fp8"):
        compat.check_config(config, caches)


# --- vLLM's own cache write ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_number_becomes_what_the_cache_write_of_vllm_makes_of_it(name: str, dtype: torch.dtype, scale: float) -> None:
    """That of the CPU cuts off where ours, like that of a GPU, rounds: at most one step apart, and the same beyond."""
    largest = torch.finfo(dtype).max
    numbers = torch.tensor([0.0, 1.0, -1.0, 1.1, 1.2, -1.9, 3.3, -77.7, 440.0, 2 * largest, -2 * largest,
                            float("inf"), float("-inf")])  # fmt: skip
    ours = torch.empty(len(numbers), dtype=torch.uint8)
    scales = [np.full((1, 2), value, dtype=np.float32) for value in (1.0, scale)]
    conversion = Conversion("float32", str(dtype).removeprefix("torch."), len(numbers), 0, *scales)
    unpack_converted(
        wire_pages(ours.data_ptr(), 1, 1, 1, len(numbers)), numbers.data_ptr(), conversion,
        num_heads=1, num_tokens=1, device=torch.device("cpu"),
    )  # fmt: skip
    theirs = torch.cat([_written(number, name, scale) for number in numbers])
    assert (ours.int() - theirs.int()).abs().max() <= 1
    beyond = numbers.abs() > largest * scale
    assert beyond.sum() >= 4 and torch.equal(ours[beyond], theirs[beyond])


def _written(number: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """The one byte that vLLM stores for a key of this number."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        _get_attn_isa(torch.bfloat16, 32, 32, name)
    except NotImplementedError as reason:  # a processor without AVX-512
        pytest.skip(str(reason))
    key = number.expand(1, 1, 32).contiguous()
    keys, values = torch.zeros(1, 1, 64, 32, dtype=torch.uint8).chunk(2, dim=2)
    slot = torch.tensor([0])
    ops.cpu_attn_reshape_and_cache(
        key, key, keys, values, slot, "vec", k_scale=scale, v_scale=scale, kv_cache_dtype=name
    )
    stored = keys.unique()
    return stored[stored != 0] if len(stored) > 1 else stored
