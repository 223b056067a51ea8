"""Block sizes, specs, backends and attention groups: ours and the installed vLLM's on the same random inputs."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm
kvi = pytest.importorskip("vllm.v1.kv_cache_interface")
if not hasattr(kvi, "KVCacheLayout"):
    pytest.skip("this vLLM has no KVCacheLayout", allow_module_level=True)

from vllm.distributed.kv_transfer.kv_connector import utils as transfer  # noqa: E402
from vllm.v1.attention.backend import MultipleOf  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData  # noqa: E402
from vllm.v1.worker import utils as theirs  # noqa: E402
from vllm.v1.worker.gpu import attn_utils  # noqa: E402

from kvferry.connector.binding import attention_group, kv_spec  # noqa: E402
from kvferry.connector.engine.aggregator import yield_req_data  # noqa: E402
from tests.vllm.fake_layers import (  # noqa: E402
    BLOCKS,
    DTYPES,
    FakeAttention,
    both,
    fake_backend,
    form,
    placed,
    random_backend,
    random_spec,
    vllm_config,
)


def test_select_common_block_size() -> None:
    agreed = refused = 0
    for seed in range(2000):
        draw = random.Random(seed)
        backends = [random_backend(draw) for _ in range(draw.randint(1, 3))]
        manager = draw.choice([8, 16, 32, 48, 64, 96])
        specs = [random_spec(draw, manager) for _ in backends] if draw.random() < 0.5 else None
        pair = both(
            lambda: theirs.select_common_block_size(manager, backends, specs),  # noqa: B023
            lambda: attention_group.select_common_block_size(manager, backends, specs),  # noqa: B023
        )
        if pair is None:
            refused += 1
        else:
            agreed += 1
            assert pair[0] == pair[1]
    assert agreed > 500 and refused > 300


def test_prepare_kernel_block_sizes() -> None:
    agreed = refused = 0
    for draw, _, config in placed(range(150)):
        names = iter("xyz")
        for extra in draw.sample([
            kvi.EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype=torch.int8),
            kvi.MambaSpec(block_size=64, shapes=((2, 3),), dtypes=(torch.float32,)),
        ], draw.randint(0, 2)):  # fmt: skip
            config.kv_cache_groups.insert(0, kvi.KVCacheGroupSpec([next(names)], extra))
        made: list[list[list[Any]]] = [[], []]
        for number, group in enumerate(config.kv_cache_groups):
            backends = [random_backend(draw) for _ in range(draw.randint(1, 2))]
            for groups, kind in zip(made, (theirs.AttentionGroup, attention_group.AttentionGroup), strict=True):
                groups.append([kind(backend, group.layer_names, group.kv_cache_spec, number) for backend in backends])
        pair = both(
            lambda c=config, m=made: theirs.prepare_kernel_block_sizes(c, m[0]),
            lambda c=config, m=made: attention_group.prepare_kernel_block_sizes(c, m[1]),
        )
        if pair is None:
            refused += 1
        else:
            agreed += 1
            assert pair[0] == pair[1]
    assert agreed > 200 and refused > 30


def test_get_kv_cache_spec() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        layers: dict[str, Any] = {"x": object()}
        for number in range(5):
            spec = random_spec(draw, draw.choice([16, 48])) if draw.random() < 0.8 else None
            layers[f"layers.{number}"] = FakeAttention(
                spec, random_backend(draw), draw.choice([None, None, "layers.0"])
            )
        config = vllm_config(layers=layers)
        wanted, got = attn_utils.get_kv_cache_spec(config), attention_group.get_kv_cache_spec(config)
        assert list(got) == list(wanted)
        for name, spec in got.items():
            assert spec.get_block_stride_alignment() == wanted[name].get_block_stride_alignment()
            same = {"block_stride_alignment": None}
            assert {**vars(spec), **same} == {**vars(wanted[name]), **same} and type(spec) is type(wanted[name])


def test_get_current_attn_backend() -> None:
    for seed in range(100):
        draw = random.Random(seed)
        layers: dict[str, Any] = {f"layers.{n}": FakeAttention(None, random_backend(draw)) for n in range(5)}
        config = vllm_config(layers=layers | {"x": object()})
        names = draw.choice([None, draw.sample(list(layers), 2)])
        assert attention_group.get_current_attn_backends(config, names) == transfer.get_current_attn_backends(
            config, names
        )
        assert attention_group.get_current_attn_backend(config, names) is transfer.get_current_attn_backend(
            config, names
        )
        assert attention_group.get_current_attn_backend(layers) is transfer.get_current_attn_backend(config)


def test_AttentionGroup() -> None:
    """Packed compressed caches as kernel blocks and back, and block tables."""
    agreed = refused = 0
    for seed in range(300):
        draw = random.Random(seed)
        per_state, heads = draw.choice([1, 4, 4]), draw.choice([1, 1, 2])
        spec = kvi.FullAttentionSpec(
            block_size=64, num_kv_heads=heads, head_size=4, dtype=draw.choice(DTYPES), tokens_per_state=per_state
        )
        states, content = spec.num_states, 8
        cache = torch.zeros(BLOCKS, draw.randint(1, 4), heads, states + draw.choice([0, 0, 1]), content)[
            :, 0, :, :states
        ]
        kernel = draw.choice([None, 16, 32, 64])
        given = fake_backend(16), ["layers.0"], spec, 0, kernel
        other, mine = theirs.AttentionGroup(*given), attention_group.AttentionGroup(*given)
        pair = both(
            lambda: other.map_kv_cache_to_kernel_blocks(cache),  # noqa: B023
            lambda: mine.map_kv_cache_to_kernel_blocks(cache),  # noqa: B023
        ) if kernel else None  # fmt: skip
        refused += pair is None and kernel is not None
        if pair is not None:
            agreed += 1
            assert (
                form({"a": pair[0]}) == form({"a": pair[1]}) and other.kernel_block_stride == mine.kernel_block_stride
            )
            if mine.kernel_block_stride:
                back = [group.map_kv_cache_to_manager_blocks(pair[0], BLOCKS) for group in (other, mine)]
                assert form({"a": back[0]}) == form({"a": back[1]}) == form({"a": cache})
        table = torch.randint(0, BLOCKS, (3, 4), dtype=torch.int32)
        if kernel:
            other.kernel_block_table = torch.zeros(1, 3, 4 * (64 // kernel), dtype=torch.int32)
            other.kernel_block_offsets = torch.arange(64 // kernel, dtype=torch.int32)
        assert torch.equal(mine.map_to_kernel_block_table(table), other.map_to_kernel_block_table(table))
    assert agreed > 50 and refused > 30


def test_yield_req_data() -> None:
    whole = "is_full_table" in (transfer.yield_req_data.__doc__ or "")
    assert whole == hasattr(transfer.KVOutputAggregator, "ft_defer_kv_connector_outputs"), "both came with 0.33"
    for seed in range(50):
        draw = random.Random(seed)
        ids = [f"r{n}" for n in range(draw.randint(0, 4))]
        blocks: list[Any] = [draw.choice([None, ([draw.randrange(9)], [])]) for _ in ids]
        new = [NewRequestData(f"n{n}", [1], [], None, None, ([n], [2]), 0, None) for n in range(draw.randint(0, 2))]
        cached = CachedRequestData(ids, set(ids[::2]), [], {}, blocks, [0] * len(ids), [0] * len(ids))
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        mine, theirs = list(yield_req_data(output)), list(transfer.yield_req_data(output))
        if not whole:  # before 0.33 the third value said nothing of new requests
            theirs = [(name, ids, is_all or name.startswith("n")) for name, ids, is_all in theirs]
        assert mine == theirs


@pytest.mark.parametrize("asked", [None, "LBHNC", "LBNHC"])
def test_get_kv_connector_cache_layout(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = type("Asks", (), {"get_required_kvcache_layout": classmethod(lambda cls, config: config.asked)})
    monkeypatch.setattr(transfer.KVConnectorFactory, "get_connector_class", staticmethod(lambda config: connector))
    config = SimpleNamespace(kv_transfer_config=object(), asked=asked)
    assert attention_group.get_kv_connector_cache_layout(connector, config) == asked
    assert transfer.get_kv_connector_cache_layout(config) == asked
    none = SimpleNamespace(kv_transfer_config=None)
    assert (
        attention_group.get_kv_connector_cache_layout(None, none)
        is transfer.get_kv_connector_cache_layout(none)
        is None
    )


def test_a_multiple_of_is_what_vllm_means_by_it() -> None:
    ours, other = (fake_backend(kind(8), 12) for kind in (kv_spec.MultipleOf, MultipleOf))
    for manager in (8, 12, 16, 24, 48):
        assert attention_group.select_common_block_size(manager, [ours]) == theirs.select_common_block_size(
            manager, [other]
        )
