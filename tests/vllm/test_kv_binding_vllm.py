"""Utilities of ``connector/binding`` give what vLLM's own give."""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import random
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector import utils as their_utils
from vllm.distributed.kv_transfer.kv_connector import utils as transfer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index as theirs_extract
from vllm.multimodal import encoder_budget
from vllm.multimodal.inputs import PlaceholderRange
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.attention import backend as attention_backend
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.worker import utils as theirs
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu import attn_utils as their_attn

from kvferry.connector.binding import attention_group, attn_metadata, kv_binding, kv_spec
from kvferry.connector.binding.block_ops import KVBlockZeroer, _make_src_and_dst_indices, copy_kv_blocks
from kvferry.connector.binding.encoder_budget import MultiModalBudget
from kvferry.connector.binding.memory_request import request_memory
from kvferry.connector.binding.mm_placeholders import sanity_check_mm_encoder_outputs
from kvferry.connector.worker.aggregator import yield_req_data
from kvferry.kernels import kv_postprocess as ours
from kvferry.transport.errors import ProtocolError
from tests.vllm.fake_layers import (
    BLOCKS,
    DTYPES,
    LAYOUTS,
    Compared,
    FakeAttention,
    fake_backend,
    form,
    place,
    placed,
    random_backend,
    random_groups,
    random_spec,
    vllm_config,
)

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")
TABLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "docs" / "binding_table.py"))
HELD, OWN, UTILITIES = TABLE["HELD"], TABLE["OWN"], TABLE["UTILITIES"]


def draws(count: int) -> Iterator[random.Random]:
    return (random.Random(seed) for seed in range(count))


def test_the_version_is_the_one_in_the_table() -> None:
    if not vllm.__version__.startswith("0.33"):
        assert vllm.__version__.startswith(HELD)
    files = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*_vllm.py"))
    compared = set(re.findall(r"^def test_(\w+)", files, re.M))
    for utility in UTILITIES:
        if utility.held != OWN:
            assert any(name.startswith(utility.name) or f"_and_{utility.name}" in name for name in compared), (
                utility.name
            )


# --- caches -------------------------------------------------------------------------------------------------------
def test_get_kv_cache_config_from_groups() -> None:
    seen = Compared()
    names = ("size", "layers", "layer_stride", "block_stride", "offset")
    for seed, layout in itertools.product(range(150), LAYOUTS):
        pair = seen.both(
            place,
            lambda groups, layout: kv_spec.get_kv_cache_config_from_groups(groups, BLOCKS, layout),
            random_groups(random.Random(seed)),
            layout,
        )
        if pair is not None:
            wanted, got = ([[getattr(t, n) for n in names] for t in config.kv_cache_tensors] for config in pair)
            assert got == wanted and pair[0].num_blocks == pair[1].num_blocks == BLOCKS
    seen.at_least(agreed=250, refused=100)


def test_allocate_and_reshape() -> None:
    """Every layout, whole and split blocks; the layouts that a placement does not belong to are left to unit tests."""
    seen = Compared()
    for draw, layout, config in placed(range(150)):
        kernel = draw.choice(
            [None, None, [draw.choice([8, 16, g.kv_cache_spec.block_size]) for g in config.kv_cache_groups]]
        )
        pair = seen.both(
            lambda c, a, k: theirs.allocate_kv_cache(c, CPU, a, k),
            lambda c, a, k: kv_binding.reshape(c, kv_binding.allocate(c, CPU), a, k),
            config,
            layout,
            kernel,
        )
        if pair is None:
            continue
        wanted, got = pair
        assert list(got) == list(wanted) and form(got) == form(wanted)
        again = kv_binding.reshape(config, kv_binding.allocate(config, CPU), layout.stride_order, kernel)
        assert form(again) == form(got)
        seen[layout.name] += 1
        seen[f"{layout.name} split"] += any(cache.shape[0] > BLOCKS for cache in got.values())
    seen.at_least(refused=30, **dict.fromkeys((layout.name for layout in LAYOUTS), 1))
    assert seen["LBHNC split"] and seen["LBNHC split"]


def test_init_kv_cache() -> None:
    """Layers that share, layers elsewhere, and a target that has no cache."""
    seen = Compared()
    for draw, layout, config in placed(range(60)):
        names = [name for group in config.kv_cache_groups for name in group.layer_names]
        shared = {
            f"model.layers.{90 + n}.self_attn.attn": draw.choice([*names, "model.layers.77.attn"]) for n in range(2)
        }
        here = draw.sample(names, draw.randint(1, len(names)))
        other, mine = (
            {n: FakeAttention() for n in here} | {n: FakeAttention(target=t) for n, t in shared.items()} for _ in "ab"
        )
        kernel = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        pair = seen.both(
            lambda c, k, a, o=other: attn_utils.init_kv_cache(o, c, CPU, k, vllm_config(a, o)),
            lambda c, k, a, m=mine: kv_binding.init_kv_cache(m, c, CPU, k, a),
            config,
            kernel,
            layout,
        )
        if pair is not None:
            assert list(pair[1]) == list(pair[0]) and form(pair[1]) == form(pair[0])
            bound = [{name: layer.kv_cache for name, layer in each.items()} for each in (other, mine)]
            assert form(bound[1]) == form(bound[0])
    seen.at_least(agreed=50, refused=20)


NAMES = ["layers.{}.self_attn", "layers.{}.cross_attn", "layers.{}.attn.0", "layers.{}.attn.1", "layers.x", "{}.mlp.3"]


def test_extract_layer_index() -> None:
    seen = Compared()
    names = *(name.format(n) for name in NAMES for n in (0, 7, 12)), "a.1.attn.2.3", "attn", ""
    for name, modules in itertools.product(names, (1, 2, 3)):
        seen.same(theirs_extract, kv_binding.extract_layer_index, name, modules)
    seen.at_least(agreed=20, refused=5)


def test_bind_kv_cache() -> None:
    seen = Compared()
    for seed, draw in enumerate(draws(400)):
        pool = NAMES[:2] if seed % 2 else NAMES
        names = list({draw.choice(pool).format(draw.randrange(4)): None for _ in range(draw.randint(1, 5))})
        caches = {name: torch.zeros(2, 1, 2, 2) for name in names}
        views = {name: cache.flatten() for name, cache in caches.items()} if draw.random() < 0.3 else None
        known = names if draw.random() < 0.9 else names[:-1]
        other, mine = ({name: FakeAttention() for name in known} for _ in range(2))
        filled = [torch.zeros(1)] if draw.random() < 0.05 else []
        runner, ours = [*filled], [*filled]
        pair = seen.both(
            lambda n, o=other, r=runner, c=caches, v=views: theirs.bind_kv_cache(c, o, r, n, layer_kv_caches=v),
            lambda n, m=mine, r=ours, c=caches, v=views: kv_binding.bind_kv_cache(c, m, r, n, layer_kv_caches=v),
            draw.choice([1, 2]),
        )
        if pair is None:
            assert len(ours) == len(filled) and all(layer.kv_cache is None for layer in mine.values())
            continue
        assert [cache.data_ptr() for cache in ours] == [cache.data_ptr() for cache in runner]
        assert all(layer.kv_cache is other[name].kv_cache for name, layer in mine.items())
    seen.at_least(agreed=150, refused=50)


def test_add_kv_sharing_layers_to_kv_cache_groups() -> None:
    seen = Compared()
    for draw in draws(300):
        groups = random_groups(draw)
        names = [name for group in groups for name in group.layer_names]
        shared = {f"s.{n}": draw.choice(names if draw.random() < 0.9 else ["none"]) for n in range(draw.randint(0, 3))}
        other, mine = copy.deepcopy(groups), copy.deepcopy(groups)
        alone: list[set[str] | None] = [None, None] if draw.random() < 0.5 else [{"x"}, {"x"}]
        pair = seen.both(
            lambda s, g=other, a=alone[0]: theirs.add_kv_sharing_layers_to_kv_cache_groups(s, g, a),
            lambda s, g=mine, a=alone[1]: kv_binding.add_kv_sharing_layers_to_kv_cache_groups(s, g, a),
            shared,
        )
        assert (mine == groups) if pair is None else (mine == other and alone[0] == alone[1])
    seen.at_least(refused=10)


# --- attention groups ---------------------------------------------------------------------------------------------
def test_select_common_block_size() -> None:
    seen = Compared()
    for draw in draws(2000):
        backends = [random_backend(draw) for _ in range(draw.randint(1, 3))]
        manager = draw.choice([8, 16, 32, 48, 64, 96])
        specs = [random_spec(draw, manager) for _ in backends] if draw.random() < 0.5 else None
        seen.same(theirs.select_common_block_size, attention_group.select_common_block_size, manager, backends, specs)
    seen.at_least(agreed=500, refused=300)
    ours, other = (fake_backend(kind(8), 12) for kind in (kv_spec.MultipleOf, MultipleOf))
    for manager in (8, 12, 16, 24, 48):
        assert attention_group.select_common_block_size(manager, [ours]) == theirs.select_common_block_size(
            manager, [other]
        )


def test_prepare_kernel_block_sizes() -> None:
    seen = Compared()
    for draw, _, config in placed(range(120)):
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
        seen.same(
            lambda c, m: theirs.prepare_kernel_block_sizes(c, m[0]),
            lambda c, m: attention_group.prepare_kernel_block_sizes(c, m[1]),
            config,
            made,
        )
    seen.at_least(agreed=150, refused=20)


def test_get_kv_cache_spec() -> None:
    for draw in draws(200):
        layers: dict[str, Any] = {"x": object()}
        for number in range(5):
            spec = random_spec(draw, draw.choice([16, 48])) if draw.random() < 0.8 else None
            target = draw.choice([None, None, "layers.0"])
            layers[f"layers.{number}"] = FakeAttention(spec, random_backend(draw), target)
        config = vllm_config(layers=layers)
        wanted, got = attn_utils.get_kv_cache_spec(config), attention_group.get_kv_cache_spec(config)
        assert list(got) == list(wanted)
        for name, spec in got.items():
            assert spec.get_block_stride_alignment() == wanted[name].get_block_stride_alignment()
            same = {"block_stride_alignment": None}
            assert {**vars(spec), **same} == {**vars(wanted[name]), **same} and type(spec) is type(wanted[name])


def test_get_current_attn_backend() -> None:
    for draw in draws(100):
        layers: dict[str, Any] = {f"layers.{n}": FakeAttention(None, random_backend(draw)) for n in range(5)}
        config = vllm_config(layers=layers | {"x": object()})
        names = draw.choice([None, draw.sample(list(layers), 2)])
        wanted = transfer.get_current_attn_backend(config, names)
        assert attention_group.get_current_attn_backend(config, names) is wanted
        assert attention_group.get_current_attn_backend(layers) is transfer.get_current_attn_backend(config)


def test_AttentionGroup() -> None:
    """Packed compressed caches as kernel blocks and back, and block tables."""
    seen = Compared()
    for draw in draws(300):
        per_state, heads = draw.choice([1, 4, 4]), draw.choice([1, 1, 2])
        spec = kvi.FullAttentionSpec(
            block_size=64, num_kv_heads=heads, head_size=4, dtype=draw.choice(DTYPES), tokens_per_state=per_state
        )
        states = spec.num_states
        cache = torch.zeros(BLOCKS, draw.randint(1, 4), heads, states + draw.choice([0, 0, 1]), 8)[:, 0, :, :states]
        kernel = draw.choice([None, 16, 32, 64])
        given = fake_backend(16), ["layers.0"], spec, 0, kernel
        other, mine = theirs.AttentionGroup(*given), attention_group.AttentionGroup(*given)
        if kernel and (
            pair := seen.both(other.map_kv_cache_to_kernel_blocks, mine.map_kv_cache_to_kernel_blocks, cache)
        ):
            assert form({"a": pair[0]}) == form({"a": pair[1]})
            assert other.kernel_block_stride == mine.kernel_block_stride
            if mine.kernel_block_stride:
                back = [group.map_kv_cache_to_manager_blocks(pair[0], BLOCKS) for group in (other, mine)]
                assert form({"a": back[0]}) == form({"a": back[1]}) == form({"a": cache})
        table = torch.randint(0, BLOCKS, (3, 4), dtype=torch.int32)
        if kernel:
            other.kernel_block_table = torch.zeros(1, 3, 4 * (64 // kernel), dtype=torch.int32)
            other.kernel_block_offsets = torch.arange(64 // kernel, dtype=torch.int32)
        assert torch.equal(mine.map_to_kernel_block_table(table), other.map_to_kernel_block_table(table))
    seen.at_least(agreed=50, refused=30)


@pytest.mark.parametrize("asked", [None, "LBHNC", "LBNHC"])
def test_get_kv_connector_cache_layout(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    connector = type("Asks", (), {"get_required_kvcache_layout": classmethod(lambda cls, config: config.asked)})
    monkeypatch.setattr(transfer.KVConnectorFactory, "get_connector_class", staticmethod(lambda config: connector))
    for transfers in (object(), None):
        config = SimpleNamespace(kv_transfer_config=transfers, asked=asked)
        ours = attention_group.get_kv_connector_cache_layout(connector if transfers else None, config)
        assert ours == transfer.get_kv_connector_cache_layout(config) == (asked if transfers else None)


# --- blocks -------------------------------------------------------------------------------------------------------
def test_KVBlockZeroer() -> None:
    """The same segments; where vLLM's asserts multiples of 4 bytes, ours takes any number."""
    agreed = 0
    for draw, layout, config in placed(range(120)):
        kernel = [draw.choice([16, g.kv_cache_spec.block_size]) for g in config.kv_cache_groups]
        try:
            caches = theirs.allocate_kv_cache(config, CPU, layout, kernel)
        except (AssertionError, ValueError, RuntimeError):
            continue
        names = [name for group in config.kv_cache_groups for name in group.layer_names]
        layers = {name: SimpleNamespace(kv_cache=caches[name]) for name in names}
        for layer in layers.values():
            if layer.kv_cache.shape[1] == 1 and draw.random() < 0.5:
                layer.kv_cache = layer.kv_cache.squeeze(1)
        alone = set(draw.sample(names, draw.choice([0, 0, 1])))
        made: list[list[Any]] = [[], []]
        for number, group in enumerate(config.kv_cache_groups):
            specs = getattr(
                group.kv_cache_spec, "kv_cache_specs", dict.fromkeys(group.layer_names, group.kv_cache_spec)
            )
            for groups, kind in zip(made, (theirs.AttentionGroup, attention_group.AttentionGroup), strict=True):
                groups += [kind(None, [name], spec, number) for name, spec in specs.items()]
        kernel = kernel[: draw.choice([1, 9])]
        mine = KVBlockZeroer(CPU, made[1], kernel, layers, BLOCKS, alone).segments
        other = theirs.KVBlockZeroer(CPU, made[0], kernel, layers, BLOCKS, alone)._meta
        agreed += 1
        got = sorted(zip(mine.addresses.tolist(), mine.strides.tolist(), mine.sizes.tolist(), strict=True))
        wanted = [] if other is None else [each.tolist() for each in other[:3]]
        assert got == sorted((a, 4 * s, 4 * n) for a, s, n in zip(*wanted, strict=True))
    assert agreed > 100
    spec = kvi.FullAttentionSpec(block_size=3, num_kv_heads=1, head_size=5, head_size_v=6, dtype=torch.int8)
    layers = {"layers.0": SimpleNamespace(kv_cache=torch.ones(BLOCKS, 1, 3, 11, dtype=torch.int8))}
    with pytest.raises(AssertionError):
        theirs.KVBlockZeroer(CPU, [theirs.AttentionGroup(None, ["layers.0"], spec, 0)], [3], layers, BLOCKS)
    group = attention_group.AttentionGroup(None, ["layers.0"], spec, 0)
    KVBlockZeroer(CPU, [group], [3], layers, BLOCKS).zero_block_ids([1])
    assert layers["layers.0"].kv_cache.flatten(1).sum(1).tolist() == [33, 0, 33, 33, 33]


def platform_copies() -> Any:
    """The block copies of the installed vLLM's GPU platforms, whose module cannot be imported without their driver."""
    path = Path(vllm.__file__).parent / "platforms" / "cuda.py"
    tree = ast.parse(path.read_text())
    wanted = ("insert_blocks_to_device", "swap_out_blocks_to_host")
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert sorted({node.name for node in found}) == sorted(wanted)
    for node in found:
        node.decorator_list = []
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([*found], []), str(path), "exec"), scope)
    return SimpleNamespace(**{name: (lambda *a, f=scope[name]: f(None, *a)) for name in wanted})


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copy_kv_blocks(direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "current_platform", platform_copies())
    for draw in draws(60):
        dtype, shape = draw.choice([torch.bfloat16, torch.float32, torch.int8]), (7, 2, 4, 3)
        source = {name: torch.randint(-99, 99, shape).to(dtype) for name in "ab"}
        if draw.random() < 0.5:
            source = {name: cache.transpose(1, 2).contiguous().transpose(1, 2) for name, cache in source.items()}
        other, mine = ({name: torch.full(shape, 5).to(dtype) for name in "abc"} for _ in range(2))
        count = draw.randint(0, 4)
        blocks = draw.sample(range(7), count), draw.sample(range(7), count)
        transfer.copy_kv_blocks(source, other, *blocks, direction)
        copy_kv_blocks(source, mine, *blocks, direction)
        assert all(torch.equal(mine[name], other[name]) for name in "abc")
        assert count == 0 or not torch.equal(mine["a"], torch.full(shape, 5).to(dtype))


def test__make_src_and_dst_indices() -> None:
    for draw in draws(100):
        sources, targets = ([draw.randrange(1 << 40) for _ in range(draw.randint(0, 5))] for _ in range(2))
        device: Any = draw.choice(["cpu", CPU])
        wanted = transfer._make_src_and_dst_indices(sources, targets, "cpu", device)
        got = _make_src_and_dst_indices(sources, targets, "cpu", device)
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other) and one.dtype == other.dtype and one.device == other.device


# --- steps --------------------------------------------------------------------------------------------------------
def test_yield_req_data() -> None:
    whole = "is_full_table" in (transfer.yield_req_data.__doc__ or "")
    assert whole == hasattr(transfer.KVOutputAggregator, "ft_defer_kv_connector_outputs"), "both came with 0.33"
    for draw in draws(50):
        ids = [f"r{n}" for n in range(draw.randint(0, 4))]
        blocks: list[Any] = [draw.choice([None, ([draw.randrange(9)], [])]) for _ in ids]
        new = [NewRequestData(f"n{n}", [1], [], None, None, ([n], [2]), 0, None) for n in range(draw.randint(0, 2))]
        cached = CachedRequestData(ids, set(ids[::2]), [], {}, blocks, [0] * len(ids), [0] * len(ids))
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)
        mine, theirs = list(yield_req_data(output)), list(transfer.yield_req_data(output))
        if not whole:  # before 0.33 the third value said nothing of new requests
            theirs = [(name, ids, is_all or name.startswith("n")) for name, ids, is_all in theirs]
        assert mine == theirs
    cached = SimpleNamespace(req_ids=["a", "b"], new_block_ids=[None], resumed_req_ids=set())
    with pytest.raises(ProtocolError, match="2 running requests with 1 lists of blocks"):
        list(yield_req_data(SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)))


GIB = 1 << 30


def test_request_memory() -> None:
    seen = Compared()
    for seed in range(3000):
        draw = random.Random(seed)
        total = draw.choice([draw.randint(1, 99), draw.randint(1, 200 * GIB)])
        free = int(total * draw.choice([draw.random(), 1.0]))
        device = MemorySnapshot(free_memory=free, total_memory=total, device="cpu", auto_measure=False)
        cache = SimpleNamespace(gpu_memory_utilization=draw.choice([draw.random() or 1.0, 0.1, 0.9, 0.95, 1.0]))
        external = draw.choice([0, 0, draw.randint(0, total), int(total * 0.1)])
        seen.same(theirs.request_memory, request_memory, device, cache, external)
    seen.at_least(agreed=500, refused=500)


def test_sanity_check_mm_encoder_outputs() -> None:
    seen = Compared()
    for seed in range(1000):
        draw = random.Random(seed)
        count = draw.randint(0, 3)
        axes = [2] * 9 + [1, 3]
        items: Any = [torch.zeros([draw.randint(0, 3) for _ in range(draw.choice(axes))]) for _ in range(count)]
        form = draw.choice(["list", "tuple", "tensor", "dict", "iterator"])
        if form == "tensor":
            items = torch.zeros(max(count, 1), *[2] * draw.choice([1, 2, 2, 3]))
        elif form != "list":
            items = {"tuple": tuple(items), "dict": dict(enumerate(items)), "iterator": iter(items)}[form]
        expected = draw.choice([count, count, 2])
        seen.same(theirs.sanity_check_mm_encoder_outputs, sanity_check_mm_encoder_outputs, items, expected)
    seen.at_least(agreed=150, refused=150)


class Processor:
    """Limits and sizes of modalities, as vLLM's processors give them; dummy items where it knows no sizes."""

    def __init__(self, draw: random.Random) -> None:
        names = draw.sample(["image", "video", "audio", "vision_chunk"], draw.randint(1, 4))
        self.limits = {name: draw.choice([0, 1, 1, 3, 999]) for name in names}
        self.sizes = {name: draw.choice([0, 1, 7, 64, 300, 5000]) for name in names if draw.random() < 0.9}
        self.known = draw.random() < 0.6
        self.asked: list[Any] = []
        self.info = SimpleNamespace(
            supported_mm_limits={name: draw.choice([None, 5]) for name in names},
            allowed_mm_limits=self.limits,
            get_mm_max_tokens_per_item=lambda seq_len, mm_counts: self.most(mm_counts),
            ctx=SimpleNamespace(model_config=SimpleNamespace(max_model_len=512)),
        )

    def most(self, mm_counts: dict[str, int]) -> dict[str, int] | None:
        self.asked.append({**mm_counts})
        return self.sizes if self.known else None

    def get_dummy_mm_inputs(self, mm_counts: dict[str, int], cache: Any = None) -> dict[str, Any]:
        self.asked.append(({**mm_counts}, cache))
        return {
            "mm_placeholders": {
                name: [
                    PlaceholderRange(0, self.sizes[name] + 2, torch.tensor([False, *[True] * self.sizes[name], False]))
                ]
                for name in mm_counts
                if name in self.sizes
            },
            "mm_kwargs": {name: [f"an item of {name}"] for name in mm_counts},
        }


def test_MultiModalBudget(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "max_model_len", "max_num_reqs", "mm_limits", "encoder_compute_budget", "encoder_cache_size",
        "mm_max_toks_per_item", "mm_max_items_per_prompt", "mm_max_items_per_batch", "cache",
    )  # fmt: skip
    seen = Compared()
    for seed in range(500):
        draw = random.Random(seed)
        mine, other = (Processor(random.Random(seed)) for _ in range(2))
        batched = draw.choice([16, 64, 512, 4096])
        scheduler = SchedulerConfig(
            max_model_len=16, is_encoder_decoder=False, max_num_batched_tokens=batched,
            max_num_seqs=draw.choice([1, 2, 16]), enable_chunked_prefill=draw.random() < 0.6,
            disable_chunked_mm_input=draw.random() < 0.2,
        )  # fmt: skip
        scheduler.encoder_cache_size = draw.choice([batched, 0, 100, 9000])
        scheduler.max_num_encoder_input_tokens = draw.choice([batched, 0, 100, 9000])
        embeds = draw.choice([None, SimpleNamespace(enable_mm_embeds=True), SimpleNamespace(enable_mm_embeds=False)])
        model = SimpleNamespace(max_model_len=draw.choice([16, 512, 9000]), get_multimodal_config=lambda e=embeds: e)
        config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        cache = draw.choice([None, SimpleNamespace(emptied=0)])
        monkeypatch.setattr(encoder_budget, "processor_only_cache_from_config", lambda config, c=cache: c)
        pair = seen.both(
            lambda c, o=other, k=cache: encoder_budget.MultiModalBudget(c, registry(o), enable_cache=k is not None),
            lambda c, m=mine, k=cache: MultiModalBudget(c, registry(m), cache=k),
            config,
        )
        if pair is None:
            continue
        assert [getattr(pair[1], name) for name in names] == [getattr(pair[0], name) for name in names]
        assert pair[1].get_encoder_budget() == pair[0].get_encoder_budget()
        modality = draw.choice([None, *mine.sizes])
        calls = Compared()
        for name, *asked in (
            ("get_modality_with_max_tokens",),
            ("get_dummy_encoder_profile_inputs",),
            ("get_dummy_encoder_profile_inputs", modality),
            ("get_dummy_encoder_profile_inputs", modality, 2),
        ):
            if modality in pair[0].mm_max_toks_per_item or modality is None:
                calls.same(getattr(pair[0], name), getattr(pair[1], name), *asked)
        assert mine.asked == other.asked
        seen["several"] += max(pair[1].mm_max_items_per_batch.values(), default=0) > 1
    seen.at_least(agreed=230, refused=15, several=60)


def registry(processor: Processor) -> Any:
    return SimpleNamespace(create_processor=lambda model_config: processor)


class RecordingBuilder(attention_backend.AttentionMetadataBuilder):
    """vLLM's builder by class; its metadata is what it was given."""

    supports_update_block_table = False

    def __init__(self, spec: Any, layer_names: list[str], config: Any, device: Any, **more: Any) -> None:
        assert not more
        self.made_with = (spec, list(layer_names), config, device)
        self.workspace: Any = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **more: Any) -> Any:
        if self.fills:
            common_attn_metadata._token_to_req_indices_cache = torch.arange(3)
        return ("built", self.made_with[:2], common_prefix_len, listed(common_attn_metadata), sorted(more.items()))

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        return ("updated", metadata, blk_table.tolist(), slot_mapping.tolist())

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return ("captured", self.build(0, common_attn_metadata))

    fills = False


def listed(value: Any) -> dict[str, Any]:
    """Every field of a batch; tensors as lists."""
    every = {each.name: getattr(value, each.name) for each in fields(value)}
    every.pop("_num_computed_tokens_cache", None)
    return {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in every.items()}


def builder_class(draw: random.Random) -> type:
    support = draw.choice([*attention_backend.AttentionCGSupport])
    members: dict[str, Any] = {
        "_cudagraph_support": support,
        "supports_update_block_table": draw.random() < 0.7,
        "fills": draw.random() < 0.3,
    }
    if draw.random() < 0.5:
        members["_get_workspace_buffer"] = lambda self: self
    if draw.random() < 0.5:
        members["set_workspace_buffer"] = lambda self, workspace: setattr(self, "workspace", workspace)
    return type("Recording", (RecordingBuilder,), members)


class FakeMamba(AttentionLayerBase):
    """Passes for a layer with a recurrent state: one of vLLM's layers, and none of its ``Attention``."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return None

    def get_attn_backend(self) -> Any:
        return self.backend


def random_backends(draw: random.Random) -> list[Any]:
    """Each by a name of its own: where two have one name, the group has the first layer's."""
    made = [random_backend(draw) for _ in range(draw.randint(1, 3))]
    for number, each in enumerate(made):
        each.__qualname__ = each.__name__ = f"Backend{number}"
        builder = builder_class(draw)
        each.get_builder_cls = staticmethod(lambda cls=builder: cls)
    return made


def random_engine(draw: random.Random, cache: Any) -> Any:
    """What both sides read as vLLM's config: layers of a placed cache, states beside them, layers that share."""
    state = kvi.MambaSpec(block_size=64, shapes=((2, 3),), dtypes=(torch.float32,))
    states = [f"mamba.{number}" for number in range(draw.choice([0, 0, 1, 2, 3]))]
    # A layer that shares joins a group of one spec; of several specs, vLLM has none for it.
    alike = [group for group in cache.kv_cache_groups if not hasattr(group.kv_cache_spec, "kv_cache_specs")]
    homes = [name for group in alike for name in group.layer_names]
    kinds = random_backends(draw)
    layers: dict[str, Any] = {
        name: FakeAttention(None, draw.choice(kinds)) for group in cache.kv_cache_groups for name in group.layer_names
    }
    cache.kv_cache_groups += [kvi.KVCacheGroupSpec([name], state) for name in states]
    sharing = [f"shared.{number}" for number in range(draw.choice([0, 1, 2, 4]) if homes else 0)]
    for name in draw.sample(states + sharing, len(states + sharing)):
        target = draw.choice(homes) if homes and draw.random() < 0.97 else "nowhere"
        kind = draw.choice(kinds)
        layers[name] = FakeMamba(kind) if name in states else FakeAttention(None, kind, target)
    if draw.random() < 0.2:
        layers["last"] = FakeAttention(None, kinds[0])
    for layer in layers.values():
        if draw.random() < 0.3:
            layer.num_heads = draw.choice([0, 2])
    if draw.random() < 0.03:
        del layers[next(iter(layers))]
    settings = vllm_config(layers=layers)
    settings.cache_config.kv_sharing_fast_prefill = draw.random() < 0.4
    settings.cache_config.mamba_cache_mode = "none"
    settings.parallel_config = SimpleNamespace(
        use_ubatching=draw.random() < 0.3, num_ubatches=2, decode_context_parallel_size=1
    )
    settings.model_config.max_model_len = 256
    settings.scheduler_config = SimpleNamespace(max_num_seqs=8)
    return settings


def fast_prefill_backend(backend: Any) -> Any:
    return create_fast_prefill_custom_backend("FastPrefill", backend)


def prepared(seen: Compared, draw: random.Random, cache: Any) -> tuple[Any, Any, Any, Any] | None:
    """vLLM's and our attention groups of one engine, with the KV cache configs that they are of."""
    settings = random_engine(draw, cache)
    caches = copy.deepcopy(cache), copy.deepcopy(cache)
    names = [name for group in cache.kv_cache_groups for name in group.layer_names]
    shared = [name for name in settings.compilation_config.static_forward_context if name.startswith("shared")]
    active = None if draw.random() < 0.7 else {*draw.sample(names, draw.randint(1, len(names))), *shared[:1]}
    drafts = draw.choice([None, set(shared[-1:])])
    fast = fast_prefill_backend if settings.cache_config.kv_sharing_fast_prefill else None
    pair = seen.both(
        lambda *given: their_attn.init_attn_backend(caches[0], *given),
        lambda *given: attn_metadata.init_attn_backend(caches[1], *given, fast_prefill_backend=fast),
        settings, CPU, active, drafts,
    )  # fmt: skip
    return None if pair is None else (*pair, caches, active)


def form_of(groups: Any) -> list[list[Any]]:
    """What the groups are. vLLM takes active layers from a set: their order is left out."""
    return [
        sorted(
            (
                sorted(each.layer_names), each.backend.__name__, repr(each.kv_cache_spec), each.kv_cache_group_id,
                each.kernel_block_size,
                [(repr(b.made_with[0]), sorted(b.made_with[1]), id(b.made_with[2]), b.made_with[3], type(b).__name__)
                 for b in each.metadata_builders],
            )
            for each in one
        )
        for one in groups
    ]  # fmt: skip


def workspaces(groups: Any) -> list[int | None]:
    """For each builder, the number of the builder whose workspace it got."""
    builders = [builder for one in groups for each in one for builder in each.metadata_builders]
    return [None if each.workspace is None else builders.index(each.workspace) for each in builders]


def test_init_attn_backend() -> None:
    seen = Compared()
    for draw, _, cache in placed(range(110)):
        pair = prepared(seen, draw, cache)
        if pair is None:
            continue
        (wanted, support, sizes), (groups, our_support, our_sizes), caches, active = pair
        assert form_of(groups) == form_of(wanted) and our_sizes == sizes
        assert [each.layer_names for each in caches[1].kv_cache_groups] == [
            each.layer_names for each in caches[0].kv_cache_groups
        ]
        assert our_support.min_cg_support.value == support.min_cg_support.value
        if active is None:
            assert our_support.min_cg_attn_backend == support.min_cg_attn_backend
            assert [[each.layer_names for each in one] for one in groups] == [
                [each.layer_names for each in one] for one in wanted
            ]
            assert workspaces(groups) == workspaces(wanted)
        every = [each for one in groups for each in one]
        seen["active"] += active is not None
        seen["fast"] += any(each.backend.__name__.startswith("Fast") for each in every)
        seen["split"] += any(each.kernel_block_size is not None for each in every)
        seen["shared workspace"] += any(each is not None for each in workspaces(groups))
        seen["micro-batches"] += any(len(each.metadata_builders) == 2 for each in every)
    seen.at_least(agreed=170, refused=15, active=15, fast=15, split=15)
    assert min(seen["shared workspace"], seen["micro-batches"]) > 15


class Model:
    """Fields of the batch and arguments of ``build`` that a model adds."""

    def __init__(self, draw: random.Random) -> None:
        self.replaces, self.adds = draw.random() < 0.5, draw.random() < 0.5

    def get_extra_common_attn_kwargs(self, kv_cache_group_id: int, num_reqs: int) -> dict[str, Any]:
        more: dict[str, Any] = {"is_prefilling": torch.ones(num_reqs, dtype=torch.bool)} if self.replaces else {}
        return more | ({"encoder_seq_lens": torch.arange(num_reqs) + kv_cache_group_id} if self.adds else {})

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        return {"model": (type(attn_metadata_builder).__name__, num_reqs)}


def random_batch(draw: random.Random, groups: int) -> dict[str, Any]:
    requests, spare = draw.randint(1, 4), draw.randint(0, 2)
    queries = torch.tensor([0] + [draw.randint(1, 5) for _ in range(requests)]).cumsum(0)
    lengths = torch.randint(5, 60, (requests + spare,))
    tokens = int(queries[-1]) + draw.randint(0, 3)

    def maybe(tensor: Any) -> Any:
        return tensor if draw.random() < 0.5 else None

    per_group = {number: draw.random() < 0.5 for number in range(groups) if draw.random() < 0.7}
    return {
        "num_reqs": requests, "num_tokens": tokens, "query_start_loc_gpu": queries, "query_start_loc_cpu": queries + 0,
        "max_query_len": 5, "seq_lens": lengths, "max_seq_len": 60,
        "block_tables": [torch.randint(0, 9, (requests, 2), dtype=torch.int32) for _ in range(groups)],
        "slot_mappings": torch.randint(0, 99, (groups, tokens)),
        "seq_lens_cpu_upper_bound": maybe(lengths + 1), "dcp_local_seq_lens": maybe(lengths // 2),
        "dcp_local_seq_lens_cpu_upper_bound": maybe(lengths // 2 + 1), "positions": maybe(torch.arange(tokens)),
        "is_prefilling": maybe(torch.zeros(requests, dtype=torch.bool)), "mm_req_doc_ranges": maybe({0: [(1, 2)]}),
        "model_specific_attn_metadata": maybe(Model(draw)), "for_cudagraph_capture": draw.random() < 0.3,
        "causal": draw.choice([True, False, torch.ones(requests, dtype=torch.bool), per_group]),
        "rswa_prefix_lens": maybe(torch.arange(requests)), "req_idx": maybe([1, 2]),
        "fast_prefill": maybe(their_attn.FastPrefillBatchMetadata(torch.tensor([3, 4, 4]), 2, 1)),
    }  # fmt: skip


def test_build_attn_metadata() -> None:
    """The same metadata for every layer, with our batches and with vLLM's; the same object for the same layers."""
    seen, prepare = Compared(), Compared()
    for draw, _, cache in placed(range(100)):
        pair = prepared(prepare, draw, cache)
        if pair is None or pair[3] is not None:
            continue
        (wanted_groups, _, _), (groups, _, _), caches, _ = pair
        batch = random_batch(draw, len(caches[0].kv_cache_groups)) | {"ubatch_idx": draw.choice([0, 0, 1])}
        if any(each.backend.__name__.startswith("Fast") for one in groups for each in one):
            continue  # vLLM's builder of fast prefill needs metadata of a dataclass
        kind = draw.choice([attn_metadata.CommonAttentionMetadata, attention_backend.CommonAttentionMetadata])
        ours = {"kv_cache_config": caches[1], "common_metadata_type": kind, **batch}
        built = seen.both(
            lambda g=wanted_groups, c=caches[0], b=batch: their_attn.build_attn_metadata(g, kv_cache_config=c, **b),
            lambda g=groups, b=ours: attn_metadata.build_attn_metadata(g, **b),
        )
        if built is None:
            continue
        wanted, got = built
        assert list(got) == list(wanted) and got == wanted
        assert [[a is b for b in got.values()] for a in got.values()] == [
            [a is b for b in wanted.values()] for a in wanted.values()
        ]
        seen["updated"] += any(one[0] == "updated" for one in got.values())
        seen["split"] += any(each.kernel_block_size is not None for one in groups for each in one)
    seen.at_least(agreed=90, refused=8, updated=8, split=8)


def test_our_batch_has_the_fields_of_vllms() -> None:
    """Under the same names and with the same defaults; vLLM's cache of computed tokens apart, which no caller gives."""
    ours, other = (
        [(each.name, each.default) for each in fields(kind)]
        for kind in (attn_metadata.CommonAttentionMetadata, attention_backend.CommonAttentionMetadata)
    )
    assert set(ours) == {each for each in other if each[0] != "_num_computed_tokens_cache"}
    support = {each.name: each.value for each in attn_metadata.AttentionCGSupport}
    assert support == {each.name: each.value for each in attention_backend.AttentionCGSupport}


POST_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn]


def caches(layout: str, shape: tuple[int, int, int, int], pad: int, dtype: torch.dtype, rng: np.random.Generator):
    """Two equal caches ``[B, H, N, C]`` of random bytes with ``pad`` elements after every block, and their memory."""
    blocks, heads, tokens, content = shape
    size = heads * tokens * content + pad
    memory = torch.from_numpy(rng.integers(0, 256, blocks * size * dtype.itemsize, dtype=np.uint8))
    inner = (tokens * content, content) if layout == "HND" else (content, heads * content)
    both = [memory, memory.clone()]
    return [each.view(dtype).as_strided(shape, (size, *inner, 1)) for each in both], both


shapes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([1, 2, 3, 8]), st.integers(1, 40))


@settings(max_examples=150, deadline=None)
@given(
    shape=shapes,
    name=st.sampled_from(["blksize", "layout", "blksize_and_layout"]),
    ratio=st.sampled_from([1, 2, 3, 4, 16]),
    pad=st.sampled_from([0, 0, 1, 8]),
    dtype=st.sampled_from(POST_DTYPES),
    ids=st.sampled_from([torch.int64, torch.int32]),
    seed=st.integers(0, 1 << 30),
)
def test_the_bytes_are_those_of_vllm(shape, name: str, ratio: int, pad: int, dtype, ids, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks, heads, remote_tokens, content = shape
    ratio = 1 if name == "layout" else ratio
    whole = (blocks, heads, remote_tokens * ratio, content)
    (cache, expected), memories = caches("HND" if name == "blksize" else "NHD", whole, pad, dtype, rng)
    indices = torch.from_numpy(rng.permutation(blocks)[: rng.integers(0, blocks + 1)]).to(ids)
    if len(indices):  # vLLM's reshape refuses an empty one
        # index_select of one-byte floats is not in torch for the CPU; the bytes are the same
        raw = expected.view(torch.uint8) if dtype.itemsize == 1 else expected
        if name == "blksize":
            their_utils.kv_postprocess_blksize_on_receive(raw, indices.long(), ratio)
        else:
            their_utils.kv_postprocess_blksize_and_layout_on_receive(raw, indices.long(), ratio)
    if name == "layout":
        ours.kv_postprocess_layout_on_receive(cache, indices)
    else:
        getattr(ours, f"kv_postprocess_{name}_on_receive")(cache, indices, ratio)
    assert torch.equal(*memories)


def test_arguments_are_named_and_ordered_as_in_vllm() -> None:
    for name in ("kv_postprocess_blksize_on_receive", "kv_postprocess_blksize_and_layout_on_receive"):
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(getattr(their_utils, name)).parameters
        )
