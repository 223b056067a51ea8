"""What the digest and the numbers are of vLLM's own configurations, attention layers and cache writes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import _custom_ops as ops
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.config.device import DeviceConfig
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from kvferry.connector.geometry.dtypes import layer_cache_dtype
from kvferry.connector.geometry.model_identity import WEIGHTS
from kvferry.connector.pages.rank_context import check_model
from kvferry.connector.vllm import from_vllm
from kvferry.connector.vllm.weights import EngineWeights
from kvferry.connector.worker.weights import checkpoint_digest
from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.float_formats import Conversion
from kvferry.kernels.paged_copy import wire_pages
from kvferry.transport.errors import ConfigError, IncompatiblePeerError
from tests.support.tiny_model import ModelSpec, build_model
from tests.vllm.stepped import Lines

pytestmark = pytest.mark.vllm
SPEC = ModelSpec(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=32, intermediate=32, vocabulary=300, max_tokens=1024
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "tiny", SPEC)


def identity(config: VllmConfig, tag: str | None = None) -> dict[str, str]:
    return from_vllm.model_identity_of(config, EngineWeights(config, tag))


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
    check_model(identity(engine(folder)), identity(engine(folder, **options)))


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
    ours, theirs = (identity(engine(folder, dtype="bfloat16", **more)) for more in ({}, options))
    with pytest.raises(IncompatiblePeerError, match=rf"^peer refused: {text}$"):
        check_model(ours, theirs)


# --- weights ------------------------------------------------------------------------------------------------------

Tensors = dict[str, torch.Tensor]


def tensors_of(folder: Path) -> Tensors:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def saved(folder: Path, copy: Path, change: Callable[[Tensors], object] = lambda tensors: None, files: int = 1) -> Path:
    """The model again, with other weights or in another number of files."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = tensors_of(folder)
    change(tensors)
    where = {name: f"part{number % files}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in where if where[name] == file}, copy / file, {"a}": '{"b": 1}'})
    if files > 1:
        (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return copy


def cached(folder: Path, tmp_path: Path) -> VllmConfig:
    """As Hugging Face keeps a repository: files are links, and the engine names the repository."""
    snapshot = saved(folder, tmp_path / "models--org--tiny" / "snapshots" / "abc", files=2)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    (tmp_path / "models--org--tiny" / "blobs").mkdir()
    for file in snapshot.glob("*.safetensors"):
        file.symlink_to(file.rename(tmp_path / "models--org--tiny" / "blobs" / file.name))
    config = engine(snapshot)
    config.model_config.model, config.load_config.download_dir = "org/tiny", str(tmp_path)
    return config


def stray(folder: Path, tmp_path: Path) -> VllmConfig:
    copy = saved(folder, tmp_path / "copy", files=2)
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(3)}, copy / "zz-not-in-the-index.safetensors")
    return engine(copy)


def linked(folder: Path, tmp_path: Path) -> VllmConfig:
    (tmp_path / "link").symlink_to(folder)
    return engine(tmp_path / "link")


def of_other_ranks(folder: Path, tmp_path: Path) -> VllmConfig:
    config = engine(folder)
    config.parallel_config = ParallelConfig(
        tensor_parallel_size=2, pipeline_parallel_size=2, distributed_executor_backend="mp"
    )
    return config


def other_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] += 1


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda folder, tmp_path: engine(build_model(tmp_path / "elsewhere", SPEC)),
        lambda folder, tmp_path: engine(saved(folder, tmp_path / "copy", files=5)),
        lambda folder, tmp_path: engine(saved(folder, tmp_path / "copy", other_head)),
        cached, stray, linked, of_other_ranks,
    ],
    ids=["same bytes", "more files", "another head", "cached", "stray", "linked", "ranks"],
)  # fmt: skip
def test_the_same_weights_elsewhere(folder: Path, tmp_path: Path, elsewhere: Callable[..., VllmConfig]) -> None:
    ours, theirs = identity(engine(folder)), identity(elsewhere(folder, tmp_path))
    assert re.match("[0-9a-f]{16} of ", ours[WEIGHTS])
    check_model(ours, theirs)


def test_a_fine_tune_of_anything_that_kv_depends_on_is_refused(folder: Path, tmp_path: Path) -> None:
    """Of one tensor of one layer, and by a small update of rank one, as of a merged LoRA adapter."""
    names, ours = sorted(tensors_of(folder)), identity(engine(folder))
    names.remove("lm_head.weight")
    assert len(names) == 2 + 2 * 9
    for number, name in enumerate(names):

        def tune(tensors: Tensors, name: str = name) -> None:
            tensor = tensors[name]
            tensor += 1e-3 * torch.randn(tensor.shape[0], *[1] * (tensor.dim() - 1)) * torch.randn(tensor.shape[-1])

        copy = saved(folder, tmp_path / str(number), tune)
        with pytest.raises(IncompatiblePeerError, match=r"^peer refused: weights digest differs, [^\n]* model_tag"):
            check_model(ours, identity(engine(copy)))
        check_model(identity(engine(folder), "v2"), identity(engine(copy), "v2"))


def test_of_the_experts_of_a_layer_the_first_counts(tmp_path: Path) -> None:
    """So a checkpoint with tens of thousands of tensors costs no more than 50 ms, too."""
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in (0, 1, 10, 123)]
    experts = {name: torch.full((8,), float(number)) for number, name in enumerate(names)}

    def digest(**changed: float) -> str:
        save_file(experts | {name: torch.full((8,), value) for name, value in changed.items()}, tmp_path / "m")
        return str(checkpoint_digest([tmp_path / "m"]))

    base = digest()
    assert [digest(**{name: 9.0}) == base for name in names] == [False, True, True, True]


def dummy(folder: Path, tmp_path: Path) -> VllmConfig:
    config = engine(folder)
    config.load_config.load_format = "dummy"
    return config


def not_cached(folder: Path, tmp_path: Path) -> VllmConfig:
    config = engine(folder)
    config.model_config.model, config.load_config.download_dir = "org/tiny", str(tmp_path)
    return config


def damaged(folder: Path, tmp_path: Path) -> VllmConfig:
    copy = saved(folder, tmp_path / "copy")
    (copy / "part0.safetensors").write_bytes(b"\xff" * 100)
    return engine(copy)


@pytest.mark.parametrize(
    ("unreadable", "why"),
    [
        (dummy, "load_format dummy"),
        (lambda _, tmp_path: engine(build_model(tmp_path / "none", SPEC, weights=False)), "no file *.safetensors in "),
        (not_cached, ""),
        (damaged, "no header of safetensors"),
    ],
    ids=["dummy", "no files", "not cached", "damaged"],
)
def test_where_weights_cannot_be_read_names_are_compared(
    folder: Path, tmp_path: Path, lines: Lines, unreadable: Callable[..., VllmConfig], why: str
) -> None:
    config = unreadable(folder, tmp_path)
    theirs, name = identity(config), f"{config.model_config.model}, revision unset"
    assert lines(f"the weights of {name} cannot be read (", why) and theirs[WEIGHTS] == f"unknown of {name}"
    check_model(theirs, theirs)
    check_model({**theirs, WEIGHTS: f"0123456789abcdef of {name}"}, theirs)
    with pytest.raises(IncompatiblePeerError, match=r"weights digest differs, ours is [0-9a-f]{16} of .* unknown of "):
        check_model({**theirs, WEIGHTS: "0123456789abcdef of another, revision unset"}, theirs)


class TakesWeights(torch.nn.Module):
    taken: list[str]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.taken = [name for name, _ in weights]


class StandInWorker:
    """Calls as vLLM's worker does: the connector finds it among its callers."""

    def __init__(self, weights: EngineWeights, *, drafts: bool = False) -> None:
        self.model, self.facts = TakesWeights(), [weights.fact]
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self._weight_update_is_draft = drafts
        weights.follow(self.model_runner, self, lambda: self.facts.append(weights.fact))

    def update_weights(self, pushed: list[tuple[str, torch.Tensor]]) -> None:
        if pushed:
            self.model.load_weights(weights=pushed)


def test_weights_that_a_trainer_sends_are_those_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """Also where none were read at the start, and in whatever parts they come."""
    tuned = engine(saved(folder, tmp_path / "tuned", lambda tensors: [tensor.mul_(1.5) for tensor in tensors.values()]))
    pushed = list(tensors_of(tmp_path / "tuned").items())
    for config in (engine(folder), dummy(folder, tmp_path)):
        worker = StandInWorker(EngineWeights(config))
        worker.update_weights(pushed[:5])
        worker.model.load_weights(each for each in pushed[5:])
        assert worker.model.taken == [name for name, _ in pushed[5:]]
        assert worker.facts[-1].partition(" ")[0] == EngineWeights(tuned).fact.partition(" ")[0]
        assert len(set(worker.facts)) == len(worker.facts) == 3
        worker.model.load_weights([(name, tensor.to("meta")) for name, tensor in pushed])
        assert worker.facts[-1] == worker.facts[-2], "vLLM has only planned a load"


def test_updates_that_pass_no_tensors_are_counted(folder: Path) -> None:
    """As many of them on P and D are the same weights, but for those of a model that drafts."""
    p, d = (StandInWorker(EngineWeights(engine(folder))) for _ in range(2))
    for worker in (p, p, d):
        worker.update_weights([])
    assert p.facts[:2] == d.facts and len(set(p.facts)) == 3
    drafts = StandInWorker(EngineWeights(engine(folder)), drafts=True)
    drafts.update_weights([])
    assert len(drafts.facts) == 1


# --- numbers ------------------------------------------------------------------------------------------------------


def attention(config: VllmConfig, name: str, **options: Any) -> Attention:
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)  # nothing is computed
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
    layer = SimpleNamespace(kv_cache_dtype="fp8", _k_scale_float=0.5, _v_scale_float=9.0)
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.uint8)
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
