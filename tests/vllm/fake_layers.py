"""vLLM's real spec objects, random; layers and backends that are vLLM's by class and hold nothing."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from kvferry.transport.errors import KVFerryError
from tests.vllm.releases import get_kv_cache_config_from_groups

BLOCKS = 5
LAYOUTS = list(kvi.KVCacheLayout)
DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float16]


class FakeAttention(Attention):
    """Passes for vLLM's attention layer; built without a model."""

    def __init__(self, spec: Any = None, backend: Any = None, target: str | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.spec, self.backend, self.kv_sharing_target_layer_name = spec, backend, target
        self.kv_cache: Any = None

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec

    def get_attn_backend(self) -> Any:
        return self.backend


def fake_backend(*sizes: Any, name: str = "FAKE") -> type[AttentionBackend]:
    return type(name, (AttentionBackend,), {
        "get_name": staticmethod(lambda: name),
        "get_supported_kernel_block_sizes": staticmethod(lambda spec=None: list(sizes)),
    })  # fmt: skip


def random_backend(draw: random.Random) -> type[AttentionBackend]:
    exact, multiples = [8, 16, 24, 32, 48, 64], [MultipleOf(n) for n in (1, 8, 16, 24, 32)]
    return fake_backend(*draw.sample(exact + multiples, draw.randint(1, 3)), name=draw.choice(["ONE", "TWO", "THREE"]))


def random_spec(draw: random.Random, block: int) -> kvi.KVCacheSpec:
    """Full, windowed or latent; some padded, packed, compressed, aligned."""
    more: dict[str, Any] = {"dtype": draw.choice(DTYPES)}
    if draw.random() < 0.15:
        more["page_size_padded"] = draw.choice([4096, 8192, 1 << 14])
    if draw.random() < 0.15:
        more["block_stride_alignment"] = draw.choice([64, 100, 512])
    if draw.random() < 0.15:
        more["state_content_bytes"] = draw.choice([8, 11, 12])
    if draw.random() < 0.3:
        more |= {"head_size": draw.choice([2, 4, 6]), "num_kv_heads": 1}
        if draw.random() < 0.4:
            more["tokens_per_state"] = 4
        return kvi.MLAAttentionSpec(block_size=block, **more)
    more |= {"head_size": draw.choice([1, 2, 4]), "num_kv_heads": draw.randint(1, 4)}
    if draw.random() < 0.2:
        return kvi.SlidingWindowSpec(block_size=block, sliding_window=64, dcp_sharded=False, **more)
    return kvi.FullAttentionSpec(block_size=block, head_size_v=draw.choice([None, 3]), **more)


def random_groups(draw: random.Random) -> list[kvi.KVCacheGroupSpec]:
    """One to three groups; sometimes one whose layers differ in size."""
    names = (f"model.layers.{n}.self_attn.attn" for n in range(99))
    groups = []
    alike = random_spec(draw, draw.choice([16, 32, 48]))
    for _ in range(draw.choice([1, 1, 2, 3])):
        block = alike.block_size
        mine = [next(names) for _ in range(draw.randint(1, 3))]
        spec: kvi.KVCacheSpec = alike if draw.random() < 0.7 else random_spec(draw, block)
        if draw.random() < 0.25:
            spec = kvi.UniformTypeKVCacheSpecs(block, {name: random_spec(draw, block) for name in mine})
        groups.append(kvi.KVCacheGroupSpec(mine, spec))
    return groups


def vllm_config(layout: Any = None, layers: dict[str, Any] | None = None, num_blocks: int | None = None) -> Any:
    """What vLLM's functions read of a config."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=num_blocks,
        ),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama")),
        compilation_config=SimpleNamespace(static_forward_context=layers or {}),
    )


class Compared(Counter[str]):
    """How often ours and vLLM's agreed on what they were given, and refused it, ours with a typed error in one line."""

    def both(self, theirs: Callable[..., Any], ours: Callable[..., Any], *given: Any) -> tuple[Any, Any] | None:
        """The two results; ``None`` where both refuse."""
        try:
            wanted = theirs(*given)
        except (AssertionError, ValueError, KeyError, IndexError, RuntimeError, NotImplementedError) as error:
            refused = error
        else:
            got = ours(*given)
            self["agreed"] += 1
            return wanted, got
        try:
            got = ours(*given)
        except KVFerryError as error:
            assert str(error) and "\n" not in str(error)
            self["refused"] += 1
            return None
        raise AssertionError(f"vLLM refuses ({refused!r}), ours answers {got!r}")

    def same(self, theirs: Callable[..., Any], ours: Callable[..., Any], *given: Any) -> None:
        pair = self.both(theirs, ours, *given)
        assert pair is None or pair[0] == pair[1]

    def at_least(self, **counts: int) -> None:
        """So that all cases were met."""
        assert all(self[name] >= count for name, count in counts.items()), self


def place(groups: list[Any], layout: Any) -> Any:
    """vLLM's own sizing and placement."""
    return get_kv_cache_config_from_groups(vllm_config(layout, num_blocks=BLOCKS), groups, available_memory=1 << 30)


def placed(seeds: range) -> list[tuple[random.Random, Any, Any]]:
    """Random groups that vLLM can place, in every layout that it can place them in."""
    found = []
    for seed in seeds:
        groups = random_groups(random.Random(seed))
        for layout in LAYOUTS:
            try:
                found.append((random.Random(seed), layout, place(copy.deepcopy(groups), layout)))
            except (AssertionError, ValueError):
                continue
    return found


def form(caches: dict[str, torch.Tensor]) -> dict[str, tuple[Any, ...]]:
    """What a cache is: shape, strides, dtype, and where in its allocation, which all of them must share."""
    assert len({cache.untyped_storage().data_ptr() for cache in caches.values()}) <= 1
    return {
        name: (
            tuple(cache.shape),
            cache.stride(),
            cache.dtype,
            cache.data_ptr() - cache.untyped_storage().data_ptr(),
            cache.untyped_storage().nbytes(),
        )
        for name, cache in caches.items()
    }
